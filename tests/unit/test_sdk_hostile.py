"""The SDK in a hostile host or over a broken backend: the program goes on as if it were not there."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from sdk_support import assembled, received, recording

from spanloop.collectors import sdk
from spanloop.collectors.sdk import _failures, _values


class Hostile:
    """Whatever is asked of it, it raises."""

    def __getattribute__(self, name: str):
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("str")

    __repr__ = __len__ = __iter__ = __bool__ = __hash__ = __eq__ = __float__ = __int__ = __index__ = __str__  # type: ignore[assignment]


class LongText(str):
    """A text whose methods lie and raise."""

    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("str")

    def __len__(self) -> int:
        return 3

    def isascii(self) -> bool:
        raise RuntimeError("isascii")


ACTS = [
    sdk.agent,
    lambda value: sdk.agent(
        "a", model=value, tools=value, system_prompt=value, conversation=value, task_key=value
    ),
    lambda value: sdk.agent("a", tools=[value, value], attributes={"k": value}),
    lambda value: sdk.spawn(value, options=value, propensities=value, chosen=value, by_policy=value),
    lambda value: sdk.delegate(value, options=[value], propensities=[value], decision=value, call=value),
    lambda value: sdk.message(value, text=value),
    sdk.receive,
    lambda value: sdk.aggregate(value, method=value),
    lambda value: sdk.aggregate([value, value]),
    lambda value: sdk.stop(value, attributes=value),
    lambda value: sdk.decision(value, value, value, chosen=value),
    lambda value: sdk.tool(value, call_id=value, arguments=value),
    lambda value: sdk.model_call(value, provider=value, system_prompt=value),
    sdk.guardrail,
]
VALUES = [
    None, object(), Hostile, LongText("x" * 100_000), "y" * 1_000_000, "\ud800 lone", "\x00", -1, 2**200, float("nan"),
    float("inf"), b"bytes", [[]], {"a": {"b": [1]}}, {1: 2}, [None] * 5_000, ("a", 1, 2.5), True, lambda: 1 / 0,
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(ACTS)))
@pytest.mark.parametrize("value", VALUES, ids=[f"value{n}" for n in range(len(VALUES))])
def test_any_value_anywhere_leaves_the_host_and_the_batch_alone(index, value):
    value = Hostile() if value is Hostile else value
    ran = []
    with recording(strict=False, capture_content=True) as exporter, sdk.agent("root"):
        with_value = ACTS[index](value)
        block = with_value if hasattr(type(with_value), "__enter__") else sdk.tool("decorated")
        with block:
            ran.append(1)
            for method in ("result", "choose", "triggered"):
                if hasattr(type(block), method):
                    getattr(block, method)(value)
            block.set(k=value)
    assert ran == [1]
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert len(exporter.get_finished_spans()) == 2
    encoded = encode_spans(exporter.get_finished_spans()).SerializeToString()
    assert len(encoded) < 200_000
    assert len(assembled(exporter)) == 1


@pytest.mark.parametrize("value", VALUES, ids=[f"value{n}" for n in range(len(VALUES))])
def test_any_response_and_any_feedback(value):
    value = Hostile() if value is Hostile else value
    with recording(strict=False), sdk.model_call("m") as call:
        call.response(
            id=value,
            model=value,
            input_tokens=value,
            output_tokens=value,
            finish_reasons=value,
            tool_calls=value,
        )
        if type(value) not in (int, bool):
            assert sdk.feedback(value, label=value, comment=value) == ""


@pytest.mark.parametrize(
    "raised", [ValueError("v"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), StopIteration(1)],
    ids=lambda exc: type(exc).__name__,
)  # fmt: skip
def test_the_hosts_exceptions_pass_unchanged(raised):
    with recording() as exporter:

        @sdk.agent("a")
        def run() -> None:
            with sdk.delegate("b"), sdk.tool("t"):
                raise raised

        with pytest.raises(type(raised)) as caught:
            run()
        assert caught.value is raised
        assert (raised.__cause__, raised.__context__) == (None, None)
    statuses = {span.status.status_code.name for span in exporter.get_finished_spans()}
    assert statuses == ({"UNSET"} if isinstance(raised, GeneratorExit) else {"ERROR"})
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert all(not span.events for span in exporter.get_finished_spans())


class Broken(SpanProcessor):
    """Raises at one place."""

    def __init__(self, place: str) -> None:
        self.place = place

    def on_start(self, span, parent_context=None) -> None:
        if self.place == "start":
            raise OSError("backend")

    def on_end(self, span) -> None:
        if self.place == "end":
            raise OSError("backend")


@pytest.mark.parametrize("place", ["start", "end"])
def test_a_backend_that_raises_is_counted_and_logged_once(place, caplog, monkeypatch):
    monkeypatch.setattr(_failures, "_counts", {})
    monkeypatch.setattr(_failures, "_counters", {})
    provider = TracerProvider()
    provider.add_span_processor(Broken(place))
    sdk.instrument(tracer_provider=provider)
    try:
        with caplog.at_level(logging.WARNING, "spanloop.sdk"):
            results = []
            for n in range(20):
                with sdk.agent("a"), sdk.tool("t"):
                    results.append(n)
    finally:
        sdk.uninstrument()
    assert results == list(range(20))
    assert list(sdk.failures().values()) == [40]
    assert len(caplog.records) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_tracer_that_raises_and_a_logger_that_raises(monkeypatch):
    class Tracer(trace.NoOpTracer):
        def start_span(self, *args, **kwargs):
            raise MemoryError

    class Provider(trace.NoOpTracerProvider):
        def get_tracer(self, *args, **kwargs):
            return Tracer()

    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("filter")

    monkeypatch.setattr(_failures, "_counters", {})
    logger = logging.getLogger("spanloop.sdk")
    logger.addFilter(refuse)
    sdk.instrument(tracer_provider=Provider())
    try:
        with sdk.agent("a") as run:
            assert run.span_id == ""
    finally:
        sdk.uninstrument()
        logger.removeFilter(refuse)


def test_a_provider_that_raises_leaves_the_sdk_inert():
    class Provider(trace.NoOpTracerProvider):
        def get_tracer(self, *args, **kwargs):
            raise RuntimeError

    sdk.instrument(tracer_provider=Provider())
    with sdk.agent("a") as run:
        assert run.span_id == ""
    sdk.uninstrument()


def test_blocks_used_wrongly():
    with recording(strict=False) as exporter:
        block = sdk.agent("a")
        with block:
            with block:
                pass
            with sdk.tool("inside"):
                pass
        with block:
            pass
        block.__exit__(None, None, None)
        block.suspend()
        block.resume()
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["execute_tool inside", "invoke_agent a", "invoke_agent a"]
    assert exporter.get_finished_spans()[0].parent.span_id == exporter.get_finished_spans()[1].context.span_id


def test_blocks_left_in_the_wrong_order_lose_no_span():
    def host() -> None:
        outer, inner = sdk.agent("a"), sdk.tool("t")
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        with sdk.agent("b") as run:
            assert run.span_id

    with recording() as exporter:
        contextvars.copy_context().run(host)
    assert len(received(exporter)) == 3


def test_bounds_on_what_one_span_carries():
    with recording() as exporter, sdk.agent("a", attributes={f"k{n}": "v" * 100_000 for n in range(500)}):
        options = [f"option-{n}" for n in range(10_000)]
        sdk.raise_in_tests(False)
        sdk.stop(options=options, propensities=[1 / 10_000] * 10_000, chosen="option-1").now()
    for span in exporter.get_finished_spans():
        assert len(span.attributes) < 64
        assert span.attributes["spanloop.sdk.truncated"] is True
        assert all(
            len(value) <= _values.CONTENT_CHARS
            for value in span.attributes.values()
            if isinstance(value, str)
        )
    (content,) = assembled(exporter)
    assert "truncated_attributes:2" in content.flags
    assert "bad_propensities:1" in content.flags
    (stop,) = [e for e in content.events if e.type == "stop"]
    assert stop.decision.propensities == ()


def test_a_senders_own_attributes_cannot_speak_for_the_gateway():
    with (
        recording() as exporter,
        sdk.agent("a", attributes={"spanloop.policy.version": "policy@v9", "team": "blue"}),
    ):
        pass
    (span,) = exporter.get_finished_spans()
    assert "spanloop.policy.version" not in span.attributes
    assert span.attributes["team"] == "blue"


@pytest.mark.parametrize(
    ("options", "propensities", "chosen"),
    [(["a", "b"], [0.5, 0.6], "a"), (["a", "b"], [1.0], "a"), (["a", "b"], [float("nan"), 1.0], "a"), (["a", "a"], [0.5, 0.5], "a"),
     (["a", "b"], [-0.5, 1.5], "a"), (["a", "b"], ["x", "y"], "b")],
)  # fmt: skip
def test_probabilities_that_are_none_are_refused_with_a_flag(options, propensities, chosen):
    before = sdk.failures().get("a decision's menu", 0)
    with recording(strict=False) as exporter, sdk.agent("a"):
        sdk.stop(options=options, propensities=propensities, chosen=chosen).now()
    (content,) = assembled(exporter)
    (stop,) = [e for e in content.events if e.type == "stop"]
    assert stop.decision.propensities == ()
    assert stop.decision.options == tuple(dict.fromkeys(options))
    assert any(flag.startswith("bad_propensities") for flag in content.flags)
    assert sdk.failures()["a decision's menu"] > before


def test_an_exporter_that_is_down_costs_the_host_nothing():
    """A process of its own: no provider, nobody listens, 3,000 acts, a short life."""
    script = (
        "import time\n"
        "from spanloop.collectors import sdk\n"
        "sdk.instrument()\n"
        "t = time.perf_counter()\n"
        "for n in range(1000):\n"
        "    with sdk.agent('a'), sdk.delegate('b'): sdk.stop('x').now()\n"
        "print(sdk.failures(), time.perf_counter() - t < 20)\n"
    )
    environment = {
        **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_EXPORT_TIMEOUT": "1000", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{} True"


def test_failures_are_bounded():
    for n in itertools.islice(itertools.count(), 100):
        with recording(strict=False):
            sdk.decision("no such kind", [f"o{n}"]).now()
    assert len(sdk.failures()) < 40
