"""Shell of an HTTP process of ``spanloop up``: bind, say ready in one JSON line, serve until SIGTERM or SIGINT.

Shared by receiver, gateway and embedded serving. The line on stdout is ``{"ready": NAME, "url": URL}``; logs go to
stderr. A port that is taken is a TransientError that names the setting. aiohttp is imported when called.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import sys
from typing import Any

from spanloop.schemas.errors import SpanloopError, TransientError

__all__ = ["hide_refused_bytes", "serve", "serve_async"]

_log = logging.getLogger(__name__)

SHUTDOWN_S = 5.0
"""Requests in flight get this long to finish."""
SWITCH_S = 0.0005
"""A background thread holds the interpreter from the event loop for at most this long (Python's default: 5 ms)."""


def hide_refused_bytes() -> None:
    """Let aiohttp report a request that is no HTTP in one line and without its bytes, which may be a key or a person's text."""
    logging.getLogger("aiohttp.server").addFilter(_without_bytes)


def _without_bytes(record: logging.LogRecord) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError

    problem = record.exc_info[1] if record.exc_info else None
    if isinstance(problem, HttpProcessingError):
        record.msg, record.args = (
            f"{record.msg}: no HTTP (%s)",
            (*(record.args or ()), type(problem).__name__),
        )
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
    return True


def serve(name: str, app: Any, host: str, port: int, *, cancel: bool = False) -> None:
    """Serve an aiohttp application as process ``name`` and exit: 0 after a signal, else the error's exit code.

    ``cancel``: a handler whose client is gone is cancelled.
    """
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s"
    )
    hide_refused_bytes()
    try:
        asyncio.run(serve_async(name, app, host, port, cancel=cancel))
    except SpanloopError as exc:
        sys.stderr.write(f"error: {exc.message}\n")
        sys.exit(exc.exit_code)


async def serve_async(name: str, app: Any, host: str, port: int, *, cancel: bool = False) -> None:
    """``serve`` inside a running loop. Raises TransientError when the address cannot be bound."""
    from aiohttp import web

    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S, handler_cancellation=cancel
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            reason = "is in use by another process" if exc.errno == errno.EADDRINUSE else str(exc)
            raise TransientError(
                f"{name} cannot listen on {host}:{port}: {reason}; stop that process or set another port "
                f"({name}.port, SPANLOOP_{name.upper()}__PORT; 0 takes any free one)"
            ) from exc
        bound_host, bound_port = runner.addresses[0][:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        sys.stdout.write(json.dumps({"ready": name, "url": f"http://{shown}:{bound_port}"}) + "\n")
        sys.stdout.flush()
        await stop.wait()
        _log.info("stopping")
    finally:
        await runner.cleanup()
