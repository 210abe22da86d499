"""The passes of the local driver over the archive, a chunk at a time: what one worker does and leaves on disk.

Place in the flow: ``driver`` runs these in worker processes, in this order: ``feedback_targets``, ``spans`` (a chunk each),
``join``, ``move`` (a chunk each), ``recorded`` (a chunk each), ``feedback``; then ``transforms`` runs a pipeline a bucket.

Invariants: a step's last act is to write its ``.json``: with that it is done and never done again. Steps write no others'
files. Memory is bounded by a chunk, and by 16 bytes for each feedback on a span or response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from spanloop.pipeline.archive.files import open_files
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.replay import progress
from spanloop.pipeline.replay.joining import ID, PIECE, as_ids, components, match_pieces, pack_pieces
from spanloop.pipeline.replay.plan import Plan
from spanloop.pipeline.replay.reading import (
    Bad,
    FeedbackRow,
    Piece,
    Position,
    encode_row,
    feedback_target,
    read_feedback,
    read_spans,
)
from spanloop.pipeline.replay.recorded import expired_feedback, read_recorded
from spanloop.pipeline.replay.results import Counts
from spanloop.pipeline.replay.source import Chunk, records, refreshed
from spanloop.pipeline.replay.spill import (
    Labels,
    Spill,
    buckets_of,
    labelled,
    read_spill,
    save_array,
    write_atomically,
)
from spanloop.schemas import topics
from spanloop.schemas.errors import TransientError

__all__ = [
    "Step", "done", "feedback", "feedback_targets", "join", "load_plan", "move", "read_chunk",
    "recorded", "spans",
]  # fmt: skip

PIECES_TOGETHER = 1_000_000
"""Pieces of evidence that are sorted in memory at once, about."""
NAMED = np.dtype(
    [("key", "S16"), ("node", "S16"), ("appended", "<i8"), ("partition", "<i4"), ("offset", "<i8")]
)
_ATTEMPTS = 5
_TELL_RECORDS = 256


class Step(msgspec.Struct):
    """What a finished step reports."""

    counts: Counts
    bad: list[Bad] = []


@cache
def load_plan(work: Path) -> Plan:
    """The plan of a work folder."""
    return msgspec.json.decode((work / "plan.json").read_bytes(), type=Plan)


@cache
def _store(work: Path) -> ArchiveStore:
    plan = load_plan(work)
    return ArchiveStore(open_files(plan.archive, plan.endpoint))


def done(work: Path, name: str) -> Step | None:
    """The report of a step that is done, None where it is not."""
    try:
        return msgspec.json.decode((work / f"{name}.json").read_bytes(), type=Step)
    except FileNotFoundError:
        return None


def _finish(work: Path, name: str, step: Step) -> None:
    write_atomically(work / f"{name}.json", msgspec.json.encode(step))


def _whole(work: Path, chunk: Chunk, take: Callable[[Iterator[tuple[Position, bytes]]], Any]) -> Any:
    """``take`` over all records of a chunk, from the start where a file was merged away meanwhile."""
    return _retried(_store(work), chunk, take)


def _retried(
    store: ArchiveStore, chunk: Chunk, take: Callable[[Iterator[tuple[Position, bytes]]], Any]
) -> Any:
    for attempt in range(_ATTEMPTS):
        try:
            return take(records(store, chunk))
        except TransientError:
            if attempt == _ATTEMPTS - 1:
                raise
            chunk = refreshed(store, chunk)
    raise AssertionError


def read_chunk(store: ArchiveStore, chunk: Chunk) -> list[tuple[Position, bytes]]:
    """All records of a chunk at once."""
    return _retried(store, chunk, list)


# ---------------------------------------------------------------- feedback


def _feedback_chunks(work: Path) -> Iterator[tuple[Position, bytes]]:
    for chunk in load_plan(work).chunks[topics.FEEDBACK]:
        yield from read_chunk(_store(work), chunk)


def feedback_targets(work: Path) -> None:
    """Keys of the spans and responses that feedback names, so that the pass over spans looks out for them."""
    keys: list[bytes] = []
    for at, value in _feedback_chunks(work):
        event = read_feedback(value, at)
        if not isinstance(event, Bad):
            key = feedback_target(event)[1]
            if key is not None:
                keys.append(key)
    save_array(work / "wanted.npy", np.unique(as_ids(keys)))
    _finish(work, "targets", Step(Counts()))


def feedback(work: Path) -> None:
    """Feedback under the label of what it is on."""
    plan = load_plan(work)
    labels = Labels.load(work)
    expired = expired_feedback(_dead_letters(work, plan))
    nodes = _named(work, plan)
    step = Step(Counts())
    for number, chunk in enumerate(plan.chunks[topics.FEEDBACK]):
        rows: list[tuple[bytes, bytes]] = []
        for at, value in read_chunk(_store(work), chunk):
            step.counts.feedback += 1
            event = read_feedback(value, at)
            if isinstance(event, Bad):
                step.bad.append(event)
                continue
            if (event.tenant, event.feedback_id) in expired:
                step.counts.feedback_expired += 1
                continue
            node, key = feedback_target(event)
            node = node or nodes.get(key or b"")
            if node is None:
                step.counts.feedback_unmatched += 1
            else:
                rows.append((node, encode_row(FeedbackRow(at.partition, at.offset, at.appended_ns, value))))
        spill = Spill(plan.buckets)
        for label, row in labelled(rows, labels):
            spill.add(label, row)
        spill.save(work / f"feedback-{number}.arrow")
    step.counts.bad = len(step.bad)
    _finish(work, "feedback", step)


def _dead_letters(work: Path, plan: Plan) -> Iterator[bytes]:
    for chunk in plan.chunks[topics.DEAD_LETTERS]:
        for _, value in read_chunk(_store(work), chunk):
            yield value


def _named(work: Path, plan: Plan) -> dict[bytes, bytes]:
    """Node of each span or response that feedback names: the one that came last, where several have it."""
    found = [np.load(work / f"named-{i}.npy") for i in range(len(plan.chunks[topics.SPANS]))]
    table = np.concatenate([np.zeros(0, NAMED), *found])
    table = np.sort(table, order=["appended", "partition", "offset", "node"])
    keys, nodes = table["key"].tolist(), table["node"].tolist()
    return {key.ljust(16, b"\0"): node.ljust(16, b"\0") for key, node in zip(keys, nodes, strict=True)}


# ---------------------------------------------------------------- spans


@cache
def _wanted(work: Path) -> frozenset[bytes]:
    return frozenset(key.ljust(16, b"\0") for key in np.load(work / "wanted.npy").tolist())


def spans(work: Path, number: int) -> None:
    """Operations of one chunk by bucket of their trace; evidence, links and names beside them."""
    plan, wanted = load_plan(work), _wanted(work)

    def take(found: Iterator[tuple[Position, bytes]]) -> None:
        spill, step = Spill(plan.buckets), Step(Counts())
        pieces: list[Piece] = []
        links: list[tuple[bytes, bytes]] = []
        named: list[tuple[bytes, bytes, int, int, int]] = []
        told = 0
        for at, value in found:
            read = read_spans(value, at, wanted)
            step.counts.span_records += 1
            step.counts.spans += read.spans
            step.bad += read.bad
            if read.row is not None:
                spill.add(read.node, encode_row(read.row))
                pieces += read.pieces
                links += [(read.node, other) for other in read.linked]
                named += [(key, read.node, at.appended_ns, at.partition, at.offset) for key in read.named]
            if step.counts.span_records % _TELL_RECORDS == 0:
                progress.advance(_TELL_RECORDS, step.counts.spans - told)
                told = step.counts.spans
        step.counts.bad = len(step.bad)
        spill.save(work / f"spans-{number}.arrow")
        packed = pack_pieces(pieces)
        save_array(work / f"pieces-{number}.npy", packed[np.argsort(packed["key"], kind="stable")])
        save_array(work / f"links-{number}.npy", np.array(sorted(set(links)), ID).reshape(-1, 2))
        save_array(work / f"named-{number}.npy", np.array(named, NAMED))
        _finish(work, f"spans-{number}", step)

    _whole(work, plan.chunks[topics.SPANS][number], take)


def join(work: Path) -> None:
    """Edges from all evidence and links, and which nodes are one component."""
    numbers = range(len(load_plan(work).chunks[topics.SPANS]))
    tables = [np.load(work / f"pieces-{i}.npy", mmap_mode="r") for i in numbers]
    parts = max(1, sum(map(len, tables)) // PIECES_TOGETHER)
    bounds = [bytes([*(n * 2**16 // parts).to_bytes(2, "big")]) for n in range(1, parts)]
    edges = [np.load(work / f"links-{i}.npy") for i in numbers]
    cuts = [
        [0, *np.searchsorted(table["key"], np.array(bounds, ID)).tolist(), len(table)] for table in tables
    ]
    for part in range(parts):
        own = [table[cut[part] : cut[part + 1]] for table, cut in zip(tables, cuts, strict=True)]
        edges.append(match_pieces(np.concatenate([np.zeros(0, PIECE), *own])))
    Labels(*components(np.concatenate([np.zeros((0, 2), ID), *edges]))).save(work)
    _finish(work, "join", Step(Counts()))


def move(work: Path, number: int) -> None:
    """Rows of one chunk whose component is at home in another bucket, under its label."""
    plan, labels = load_plan(work), Labels.load(work)
    moved = Spill(plan.buckets)
    for bucket in range(plan.buckets):
        nodes, rows = read_spill(work / f"spans-{number}.arrow", bucket)
        if not len(nodes):
            continue
        own = labels.of(nodes)
        for i in np.flatnonzero(buckets_of(own, plan.buckets) != bucket).tolist():
            moved.add(own[i].ljust(16, b"\0"), rows[i])
    moved.save(work / f"moved-{number}.arrow")
    _finish(work, f"move-{number}", Step(Counts()))


# ---------------------------------------------------------------- derived topics


def recorded(work: Path, topic: str, number: int) -> None:
    """What the stream published of each orchestration in one chunk, under its label."""
    plan, labels = load_plan(work), Labels.load(work)
    rows, bad = _whole(
        work, plan.chunks[topic][number], lambda found: read_recorded(topic, found, compare=plan.compare)
    )
    spill = Spill(plan.buckets)
    for label, row in labelled(rows, labels):
        spill.add(label, row)
    spill.save(work / f"recorded-{topic}-{number}.arrow")
    _finish(work, f"recorded-{topic}-{number}", Step(Counts(bad=len(bad)), bad))
