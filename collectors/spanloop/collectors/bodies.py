"""Reading a request's body within limits, and answering in the sender's own encoding (protobuf or JSON)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from aiohttp import web

from spanloop.collectors.auth import AuthError
from spanloop.collectors.commit import QueueFullError
from spanloop.collectors.limits import BodyTooLargeError
from spanloop.schemas.errors import SchemaError, SpanloopError, TransientError
from spanloop.schemas.settings import Collector

__all__ = [
    "JSON",
    "PROTOBUF",
    "RETRY_S",
    "ArrivingBodies",
    "BodyTimeoutError",
    "Encodings",
    "UnsupportedError",
    "encodings",
    "export_response",
    "http_status",
    "read_body",
    "reply",
    "rpc_code",
    "rpc_status",
]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_TYPES = {PROTOBUF: PROTOBUF, "application/protobuf": PROTOBUF, JSON: JSON}
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_RPC_CODES = {400: 3, 401: 16, 403: 7, 408: 4, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}
"""google.rpc.Code of an HTTP status."""
RETRY_S = 1
"""When a client that was refused for want of room should come again."""
SLOW_S = 1.0
"""A body that has been arriving for so long gives its room up when others need it."""
_RETRY_INFO = b"type.googleapis.com/google.rpc.RetryInfo"


class UnsupportedError(SchemaError):
    """A content type or encoding that is not spoken here (HTTP 415)."""


class BodyTimeoutError(TransientError):
    """The body came too slowly (HTTP 408)."""


class Encodings(NamedTuple):
    """How a body is written: its type, and the compressions in the order in which to undo them."""

    content_type: str
    codings: tuple[str, ...]


def encodings(request: web.Request, accepted: tuple[str, ...] = (PROTOBUF, JSON)) -> Encodings:
    """From the headers; raises UnsupportedError."""
    content_type = _TYPES.get(request.content_type.lower())
    if content_type not in accepted:
        raise UnsupportedError(
            f"Content-Type {request.headers.get('Content-Type', '(none)')[:80]!r} is not accepted here: use "
            + " or ".join(accepted)
        )
    codings = []
    for name in request.headers.get("Content-Encoding", "").split(","):
        coding = name.strip().lower()
        if coding in ("", "identity"):
            continue
        if coding not in _CODINGS or len(codings) == 2:
            raise UnsupportedError(
                f"Content-Encoding {name.strip()[:40]!r} is not accepted: use gzip, deflate or none"
            )
        codings.append(_CODINGS[coding])
    return Encodings(content_type, tuple(reversed(codings)))


@dataclass(eq=False)
class _Body:
    """A body that is arriving."""

    tenant: str
    since_s: float
    timeout: asyncio.Timeout
    size: int = 0
    taken: bool = False
    """Another body has its room now."""


class ArrivingBodies:
    """Bytes of the request bodies that are arriving, over all connections.

    When there is no room for more, slow bodies give way: the oldest of the tenant that holds most, unless who asks holds more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._bodies: dict[_Body, None] = {}

    @contextmanager
    def body(self, tenant: str, timeout: asyncio.Timeout) -> Iterator[_Body]:
        """A body that arrives; ``timeout`` ends it. Its bytes are given back at the end."""
        mine = _Body(tenant, asyncio.get_running_loop().time(), timeout)
        self._bodies[mine] = None
        try:
            yield mine
        finally:
            self._drop(mine)

    def grow(self, body: _Body, size: int) -> None:
        """``size`` more bytes of a body came.

        Raises:
            TransientError: there is no room for them.
        """
        while not body.taken and self.used + size > self.limit:
            self._free(body, size)
        if body.taken:
            raise TransientError(
                "too many request bodies are arriving at once, and this one was slow; try again shortly"
            )
        body.size += size
        self.used += size

    def _free(self, asking: _Body, size: int) -> None:
        now_s = asyncio.get_running_loop().time()
        held: Counter[str] = Counter()
        for body in self._bodies:
            held[body.tenant] += body.size
        slow = [
            body
            for body in self._bodies
            if body is not asking
            and body.size
            and now_s - body.since_s > SLOW_S
            and (body.tenant == asking.tenant or held[body.tenant] >= held[asking.tenant] + size)
        ]
        if not slow:
            raise TransientError("too many request bodies are arriving at once; try again shortly")
        victim = max(slow, key=lambda body: (held[body.tenant], -body.since_s))
        victim.taken = True
        victim.timeout.reschedule(now_s)
        self._drop(victim)

    def _drop(self, body: _Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self.used -= body.size


async def read_body(
    request: web.Request, limits: Collector, arriving: ArrivingBodies, tenant: str, *, compressed: bool
) -> bytes:
    """The body as sent. Its bytes count in ``arriving`` until it is whole.

    Raises:
        BodyTooLargeError: over collector.max_body_bytes (compressed) or collector.max_expanded_bytes (plain).
        BodyTimeoutError: it took longer than collector.read_timeout_s.
        TransientError: all bodies together have no room.
    """
    limit = limits.max_body_bytes if compressed else limits.max_expanded_bytes
    setting = "collector.max_body_bytes" if compressed else "collector.max_expanded_bytes"
    if (request.content_length or 0) > limit:
        raise BodyTooLargeError(f"the body has {request.content_length} bytes, at most {limit} ({setting})")
    parts: list[bytes] = []
    timeout = asyncio.timeout(limits.read_timeout_s)
    with arriving.body(tenant, timeout) as mine:
        try:
            async with timeout:
                async for part in request.content.iter_any():
                    arriving.grow(mine, len(part))
                    if mine.size > limit:
                        raise BodyTooLargeError(f"the body has more than {limit} bytes ({setting})")
                    parts.append(part)
        except TimeoutError as exc:
            if mine.taken:
                raise TransientError(
                    "too many request bodies are arriving at once, and this one was slow; try again shortly"
                ) from exc
            raise BodyTimeoutError(
                f"the body did not arrive within {limits.read_timeout_s:g} s (collector.read_timeout_s)"
            ) from exc
    return b"".join(parts)


def reply(
    content_type: str, status: int, message: str = "", rejected: int = 0, field: str = "rejectedSpans"
) -> web.Response:
    """An Export...ServiceResponse (status 200) or a google.rpc.Status, in protobuf or JSON, where ``field`` names the count."""
    if content_type == PROTOBUF:
        body = _protobuf(status, message, rejected)
    else:
        body = json.dumps(_json(status, message, rejected, field)).encode()
    response = web.Response(status=status, body=body, content_type=content_type)
    if status in (408, 429, 503):
        response.headers["Retry-After"] = str(RETRY_S)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(status: int, message: str, rejected: int, field: str) -> dict[str, object]:
    if status != 200:
        return {"code": rpc_code(status), "message": message}
    if not rejected:
        return {}
    return {"partialSuccess": {field: str(rejected), "errorMessage": message}}


def _protobuf(status: int, message: str, rejected: int) -> bytes:
    if status != 200:
        return rpc_status(rpc_code(status), message)
    return export_response(rejected, message)


def http_status(exc: SpanloopError) -> int:
    """The HTTP status that tells a sender what to do about an error."""
    if isinstance(exc, AuthError):
        return exc.status
    for kind, status in (
        (BodyTooLargeError, 413), (UnsupportedError, 415), (SchemaError, 400), (BodyTimeoutError, 408),
        (QueueFullError, 429), (TransientError, 503),
    ):  # fmt: skip
        if isinstance(exc, kind):
            return status
    return 503


def rpc_code(status: int) -> int:
    """The google.rpc.Code of an HTTP status.

    >>> rpc_code(401), rpc_code(429), rpc_code(418)
    (16, 8, 2)
    """
    return _RPC_CODES.get(status, 2)


def rpc_status(code: int, message: str, retry_s: int = 0) -> bytes:
    """A google.rpc.Status; with RetryInfo where ``retry_s`` is not 0."""
    body = _varint_field(1, code) + _bytes_field(2, message.encode("utf-8", "replace"))
    if retry_s:
        info = _bytes_field(1, _varint_field(1, retry_s))
        body += _bytes_field(3, _bytes_field(1, _RETRY_INFO) + _bytes_field(2, info))
    return body


def export_response(rejected: int, message: str) -> bytes:
    """An ExportTraceServiceResponse or ExportLogsServiceResponse, which are the same on the wire."""
    if not rejected:
        return b""
    text = message.encode("utf-8", "replace")
    return _bytes_field(1, _varint_field(1, rejected) + _bytes_field(2, text))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value
