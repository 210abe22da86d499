"""One request on its way through the gateway, and the refusals of the gateway itself."""

from __future__ import annotations

import itertools
import re
import secrets
from typing import Any

import msgspec
from aiohttp import web

from spanloop.collectors.gateway_finished import Finished
from spanloop.collectors.gateway_shapes import Shape
from spanloop.collectors.gateway_targets import Target
from spanloop.collectors.gateway_tokens import Asked
from spanloop.collectors.routing import StickyKey, parse_traceparent, sticky_key

__all__ = [
    "Call",
    "GatewayError",
    "bad_request",
    "decode_json_body",
    "new_call_id",
    "own_headers",
    "read_call",
    "session_of",
]

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()
_TURN_TYPE = re.compile(r"[A-Za-z0-9_.\-:/ ]{1,64}")
TASK_KEY_MAX = 256


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

    def body(self) -> bytes:
        """OpenAI's error object."""
        return _encode({"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}})

    def response(self) -> web.Response:
        """The HTTP answer."""
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s is not None else {}
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def bad_request(message: str) -> GatewayError:
    """400 with OpenAI's words."""
    return GatewayError(400, message, kind="invalid_request_error", code="invalid_request")


def new_call_id() -> str:
    """32 hex digits that no other process gives."""
    return f"{_PROCESS}{next(_numbers):016x}"


class Call:
    """What the record will say of a call, filled in as it becomes known."""

    def __init__(
        self, shape: Shape, tenant: str, body: dict[str, Any], data: bytes, *, key: StickyKey, target: Target
    ) -> None:
        self.shape = shape
        self.tenant = tenant
        self.body = body
        """The request as the client sent it; never changed."""
        self.data = data
        """The bytes for the upstream."""
        self.request = data
        """The bytes that the client sent."""
        self.key = key
        self.target = target
        self.call_id = new_call_id()
        self.route = "pass"
        self.version = ""
        self.exploration = 0.0
        self.runtime = ""
        """What runs the agent, in the fingerprint of its harness."""
        self.parent: tuple[str, str] | None = None
        self.trace_id = ""
        """Trace of a call without a trace context that belongs to a session's; empty: one of its own."""
        self.fallback = ""
        """Why a decision was the caller's default."""
        self.task_key = ""
        self.turn_type = ""
        self.start_ns = 0
        self.asked: Asked | None = None
        """None: the answer goes back byte for byte."""
        self.wants_tokens = False
        """Token ids are asked for."""
        self.sent = False
        """It went to the upstream: it will be recorded."""
        self.upstream = ""
        """Base URL of the server that was asked."""
        self.answer = b""
        """The upstream's answer as it came."""
        self.folds = False
        """It is a stream of events."""
        self.response_id = ""
        """Of an answer of the Responses API."""
        self.noted = False
        """Its answer is known by its id."""
        self.error = ""

    def finished(self, status: int, *, end_ns: int, server: tuple[str, int]) -> Finished:
        """What is handed over to be recorded.

        Args:
            status: Towards the client.
            end_ns: Now.
            server: Host and port that answered.
        """
        return Finished(
            tenant=self.tenant,
            shape=self.shape.name,
            call_id=self.call_id,
            request=self.request,
            answer=self.answer,
            folds=self.folds,
            runtime=self.runtime,
            sticky=self.key.value,
            sticky_source=self.key.source,
            route=self.route,
            policy_version=self.version,
            exploration=self.exploration,
            asked_tokens=self.wants_tokens,
            start_ns=self.start_ns,
            end_ns=end_ns,
            status=status,
            error=self.error,
            parent=self.parent,
            task_key=self.task_key,
            turn_type=self.turn_type,
            trace_id=self.trace_id,
            fallback=self.fallback,
            server_address=server[0],
            server_port=server[1],
        )


def decode_json_body(data: bytes) -> dict[str, Any]:
    """A request's body. Raises GatewayError (400)."""
    try:
        body = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(f"the request body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise bad_request("the request body must be an object with a text `model`")
    return body


def read_call(
    request: web.Request,
    shape: Shape,
    tenant: str,
    data: bytes,
    *,
    start_ns: int,
    target: Target,
) -> Call:
    """A call from its request. Raises GatewayError (400).

    Args:
        request: Its headers and path say the session, the trace context, the turn.
        shape: Which API.
        tenant: Of the credential.
        data: The body.
        start_ns: When it came.
        target: Who answers where nothing else is decided.
    """
    body = decode_json_body(data)
    headers = request.headers
    parent = parse_traceparent(headers.get("traceparent"))
    sticky = sticky_key(
        session=session_of(request),
        trace_id=parent[0] if parent else None,
        user=body.get("user"),
        messages=shape.request_view(body).get("messages"),
    )
    call = Call(shape, tenant, body, data, key=sticky, target=target)
    call.parent = parent
    own_headers(call, request)
    call.start_ns = start_ns
    call.runtime = headers.get("X-Harness-Runtime") or headers.get("User-Agent", "")
    return call


def session_of(request: web.Request) -> str | None:
    """The session that a request names in its path or a header."""
    headers = request.headers
    return (
        request.match_info.get("session") or headers.get("X-Session-Id") or headers.get("X-Spanloop-Session")
    )


def own_headers(call: Call, request: web.Request) -> None:
    """Take what the client says of the task and the turn."""
    call.task_key = request.headers.get("X-Task-Key", "")[:TASK_KEY_MAX]
    turn = request.headers.get("X-Turn-Type", "")
    call.turn_type = turn if _TURN_TYPE.fullmatch(turn) else ""
