"""feedback(): what is sent, sent again, refused, given up and bounded; the host waits for none of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sdk_support import recording

from spanloop.collectors import sdk
from spanloop.collectors.sdk import _failures, _outcomes


class Endpoint:
    """A feedback endpoint that answers as it is told: statuses in order, then 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: list[dict] = []
        self.headers: list[dict] = []
        self.requests = 0
        self.wait = threading.Event()
        self.wait.set()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.wait.wait(20)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests += 1
                status = endpoint.statuses.pop(0) if endpoint.statuses else 200
                if status == 200:
                    endpoint.got += body
                    endpoint.headers.append(dict(self.headers))
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(b'{"accepted": 1, "rejected": []}')

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def endpoint(monkeypatch):
    found = Endpoint()
    monkeypatch.setattr(_failures, "_counts", {})
    monkeypatch.setattr(_failures, "_counters", {})
    monkeypatch.setattr(_outcomes, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    monkeypatch.setenv("SPANLOOP_SCORER_TOKEN", "scorer-key")
    yield found
    found.wait.set()
    assert sdk.flush_feedback(20)
    found.server.shutdown()


def test_it_is_for_the_trace_that_the_host_is_in(endpoint):
    with recording(), sdk.agent("a") as run:
        name = sdk.feedback(0.5, name="quality", label="good", comment="fine", final=False)
    assert sdk.flush_feedback(10)
    (item,) = endpoint.got
    assert item.pop("observed_at") > 0
    assert item == {"trace_id": run.trace_id, "value": 0.5, "name": "quality", "label": "good", "comment": "fine",
                    "final": False, "feedback_id": name}  # fmt: skip
    assert endpoint.headers[0]["Authorization"] == "Bearer scorer-key"


@pytest.mark.parametrize(
    "target",
    [{"response_id": "r"}, {"orchestration_id": "0" * 31 + "1"}, {"trace_id": "1" * 32, "span_id": "2" * 16}],
)
def test_other_targets(endpoint, target):
    assert sdk.feedback(1, **target)
    assert sdk.flush_feedback(10)
    assert target.items() <= endpoint.got[0].items()


def test_a_block_is_a_target(endpoint):
    with recording(), sdk.agent("a") as run, sdk.delegate("b") as act:
        pass
    sdk.feedback(1, target=act)
    assert sdk.flush_feedback(10)
    assert (endpoint.got[0]["span_id"], endpoint.got[0]["trace_id"]) == (act.span_id, run.trace_id)


@pytest.mark.parametrize("statuses", [[503], [429, 429], [500, 503, 429]])
def test_it_is_sent_again_as_the_same_feedback(endpoint, statuses):
    endpoint.statuses = list(statuses)
    sdk.feedback(1, response_id="r")
    assert sdk.flush_feedback(20)
    assert len(endpoint.got) == 1
    assert endpoint.requests == len(statuses) + 1
    assert sdk.failures() == {}


@pytest.mark.parametrize("status", [400, 401, 403, 413])
def test_what_is_refused_is_counted_and_not_sent_again(endpoint, status):
    endpoint.statuses = [status]
    sdk.feedback(1, response_id="r")
    assert sdk.flush_feedback(10)
    assert endpoint.requests == 1
    assert sdk.failures() == {"feedback was refused": 1}


def test_it_is_given_up_after_so_many_tries(endpoint, monkeypatch):
    monkeypatch.setattr(_outcomes, "TRIES_MAX", 3)
    endpoint.statuses = [503] * 3
    sdk.feedback(1, response_id="r")
    assert sdk.flush_feedback(20)
    assert (endpoint.requests, endpoint.got) == (3, [])
    assert sdk.failures() == {"feedback was given up": 1}


def test_a_full_queue_drops_and_counts_and_the_host_never_waits(endpoint, monkeypatch):
    monkeypatch.setattr(_outcomes, "QUEUE_MAX", 50)
    endpoint.wait.clear()
    started = time.perf_counter()
    names = [sdk.feedback(n, response_id=f"r{n}") for n in range(200)]
    assert time.perf_counter() - started < 5
    endpoint.wait.set()
    assert sdk.flush_feedback(20)
    kept = [name for name in names if name]
    assert len(kept) == 50
    assert sorted(item["feedback_id"] for item in endpoint.got) == sorted(kept)
    assert sdk.failures() == {"feedback was dropped": 150}


def test_nobody_listens(monkeypatch, endpoint):
    monkeypatch.setattr(_outcomes, "TRIES_MAX", 2)
    assert sdk.feedback(1, response_id="r", endpoint="http://127.0.0.1:9/v1/feedback")
    assert sdk.flush_feedback(20)
    assert sdk.failures() == {"feedback was given up": 1}


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: sdk.feedback(1), "feedback without a target"),
        (lambda: sdk.feedback(float("nan"), response_id="r"), "feedback with a value that is no number"),
        (lambda: sdk.feedback("x", response_id="r"), "feedback()"),  # type: ignore[arg-type]
        (lambda: sdk.feedback(1, response_id="r", endpoint="file:///etc/passwd"), "feedback()"),
    ],
)
def test_what_cannot_be_sent_is_counted(endpoint, call: Callable[[], str], place: str):
    assert call() == ""
    assert sdk.failures() == {place: 1}
