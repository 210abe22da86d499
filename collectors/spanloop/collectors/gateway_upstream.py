"""The gateway's side towards the upstream: asking it, and relaying whole and streamed answers to the client.

With several servers (``serving.urls``) a conversation stays with one of them, so that its prefix stays in that server's cache; a
server that cannot be reached is passed over. Invariants: an answer that the gateway did not change goes back byte for byte; an upstream's error keeps its status and
body; the record keeps the tokens that the client's copy does not show.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from spanloop.collectors.gateway_call import Call, GatewayError
from spanloop.collectors.gateway_stream import ChunkFolder, SseSplitter, event_data
from spanloop.collectors.gateway_tokens import Asked, strip_response
from spanloop.schemas.settings import Settings

__all__ = ["Upstream", "upstream_urls"]

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

CONNECTIONS_MAX = 1024
CONNECT_S = 5.0
_FORWARDED = ("accept", "openai-organization", "openai-project", "x-request-id", "user-agent")
_RETURNED = ("retry-after", "x-request-id", "openai-processing-ms", "openai-version")


def upstream_urls(settings: Settings) -> tuple[str, ...]:
    """Base URLs of the servers to ask, each ending in /v1: ``gateway.upstream``, else ``serving.urls``, else our own."""
    if settings.gateway.upstream:
        return (settings.gateway.upstream.rstrip("/"),)
    if settings.serving.engine == "vllm" and settings.serving.urls:
        return tuple(url.rstrip("/").removesuffix("/v1") + "/v1" for url in settings.serving.urls)
    host = settings.serving.host
    return (f"http://{f'[{host}]' if ':' in host else host}:{settings.serving.port}/v1",)


class Upstream:
    """A pool of connections to OpenAI-compatible servers that answer alike. Make it inside the running loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._urls = upstream_urls(settings)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=settings.gateway.timeout_s, connect=CONNECT_S),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    def address(self, call: Call) -> tuple[str, int]:
        """Host and port of the server that a call went to."""
        split = urlsplit(call.upstream or self._urls[0])
        return split.hostname or "", split.port or (443 if split.scheme == "https" else 80)

    def _order(self, call: Call) -> tuple[str, ...]:
        """The servers, the conversation's own first."""
        first = zlib.crc32(call.key.value.encode("utf-8", "replace")) % len(self._urls)
        return self._urls[first:] + self._urls[:first]

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def models(self, request: web.Request) -> list[Any]:
        """Models that the upstream lists; empty when it cannot be asked."""
        try:
            async with self._session.get(self._urls[0] + "/models", headers=self._headers(request)) as answer:
                listed = _decode(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, *_MALFORMED) as exc:
            _log.warning("the upstream's models cannot be listed: %s", exc)
            return []
        found = listed.get("data") if isinstance(listed, dict) else None
        return found if isinstance(found, list) else []

    async def relay(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Ask the upstream and bring its answer to the client. Raises GatewayError (502, 504)."""
        call.sent = True
        try:
            async with await self._ask(request, call) as answer:
                if answer.status == 200 and answer.content_type == "text/event-stream":
                    return await self._stream(request, call, answer)
                return _whole(call, answer, await answer.read())
        except TimeoutError as exc:
            seconds = self._settings.gateway.timeout_s
            raise GatewayError(
                504,
                f"the upstream {call.upstream} gave no answer in {seconds:g} s (gateway.timeout_s)",
                kind="timeout",
                code="upstream_timeout",
            ) from exc
        except aiohttp.ClientError as exc:
            raise GatewayError(
                502,
                f"the upstream {call.upstream} cannot be reached: {exc}. Is it running (gateway.upstream, serving.urls, "
                "serving.port)?",
                kind="bad_gateway",
                code="upstream_unreachable",
            ) from exc

    async def _ask(self, request: web.Request, call: Call) -> aiohttp.ClientResponse:
        for number, base in enumerate(self._order(call), 1):
            call.upstream = base
            try:
                return await self._ask_one(base + "/chat/completions", request, call)
            except aiohttp.ClientConnectorError:
                if number == len(self._urls):
                    raise
                _log.warning("%s cannot be reached; asking the next server", base)
        raise AssertionError("there is at least one upstream")

    async def _ask_one(self, url: str, request: web.Request, call: Call) -> aiohttp.ClientResponse:
        headers = self._headers(request)
        try:
            return await self._session.post(url, data=call.data, headers=headers)
        except aiohttp.ServerDisconnectedError:  # an idle connection that the server had closed: once more
            return await self._session.post(url, data=call.data, headers=headers)

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Headers for the upstream. A key that is the gateway's own credential goes no further."""
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        headers["Content-Type"] = "application/json"
        key = self._settings.gateway.upstream_key.get_secret_value()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        elif not self._settings.credentials and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        return headers

    async def _stream(
        self, request: web.Request, call: Call, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers=_returned(answer) | {"Cache-Control": "no-cache"})
        reply.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        await reply.prepare(request)
        splitter, folder = SseSplitter(), ChunkFolder()
        try:
            async for piece in answer.content.iter_any():
                out = b"".join([_event(call, event, folder) for event in splitter.feed(piece)])
                if out:
                    await reply.write(out)
            if rest := splitter.rest():
                await reply.write(_event(call, rest, folder))
            await reply.write_eof()
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            call.error = "client_disconnected"
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            await self._cut_off(call, reply, exc)
        finally:
            call.response = folder.response()
        return reply

    async def _cut_off(self, call: Call, reply: web.StreamResponse, cause: Exception) -> None:
        """The status line is gone: an error event tells the client, as vLLM does it."""
        call.error = "upstream_cut_off"
        _log.warning("the upstream broke off a stream: %s", cause)
        error = GatewayError(502, "the upstream broke off", kind="bad_gateway", code="upstream_cut_off")
        body = {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}
        try:
            await reply.write(b"data: " + _encode(body) + b"\n\n")
            await reply.write_eof()
        except ConnectionError:
            _log.info("the client of a broken stream is gone too")


def _returned(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _RETURNED if name in answer.headers}


def _whole(call: Call, answer: aiohttp.ClientResponse, data: bytes) -> web.Response:
    if answer.status >= 400:
        call.error = f"upstream_{answer.status}"
    else:
        data = _fold_whole(call, data)
    headers = _returned(answer) | {"Content-Type": answer.headers.get("Content-Type", "application/json")}
    return web.Response(status=answer.status, body=data, headers=headers)


def _fold_whole(call: Call, data: bytes) -> bytes:
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
    call.response = response
    return data if call.asked is None else _encode(_shown(response, call.asked))


def _shown(response: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The client's copy; it shares what is not removed with the record's."""
    shown = dict(response)
    if isinstance(response.get("choices"), list):
        shown["choices"] = [dict(c) if isinstance(c, dict) else c for c in response["choices"]]
    strip_response(shown, asked)
    return shown


def _event(call: Call, event: bytes, folder: ChunkFolder) -> bytes:
    """One event for the client: as it came, or without what only the record needs. Empty: not for the client."""
    data = event_data(event)
    if data is None or data == b"[DONE]":
        return event + b"\n\n"
    try:
        chunk = _decode(data)
    except _MALFORMED:
        chunk = None
    if not isinstance(chunk, dict) or "error" in chunk:
        call.error = "upstream_error_event"
        return event + b"\n\n"
    folder.add(chunk)
    if call.asked is None:
        return event + b"\n\n"
    shown = _shown(chunk, call.asked)
    if not call.asked.usage:
        if not shown.get("choices") and shown.get("usage") is not None:
            return b""
        shown.pop("usage", None)
    return b"data: " + _encode(shown) + b"\n\n"
