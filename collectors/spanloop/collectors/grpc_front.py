"""OTLP/gRPC: TraceService and LogsService on one port, into the same reception as HTTP.

Messages are taken as bytes and never parsed by gRPC: compressed ones arrive as sent, so that they expand under our
own limits and not before the credential was checked. Invariants: OK only after the durable append; the metadata's
credential is checked before a message is read; what a client should send again is answered with RetryInfo.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from spanloop.collectors.auth import Authenticator
from spanloop.collectors.bodies import (
    PROTOBUF,
    RETRY_S,
    BodyTimeoutError,
    Encodings,
    export_response,
    http_status,
    rpc_code,
    rpc_status,
)
from spanloop.collectors.commit import QueueFullError
from spanloop.collectors.limits import BodyTooLargeError
from spanloop.collectors.reception import SIGNALS, Reception, labels_of
from spanloop.collectors.routes import GRPC_ROUTES, GrpcRoute
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError

__all__ = ["GrpcFront", "coding_of"]

_log = logging.getLogger("spanloop.collector")

ARRIVING_MAX = 16
"""Messages that may be arriving at once. It bounds memory: each may have max_expanded_bytes. A further one takes the place of one
that is slow, else it is told to come again."""
SLOW_S = 1.0
"""A message that has been arriving for so long gives its place up when others wait: streams that are opened and send nothing must
not keep everybody else out."""
DETAILS_MAX = 1_000
"""Characters of an error message: gRPC carries it in a header."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_ZLIB = 8


class GrpcFront(grpc.GenericRpcHandler):
    """The gRPC side of a collector.

    Args:
        reception: where messages go.
        authenticator: checks ``authorization`` or ``x-api-key`` of the metadata.
    """

    def __init__(self, reception: Reception, authenticator: Authenticator) -> None:
        self._reception = reception
        self._limits = reception.limits
        self._auth = authenticator
        self._methods = {route.path: self._handler(route) for route in GRPC_ROUTES}
        self._arriving = _Arriving(ARRIVING_MAX)
        self._server: grpc.aio.Server | None = None

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method; None: not one of ours (UNIMPLEMENTED)."""
        return self._methods.get(handler_call_details.method)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was bound. Raises ConfigError when it cannot."""
        timeout_ms = max(1, int(self._limits.read_timeout_s * 1000))
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.per_message_decompression", 0),
                ("grpc.max_receive_message_length", self._limits.max_expanded_bytes),
                ("grpc.max_concurrent_streams", 128),
                ("grpc.server_handshake_timeout_ms", timeout_ms),
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ]
        )
        server.add_generic_rpc_handlers((self,))
        name = f"[{host}]" if ":" in host else host
        try:
            bound = server.add_insecure_port(f"{name}:{port}")
        except RuntimeError as exc:
            raise _port_error(host, port) from exc
        if not bound:
            raise _port_error(host, port)
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those under way have ``grace_s`` to end."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _handler(self, route: GrpcRoute) -> Any:
        return grpc.stream_unary_rpc_method_handler(partial(self._export, route))

    async def _export(self, route: GrpcRoute, _: Any, context: Any) -> bytes:
        """One call. The message is read here and not before, hence a handler of streams: its wire form is the same."""
        code, details = 0, ""
        answer = b""
        try:
            answer = await self._answer(route, context)
        except SpanloopError as exc:
            code, details = rpc_code(http_status(exc)), exc.message[:DETAILS_MAX]
            if isinstance(exc, QueueFullError):
                code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        except Exception:
            _log.exception("call failed")
            code, details = 13, "internal error; the collector's log has the trace"
        self._reception.metrics.add("spanloop_requests_total", route=route.action, status=f"grpc_{code}")
        if code:
            status = rpc_status(code, details, retry_s=RETRY_S if code in _RETRIED else 0)
            await context.abort(_CODES[code], details, (("grpc-status-details-bin", status),))
        return answer

    async def _answer(self, route: GrpcRoute, context: Any) -> bytes:
        metadata = {key: value for key, value in context.invocation_metadata() or () if type(value) is str}
        identity = self._auth.check(
            metadata.get("authorization"), route.action, api_key=metadata.get("x-api-key")
        )
        self._reception.committer.check_room()
        body = await self._read(context.read, identity.tenant)
        coding = coding_of(body)
        if coding.codings and len(body) > self._limits.max_body_bytes:
            raise BodyTooLargeError(
                f"the message has {len(body)} compressed bytes, at most {self._limits.max_body_bytes} "
                "(collector.max_body_bytes)"
            )
        taken = await self._reception.take(
            SIGNALS[route.handler], body, coding, identity, labels_of(metadata)
        )
        return export_response(taken.rejected, taken.message)

    async def _read(self, read: Callable[[], Awaitable[Any]], tenant: str) -> bytes:
        """The one message of the call.

        Raises:
            QueueFullError: too many are arriving.
            BodyTimeoutError: it took longer than collector.read_timeout_s.
            SchemaError: none came, or one over the limit.
        """
        timeout = asyncio.timeout(self._limits.read_timeout_s)
        with self._arriving.place(tenant, timeout) as place:
            try:
                async with timeout:
                    body = await read()
            except TimeoutError as exc:
                if place.taken:
                    raise QueueFullError(
                        "too many messages are arriving at once, and this one was slow; try again shortly"
                    ) from exc
                raise BodyTimeoutError(
                    f"the message did not arrive within {self._limits.read_timeout_s:g} s (collector.read_timeout_s)"
                ) from exc
        if not isinstance(body, bytes):
            raise SchemaError("the call carries no message")
        return body


@dataclass(eq=False)
class _Place:
    """A message that is arriving."""

    tenant: str
    since_s: float
    timeout: asyncio.Timeout
    taken: bool = False
    """Another message has its place now."""


class _Arriving:
    """Places for messages that are arriving. When all are held, a slow one gives way: the oldest of the tenant that holds most."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._places: dict[_Place, None] = {}

    @contextmanager
    def place(self, tenant: str, timeout: asyncio.Timeout) -> Iterator[_Place]:
        """A place for one message; ``timeout`` ends its arrival. Raises QueueFullError when none is free or slow."""
        now_s = asyncio.get_running_loop().time()
        if len(self._places) >= self._num_places:
            self._free(now_s)
        mine = _Place(tenant, now_s, timeout)
        self._places[mine] = None
        try:
            yield mine
        finally:
            self._places.pop(mine, None)

    def _free(self, now_s: float) -> None:
        held = Counter(place.tenant for place in self._places)
        slow = [place for place in self._places if now_s - place.since_s > SLOW_S]
        if not slow:
            raise QueueFullError("too many messages are arriving at once; try again shortly")
        victim = max(slow, key=lambda place: (held[place.tenant], -place.since_s))
        victim.taken = True
        victim.timeout.reschedule(now_s)
        del self._places[victim]


_RETRIED = frozenset({4, 8, 14})
"""DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED and UNAVAILABLE, as OTLP has it."""


def coding_of(body: bytes) -> Encodings:
    """How a message is compressed, by its first bytes: gRPC keeps the header to itself. A request in protobuf begins with the
    tag of its first field, which neither compression begins with.

    >>> coding_of(b"\\x1f\\x8b\\x08").codings, coding_of(b"x\\x9c").codings, coding_of(b"\\x0a\\x00").codings
    (('gzip',), ('deflate',), ())
    """
    if body[:2] == b"\x1f\x8b":
        return Encodings(PROTOBUF, ("gzip",))
    if len(body) > 1 and body[0] & 0x0F == _ZLIB and (body[0] << 8 | body[1]) % 31 == 0:
        return Encodings(PROTOBUF, ("deflate",))
    return Encodings(PROTOBUF, ())


def _port_error(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"port {port} on {host} cannot be opened for OTLP/gRPC, perhaps it is taken: stop that process, or choose another with "
        "collector.grpc_port in the TOML or SPANLOOP_COLLECTOR__GRPC_PORT"
    )
