"""Background recording: groups, waits while the log fails, loses only beyond its bound."""

import threading
import time

import pytest

from spanloop.collectors.gateway_follow import Follower
from spanloop.collectors.gateway_metrics import GatewayMetrics
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.routing import Router
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.events import RoutingChanged, SpansReceived


class Log(MemoryLog):
    """A log that can refuse and that counts appends."""

    def __init__(self):
        super().__init__(ManualClock())
        self.refuse = None
        self.appends = []

    def append(self, records):
        self.appends.append(len(records))
        if self.refuse is not None:
            self.refuse(records)
        return super().append(records)


def build(call):
    if call == "odd":
        raise ValueError("odd")
    return SpansReceived(trace_id=call, spans=())


def full_disk(_):
    raise TransientError("no space left")


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def traces(log):
    return [r.key.split("/")[1] for r in log.read(["spans"], {}, 10_000)]


def test_calls_are_appended_in_order_and_in_groups():
    log = Log()
    recorder = Recorder(log, build, queue_max=1000)
    for i in range(100):
        assert recorder.put(f"t{i}")
    recorder.start()
    recorder.close()
    assert traces(log) == [f"t{i}" for i in range(100)]
    assert len(log.appends) < 5
    assert (recorder.num_recorded, recorder.num_lost, recorder.depth) == (100, 0, 0)


def test_while_the_log_fails_calls_wait_up_to_the_bound():
    log = Log()
    log.refuse = full_disk
    recorder = Recorder(log, build, queue_max=20, group_s=0.001)
    recorder.start()
    recorder.put("t0")
    wait_for(lambda: recorder.num_failed_appends)
    accepted = [f"t{i}" for i in range(1, 30) if recorder.put(f"t{i}")]
    assert accepted == [f"t{i}" for i in range(1, 20)]
    assert recorder.num_lost == 10
    log.refuse = None
    wait_for(lambda: recorder.depth == 0)
    recorder.close()
    assert traces(log) == ["t0", *accepted]
    assert not recorder.put("late")


def test_a_call_that_cannot_be_built_costs_only_itself():
    log = Log()
    recorder = Recorder(log, build, queue_max=10)
    recorder.start()
    for call in ("t0", "odd", "t1"):
        recorder.put(call)
    recorder.close()
    assert traces(log) == ["t0", "t1"]
    assert (recorder.num_recorded, recorder.num_lost) == (2, 1)


def test_a_malformed_record_costs_only_itself():
    log = Log()

    def refuse(records):
        if any(r.key.endswith("t1") for r in records):
            raise SchemaError("not a key")

    log.refuse = refuse
    recorder = Recorder(log, build, queue_max=10)
    for i in range(4):
        recorder.put(f"t{i}")
    recorder.start()
    recorder.close()
    assert traces(log) == ["t0", "t2", "t3"]
    assert (recorder.num_recorded, recorder.num_lost) == (3, 1)


def test_close_gives_up_after_its_time_and_says_what_is_lost():
    log = Log()
    log.refuse = full_disk
    recorder = Recorder(log, build, queue_max=10, close_s=0.3)
    recorder.start()
    recorder.put("t0")
    started = time.monotonic()
    recorder.close()
    assert time.monotonic() - started < 3
    assert recorder.num_lost == 1


def test_put_never_waits_for_the_log():
    log, gate = Log(), threading.Event()
    log.refuse = lambda _: gate.wait(10)
    recorder = Recorder(log, build, queue_max=1000, group_s=0)
    recorder.start()
    recorder.put("t0")
    wait_for(lambda: log.appends)
    started = time.monotonic()
    for i in range(200):
        recorder.put(f"u{i}")
    assert time.monotonic() - started < 1
    gate.set()
    recorder.close()
    assert len(traces(log)) == 201


def test_the_follower_reads_what_is_there_and_what_comes():
    log = Log()
    log.append(
        [NewRecord("policies", "k", "junk", b"{}"), new_record(RoutingChanged(sequence=1, champion=1))]
    )
    router = Router("policy", time.monotonic)
    follower = Follower(log, router, poll_s=0.01)
    follower.start()
    assert router.routing("default").champion == 1  # before the first request
    log.append([new_record(RoutingChanged(sequence=2, champion=2))])
    wait_for(lambda: router.routing("default").champion == 2)
    log.read = full_disk_read = lambda *_: full_disk(None)
    wait_for(lambda: follower.num_failed_reads)
    assert full_disk_read is log.read
    assert router.routing("default").champion == 2
    follower.close()


def test_metrics_are_prometheus_text():
    metrics = GatewayMetrics()
    metrics.observe("champion", 200, 0.003)
    metrics.observe("champion", 200, 99.0)
    metrics.observe("pass", 502, 0.0001)
    text = metrics.text({"spanloop_gateway_queue": ("gauge", "Waiting.", 3)})
    assert 'spanloop_gateway_requests_total{route="champion",status="200"} 2' in text
    assert 'spanloop_gateway_request_seconds_bucket{le="0.001"} 1' in text
    assert 'spanloop_gateway_request_seconds_bucket{le="60.0"} 2' in text
    assert 'spanloop_gateway_request_seconds_bucket{le="+Inf"} 3' in text
    assert "spanloop_gateway_queue 3\n" in text


@pytest.mark.parametrize("n", [0, 1])
def test_closing_an_idle_recorder(n):
    recorder = Recorder(Log(), build, queue_max=1)
    if n:
        recorder.start()
    recorder.close()
    assert recorder.num_lost == 0
