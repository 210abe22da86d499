"""Laws of a replay's parts: evidence matched in parts joins what the joiner joins, buckets hold whole components, rows survive."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.test_replay import joined_events

from spanloop.pipeline.assembly.join import Joiner
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.replay.assembling import assemble
from spanloop.pipeline.replay.joining import ID, Union, as_ids, components, match_pieces, pack_pieces
from spanloop.pipeline.replay.reading import Position, SpansRow, decode_row, encode_row, node_of, read_spans
from spanloop.pipeline.replay.spill import Labels, Spill, bucket_of, buckets_of, read_spill
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import encode

nodes = st.integers(0, 12).map(lambda n: bytes.fromhex(digest("node", n)))
edge_lists = st.lists(st.tuples(nodes, nodes), max_size=20)


def partition(labels: dict[bytes, bytes]) -> set[frozenset[bytes]]:
    groups: dict[bytes, set[bytes]] = {}
    for node, label in labels.items():
        groups.setdefault(label, set()).add(node)
    return {frozenset(group) for group in groups.values()}


@given(edge_lists, st.integers(1, 4), st.randoms(use_true_random=False))
def test_both_ways_of_joining_give_the_same_labels(edges, parts, rng):
    array = np.array([*edges], ID).reshape(-1, 2)
    found, labels = components(array)
    by_array = {
        n.ljust(16, b"\0"): x.ljust(16, b"\0") for n, x in zip(found.tolist(), labels.tolist(), strict=True)
    }
    unions = [Union() for _ in range(parts)]
    for edge in edges:
        rng.choice(unions).add(*edge)
    total = Union()
    for union in unions:
        total.merge(union)
    assert {node: total.find(node) for node in by_array} == by_array
    assert total.labels() == {node: label for node, label in by_array.items() if node != label}


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4, unique=True),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
@settings(max_examples=25)
def test_evidence_by_key_joins_what_the_joiner_joins(numbers, rng, parts):
    """Also where the pieces come from several files that were each sorted by key."""
    events = [event for n in numbers for event in joined_events(n)]
    rng.shuffle(events)
    joiner = Joiner()
    for event in events:
        for span in event.spans:
            operation = operation_of(span, event.source)
            joiner.add(event.tenant, operation, encode_operation(operation))
    truth = {
        frozenset(node_of(c.tenant, trace) for trace in (*c.traces, *c.linked)) for c in joiner.components()
    }
    reads = [
        read_spans(encode(event), Position("spans", 0, i, i, event.key)) for i, event in enumerate(events)
    ]
    tables = []
    for part in range(parts):
        packed = pack_pieces([piece for read in reads[part::parts] for piece in read.pieces])
        tables.append(packed[np.argsort(packed["key"], kind="stable")])
    links = np.array([(read.node, other) for read in reads for other in read.linked], ID).reshape(-1, 2)
    known, labels = components(np.concatenate([links, match_pieces(np.concatenate(tables))]))
    table = Labels(known, labels)
    own = as_ids(sorted({read.node for read in reads}))
    found = {
        n.ljust(16, b"\0"): x.ljust(16, b"\0")
        for n, x in zip(own.tolist(), table.of(own).tolist(), strict=True)
    }
    assert partition(found) == truth


@given(st.lists(st.tuples(nodes, st.binary(max_size=20)), max_size=30), st.integers(1, 7))
@settings(max_examples=25)
def test_a_spill_gives_back_its_rows_by_bucket(tmp_path_factory, rows, buckets):
    path = tmp_path_factory.mktemp("spill") / "rows.arrow"
    spill = Spill(buckets)
    for node, row in rows:
        spill.add(node, row)
    spill.save(path)
    found = []
    for bucket in range(buckets):
        own, values = read_spill(path, bucket)
        back = [node.ljust(16, b"\0") for node in own.tolist()]
        assert all(bucket_of(node, buckets) == bucket for node in back)
        assert (buckets_of(own, buckets) == bucket).all()
        found += list(zip(back, values, strict=True))
    assert sorted(found) == sorted(rows)


@given(st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=25)
def test_a_group_does_not_depend_on_order_repetition_or_batching(rng, size):
    events = joined_events(1)
    rows = []
    for i, event in enumerate(events):
        read = read_spans(encode(event), Position("spans", 0, i, i, event.key))
        assert read.row is not None
        for at in range(0, len(read.row.operations), size):
            part = read.row.operations[at : at + size]
            rows.append(encode_row(SpansRow(event.tenant, event.trace_id, 0, i, i, part)))
    truth = assemble(rows).orchestration
    assert truth is not None
    mixed = [*rows, *rng.sample(rows, len(rows) // 2)]
    rng.shuffle(mixed)
    again = assemble(mixed).orchestration
    assert again is not None
    assert (again.content, again.complete, again.spans) == (truth.content, truth.complete, truth.spans)
    assert all(isinstance(decode_row(row), SpansRow) for row in rows)


def test_pieces_beyond_memory_are_matched_in_parts(monkeypatch, tmp_path):
    """``join`` cuts the keys in ranges: the edges are the same."""
    import msgspec

    from spanloop.pipeline.replay import passes
    from spanloop.pipeline.replay.spill import save_array

    events = [event for n in range(1, 9) for event in joined_events(n)]
    random.Random(1).shuffle(events)
    pieces, links = [], []
    for i, event in enumerate(events):
        read = read_spans(encode(event), Position("spans", 0, i, i, event.key))
        pieces += read.pieces
        links += [(read.node, other) for other in read.linked]
    packed = pack_pieces(pieces)
    labels = []
    for together in (10**6, 5):
        work = tmp_path / str(together)
        for number in range(2):
            own = packed[number::2]
            save_array(work / f"pieces-{number}.npy", own[np.argsort(own["key"], kind="stable")])
            save_array(work / f"links-{number}.npy", np.array(links[number::2], ID).reshape(-1, 2))
        plan = msgspec.defstruct("P", ["chunks"])({"spans": [0, 1]})
        monkeypatch.setattr(passes, "load_plan", lambda _, plan=plan: plan)
        monkeypatch.setattr(passes, "PIECES_TOGETHER", together)
        passes.join(work)
        found = Labels.load(work)
        labels.append((np.asarray(found._nodes).tolist(), np.asarray(found._labels).tolist()))
    assert labels[0] == labels[1]
    assert len(labels[0][0]) > 16
