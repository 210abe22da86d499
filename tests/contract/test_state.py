"""What every StateStore adapter must do: entries, offsets and outputs are one thing."""

from __future__ import annotations

import pytest

from spanloop.schemas.errors import SpanloopError, TerminalError


def test_a_new_stage_is_empty(adapter):
    assert adapter.state.load("assembly") == {}
    assert adapter.state.offsets("assembly") == {}


def test_entries_offsets_and_outputs_are_there_after_reopening(adapter, make):
    adapter.state.commit(
        "assembly",
        writes={"a": b"1", "b": b"2"},
        offsets={"spans": 4},
        outputs=[make("o1", topic="orchestrations")],
    )
    adapter.state.commit("assembly", writes={"a": None, "c": b"3"}, offsets={"spans": 7})
    adapter.state.commit("signal", writes={"a": b"other"}, offsets={"feedback": 1})
    log, state = adapter.reopen()
    assert state.load("assembly") == {"b": b"2", "c": b"3"}
    assert state.offsets("assembly") == {"spans": 7}
    assert state.load("signal") == {"a": b"other"}
    assert [r.event_id for r in log.read(["orchestrations"], {}, 10)] == ["o1"]


def test_outputs_repeated_after_a_crash_are_one_record(adapter, make):
    for _ in range(2):
        adapter.state.commit("s", writes={}, offsets={"spans": 1}, outputs=[make("same", topic="rewards")])
    assert len(adapter.log.read(["rewards"], {}, 10)) == 1


def test_deleting_what_is_not_there_is_no_error(adapter):
    adapter.state.commit("s", writes={"never": None}, offsets={})
    assert adapter.state.load("s") == {}


@pytest.mark.parametrize("broken", ["output", "value"])
def test_a_failed_commit_leaves_state_offsets_and_outputs_as_they_were(adapter, make, broken):
    adapter.state.commit("s", writes={"a": b"1"}, offsets={"spans": 1})
    outputs = [make("good", topic="rewards")]
    writes = {"a": b"2"}
    if broken == "output":
        if not adapter.durable:
            adapter.log.close()
        else:
            outputs.append(make("bad", topic="rewards", key="\ud800"))
    elif adapter.durable:
        writes["b"] = object()  # refused by the driver in the middle of the transaction
    else:
        pytest.skip("memory keeps any object")
    with pytest.raises(SpanloopError):
        adapter.state.commit("s", writes=writes, offsets={"spans": 2}, outputs=outputs)
    log, state = adapter.reopen()
    assert state.load("s") == {"a": b"1"}
    assert state.offsets("s") == {"spans": 1}
    assert log.read(["rewards"], {}, 10) == []


def test_two_processes_cannot_both_run_a_stage(adapter):
    if not adapter.durable:
        pytest.skip("one process only")
    first = adapter.state
    first.load("s")
    _, second = adapter.reopen()
    second.load("s")
    second.commit("s", writes={"a": b"2"}, offsets={"spans": 1})
    with pytest.raises(TerminalError, match="another process"):
        first.commit("s", writes={"a": b"1"}, offsets={"spans": 1})
    assert first.load("s") == {"a": b"2"}
    first.commit("s", writes={}, offsets={"spans": 2})
