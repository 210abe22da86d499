"""Exports of Langfuse: a trace with its observations, or observations, traces and scores one by one, in the API's or the
warehouse's spelling.

Langfuse keeps the attributes that a framework's OpenTelemetry sent under ``metadata`` and takes messages, arguments and
results out of them into ``input`` and ``output``; both are put together again, so that the framework's own dialect reads the
span. An observation without such attributes (Langfuse's own SDK) gets the attributes that this SDK would have sent. Scores
become feedback under their own names; categories and texts are counted and left out.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.formats.values import (
    Read,
    channel,
    either,
    flagged,
    json_text,
    parsed,
    plain,
    span_id,
    time_ns,
    trace_id,
    words,
)
from spanloop.pipeline.otlp.decoded import BadSpanError, Rejected
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "langfuse"

_TYPES = frozenset(
    {
        "SPAN", "GENERATION", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "GUARDRAIL", "EMBEDDING",
    }
)  # fmt: skip
_TELEMETRY = frozenset({"attributes", "resourceAttributes", "scope"})
"""Keys of ``metadata`` that hold what OpenTelemetry sent."""


def matches(value: dict[str, Any]) -> bool:
    """A trace with observations, an observation, a score, or a trace alone."""
    if isinstance(value.get("observations"), list) and (
        isinstance(value.get("trace"), dict) or "timestamp" in value
    ):
        return True
    return _is_observation(value) or _is_score(value) or _is_trace(value)


def _is_observation(value: dict[str, Any]) -> bool:
    return (
        words(value.get("type")).upper() in _TYPES
        and ("startTime" in value or "start_time" in value)
        and ("traceId" in value or "trace_id" in value)
        and "id" in value
    )


def _is_score(value: dict[str, Any]) -> bool:
    return ("dataType" in value or "data_type" in value) and "value" in value and "name" in value


def _is_trace(value: dict[str, Any]) -> bool:
    return "timestamp" in value and "id" in value and ("sessionId" in value or "session_id" in value)


def read(value: dict[str, Any]) -> Read:
    """Spans and scores of a record. Raises SchemaError or BadSpanError where it is a single one and bad."""
    if _is_observation(value):
        return Read([_span(value, {})], [])
    if _is_score(value):
        item = _score(value, {})
        return Read([], [], feedback=[item] if item else [], ignored=0 if item else 1)
    trace = value.get("trace") if isinstance(value.get("trace"), dict) else value
    assert isinstance(trace, dict)  # noqa: S101 - just looked
    found = Read([], [])
    _scores(trace, found)
    observations = value.get("observations") or trace.get("observations") or []
    if not isinstance(observations, list):
        raise SchemaError("observations is no list")
    for raw in observations:
        try:
            found.spans.append(_span(raw, trace))
        except BadSpanError as exc:
            found.rejected.append(Rejected(str(exc), _bytes(raw), exc.kind))
    return found


def _bytes(raw: Any) -> bytes:
    try:
        return canonical_json(plain(raw, [], "observation"))
    except BadSpanError:
        return repr(raw)[:65_536].encode("utf-8", "replace")


def _span(raw: Any, trace: dict[str, Any]) -> Span:
    flags: list[str] = []
    if not isinstance(raw, dict):
        raise BadSpanError("an observation is no object")
    kind = words(raw.get("type")).upper()
    start = time_ns(either(raw, "startTime", "start_time"), "startTime")
    end = time_ns(either(raw, "endTime", "end_time"), "endTime")
    metadata = parsed(raw.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    sent = metadata.get("attributes")
    if isinstance(sent, dict) and sent:
        attributes = {words(k): plain(v, flags, words(k)) for k, v in sent.items()}
        _put_back(attributes, raw, flags)
        if kind == "GENERATION":
            _usage(attributes, raw)
    else:
        attributes = _own(raw, metadata, trace, flags)
    session = words(either(trace, "sessionId", "session_id"))
    if session and "session.id" not in attributes:
        attributes["session.id"] = session
    scope = metadata.get("scope")
    scope = scope if isinstance(scope, dict) else {}
    resource = metadata.get("resourceAttributes")
    parent = either(raw, "parentObservationId", "parent_observation_id")
    failed = words(raw.get("level")).upper() == "ERROR"
    return Span(
        trace_id=trace_id(either(raw, "traceId", "trace_id") or trace.get("id")),
        span_id=span_id(raw.get("id")),
        parent_span_id=span_id(parent) if parent else None,
        name=words(raw.get("name")) or kind.lower(),
        start_ns=start,
        end_ns=end or (start if kind == "EVENT" else 0),
        status="error" if failed else "unset",
        status_message=words(either(raw, "statusMessage", "status_message")),
        attributes=flagged(attributes, flags),
        scope=words(scope.get("name")),
        scope_version=words(scope.get("version")),
        resource={words(k): plain(v, flags, words(k)) for k, v in resource.items()}
        if isinstance(resource, dict)
        else {},
    )


def _put_back(attributes: dict[str, Any], raw: dict[str, Any], flags: list[str]) -> None:
    """Messages, arguments and results where the framework had them."""
    operation = words(attributes.get("gen_ai.operation.name"))
    if operation == "execute_tool" or ("gen_ai.tool.name" in attributes and not operation):
        if attributes.keys().isdisjoint({"tool_arguments", "gen_ai.tool.call.arguments"}):
            _put(attributes, "gen_ai.tool.call.arguments", raw.get("input"), flags)
        if attributes.keys().isdisjoint({"tool_response", "gen_ai.tool.call.result"}):
            _put(attributes, "gen_ai.tool.call.result", raw.get("output"), flags)
    elif operation or "gen_ai.request.model" in attributes:
        if not any(key.startswith("gen_ai.prompt.") for key in attributes):
            _put(attributes, "gen_ai.input.messages", raw.get("input"), flags)
        if not any(key.startswith("gen_ai.completion.") for key in attributes):
            _put(attributes, "gen_ai.output.messages", raw.get("output"), flags)
    elif "ai.toolCall.name" in attributes:
        _put(attributes, "ai.toolCall.args", raw.get("input"), flags)
        _put(attributes, "ai.toolCall.result", raw.get("output"), flags)
    elif "ai.operationId" in attributes:
        _put(attributes, "ai.prompt.messages", raw.get("input"), flags)
        output = parsed(raw.get("output"))
        key = "ai.response.toolCalls" if isinstance(output, list) else "ai.response.text"
        _put(attributes, key, raw.get("output"), flags)


def _usage(attributes: dict[str, Any], raw: dict[str, Any]) -> None:
    """Token counts that Langfuse took out, or counted itself."""
    usage = parsed(either(raw, "usageDetails", "usage_details"))
    if not isinstance(usage, dict):
        return
    openinference = "openinference.span.kind" in attributes
    names = ("llm.token_count.prompt", "llm.token_count.completion")
    if not openinference:
        names = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
        if any(key.startswith(("gen_ai.usage.", "ai.usage.")) for key in attributes):
            return
    for name, key in zip(names, ("input", "output"), strict=True):
        if type(usage.get(key)) is int:
            attributes.setdefault(name, usage[key])


def _put(attributes: dict[str, Any], key: str, value: Any, flags: list[str]) -> None:
    if value not in (None, "") and key not in attributes:
        attributes[key] = json_text(value, flags, key)


def _own(
    raw: dict[str, Any], metadata: dict[str, Any], trace: dict[str, Any], flags: list[str]
) -> dict[str, Any]:
    """What Langfuse's own SDK would have sent."""
    own = "langfuse.observation."
    attributes: dict[str, Any] = {own + "type": words(raw.get("type")).lower()}
    for key, value in (("input", raw.get("input")), ("output", raw.get("output"))):
        _put(attributes, own + key, value, flags)
    for key, value in (
        ("model.name", either(raw, "model", "provided_model_name")),
        ("level", raw.get("level")),
        ("status_message", either(raw, "statusMessage", "status_message")),
    ):
        if text := words(value):
            attributes[own + key] = text
    for key, value in (
        ("model.parameters", either(raw, "modelParameters", "model_parameters")),
        ("usage_details", either(raw, "usageDetails", "usage_details")),
        ("cost_details", either(raw, "costDetails", "cost_details")),
    ):
        if parsed(value):
            _put(attributes, own + key, value, flags)
    for key, value in metadata.items():
        if key not in _TELEMETRY:
            name = f"{own}metadata.{words(key)}"
            clean = plain(value, flags, name)
            attributes[name] = clean if not isinstance(clean, dict | list) else json_text(clean, flags, name)
    for key, value in (
        ("langfuse.trace.name", trace.get("name")),
        ("user.id", either(trace, "userId", "user_id")),
    ):
        if text := words(value):
            attributes[key] = text
    return attributes


def _scores(trace: dict[str, Any], found: Read) -> None:
    """The scores of a trace, as feedback."""
    listed = trace.get("scores")
    for score in listed if isinstance(listed, list) else ():
        try:
            item = _score(score, trace) if isinstance(score, dict) else None
        except BadSpanError as exc:
            found.rejected.append(Rejected(f"score: {exc}", _bytes(score), exc.kind))
            continue
        if item is None:
            found.ignored += 1
        else:
            found.feedback.append(item)


def _score(score: dict[str, Any], trace: dict[str, Any]) -> dict[str, Any] | None:
    """A numeric score as feedback; None for a category or a text, which have no value to learn from. Raises BadSpanError."""
    value = score.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    item: dict[str, Any] = {
        "value": float(value),
        "name": channel(score.get("name"), NAME),
        "trace_id": trace_id(either(score, "traceId", "trace_id") or trace.get("id")),
        "feedback_id": f"langfuse:{words(score.get('id')) or digest(_bytes(score))}",
        "observed_at": time_ns(either(score, "timestamp", "updatedAt", "updated_at"), "timestamp"),
    }
    observation = either(score, "observationId", "observation_id")
    if observation:
        item["span_id"] = span_id(observation)
    if comment := words(score.get("comment")):
        item["comment"] = comment
    label = words(either(score, "stringValue", "string_value"))
    return item | ({"label": label} if label else {})
