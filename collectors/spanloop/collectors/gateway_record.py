"""A call through the gateway as a GenAI span. Pure: from what was asked and answered to one ``SpansReceived``.

Place: built by the recorder's thread, behind the response. Invariants: the span's ids follow from the response id, so
recording twice is one span; with content off it holds no token id, log-probability, menu or text, only counts and
what ``redact`` leaves of a text (its length and a keyed hash).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from spanloop.collectors.gateway_decided import decision_attributes
from spanloop.collectors.gateway_shapes import DECIDE, shape_of
from spanloop.collectors.gateway_tokens import call_tokens, is_greedy
from spanloop.collectors.limits import cut_span
from spanloop.collectors.untyped import maps, number, text, the_map
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.events import SpansReceived
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id
from spanloop.schemas.spans import Span

__all__ = ["CallRecord", "Redact", "Seal", "call_event"]

SCOPE = "spanloop.gateway"
CLIENT = 3

Redact = Callable[[Span], Span]
"""A span to what of it may be written where content is off (``redaction.Redactor.span``)."""


Seal = Callable[[Span, str], Span]
"""A span and its tenant to what of it may be written where content is kept under keys."""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a finished call."""

    tenant: str
    call_id: str
    """Names the call where there is no response id."""
    request: Mapping[str, Any]
    """The request as the client sent it."""
    response: Mapping[str, Any] | None
    """The answer as the server sent it; None: no usable answer."""
    route: str
    """champion, learning, canary, pinned (the client named a version) or pass (another model)."""
    policy_version: str
    """Serving name; empty on route "pass"."""
    conversation: str
    """Keyed digest of the sticky key."""
    conversation_source: str
    harness: str
    start_ns: int
    end_ns: int
    status: int
    """HTTP status towards the client."""
    error: str = ""
    """Why it failed: a word without content."""
    parent: tuple[str, str] | None = None
    """(trace id, span id) of the caller's span."""
    task_key: str = ""
    server_address: str = ""
    server_port: int = 0
    streamed: bool = False
    shape: str = "chat"
    """Which API: name of one of ``gateway_shapes``."""
    repeated: bool = False
    """Another call had the same response id: this one is told apart by ``call_id``."""
    exploration: float = 0.0
    """Floor that the server was asked for."""
    asked_tokens: bool = True
    """Token ids were asked for."""
    turn_type: str = ""
    """What the client said in X-Turn-Type."""
    trace_id: str = ""
    """Trace of a call that came without a trace context; empty: one of its own."""
    fallback: str = ""
    """Why a decision was the caller's default."""


_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
    "min_p": "spanloop.request.min_p",
    "min_tokens": "spanloop.request.min_tokens",
    "repetition_penalty": "spanloop.request.repetition_penalty",
}
"""Sampling parameters of a request and the attributes that keep them."""


def call_event(
    record: CallRecord,
    *,
    content: bool,
    redact: Redact | None = None,
    max_attribute_bytes: int = 64 * 2**10,
    seal: Seal | None = None,
) -> SpansReceived:
    """The event of one call.

    Args:
        record: The call.
        content: Keep token ids, log-probabilities, menus and messages (the deployment opted in to training).
        redact: Applied to the span when ``content`` is False; None leaves messages out altogether.
        max_attribute_bytes: A longer text is cut and flagged, as the receiver does it.
        seal: Applied to the span when ``content`` is True: what becomes of it where content is kept under keys.
    """
    shape = shape_of(record.shape)
    request = shape.request_view(record.request)
    response = shape.response_view(record.response) if record.response else {}
    response_id = text(response.get("id"))
    identity = f"{response_id}/{record.call_id}" if record.repeated else response_id or record.call_id
    trace_id, parent_span_id = record.parent or (record.trace_id or gateway_trace_id(identity), None)
    attributes = _attributes(record, request, response, response_id)
    attributes["gen_ai.operation.name"] = shape.operation
    if shape is DECIDE and record.response is not None:
        attributes |= decision_attributes(request, response, record.fallback)
    if content:
        attributes |= _token_attributes(record, request, response)
    if content or redact is not None:
        attributes |= _messages(request, response)
    failed = record.status >= 400 or bool(record.error)
    span = Span(
        trace_id=trace_id,
        span_id=gateway_span_id(identity),
        parent_span_id=parent_span_id,
        name=f"{shape.operation} {text(request.get('model'))}".rstrip(),
        kind=CLIENT,
        start_ns=record.start_ns,
        end_ns=record.end_ns,
        status="error" if failed else "unset",
        status_message=record.error,
        attributes=attributes,
        scope=SCOPE,
        resource={"service.name": SCOPE},
    )
    if not content and redact is not None:
        span = redact(span)
    if content and seal is not None:
        span = seal(span, record.tenant)
    span = cut_span(span, max_attribute_bytes)
    return SpansReceived(tenant=record.tenant, trace_id=trace_id, spans=(span,), source="gateway")


def _attributes(
    record: CallRecord, request: Mapping[str, Any], response: Mapping[str, Any], response_id: str
) -> dict[str, Any]:
    usage = the_map(response.get("usage"))
    finish = [text(choice.get("finish_reason")) for choice in maps(response.get("choices"))]
    found: dict[str, Any] = {
        "gen_ai.request.model": text(request.get("model")),
        "gen_ai.response.model": text(response.get("model")),
        "gen_ai.response.id": response_id,
        "gen_ai.response.finish_reasons": [reason for reason in finish if reason],
        "gen_ai.usage.input_tokens": number(usage.get("prompt_tokens")),
        "gen_ai.usage.output_tokens": number(usage.get("completion_tokens")),
        "gen_ai.request.max_tokens": number(request.get("max_completion_tokens", request.get("max_tokens"))),
        "gen_ai.request.stream": True if record.streamed else None,
        "server.address": record.server_address,
        "server.port": record.server_port or None,
        "spanloop.api": "" if record.shape == "chat" else record.shape,
        "spanloop.policy.version": record.policy_version,
        "spanloop.policy.route": record.route,
        "spanloop.policy.exploration": record.exploration or None,
        "spanloop.harness": record.harness,
        "spanloop.conversation": record.conversation,
        "spanloop.conversation.source": record.conversation_source,
        "spanloop.task.key": record.task_key,
        "spanloop.turn.type": record.turn_type,
        "spanloop.response_id.repeated": True if record.repeated else None,
    }
    for name, attribute in _SAMPLING.items():
        found[attribute] = number(request.get(name))
    if record.status >= 400 or record.error:
        found["http.response.status_code"] = record.status
        found["error.type"] = record.error or str(record.status)
    return {name: value for name, value in found.items() if value not in ("", None, [])}


def _token_attributes(
    record: CallRecord, request: Mapping[str, Any], response: Mapping[str, Any]
) -> dict[str, Any]:
    """Token ids and log-probabilities; where the backend gave none, that is said: nothing may be imputed."""
    if not response or record.status >= 400 or record.fallback:
        return {}
    if not record.asked_tokens:
        return {"spanloop.backend_gave_none": True}
    tokens = call_tokens(response, greedy=is_greedy(request))
    found: dict[str, Any] = {
        "spanloop.prompt_token_ids": list(tokens.prompt_ids),
        "spanloop.response_token_ids": list(tokens.response_ids),
        "spanloop.response_logprobs": list(tokens.logprobs),
        "spanloop.menus": [[list(option) for option in menu] for menu in tokens.menus],
        "spanloop.tokens.problem": tokens.problem,
        "spanloop.backend_gave_none": tokens.gave_none,
    }
    return {name: value for name, value in found.items() if value}


def _messages(request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Messages as JSON texts in the parts of the GenAI conventions."""
    found: dict[str, Any] = {}
    if isinstance(request.get("messages"), list):
        found["gen_ai.input.messages"] = _json([_message(m) for m in maps(request["messages"])])
    answers: list[dict[str, Any]] = []
    for choice in response.get("choices") or ():
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
            answers.append(
                {**_message(choice["message"]), "finish_reason": text(choice.get("finish_reason"))}
            )
    if answers:
        found["gen_ai.output.messages"] = _json(answers)
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    content = message.get("content")
    if message.get("role") == "tool":
        call_id = text(message.get("tool_call_id"))
        parts.append({"type": "tool_call_response", "id": call_id, "response": _flat(content)})
    elif content:
        parts.append({"type": "text", "content": _flat(content)})
    for call in maps(message.get("tool_calls")):
        if function := the_map(call.get("function")):
            name, arguments = text(function.get("name")), text(function.get("arguments"))
            parts.append(
                {"type": "tool_call", "id": text(call.get("id")), "name": name, "arguments": arguments}
            )
    return {"role": text(message.get("role")), "parts": parts}


def _json(value: Any) -> str:
    return canonical_json(value).decode()


def _flat(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(text(part.get("text")) for part in maps(content))
    return text(content)
