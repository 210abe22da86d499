"""``spanloop verify``: rebuild orchestrations, rewards and credit from the sources and compare with what the log says.

The sources are spans, feedback and the value models' recorded versions, up to the offsets that the pipeline has folded.
Spans are assembled afresh; rewards and credit of each orchestration are derived afresh with the version of the value model
that its credit names. Compared is the content of the last revisions, by hash: revision numbers, provisional or final,
and times of processing are no content. Nothing is written. Over Kafka, where the state is in the workers' snapshots, and over an
archive see ``replay.checking``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Appended, Clock, Log, LogRecord, NewRecord, StateStore
from spanloop.pipeline.replay.hashes import credit_hash, rewards_hash, same_inputs
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError, TerminalError, TransientError
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.settings import Pipeline

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault

__all__ = ["Difference", "Verified", "verify"]

_FAR_NS = 2**62
"""Later than any timer."""
_Derived = TypeVar("_Derived", RewardsComputed, CreditAssigned)
_Key = tuple[str, str]
"""Tenant and orchestration id."""
_Pairs = Mapping[_Key, tuple[OrchestrationRevised, OrchestrationRevised]]
"""Last revisions: as recorded, as replayed."""


class Difference(msgspec.Struct, frozen=True):
    """One orchestration that the log and the replay do not agree on."""

    tenant: str
    orchestration_id: str
    what: str
    """orchestration, rewards, inputs of rewards, or credit; missing: only on the log; extra: only in the replay."""
    recorded: str = ""
    replayed: str = ""


class Verified(msgspec.Struct):
    """What ``verify`` found."""

    orchestrations: int = 0
    """Last revisions compared."""
    rewards: int = 0
    other_definitions: int = 0
    """Of these recorded under other reward definitions than the settings have now."""
    credits: int = 0
    equal: int = 0
    """Orchestrations of which everything compared is equal."""
    open: int = 0
    """Still collecting spans: their next revision is not on the log yet."""
    behind: int = 0
    """Revised after what the signal stage has folded: their rewards are not due yet."""
    late: int = 0
    """Have spans that came after the retention and were dead-lettered, so that the log is right to differ."""
    erased: int = 0
    """Their token ids cannot be read any more: their credit is as it was recorded, and was not derived again."""
    span_records: int = 0
    unread_records: int = 0
    """Records of spans that the pipeline has not folded yet."""
    models: int = 0
    seconds: float = 0.0
    differences: list[Difference] = []


class _Upto:
    """A log that ends at given offsets: what a stage had folded at one moment."""

    def __init__(self, log: Log, ends: Mapping[str, int]) -> None:
        self._log = log
        self._ends = ends

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        records = self._log.read(topic_names, after, limit)
        return [record for record in records if record.offset <= self._ends.get(record.source, -1)]

    def end(self, source: str) -> int:
        return self._ends.get(source, -1)

    def sources(self, topic: str) -> tuple[str, ...]:
        return self._log.sources(topic)

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        raise TerminalError("verify writes nothing")

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        raise TerminalError("verify writes nothing")

    def committed(self, group: str) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """The log is the caller's."""


class _LastRevisions(MemoryLog):
    """Takes a stage's outputs and keeps only the last revision of each orchestration."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.last: dict[_Key, OrchestrationRevised] = {}

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        for record in records:
            event = decode(record.value)
            if isinstance(event, OrchestrationRevised):
                self.last[(event.tenant, event.orchestration_id)] = event
        return []


def verify(
    log: Log, state: StateStore, pipeline: Pipeline, clock: Clock, *, vault: Vault | None = None
) -> Verified:
    """Replay the sources of a workspace and compare.

    Args:
        log: the workspace's.
        state: its StateStore, for what the stages have folded.
        pipeline: the settings that the stages run with.
        clock: processing time.
        vault: opens token arrays, where they are sealed.
    """
    started = time.monotonic()
    found = Verified()
    offsets, entries = _moment(state, "assembly")
    signal_offsets = state.offsets("signal")
    recorded, record_offsets = _last_revisions(log)
    replayed = _assemble(log, offsets, pipeline, clock)
    found.span_records = sum(1 for _ in scan(log, [topics.SPANS], upto=offsets)) if offsets else 0
    found.unread_records = sum(1 for _ in scan(log, [topics.SPANS], after=offsets))
    open_keys = _open_keys(entries, pipeline)
    late = _late_keys(log, replayed)
    found.open, found.late = len(open_keys), len(late)
    settled = _compare_contents(recorded, replayed, open_keys | late, found)
    upto = signal_offsets.get(topics.ORCHESTRATIONS, -1)
    behind = {key for key in settled if record_offsets[key] > upto}
    found.behind = len(behind)
    different = {(d.tenant, d.orchestration_id) for d in found.differences}
    pairs = {key: (recorded[key], replayed[key]) for key in settled if key not in behind}
    merged = [event for event in recorded.values() if event.merged_into]
    feedback = _feedback(log, pairs, merged, signal_offsets)
    _compare_derived(log, pairs, feedback, pipeline, found, vault=vault)
    different |= {(d.tenant, d.orchestration_id) for d in found.differences}
    found.equal = sum(1 for key in settled if key not in different)
    found.seconds = round(time.monotonic() - started, 3)
    return found


def _moment(state: StateStore, stage: str) -> tuple[dict[str, int], dict[str, bytes]]:
    """Offsets and entries of one commit, also while the pipeline runs."""
    for _ in range(100):
        offsets = state.offsets(stage)
        entries = state.load(stage)
        if offsets == state.offsets(stage):
            return offsets, entries
    raise TransientError(
        f"stage {stage} commits faster than its state can be read: stop the pipeline, then verify"
    )


def _events(log: Log, topic: str, upto: Mapping[str, int] | None = None) -> list[tuple[int, Event]]:
    """Readable events of a topic; unreadable ones are dead letters of the stages already."""
    events = []
    for record in scan(log, [topic], upto=upto):
        try:
            events.append((record.offset, decode(record.value)))
        except SchemaError:
            continue
    return events


def _last_revisions(log: Log) -> tuple[dict[_Key, OrchestrationRevised], dict[_Key, int]]:
    last: dict[_Key, OrchestrationRevised] = {}
    offsets: dict[_Key, int] = {}
    for offset, event in _events(log, topics.ORCHESTRATIONS):
        if isinstance(event, OrchestrationRevised):
            key = (event.tenant, event.orchestration_id)
            if key not in last or event.revision > last[key].revision:
                last[key], offsets[key] = event, offset
    return last, offsets


def _assemble(
    log: Log, offsets: Mapping[str, int], pipeline: Pipeline, clock: Clock
) -> dict[_Key, OrchestrationRevised]:
    from spanloop.pipeline.assembly.stage import AssemblyStage

    outputs = _LastRevisions(clock)
    state = MemoryState(outputs)
    run_to_end([AssemblyStage(pipeline)], _Upto(log, offsets), state, clock)
    return {key: event for key, event in outputs.last.items() if event.content is not None}


def _open_keys(entries: Mapping[str, bytes], pipeline: Pipeline) -> set[_Key]:
    """What the pipeline would still publish if time went on: these are not finished, not wrong."""
    from spanloop.pipeline.assembly.stage import AssemblyStage

    stage = AssemblyStage(pipeline)
    stage.restore(entries)
    events = stage.tick(_FAR_NS).events if entries else []
    return {(e.tenant, e.orchestration_id) for e in events if isinstance(e, OrchestrationRevised)}


def _late_keys(log: Log, replayed: Mapping[_Key, OrchestrationRevised]) -> set[_Key]:
    """Orchestrations of traces that had spans refused as later than the retention."""
    refused = {
        (event.tenant, str(event.details.get("trace_id", "")))
        for _, event in _events(log, topics.DEAD_LETTERS)
        if isinstance(event, DeadLettered) and event.source == "assembly" and "retention" in event.reason
    }
    if not refused:
        return set()
    return {
        key
        for key, event in replayed.items()
        if event.content and any((key[0], trace) in refused for trace in event.content.trace_ids)
    }


def _compare_contents(
    recorded: Mapping[_Key, OrchestrationRevised],
    replayed: Mapping[_Key, OrchestrationRevised],
    skip: set[_Key],
    found: Verified,
) -> list[_Key]:
    """Compare orchestrations; returns the keys whose rewards and credit are worth comparing."""
    settled = []
    for key in sorted(recorded.keys() | replayed.keys()):
        if key in skip:
            continue
        there, again = recorded.get(key), replayed.get(key)
        if there is not None and there.content is None and again is None:
            continue  # merged into another in both
        found.orchestrations += 1
        if there is None or there.content is None:
            found.differences.append(Difference(*key, "extra", "", again.content_hash if again else ""))
        elif again is None:
            found.differences.append(Difference(*key, "missing", content_hash(there.content)))
        else:
            hashes = content_hash(there.content), content_hash(again.content)
            if hashes[0] != hashes[1] or there.content_hash != hashes[0]:
                found.differences.append(Difference(*key, "orchestration", *hashes))
            else:
                settled.append(key)
    return settled


def _compare_derived(
    log: Log,
    pairs: _Pairs,
    feedback: Mapping[_Key, list[FeedbackReceived]],
    pipeline: Pipeline,
    found: Verified,
    *,
    vault: Vault | None,
) -> None:
    """Derive rewards and credit again and compare them with the last ones on the log."""
    from spanloop.pipeline.credit.value_model import ValueModel
    from spanloop.pipeline.signal import NO_MODEL, derive

    rewards = _last(log, topics.REWARDS, RewardsComputed)
    credits_ = _last(log, topics.CREDITS, CreditAssigned)
    published = {
        (e.tenant, e.version): e for _, e in _events(log, topics.MODELS) if isinstance(e, ValueModelPublished)
    }
    models: dict[_Key, Any] = {}
    for key, (there, replayed) in pairs.items():
        content = replayed.content
        if content is None:
            continue
        erased = any(call.sealed for call in content.calls) and (vault is None or vault.is_erased(content))
        if vault is not None:
            content = vault.open_content(content)
        credit = credits_.get(key)
        version = credit.value_model if credit is not None else NO_MODEL
        name = (key[0], version)
        if version != NO_MODEL and name not in models:
            if name not in published:
                found.differences.append(
                    Difference(*key, "credit", f"value model {version} is not on the log")
                )
                continue
            models[name] = ValueModel.from_dict(published[name].parameters)
        again = derive(
            content, feedback.get(key, ()), complete=there.complete, settings=pipeline, version=version,
            model=models.get(name),
        )  # fmt: skip
        found.rewards += 1
        recorded = rewards.get(key)
        _compare(found, key, "rewards", (rewards_hash(recorded), rewards_hash(again.rewards)))
        if recorded is not None and recorded.definitions:
            found.other_definitions += recorded.definitions != again.rewards.definitions
        if erased:
            found.erased += 1
            continue
        if recorded is not None and not same_inputs(recorded, again.rewards):
            found.differences.append(Difference(*key, "inputs of rewards"))
        if credit is not None or again.credit is not None:
            found.credits += 1
            _compare(found, key, "credit", (credit_hash(credit), credit_hash(again.credit)))
    found.models = len(models)


def _last(log: Log, topic: str, kind: type[_Derived]) -> dict[_Key, _Derived]:
    last: dict[_Key, _Derived] = {}
    for _, event in _events(log, topic):
        if isinstance(event, kind):
            key = (event.tenant, event.orchestration_id)
            if key not in last or event.revision > last[key].revision:
                last[key] = event
    return last


def _feedback(
    log: Log, pairs: _Pairs, merged: Sequence[OrchestrationRevised], offsets: Mapping[str, int]
) -> dict[_Key, list[FeedbackReceived]]:
    """Feedback by orchestration, matched by the signal stage's own rules."""
    from spanloop.pipeline.held import Store

    expired = {
        (event.tenant, event.details.get("feedback_id"))
        for _, event in _events(log, topics.DEAD_LETTERS)
        if isinstance(event, DeadLettered) and event.source == "feedback"
    }
    store = Store(_FAR_NS, sys.maxsize)
    for event in (*(pair[1] for pair in pairs.values()), *merged):
        store.put_orchestration(event, 0)
        store.take_writes()
    upto = {topics.FEEDBACK: offsets.get(topics.FEEDBACK, -1)}
    for _, event in _events(log, topics.FEEDBACK, upto):
        if isinstance(event, FeedbackReceived) and (event.tenant, event.feedback_id) not in expired:
            store.put_feedback(event, 0)
            store.take_writes()
    return {key: store.feedback_on("/".join(key)) for key in pairs}


def _compare(found: Verified, key: _Key, what: str, hashes: tuple[str, str]) -> None:
    if hashes[0] != hashes[1]:
        found.differences.append(Difference(*key, what, *hashes))
