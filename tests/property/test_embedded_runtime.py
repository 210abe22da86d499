"""Laws of the embedded runtime, with stages small enough to know the answer."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord, StageOutput
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime, run_to_end
from spanloop.pipeline.state.memory import MemoryState
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas.errors import TerminalError, TransientError
from spanloop.schemas.events import DeadLettered, decode

SECOND = 1_000_000_000


class Sum:
    """Sums numbers by key, tells the running sum on dead_letters (any event will do); a quiet key is closed by timer."""

    name = "sum"
    topics = ("spans", "feedback")

    def __init__(self, poison=frozenset(), quiet_ns=SECOND):
        self.poison, self.quiet_ns = poison, quiet_ns
        self.sums, self.due = {}, {}

    def restore(self, entries):
        loaded = {key: json.loads(value) for key, value in entries.items()}
        self.sums = {key: value[0] for key, value in loaded.items()}
        self.due = {key: value[1] for key, value in loaded.items() if value[1] is not None}

    def process(self, records, now_ns):
        touched, events = {}, []
        for record in records:
            number = json.loads(record.value)
            self.sums[record.key] = self.sums.get(record.key, 0) + number  # half folded when it raises below
            if number in self.poison:
                raise ValueError(f"cannot fold {number}")
            self.due[record.key] = now_ns + self.quiet_ns
            touched[record.key] = None
            events.append(_told("sum", record.key, record.event_id, self.sums[record.key]))
        return StageOutput(events=events, writes={key: self._entry(key) for key in touched})

    def tick(self, now_ns):
        closed = sorted(key for key, due in self.due.items() if due <= now_ns)
        for key in closed:
            del self.due[key]
        return StageOutput(
            events=[_told("closed", key, "", self.sums[key]) for key in closed],
            writes={key: self._entry(key) for key in closed},
        )

    def next_timer_ns(self):
        return min(self.due.values(), default=None)

    def _entry(self, key):
        return json.dumps([self.sums[key], self.due.get(key)]).encode()


class Count:
    """Counts what Sum told: a second stage that reads the first one's outputs."""

    name = "count"
    topics = ("dead_letters",)

    def restore(self, entries):
        self.count = int(entries.get("count", b"0"))

    def process(self, records, now_ns):
        self.count += len(list(records))
        return StageOutput(writes={"count": str(self.count).encode()})

    def tick(self, now_ns):
        return StageOutput()

    def next_timer_ns(self):
        return None


def _told(kind, key, event_id, value):
    return DeadLettered(source=kind, reason=f"{key}={value}", sha256=event_id, size=value)


def _inputs(numbers):
    topics = ("spans", "feedback")
    return [NewRecord(topics[n % 2], f"k{n % 3}", f"e{i}", str(n).encode()) for i, n in enumerate(numbers)]


def _told_on(log):
    return [(e.source, e.reason, e.sha256) for e in (decode(r.value) for r in scan(log, ["dead_letters"]))]


class Crash(BaseException):
    pass


class CrashingState:
    """Dies before or after the n-th commit, as a process does."""

    def __init__(self, inner, crash_at, after):
        self.inner, self.left, self.after = inner, crash_at, after

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def commit(self, stage, **changes):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        self.inner.commit(stage, **changes)
        if self.left == 0:
            raise Crash


def _reference(numbers):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    state = MemoryState(log)
    log.append(_inputs(numbers)) if numbers else None
    run_to_end([Sum(), Count()], log, state, clock, batch_max=1)
    return _told_on(log), {k: json.loads(v)[0] for k, v in state.load("sum").items()}, state.load("count")


@given(
    numbers=st.lists(st.integers(0, 50), max_size=25),
    batch=st.integers(1, 7),
    crashes=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_batching_and_crashes_change_nothing(numbers, batch, crashes):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    store = MemoryState(log)
    log.append(_inputs(numbers)) if numbers else None
    for crash_at, after in [*crashes, (0, False)]:
        try:
            run_to_end([Sum(), Count()], log, CrashingState(store, crash_at, after), clock, batch_max=batch)
        except Crash:
            continue
    sums = {k: json.loads(v)[0] for k, v in store.load("sum").items()}
    assert (_told_on(log), sums, store.load("count")) == _reference(numbers)


@given(
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    crash_at=st.integers(1, 8),
    after=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_over_sqlite(tmp_path_factory, numbers, crash_at, after):
    clock, path = ManualClock(0), tmp_path_factory.mktemp("run") / "spanloop.db"
    with closing(SqliteLog(path, clock)) as log:
        log.append(_inputs(numbers))
        for attempt in (crash_at, 0):
            with closing(SqliteState(path, clock)) as state:
                try:
                    run_to_end(
                        [Sum(), Count()], log, CrashingState(state, attempt, after), clock, batch_max=3
                    )
                except Crash:
                    continue
                sums = {k: json.loads(v)[0] for k, v in state.load("sum").items()}
                assert (_told_on(log), sums, state.load("count")) == _reference(numbers)


@given(
    numbers=st.lists(st.integers(0, 20), max_size=25),
    poison=st.sets(st.integers(0, 20), max_size=4),
    batch=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_a_poisonous_record_is_dead_lettered_and_everything_else_counts(numbers, poison, batch):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    store = MemoryState(log)
    inputs = _inputs(numbers)
    log.append(inputs) if inputs else None
    metrics = run_to_end([Sum(poison)], log, store, clock, batch_max=batch)
    dead = [decode(r.value) for r in scan(log, ["dead_letters"])]
    dead = [d for d in dead if d.source == "stage:sum"]
    refused = {hashlib.sha256(r.value).hexdigest() for r in inputs if json.loads(r.value) in poison}
    assert {d.sha256 for d in dead} == refused
    expected = {}
    for record in inputs:
        if json.loads(record.value) not in poison:
            expected[record.key] = expected.get(record.key, 0) + json.loads(record.value)
    assert {k: json.loads(v)[0] for k, v in store.load("sum").items()} == expected
    assert metrics["sum"].records == len(numbers)
    assert metrics["sum"].dead_letters == sum(n in poison for n in numbers)
    assert all("cannot fold" not in d.reason and "ValueError" in d.reason for d in dead)


def test_timers_fire_at_their_time_and_not_while_a_backlog_waits():
    clock = ManualClock(0)
    log = MemoryLog(clock)
    log.append([NewRecord("spans", "a", "a0", b"3")])
    runtime = EmbeddedRuntime([Sum()], log, MemoryState(log), clock, batch_max=2)
    runtime.restore()
    assert runtime.step() == 1
    clock.advance(seconds=0.5)
    log.append([NewRecord("spans", key, f"{key}{n}", b"3") for n, key in enumerate("bbba", 1)])
    clock.advance(seconds=10)  # a has been quiet for long, but the log has more of it: do not close it yet
    assert runtime.step() == 2
    assert runtime.metrics()["sum"].lag_ms == pytest.approx(10_000)
    assert runtime.step() == 2
    assert [kind for kind, _, _ in _told_on(log)] == ["sum"] * 5
    runtime.step()
    assert runtime.metrics()["sum"].lag_ms == 0
    clock.advance(seconds=1)
    assert runtime.step() == 4  # two events and two entries
    assert _told_on(log)[-2:] == [("closed", "a=6", ""), ("closed", "b=9", "")]
    assert runtime.step() == 0


class FailingState(MemoryState):
    failures = 0

    def commit(self, stage, **changes):
        if self.failures:
            self.failures -= 1
            raise TransientError("disk full: free space")
        super().commit(stage, **changes)


def test_a_commit_that_fails_for_now_is_repeated_with_the_same_outputs():
    clock = ManualClock(0)
    log = MemoryLog(clock)
    store = FailingState(log)
    log.append(_inputs([1, 2, 3]))
    runtime = EmbeddedRuntime([Sum(), Count()], log, store, clock)
    runtime.restore()
    store.failures = 2
    runtime.step()
    assert runtime.metrics()["sum"].retries == 2
    assert store.load("count") == {"count": b"3"}
    store.failures = 5
    log.append([NewRecord("spans", "k", "x", b"1")])
    with pytest.raises(TransientError):
        run_to_end([Sum(), Count()], log, store, clock)


def test_stop_ends_run_during_a_failing_commit_without_losing_the_record():
    clock = ManualClock(0)
    log = MemoryLog(clock)
    store = FailingState(log)
    log.append(_inputs([1]))
    runtime = EmbeddedRuntime([Sum()], log, store, clock)
    runtime.restore()
    store.failures = 10**6
    ended = []
    thread = threading.Thread(target=lambda: ended.append(_error_of(runtime.run)))
    thread.start()
    runtime.stop()
    thread.join(timeout=10)
    assert isinstance(ended[0], TransientError)
    store.failures = 0
    run_to_end([Sum()], log, store, clock)
    assert json.loads(store.load("sum")["k1"])[0] == 1


def _error_of(call):
    try:
        call()
    except Exception as exc:
        return exc
    return None


class Restless(Count):
    timer_ns = 0

    def next_timer_ns(self):
        return self.timer_ns


class BrokenTimer(Count):
    def next_timer_ns(self):
        return 0

    def tick(self, now_ns):
        raise KeyError("secret text")


@pytest.mark.parametrize("timer_ns", [-1, 1])
def test_a_timer_without_effect_does_not_spin_for_ever(timer_ns):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    stage = Restless()
    stage.timer_ns = timer_ns
    with pytest.raises(TerminalError, match="without effect"):
        run_to_end([stage], log, MemoryState(log), clock)


def test_a_raising_timer_ends_with_the_place_and_without_the_text():
    clock = ManualClock(0)
    log = MemoryLog(clock)
    with pytest.raises(TerminalError, match=r"KeyError at .* tick") as caught:
        run_to_end([BrokenTimer()], log, MemoryState(log), clock)
    assert "secret" not in caught.value.message


_PROCESS = """
import sys
from spanloop.pipeline.runtimes import process
sys.path.insert(0, sys.argv.pop(1))
from property.test_embedded_runtime import Count, Sum
process.build_stages = lambda pipeline, vault=None: [Sum(quiet_ns=10**18), Count()]
process.main()
"""


def test_the_process_is_ready_folds_and_ends_cleanly_on_sigterm(tmp_path, request):
    config = tmp_path / "spanloop.toml"
    config.write_text(f'workspace = "{tmp_path / "workspace"}"\n')
    tests = str(request.config.rootpath / "tests")
    child = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, tests, "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert json.loads(child.stdout.readline()) == {"ready": "pipeline", "url": ""}
        path = tmp_path / "workspace" / "spanloop.db"
        with closing(SqliteLog(path)) as log, closing(SqliteState(path)) as state:
            log.append(_inputs(range(20)))
            deadline = time.monotonic() + 20
            while state.load("count") != {"count": b"20"} and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state.load("count") == {"count": b"20"}
            log.append([NewRecord("spans", "last", "last", b"5")])
            child.send_signal(signal.SIGTERM)
            _, err = child.communicate(timeout=20)
            assert child.returncode == 0, err
            assert json.loads(state.load("sum")["last"])[0] == 5
        status = json.loads((tmp_path / "workspace" / "pipeline.json").read_text())
        assert status["stages"]["sum"]["records"] == 21
    finally:
        child.kill()
        child.communicate()


def test_the_process_says_what_is_wrong_with_its_settings(tmp_path):
    config = tmp_path / "spanloop.toml"
    config.write_text("unknown = 1\n")
    child = subprocess.run(
        [sys.executable, "-m", "spanloop.pipeline.runtimes.embedded", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert child.returncode == 2
    assert "unknown" in child.stderr
    assert "Traceback" not in child.stderr
