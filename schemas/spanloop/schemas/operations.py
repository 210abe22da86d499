"""Messages between the partitions of the partitioned runtime, on the internal topics ``operations`` and ``lessons``.

They carry a span's way to the partition that assembles it (ADR 7): normalised operations to the owner of their trace, evidence
to the owner of its key, unions of traces, and what moves when two of them turn out to be one orchestration. Each message may
arrive any number of times, in any order. They can be rebuilt from spans and feedback, so that no other version has to
read them: after an upgrade that changes them the internal topics are emptied and rebuilt.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from spanloop.schemas import topics
from spanloop.schemas.events import (
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    ValueModelPublished,
    register,
)

__all__ = [
    "EvidenceSeen",
    "FeedbackClaimed",
    "FeedbackRouted",
    "LessonReady",
    "OperationsMoved",
    "OperationsRead",
    "OrchestrationPlaced",
    "Published",
    "TracesJoined",
]


class Message(Event, frozen=True, omit_defaults=True, kw_only=True):
    """Base of messages to the owner of a key."""

    TOPIC: ClassVar[str] = topics.OPERATIONS


class OperationsRead(Message, frozen=True, omit_defaults=True, tag="operations_read", kw_only=True):
    """Spans of one trace as operations, on their way to the trace's owner and on to the home of its orchestration."""

    trace_id: str
    operations: tuple[bytes, ...]
    """``encode_operation`` of each."""
    home: str = ""
    """The trace in whose partition they belong as far as the sender knows; empty: the trace itself."""

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.home or self.trace_id}"


class EvidenceSeen(Message, frozen=True, omit_defaults=True, tag="evidence_seen", kw_only=True):
    """One end of a piece of evidence that two traces are one orchestration, to the owner of the evidence."""

    evidence: str
    trace_id: str
    side: int
    operation: bytes = b""

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.evidence}"


class TracesJoined(Message, frozen=True, omit_defaults=True, tag="traces_joined", kw_only=True):
    """Two traces are one orchestration: to ``trace_id``, or to where that one was joined to."""

    trace_id: str
    other: str

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.trace_id}"


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was last published under an orchestration id, so that its revisions go on elsewhere."""

    orchestration_id: str
    revision: int = 0
    content_hash: str = ""
    complete: bool = False
    merged_into: str = ""
    signal_revision: int = 0
    rewards_hash: str = ""
    credit_hash: str = ""
    samples_hash: str = ""
    value_model: str = ""
    version_fixed: bool = False


class OperationsMoved(Message, frozen=True, omit_defaults=True, tag="operations_moved", kw_only=True):
    """Everything that the home of ``child`` held, to the home of ``trace_id``: the two are one orchestration."""

    trace_id: str
    child: str
    operations: tuple[bytes, ...] = ()
    overflow: int = 0
    """Operations that were too many and are not among them."""
    published: tuple[Published, ...] = ()
    models: tuple[ValueModelPublished, ...] = ()
    """Versions that credit was given by for good."""
    feedback: tuple[FeedbackReceived, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.trace_id}"


class FeedbackRouted(Message, frozen=True, omit_defaults=True, tag="feedback_routed", kw_only=True):
    """Feedback on its way: to a trace, to the owner of a response or of an orchestration id, or to a partition."""

    feedback: FeedbackReceived
    to: str
    """Key of the receiver without the tenant: a trace id, r/..., orchestration/..., or span/..."""
    partition: int = -1
    """Set: one of the copies of feedback on a span of an unknown trace, which every partition gets."""
    answers: int = -1
    """Partition that sends such feedback to its trace, or dead-letters it when its target never comes."""

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.to}"


class FeedbackClaimed(Message, frozen=True, omit_defaults=True, tag="feedback_claimed", kw_only=True):
    """A partition has the target of feedback that every partition got: to the one that answers for it."""

    feedback_id: str
    to: str
    partition: int = -1
    trace_id: str
    """Trace in which the target is."""

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.to}"


class OrchestrationPlaced(Message, frozen=True, omit_defaults=True, tag="orchestration_placed", kw_only=True):
    """Where an orchestration id is at home, to the owner of the id."""

    orchestration_id: str
    trace_id: str

    @property
    def key(self) -> str:
        return f"{self.tenant}/orchestration/{self.orchestration_id}"


class LessonReady(Event, frozen=True, omit_defaults=True, tag="lesson_ready", kw_only=True):
    """What the tenant's value stage learns from: a final or void reward with the orchestration that earned it, or what became
    of one that it knows already."""

    TOPIC: ClassVar[str] = topics.LESSONS
    orchestration: OrchestrationRevised | None = None
    rewards: RewardsComputed | None = None


register(
    OperationsRead, EvidenceSeen, TracesJoined, OperationsMoved, FeedbackRouted, FeedbackClaimed,
    OrchestrationPlaced, LessonReady,
)  # fmt: skip
