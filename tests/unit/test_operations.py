"""Messages between partitions: what they are keyed by, and that they come back as they went."""

from __future__ import annotations

import pytest
from made_spans import agent
from synthetic_orchestrations import make_content, make_feedback, make_model, make_revision

from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.ports import output_records
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import EVENTS, RewardsComputed, decode, encode
from spanloop.schemas.operations import (
    EvidenceSeen,
    FeedbackClaimed,
    FeedbackRouted,
    LessonReady,
    OperationsMoved,
    OperationsRead,
    OrchestrationPlaced,
    Published,
    TracesJoined,
)

OPERATION = encode_operation(operation_of(agent("a", None, 0, 1), "otlp"))
CONTENT = make_content(1)
FEEDBACK = make_feedback(CONTENT, kind="span", value=0.5)
REWARDS = RewardsComputed(
    orchestration_id="o", revision=1, orchestration_revision=1, rewards=(), team=None, status="missing"
)
MESSAGES = {
    "t/1": OperationsRead(tenant="t", trace_id="1", operations=(OPERATION, b"\x00\xff")),
    "t/0": OperationsRead(tenant="t", trace_id="1", operations=(), home="0"),
    "t/r/x": EvidenceSeen(tenant="t", evidence="r/x", trace_id="1", side=1),
    "t/t/c/h": EvidenceSeen(tenant="t", evidence="t/c/h", trace_id="1", side=0, operation=OPERATION),
    "t/2": TracesJoined(tenant="t", trace_id="2", other="1"),
    "t/3": OperationsMoved(
        tenant="t", trace_id="3", child="4", operations=(OPERATION,), overflow=1, feedback=(FEEDBACK,),
        published=(Published("o", 3, "h", True, "", 2, "r", "c", "s", "value@v1", True),), models=(make_model(1),),
    ),
    "t/orchestration/o": FeedbackRouted(tenant="t", feedback=FEEDBACK, to="orchestration/o"),
    "t/span/s": FeedbackRouted(tenant="t", feedback=FEEDBACK, to="span/s", partition=2, answers=1),
    "t/span/q": FeedbackClaimed(tenant="t", feedback_id="f", to="span/q", partition=1, trace_id="1"),
    "t/orchestration/p": OrchestrationPlaced(tenant="t", orchestration_id="p", trace_id="1"),
    "t": LessonReady(tenant="t", rewards=REWARDS, orchestration=make_revision(CONTENT)),
}  # fmt: skip


@pytest.mark.parametrize("key", MESSAGES)
def test_they_come_back_as_they_went(key):
    event = MESSAGES[key]
    assert event.key == key
    assert decode(encode(event)) == event
    assert event.TOPIC in topics.INTERNAL


def test_the_log_of_record_knows_nothing_of_them():
    assert not {type(event) for event in MESSAGES.values()} & set(EVENTS)
    assert all(event.TOPIC not in topics.ALL_TOPICS for event in MESSAGES.values())


def test_a_malformed_one_is_no_event():
    with pytest.raises(SchemaError, match="operations_read"):
        decode(b'{"operations":3,"trace_id":"1","type":"operations_read"}')


def test_only_those_that_name_a_partition_are_sent_to_one():
    class Shard:
        output_partition = 3

    sent = {key: output_records(Shard(), [event])[0].partition for key, event in MESSAGES.items()}
    assert {key: n for key, n in sent.items() if n is not None} == {"t/span/s": 2, "t/span/q": 1}
