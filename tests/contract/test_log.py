"""What every Log adapter must do."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas.errors import TerminalError


def test_an_append_is_read_back_as_it_was(log_adapter, make):
    (appended,) = log_adapter.log.append([make("e1", topic="spans", key="t/1", value=b'{"a":1}')])
    (read,) = log_adapter.log.read(["spans"], {}, 10)
    assert (read.topic, read.key, read.event_id, read.value) == ("spans", "t/1", "e1", b'{"a":1}')
    assert (read.offset, read.appended_ns, appended.duplicate) == (appended.offset, 1_000, False)


def test_the_same_event_id_is_one_record_in_its_topic(log_adapter, make):
    first, again, inside = log_adapter.log.append(
        [make("e"), make("e", value=b"other"), make("e", topic="feedback")]
    )
    (later,) = log_adapter.log.append([make("e", value=b"third")])
    assert (first.duplicate, again.duplicate, inside.duplicate, later.duplicate) == (False, True, False, True)
    assert first.offset == again.offset == later.offset
    assert [r.value for r in log_adapter.log.read(["spans"], {}, 10)] == [b"{}"]
    assert len(log_adapter.log.read(["feedback"], {}, 10)) == 1


def test_offsets_rise_and_topics_merge_in_append_order(log_adapter, make):
    order = ["spans", "feedback", "spans", "models", "feedback", "spans"]
    for number, topic in enumerate(order):
        log_adapter.clock.advance(ns=1)
        log_adapter.log.append([make(f"e{number}", topic=topic)])
    records = log_adapter.log.read(["feedback", "models", "spans"], {}, 100)
    assert [r.event_id for r in records] == [f"e{n}" for n in range(6)]
    for topic in set(order):
        offsets = [r.offset for r in records if r.topic == topic]
        assert offsets == sorted(set(offsets))
        assert log_adapter.log.end(topic) == offsets[-1]
    assert log_adapter.log.end("samples") == -1


def test_read_starts_behind_each_topics_offset_and_keeps_the_limit(log_adapter, make):
    for number in range(10):
        log_adapter.log.append([make(f"s{number}"), make(f"f{number}", topic="feedback")])
    everything = log_adapter.log.read(["spans", "feedback"], {}, 100)
    position, seen = {}, []
    while page := log_adapter.log.read(["spans", "feedback"], position, 3):
        assert len(page) <= 3
        seen += page
        position.update({r.topic: r.offset for r in page})
    assert seen == everything
    tail = log_adapter.log.read(["spans", "feedback"], {"spans": log_adapter.log.end("spans")}, 100)
    assert {r.topic for r in tail} == {"feedback"}
    assert log_adapter.log.read([], {}, 10) == log_adapter.log.read(["spans"], {}, 0) == []
    assert log_adapter.log.read(["spans", "spans"], {}, 100) == log_adapter.log.read(["spans"], {}, 100)


def test_scan_walks_to_the_end_it_saw_and_stops_where_told(log_adapter, make):
    log_adapter.log.append([make(f"e{n}", topic=("spans", "models")[n % 2]) for n in range(9)])
    walk = scan(log_adapter.log, ["spans", "models"], batch=2)
    first = next(walk)
    log_adapter.log.append([make("late")])
    ids = [first.event_id, *(r.event_id for r in walk)]
    expected = [f"e{n}" for n in range(9)]
    if not log_adapter.one_order:  # records of one moment: each topic in its own order
        assert [i for i in ids if i in expected[::2]] == expected[::2]
        ids.sort()
    assert ids == expected
    cut = log_adapter.log.read(["spans"], {}, 100)[2].offset
    assert [r.event_id for r in scan(log_adapter.log, ["spans"], upto={"spans": cut})] == ["e0", "e2", "e4"]


def test_consumer_offsets_are_kept_by_group_and_topic(log_adapter):
    assert log_adapter.log.committed("learner") == {}
    log_adapter.log.commit("learner", {"samples": 5})
    log_adapter.log.commit("learner", {"policies": 2})
    log_adapter.log.commit("gateway", {"policies": 9})
    log, _ = log_adapter.reopen()
    assert log.committed("learner") == {"samples": 5, "policies": 2}
    log.commit("learner", {"samples": 3})
    assert log.committed("learner")["samples"] == 3


def test_reopening_finds_every_record_and_continues_the_offsets(log_adapter, make):
    before = log_adapter.log.append([make("a"), make("b")])
    log, _ = log_adapter.reopen()
    (after,) = log.append([make("c")])
    assert after.offset > before[-1].offset
    assert log.append([make("a")])[0] == before[0].__class__(offset=before[0].offset, duplicate=True)
    assert [r.event_id for r in log.read(["spans"], {}, 10)] == ["a", "b", "c"]


def test_append_of_nothing_is_nothing_and_a_closed_log_refuses(log_adapter, make):
    assert log_adapter.log.append([]) == []
    log_adapter.log.close()
    with pytest.raises(TerminalError, match="closed"):
        log_adapter.log.append([make()])


def test_threads_append_concurrently_without_loss_or_repeat(log_adapter, make):
    results = {}

    def work(name):
        results[name] = [log_adapter.log.append([make(f"{name}-{n}"), make("shared")])[0] for n in range(25)]

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = log_adapter.log.read(["spans"], {}, 1_000)
    by_offset = {r.offset: r.event_id for r in records}
    assert len(records) == 8 * 25 + 1
    for name, appended in results.items():
        assert [by_offset[a.offset] for a in appended] == [f"{name}-{n}" for n in range(25)]


_appends = st.lists(
    st.lists(st.tuples(st.sampled_from(["spans", "feedback"]), st.integers(0, 12)), min_size=1, max_size=4),
    max_size=12,
)


@given(appends=_appends, limit=st.integers(1, 5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sqlite_agrees_with_memory(tmp_path_factory, appends, limit):
    clock = ManualClock(7)
    logs = [MemoryLog(clock), SqliteLog(tmp_path_factory.mktemp("log") / "spanloop.db", clock)]
    try:
        views = []
        for log in logs:
            flags = []
            for batch in appends:
                got = log.append([NewRecord(t, "k", f"e{n}", str(n).encode()) for t, n in batch])
                flags.append([a.duplicate for a in got])
            pages, position = [], {}
            while page := log.read(["feedback", "spans"], position, limit):
                position.update({r.topic: r.offset for r in page})
                pages.append([(r.topic, r.event_id, r.value, r.appended_ns) for r in page])
            views.append((flags, pages))
        assert views[0] == views[1]
    finally:
        logs[1].close()
