"""What the stream published, read from the archive's derived topics: versions of value models, hashes, what it refused.

Place in the flow: a replay credits with the recorded version; ``verify`` and ``diff recorded`` compare hashes. Pure.

Invariants: of several revisions the last counts; a void record (merged away, credit withdrawn) is kept as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from spanloop.pipeline.replay.hashes import credit_hash, rewards_hash
from spanloop.pipeline.replay.reading import (
    Bad,
    Position,
    VersionRow,
    bad_record,
    encode_row,
    node_of,
)
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    OrchestrationRevised,
    RewardsComputed,
    decode,
)
from spanloop.schemas.ids import is_hex_id

__all__ = ["expired_feedback", "read_recorded"]


class _Head(msgspec.Struct):
    """What names and orders a derived record; the rest is skipped."""

    orchestration_id: str
    revision: int
    tenant: str = "default"
    value_model: str = ""


_heads = msgspec.json.Decoder(_Head)


def read_recorded(
    topic: str, found: Iterator[tuple[Position, bytes]], *, compare: bool
) -> tuple[list[tuple[bytes, bytes]], list[Bad]]:
    """Rows of the last revision of each orchestration among some records, and what could not be read.

    Args:
        topic: credits, orchestrations, rewards; of dead_letters: the traces that had spans refused as too late.
        found: Records.
        compare: Whether hashes are wanted; they cost decoding everything.
    """
    if topic == topics.DEAD_LETTERS:
        return _late(found), []
    last: dict[tuple[str, str], tuple[_Head, Position, bytes]] = {}
    bad: list[Bad] = []
    for at, value in found:
        try:
            head = _heads.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            bad.append(bad_record(value, at, f"not a record of {topic}: {exc}"))
            continue
        old = last.get((head.tenant, head.orchestration_id))
        if old is None or head.revision > old[0].revision:
            last[(head.tenant, head.orchestration_id)] = (head, at, value if compare else b"")
    rows = []
    for head, at, value in last.values():
        row = VersionRow(
            topic,
            head.tenant,
            head.orchestration_id,
            head.revision,
            at.offset,
            at.appended_ns,
            head.value_model,
        )
        if compare:
            try:
                row = _hashed(row, value)
            except SchemaError as exc:
                bad.append(bad_record(value, at, exc.message))
                continue
        node = head.orchestration_id
        if not is_hex_id(node, 32):
            node = node_of(head.tenant, node).hex()
        rows.append((bytes.fromhex(node), encode_row(row)))
    return rows, bad


def _hashed(row: VersionRow, value: bytes) -> VersionRow:
    event = decode(value)
    if isinstance(event, OrchestrationRevised):
        own = content_hash(event.content) if event.content is not None else ""
        return msgspec.structs.replace(
            row,
            hash=own,
            told=event.content_hash,
            complete=event.complete,
            merged=bool(event.merged_into),
        )
    if isinstance(event, RewardsComputed):
        return msgspec.structs.replace(row, hash=rewards_hash(event))
    if isinstance(event, CreditAssigned):
        return msgspec.structs.replace(row, hash=credit_hash(event))
    raise SchemaError(f"a {type(event).__name__} on topic {row.topic}")


def _dead_letters(values: Iterable[bytes]) -> Iterator[DeadLettered]:
    for value in values:
        try:
            event = decode(value)
        except SchemaError:
            continue  # what cannot be read refuses nothing
        if isinstance(event, DeadLettered):
            yield event


def _late(found: Iterator[tuple[Position, bytes]]) -> list[tuple[bytes, bytes]]:
    traces = {
        (event.tenant, str(event.details.get("trace_id", "")))
        for event in _dead_letters(value for _, value in found)
        if event.source == "assembly" and "retention" in event.reason
    }
    rows = []
    for tenant, trace in sorted(traces):
        node = node_of(tenant, trace)
        rows.append((node, encode_row(VersionRow(topics.DEAD_LETTERS, tenant, node.hex(), 1, 0, 0))))
    return rows


def expired_feedback(values: Iterable[bytes]) -> set[tuple[str, str]]:
    """(tenant, feedback id) of what the stream dead-lettered because its target never came in time."""
    return {
        (event.tenant, str(event.details.get("feedback_id", "")))
        for event in _dead_letters(values)
        if event.source == "feedback" and "feedback_id" in event.details
    }
