"""Closing HTTP connections that hold a place and send no request (slowloris).

aiohttp waits for the head of a request as long as its sender likes; a body has its own time-out (``read_body``). The
guard looks at all connections now and then: one that has not been inside a request for too long is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

__all__ = ["ConnectionGuard"]

IDLE_S = 75.0
"""A connection that has had a request before may rest for so long: exporters send every few seconds or once a minute."""


class ConnectionGuard:
    """Watches the connections of one runner.

    Args:
        first_s: time in which a new connection must have sent the head of its first request.
        idle_s: time in which it must send the head of its next one.
    """

    def __init__(
        self, first_s: float, idle_s: float = IDLE_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._idle_s = idle_s
        self._now_s = now_s
        self._opened: dict[Any, float] = {}
        self._answered: dict[Any, float] = {}
        self._busy: set[Any] = set()
        self.closed = 0
        """Connections that were closed."""

    def middleware(self) -> Any:
        """Notes which connections are inside a request."""

        @web.middleware
        async def note(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            connection = request.protocol
            self._busy.add(connection)
            try:
                return await handler(request)
            finally:
                self._busy.discard(connection)
                self._answered[connection] = self._now_s()

        return note

    async def watch(self, runner: web.AppRunner) -> None:
        """Close what is too slow, until cancelled."""
        while True:
            await asyncio.sleep(min(self._first_s, 5.0) / 2)
            self.sweep(runner.server.connections if runner.server is not None else [])

    def sweep(self, connections: list[Any]) -> None:
        """One look at all connections."""
        now = self._now_s()
        self._opened = {connection: self._opened.get(connection, now) for connection in connections}
        self._answered = {c: at for c, at in self._answered.items() if c in self._opened}
        for connection, opened in self._opened.items():
            if connection in self._busy:
                continue
            answered = self._answered.get(connection)
            late = now - opened > self._first_s if answered is None else now - answered > self._idle_s
            transport = connection.transport
            if late and transport is not None:
                self.closed += 1
                transport.abort()
