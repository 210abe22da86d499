"""Exports of Arize Phoenix: spans as its REST API gives them (``context`` an object, ``attributes`` flat or nested), as a data
frame writes its rows (``context.trace_id``, ``attributes.llm.model_name``), or as ``px`` writes a trace with its spans.

Phoenix unfolds OpenInference's dotted keys into objects and lists; they are folded again. It keeps no scope. Annotations of a
span become feedback under their own names.
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
from spanloop.pipeline.otlp.decoded import BadSpanError
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.spans import Span, SpanEvent

__all__ = ["NAME", "folded", "matches", "read"]

NAME = "phoenix"

_PREFIX = "attributes."
_JSON = frozenset(
    {
        "metadata", "llm.invocation_parameters", "llm.prompt_template.variables", "tool.parameters", "input.value",
        "output.value", "llm.function_call", "tool.json_schema",
    }
)  # fmt: skip
"""Keys whose value is one JSON text in OpenInference."""
_JSON_ENDS = (
    ".tool_call.function.arguments",
    ".tool.json_schema",
    ".document.metadata",
    ".function_call_arguments_json",
)
_STATUS = {"OK": "ok", "ERROR": "error"}
_DEPTH = 24


def matches(value: dict[str, Any]) -> bool:
    """A span of Phoenix: its context, and a start."""
    context = value.get("context")
    told = isinstance(context, dict) and {"trace_id", "span_id"} <= context.keys()
    flat = "context.span_id" in value and "context.trace_id" in value
    return (told or flat) and ("start_time" in value or "span_kind" in value)


def read(value: dict[str, Any]) -> Read:
    """The one span of a record and its annotations. Raises BadSpanError."""
    flags: list[str] = []
    context = value.get("context")
    context = context if isinstance(context, dict) else {}
    trace = trace_id(context.get("trace_id") or value.get("context.trace_id"))
    span = span_id(context.get("span_id") or value.get("context.span_id"))
    attributes = _attributes(value, flags)
    kind = words(value.get("span_kind"))
    if kind and "openinference.span.kind" not in attributes:
        attributes["openinference.span.kind"] = kind.upper()
    parent = value.get("parent_id")
    start = time_ns(value.get("start_time"), "start_time")
    found = Span(
        trace_id=trace,
        span_id=span,
        parent_span_id=span_id(parent) if parent else None,
        name=words(value.get("name")),
        start_ns=start,
        end_ns=time_ns(value.get("end_time"), "end_time"),
        status=_STATUS.get(words(value.get("status_code")).upper(), "unset"),
        status_message=words(value.get("status_message")),
        attributes=flagged(attributes, flags),
        events=_events(parsed(value.get("events")), flags),
    )
    notes = either(value, "annotations", "span_annotations")
    return Read([found], [], feedback=_feedback(notes, trace, span))


def _attributes(value: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    inner = parsed(value.get("attributes"))
    if isinstance(inner, dict):
        for key, item in inner.items():
            folded(found, words(key), item, flags, _DEPTH)
    for key, item in value.items():
        if key.startswith(_PREFIX):
            folded(found, words(key).removeprefix(_PREFIX), item, flags, _DEPTH)
    return found


def folded(found: dict[str, Any], key: str, value: Any, flags: list[str], depth: int) -> None:
    """Put ``value`` into ``found`` under dotted keys: objects and lists of objects are taken apart, null is absent."""
    if value is None:
        return
    if key in _JSON or key.endswith(_JSON_ENDS):
        found[key] = value if isinstance(value, str) and value.isascii() else json_text(value, flags, key)
    elif isinstance(value, dict) and value:
        if depth <= 0:
            raise BadSpanError(f"the value of {key[:80]!r} is nested too deep", "nesting")
        for name, item in value.items():
            folded(found, f"{key}.{words(name)}", item, flags, depth - 1)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        if depth <= 0:
            raise BadSpanError(f"the value of {key[:80]!r} is nested too deep", "nesting")
        for number, item in enumerate(value):
            folded(found, f"{key}.{number}", item, flags, depth - 1)
    else:
        found[key] = plain(value, flags, key)


def _events(raw: Any, flags: list[str]) -> tuple[SpanEvent, ...]:
    found = []
    for event in raw if isinstance(raw, list) else ():
        if isinstance(event, dict):
            inner = event.get("attributes")
            attributes: dict[str, Any] = {}
            for key, item in inner.items() if isinstance(inner, dict) else ():
                folded(attributes, words(key), item, flags, _DEPTH)
            t = time_ns(either(event, "timestamp", "time"), "event time")
            found.append(SpanEvent(name=words(event.get("name")), t_ns=t, attributes=attributes))
    return tuple(found)


def _feedback(raw: Any, trace: str, span: str) -> list[dict[str, Any]]:
    """Annotations that have a score."""
    found = []
    for note in raw if isinstance(raw, list) else ():
        result = (
            note.get("result") if isinstance(note, dict) and isinstance(note.get("result"), dict) else note
        )
        score = result.get("score") if isinstance(result, dict) else None
        if isinstance(score, bool) or not isinstance(score, int | float):
            continue
        assert isinstance(note, dict)  # noqa: S101 - just looked
        assert isinstance(result, dict)  # noqa: S101
        own = words(note.get("id")) or digest(span, canonical_json(plain(note, [], "annotation")))
        item = {
            "value": float(score),
            "name": channel(note.get("name"), NAME),
            "trace_id": trace,
            "span_id": span,
            "feedback_id": f"phoenix:{own}",
            "observed_at": time_ns(either(note, "updated_at", "created_at"), "annotation time"),
            "label": words(result.get("label"))[:64],
            "comment": words(result.get("explanation")),
        }
        found.append({key: value for key, value in item.items() if value != ""})
    return found
