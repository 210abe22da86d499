"""Feedback items: what is accepted, and that repeats are the same event."""

from __future__ import annotations

from typing import Any

import pytest
from otlp_requests import case

from spanloop.collectors.feedback import Parsed, parse_feedback
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_json import parse_json
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import Content

NOW = 1_790_000_000_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


def _parse(data: Any, training: bool = False, now_ns: int = NOW, tenant: str = "default") -> Parsed:
    redactor = Redactor(Content(training=training), b"k" * 32)
    return parse_feedback(data, tenant=tenant, scorer="local", now_ns=now_ns, redactor=redactor)


def _case_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {
        "traceId": "trace_id",
        "spanId": "span_id",
        "feedbackId": "feedback_id",
        "name": "name",
        "value": "value",
    }
    return [{names[k]: v for k, v in item.items() if k in names} for item in items]


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ({"trace_id": TRACE.upper()}, "trace"), ({"orchestration_id": TRACE}, "orchestration"),
        ({"span_id": "00f067aa0ba902b7"}, "span"), ({"response_id": "chatcmpl-1"}, "response"),
        ({"span_id": "00f067aa0ba902b7", "trace_id": TRACE}, "span"),
    ],
)  # fmt: skip
def test_targets(target: dict[str, str], kind: str) -> None:
    (event,) = _parse({**target, "value": 1}).events
    assert (event.target_kind, event.value, event.name, event.observed_ns) == (kind, 1.0, "outcome", NOW)
    assert event.target_id == target.get(f"{kind}_id", "").lower()
    assert event.trace_id == (TRACE if len(target) == 2 else "")


@pytest.mark.parametrize(
    "item",
    [
        {"value": 1}, {"trace_id": TRACE}, {"trace_id": TRACE, "orchestration_id": TRACE, "value": 1},
        {"trace_id": "zz", "value": 1}, {"trace_id": "0" * 32, "value": 1}, {"span_id": TRACE, "value": 1},
        {"response_id": "", "value": 1}, {"trace_id": TRACE, "value": "0.5"}, {"trace_id": TRACE, "value": True},
        {"trace_id": TRACE, "value": None}, {"trace_id": TRACE, "value": float("nan")},
        {"trace_id": TRACE, "value": 1e300}, {"trace_id": TRACE, "value": 1, "extra": 1},
        {"trace_id": TRACE, "value": 1, "name": "a b"}, {"trace_id": TRACE, "value": 1, "label": "x" * 65},
        {"trace_id": TRACE, "value": 1, "observed_at": "2026-01-01"},
        {"trace_id": TRACE, "value": 1, "observed_at": "2026-01-01T00:00:00"},
        {"trace_id": TRACE, "value": 1, "observed_at": NOW + 10**12}, {"trace_id": TRACE, "value": 1, "observed_at": -1},
        7, None, "x", [],
    ],
)  # fmt: skip
def test_bad_items_are_refused_alone(item: Any) -> None:
    parsed = _parse([{"trace_id": TRACE, "value": 0.25}, item])
    assert ([e.value for e in parsed.events], parsed.indexes) == ([0.25], [0])
    assert [r["index"] for r in parsed.rejected] == [1]
    assert parsed.rejected[0]["reason"]


@pytest.mark.parametrize("data", [7, None, "x", [{}] * 10_001])
def test_what_is_no_feedback_is_refused_whole(data: Any) -> None:
    with pytest.raises(SchemaError):
        _parse(data)


def test_a_repeat_is_the_same_event_and_a_correction_another() -> None:
    item = {"trace_id": TRACE, "value": 0.5, "feedback_id": "human-1"}
    first = _parse(item).events[0]
    assert _parse(item, now_ns=NOW + 10**9).events[0].event_id == first.event_id
    assert _parse(item, tenant="other").events[0].event_id != first.event_id
    correction = _parse({**item, "value": 0.0}, now_ns=NOW + 10**9).events[0]
    assert correction.event_id != first.event_id
    assert (correction.observed_ns, correction.feedback_id) > (first.observed_ns, first.feedback_id)
    assert _parse({"trace_id": TRACE, "value": 0.5}).events[0].event_id != first.event_id


def test_times() -> None:
    for given in ("2026-09-21T14:13:20Z", "2026-09-21T16:13:20+02:00", 1_790_000_000_000_000_000):
        assert _parse({"trace_id": TRACE, "value": 1, "observed_at": given}).events[0].observed_ns == NOW


def test_comments_are_content() -> None:
    item = {"trace_id": TRACE, "value": 1, "comment": "Pat called", "label": "mail pat@example.invalid"}
    kept = _parse(item, training=True).events[0]
    assert (kept.comment, kept.label) == ("Pat called", "mail pat@example.invalid")
    dropped = _parse(item).events[0]
    assert dropped.comment["$redacted"] == 10
    assert "example" not in dropped.label


def test_case_17_only_the_number_is_accepted() -> None:
    found, _ = case(17)
    parsed = _parse(_case_items(found["feedback"]))
    assert [e.value for e in parsed.events] == [found["checks"]["accepted_feedback_value"]]
    for raw in found["raw_messages"]:
        data = parse_json(raw.replace("traceId", "trace_id").replace("feedbackId", "feedback_id").encode())[0]
        assert len(_parse(data).rejected) == 1


def test_case_33_corrections_under_one_id() -> None:
    found, _ = case(33)
    events = [_parse(i, now_ns=NOW + n).events[0] for n, i in enumerate(_case_items(found["feedback"]))]
    assert len({e.event_id for e in events}) == found["checks"]["revisions"]
    assert max(events, key=lambda e: (e.observed_ns, e.feedback_id)).value == found["checks"]["final_outcome"]


def test_case_34_unknown_targets_are_accepted_and_bad_ids_are_not() -> None:
    found, _ = case(34)
    parsed = _parse(_case_items(found["feedback"]))
    assert len(parsed.rejected) == found["checks"]["rejected_feedback"]
    assert [e.target_kind for e in parsed.events] == ["trace", "trace", "span"]


@pytest.mark.parametrize("extreme", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
def test_a_time_at_the_end_of_the_calendar_is_refused_alone(extreme: str) -> None:
    item = {"trace_id": TRACE, "value": 1}
    parsed = _parse([item, {**item, "observed_at": extreme}])
    assert len(parsed.events) == 1
    assert "observed_at" in parsed.rejected[0]["reason"]
