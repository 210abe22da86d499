"""Traces in the LLM multi-agent RL survey's format, into the log and out again without loss.

A document becomes one span for the trace (all that is not an event or an edge), one for each event and one for each
``EDGES_A_SPAN`` edges. Numbers, ids and names are attributes of their own, which every deployment keeps; nested values and long
texts are content, which a deployment that does not keep content drops: then ``document_of`` says how many are gone. The
rewards of a document become feedback: ``team`` is the outcome, others are channels of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spanloop.pipeline.assembly.survey import SurveyTrace, from_survey, is_survey
from spanloop.pipeline.formats.event_spans import event_span, log_span
from spanloop.pipeline.formats.values import Read, channel, flagged, json_text, parsed, plain
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span

__all__ = ["EDGES_A_SPAN", "NAME", "document_of", "is_survey_span", "matches", "read"]

NAME = "survey"
EDGES_A_SPAN = 500
_BASE_NS = 1_000_000_000
"""Time 0 of a document: a span with an end of 0 would be unfinished."""
_FORMAT = "event_log.format"
_PLACE = "survey.place"
_TEXT_MAX = 200
_NONE: frozenset[str] = frozenset()
_EVENT: dict[str, frozenset[str]] = dict.fromkeys(
    ("id", "t", "type", "agent", "role", "from", "to", "tool", "content_ref", "trusted", "spanloop_type", "confidence", "rule",
     "status", "triggered", "mode", "call_id"),
    _NONE,
)  # fmt: skip
"""What the format (or our own export) names in an event: kept by every deployment, see collectors/allowlist."""
_REWARDS = frozenset(
    {
        "team",
        "individual",
        "role",
        "process",
        "tool",
        "debate",
        "verifier",
        "orchestration",
        "hybrid",
        "safety",
    }
)
_COSTS = frozenset({"tokens", "wall_clock_s", "tool_calls", "messages"})
_METRICS = frozenset({"task_success", "parallelism_efficiency", "protocol_overhead", "error_amplification"})
_HEADER: dict[str, frozenset[str]] = {
    **dict.fromkeys(("trace_id", "task_id", "system", "topology"), _NONE),
    "rewards": _REWARDS, "costs": _COSTS, "metrics": _METRICS,
}  # fmt: skip


def matches(value: dict[str, Any]) -> bool:
    """A document that claims to be a trace of this format."""
    return is_survey(value)


def read(value: dict[str, Any]) -> Read:
    """Spans and rewards of a document. Raises SchemaError that names what is missing or wrong."""
    trace = from_survey(value)
    flags: list[str] = []
    clean = plain(value, flags, "document")
    trace_id = digest("survey", canonical_json(clean))
    events = clean["events"]
    times = [_BASE_NS + event.t_ns for event in trace.content.events]
    header = {_FORMAT: NAME, "survey.events": len(events), "survey.edges": len(clean["edges"])}
    _put(header, {k: v for k, v in clean.items() if k not in ("events", "edges")}, _HEADER)
    spans = [log_span(trace_id, NAME, min(times), max(times), flagged(header, flags))]
    spans += _events(trace_id, trace, events)
    spans += _edges(trace_id, clean["edges"], max(times))
    return Read(spans, [], feedback=_feedback(trace_id, clean.get("rewards")))


def _events(trace_id: str, trace: SurveyTrace, events: list[dict[str, Any]]) -> Iterable[Span]:
    ours = {event.id: event for event in trace.content.events}
    for place, raw in enumerate(events):
        event = ours[raw["id"]]
        attributes: dict[str, Any] = {_FORMAT: NAME, _PLACE: place, "event_log.type": event.type}
        for key in ("agent", "to", "tool", "status", "mode"):
            if text := getattr(event, key):
                attributes[f"event_log.{key}"] = text
        attributes["event_log.key"] = event.id
        if event.triggered is not None:
            attributes["event_log.triggered"] = event.triggered
        _put(attributes, raw, _EVENT)
        at = _BASE_NS + event.t_ns
        yield event_span(
            trace_id, f"event {event.id}", event.type, start_ns=at, end_ns=at, attributes=attributes
        )


def _edges(trace_id: str, edges: list[dict[str, Any]], at: int) -> Iterable[Span]:
    for first in range(0, len(edges), EDGES_A_SPAN):
        some = edges[first : first + EDGES_A_SPAN]
        attributes: dict[str, Any] = {_FORMAT: NAME, _PLACE: first}
        for key in ("src", "dst", "type"):
            attributes[f"event_log.edges.{key}"] = [edge[key] for edge in some]
        yield event_span(trace_id, f"edges {first}", "edges", start_ns=at, end_ns=at, attributes=attributes)


def _put(attributes: dict[str, Any], raw: dict[str, Any], known: dict[str, frozenset[str]]) -> None:
    """All of an object: what the format itself names each under its key, the rest as one JSON text."""
    rest: dict[str, Any] = {}
    for key, value in raw.items():
        inner = known.get(key)
        if inner is None or not (isinstance(value, dict) if inner else _is_short(value)):
            rest[key] = value
        elif not inner:
            attributes[f"survey.{key}"] = value
        elif value.keys() <= inner and value and all(map(_is_number, value.values())):
            attributes |= {f"survey.{key}.{name}": item for name, item in value.items()}
        else:
            rest[key] = value
    if rest:
        attributes["metadata"] = json_text(rest, [], "metadata")


def _is_short(value: Any) -> bool:
    return (
        (isinstance(value, str) and len(value) <= _TEXT_MAX) or isinstance(value, bool) or _is_number(value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _feedback(trace_id: str, rewards: Any) -> list[dict[str, Any]]:
    return [
        {"trace_id": trace_id, "value": float(value), "feedback_id": f"{NAME}:{trace_id}:{name}",
         "name": "outcome" if name == "team" else channel(name, NAME), "observed_at": _BASE_NS}
        for name, value in (rewards.items() if isinstance(rewards, dict) else ())
        if _is_number(value)
    ]  # fmt: skip


# ---------------------------------------------------------------- and out again


def is_survey_span(span: Span) -> bool:
    """Whether a span was made of such a document."""
    return span.attributes.get(_FORMAT) == NAME


def document_of(spans: Iterable[Span]) -> tuple[dict[str, Any], int]:
    """The document that ``spans`` (all of one trace) were made of, and how many of its values the deployment did not keep.

    Raises:
        SchemaError: some of its spans are missing.
    """
    header: dict[str, Any] = {}
    events: dict[int, dict[str, Any]] = {}
    edges: dict[int, list[dict[str, str]]] = {}
    gone = 0
    counts = (-1, -1)
    for span in spans:
        attributes = span.attributes
        if "event_log.edges.src" in attributes:
            ends = [
                [_told(item) for item in attributes[f"event_log.edges.{key}"]]
                for key in ("src", "dst", "type")
            ]
            gone += sum(lost for end in ends for _, lost in end)
            edges[attributes[_PLACE]] = [
                {"src": s[0], "dst": d[0], "type": t[0]} for s, d, t in zip(*ends, strict=True)
            ]
            continue
        found, lost = _taken(attributes, _EVENT if "event_log.type" in attributes else _HEADER)
        gone += lost
        if "event_log.type" in attributes:
            events[attributes[_PLACE]] = found
        else:
            header = found
            counts = (attributes.get("survey.events", -1), attributes.get("survey.edges", -1))
    listed = [edge for place in sorted(edges) for edge in edges[place]]
    if (len(events), len(listed)) != counts:
        raise SchemaError(
            f"the spans of a survey trace are not all there: {len(events)} of {counts[0]} events, {len(listed)} of {counts[1]} edges"
        )
    return {**header, "events": [events[place] for place in sorted(events)], "edges": listed}, gone


def _taken(attributes: dict[str, Any], known: dict[str, frozenset[str]]) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    gone = 0
    for key, inner in known.items():
        if f"survey.{key}" in attributes:
            found[key], lost = _told(attributes[f"survey.{key}"])
            gone += lost
        numbers = {
            name: attributes[f"survey.{key}.{name}"] for name in inner if f"survey.{key}.{name}" in attributes
        }
        if numbers:
            found[key] = numbers
    rest = attributes.get("metadata")
    if rest is not None:
        more = parsed(rest)
        gone += str(rest).count("$redacted")
        found |= more if isinstance(more, dict) and "$redacted" not in more else {}
    return found, gone


def _told(value: Any) -> tuple[Any, int]:
    """A value, or what stands for one that was dropped as a text, and 1 for that."""
    if isinstance(value, dict) and "$redacted" in value:
        return f"redacted:{value.get('$redacted')}:{value.get('$hmac')}", 1
    return value, 0
