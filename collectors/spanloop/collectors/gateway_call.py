"""One request on its way through the gateway, and the refusals of the gateway itself."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from spanloop.collectors.gateway_tokens import Asked
from spanloop.collectors.harness import harness_fingerprint
from spanloop.collectors.routing import StickyKey, parse_traceparent, sticky_key

__all__ = ["Call", "GatewayError", "bad_request", "decode_json_body", "read_call"]

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


class GatewayError(Exception):
    """A refusal of the gateway, told as OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, kind: str, code: str, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.retry_s = retry_s

    def response(self) -> web.Response:
        """The HTTP answer."""
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s is not None else {}
        body = {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}
        return web.Response(
            status=self.status, body=_encode(body), content_type="application/json", headers=headers
        )


def bad_request(message: str) -> GatewayError:
    """400 with OpenAI's words."""
    return GatewayError(400, message, kind="invalid_request_error", code="invalid_request")


class Call:
    """What the record will say of a call, filled in as it becomes known."""

    def __init__(self, tenant: str, body: dict[str, Any], data: bytes, key: StickyKey) -> None:
        self.tenant = tenant
        self.body = body
        """The request as the client sent it; never changed."""
        self.data = data
        """The bytes for the upstream."""
        self.key = key
        self.call_id = f"{_PROCESS}{next(_numbers):016x}"
        self.route = "pass"
        self.version = ""
        self.harness = ""
        self.parent: tuple[str, str] | None = None
        self.task_key = ""
        self.start_ns = 0
        self.asked: Asked | None = None
        """None: the answer goes back byte for byte."""
        self.sent = False
        """It went to the upstream: it will be recorded."""
        self.upstream = ""
        """Base URL of the server that was asked."""
        self.response: Mapping[str, Any] | None = None
        self.error = ""


def decode_json_body(data: bytes) -> dict[str, Any]:
    """A chat request's body. Raises GatewayError (400)."""
    try:
        body = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(f"the request body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise bad_request("the request body must be an object with a text `model`")
    return body


def read_call(request: web.Request, tenant: str, data: bytes, *, start_ns: int, key: bytes) -> Call:
    """A call from its request; ``key``: secret of the workspace's hashes. Raises GatewayError (400)."""
    body = decode_json_body(data)
    parent = parse_traceparent(request.headers.get("traceparent"))
    sticky = sticky_key(
        session=request.match_info.get("session") or request.headers.get("X-Session-Id"),
        trace_id=parent[0] if parent else None,
        user=body.get("user"),
        messages=body.get("messages"),
    )
    call = Call(tenant, body, data, sticky)
    call.parent = parent
    call.task_key = request.headers.get("X-Task-Key", "")[:256]
    call.start_ns = start_ns
    runtime = request.headers.get("X-Harness-Runtime") or request.headers.get("User-Agent", "")
    call.harness = harness_fingerprint(body, runtime=runtime, key=key)
    return call
