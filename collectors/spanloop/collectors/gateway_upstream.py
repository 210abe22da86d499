"""The gateway's side towards the upstreams: asking them, and relaying whole and streamed answers to the client.

With several servers (``serving.urls``) a conversation stays with one of them, so that its prefix stays in that server's cache; a
server that cannot be reached is passed over. Invariants: an answer from which nothing is taken out goes back byte for byte, as it
comes; an upstream's error keeps its status, body and Retry-After; the record keeps the tokens that the client's copy does not show;
a client that goes away ends the request to the upstream (the handler is cancelled); no credential is kept, followed to another
host or shared through cookies.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from spanloop.collectors.gateway_call import Call, GatewayError
from spanloop.collectors.gateway_reading import Reading
from spanloop.collectors.gateway_shapes import CHAT, RESPONSES
from spanloop.collectors.gateway_targets import Target, Targets
from spanloop.collectors.gateway_tokens import shown_chat_bytes
from spanloop.collectors.untyped import text
from spanloop.schemas.settings import Settings

__all__ = ["Upstream"]

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

CONNECTIONS_MAX = 1024
CONNECT_S = 5.0
MODELS_S = 5.0
_KEPT = frozenset(
    [
        "accept-encoding",
        "authorization",
        "baggage",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "traceparent",
        "tracestate",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-harness-runtime",
        "x-session-id",
        "x-spanloop-key",
        "x-spanloop-session",
        "x-task-key",
        "x-turn-type",
    ]
)
"""Request headers that go no further: of the connection, of our own, and what names other systems of the caller."""
_OWN = frozenset(
    [
        "alt-svc",
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""Response headers that are of the upstream's connection."""


class Upstream:
    """A pool of connections to OpenAI-compatible servers. Make it inside the running loop.

    Args:
        settings: The deployment.
        targets: Who there is to ask.
        answered: Told of each streamed answer of the Responses API, by its id.
    """

    def __init__(self, settings: Settings, targets: Targets, answered: Callable[[Call, str], None]) -> None:
        self._settings = settings
        self._answered = answered
        self._targets = targets
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_S, sock_read=settings.gateway.timeout_s),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def address(self, call: Call) -> tuple[str, int]:
        """Host and port of the server that a call went to."""
        return _address(call.upstream or call.target.urls[0])

    async def models(self, request: web.Request) -> list[Any]:
        """Models that the upstreams list and that go to them; none of one that cannot be asked."""
        found = await asyncio.gather(
            *[self._models_of(request, target) for target in (self._targets.own, *self._targets.others)]
        )
        return [card for cards in found for card in cards]

    async def _models_of(self, request: web.Request, target: Target) -> list[Any]:
        timeout = aiohttp.ClientTimeout(total=MODELS_S)
        try:
            headers = self._headers(request, target)
            async with self._session.get(
                target.urls[0] + "/models", headers=headers, timeout=timeout
            ) as answer:
                listed = _decode(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, *_MALFORMED) as exc:
            _log.warning("the models of %s cannot be listed: %s", target.urls[0], exc)
            return []
        cards = listed.get("data") if isinstance(listed, dict) else None
        names = [(card, card.get("id")) for card in cards or () if isinstance(card, dict)]
        return [card for card, name in names if isinstance(name, str) and self._targets.of(name) is target]

    # ------------------------------------------------------------ a recorded call

    async def relay(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Ask the upstream and bring its answer to the client. Raises GatewayError (502, 504)."""
        call.sent = True
        order = _order(call)
        async with self._asked(request, call.target, call.shape.path, call.data, order) as (answer, base):
            call.upstream = base
            if answer.status == 200 and answer.content_type == "text/event-stream":
                return await self._stream(request, call, answer)
            return _whole(call, answer, await answer.read())

    @asynccontextmanager
    async def _asked(
        self, request: web.Request, target: Target, path: str, data: bytes, order: tuple[str, ...]
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, str]]:
        """An answer and who gave it. Raises GatewayError (502, 504), also for what goes wrong while it is read."""
        base = order[0]
        try:
            for number, base in enumerate(order, 1):
                try:
                    answer = await self._ask_one(base + path, request, target, data)
                except aiohttp.ClientConnectorError:
                    if number == len(order):
                        raise
                    _log.warning("%s cannot be reached; asking the next server", base)
                    continue
                async with answer:
                    yield answer, base
                return
        except TimeoutError as exc:
            seconds = self._settings.gateway.timeout_s
            message = f"the upstream {base} gave no answer in {seconds:g} s (gateway.timeout_s)"
            raise GatewayError(504, message, kind="timeout", code="upstream_timeout") from exc
        except aiohttp.ClientError as exc:
            message = (
                f"the upstream {base} cannot be reached: {exc}. Is it running (gateway.upstream, gateway.upstreams, "
                "serving.urls, serving.port)?"
            )
            raise GatewayError(502, message, kind="bad_gateway", code="upstream_unreachable") from exc

    async def _ask_one(
        self, url: str, request: web.Request, target: Target, data: bytes
    ) -> aiohttp.ClientResponse:
        headers = self._headers(request, target)
        if request.query_string:
            url = f"{url}?{request.query_string}"
        method, body = request.method, data or None
        try:
            return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ServerDisconnectedError:  # an idle connection that the server had closed: once more
            return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)

    def _headers(self, request: web.Request, target: Target) -> dict[str, str]:
        """Headers for the upstream. A key that is the gateway's own credential goes no further."""
        dropped = {name.strip().lower() for name in request.headers.get("Connection", "").split(",")}
        headers = {
            n: v for n, v in request.headers.items() if n.lower() not in _KEPT and n.lower() not in dropped
        }
        if request.body_exists:
            headers["Content-Type"] = request.headers.get("Content-Type") or "application/json"
        if target.key:
            headers["Authorization"] = f"Bearer {target.key}"
        elif "Authorization" in request.headers and (
            not self._settings.credentials or "X-Spanloop-Key" in request.headers
        ):
            headers["Authorization"] = request.headers["Authorization"]
        return headers

    async def _stream(
        self, request: web.Request, call: Call, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers=_returned(answer))
        reply.headers.setdefault("Cache-Control", "no-cache")
        reply.headers.setdefault("X-Accel-Buffering", "no")
        await reply.prepare(request)
        stream = Reading(call)
        try:
            async for piece in answer.content.iter_any():
                out = stream.take(piece)
                if (
                    call.response_id and not call.noted
                ):  # the client may go on from it before its stream has ended here
                    call.noted = True
                    self._answered(call, call.response_id)
                if out:
                    await reply.write(out)
            if rest := stream.end():
                await reply.write(rest)
            await reply.write_eof()
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            call.error = "client_disconnected"
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            await _cut_off(call, reply, exc)
        finally:
            call.answer, call.folds = stream.answer, True
        return reply

    # ------------------------------------------------------------ passed on

    async def forward(
        self, request: web.Request, target: Target, path: str, data: bytes, base: str = ""
    ) -> web.StreamResponse:
        """Pass a request on and its answer back, byte for byte, unrecorded. Raises GatewayError (502, 504).

        ``base``: the server to ask; empty: the target's first that can be reached.
        """
        order = (base,) if base else target.urls
        async with self._asked(request, target, path, data, order) as (answer, _):
            reply = web.StreamResponse(status=answer.status, headers=_returned(answer))
            if answer.content_length is not None and "Content-Encoding" not in answer.headers:
                reply.content_length = answer.content_length
            await reply.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await reply.write(piece)
                await reply.write_eof()
            except (aiohttp.ClientConnectionResetError, ConnectionResetError):
                _log.info("the client of a passed request is gone")
            except (aiohttp.ClientError, TimeoutError) as exc:
                _log.warning("the upstream broke off: %s", exc)
                if request.transport is not None:
                    request.transport.abort()
            return reply


@lru_cache(256)
def _address(url: str) -> tuple[str, int]:
    split = urlsplit(url)
    return split.hostname or "", split.port or (443 if split.scheme == "https" else 80)


def _order(call: Call) -> tuple[str, ...]:
    """The servers, the conversation's own first."""
    urls = call.target.urls
    if call.upstream in urls:  # the one that has the answer which the request goes on from
        first = urls.index(call.upstream)
    else:
        first = zlib.crc32(call.key.value.encode("utf-8", "replace")) % len(urls)
    return urls[first:] + urls[:first]


async def _cut_off(call: Call, reply: web.StreamResponse, cause: Exception) -> None:
    """The status line is gone: an error event tells the client, as vLLM does it."""
    call.error = "upstream_cut_off"
    _log.warning("the upstream broke off a stream: %s", cause)
    error = GatewayError(502, "the upstream broke off", kind="bad_gateway", code="upstream_cut_off")
    try:
        await reply.write(b"data: " + error.body() + b"\n\n")
        await reply.write_eof()
    except ConnectionError:
        _log.info("the client of a broken stream is gone too")


def _returned(answer: aiohttp.ClientResponse) -> dict[str, str]:
    dropped = {name.strip().lower() for name in answer.headers.get("Connection", "").split(",")}
    return {n: v for n, v in answer.headers.items() if n.lower() not in _OWN and n.lower() not in dropped}


def _whole(call: Call, answer: aiohttp.ClientResponse, data: bytes) -> web.Response:
    if answer.status >= 300:
        call.error = f"upstream_{answer.status}"
    else:
        data = _read_whole(call, data)
    return web.Response(status=answer.status, body=data, headers=_returned(answer))


def _read_whole(call: Call, data: bytes) -> bytes:
    """What the client gets of a whole answer. Only what must be changed is read here, and who needs the answer's id."""
    call.answer = data
    if call.asked is None and call.shape is not RESPONSES:
        return data
    if call.asked is not None and call.shape is CHAT:
        with suppress(msgspec.DecodeError):
            return shown_chat_bytes(data, call.asked)
    try:
        response = _decode(data)
    except _MALFORMED:
        response = None
    if not isinstance(response, dict):
        call.error = "upstream_malformed"
        if call.asked is None:
            return data
        raise GatewayError(
            502, "the upstream's answer is not a JSON object", kind="bad_gateway", code="upstream_malformed"
        )
    call.response_id = text(response.get("id")) if call.shape is RESPONSES else ""
    if call.asked is None:
        return data
    shown = call.shape.shown(response, call.asked)
    return data if shown == response else _encode(shown)
