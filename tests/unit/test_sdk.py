"""The SDK in a well-behaved host: acts, decorators, contexts, threads, processes, harness, instrumentor's contract."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from sdk_support import assembled, recording

from spanloop.collectors import sdk
from spanloop.collectors.harness import harness_fingerprint
from spanloop.collectors.sdk import _runtime


@pytest.fixture
def exporter():
    with recording() as found:
        yield found


def spans_of(exporter) -> dict[str, trace.Span]:
    return {span.name: span for span in exporter.get_finished_spans()}


def parents(exporter) -> dict[str, str]:
    """Span name -> name of its parent."""
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent.span_id, "?") if span.parent else "" for span in spans}


# ---------------------------------------------------------------- the instrumentor's contract


def test_nothing_is_recorded_unless_instrumented():
    with sdk.agent("a") as run, sdk.delegate("b") as act:
        sdk.stop("done").now()
    assert (run.span_id, act.carrier, _runtime.active()) == ("", {}, None)


def test_instrumenting_twice_warns_and_changes_nothing(exporter, caplog):
    runtime = _runtime.active()
    with caplog.at_level(logging.WARNING):
        sdk.instrument()
    assert "already instrumented" in caplog.text
    assert _runtime.active() is runtime


def test_uninstrumented_blocks_that_are_open_still_end(exporter):
    with sdk.agent("a"):
        sdk.uninstrument()
    sdk.instrument(tracer_provider=trace.NoOpTracerProvider())
    assert [span.name for span in exporter.get_finished_spans()] == ["invoke_agent a"]
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_the_entry_point_is_the_instrumentor():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="opentelemetry_instrumentor", name="spanloop")
    assert found.load() is sdk.SpanloopInstrumentor
    assert sdk.SpanloopInstrumentor() is sdk.SpanloopInstrumentor()
    assert tuple(sdk.SpanloopInstrumentor().instrumentation_dependencies()) == ()


@pytest.mark.parametrize(
    ("variables", "spans", "counted"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, 1, 0),
        ({"OTEL_TRACES_EXPORTER": "none"}, 0, 0),
        ({"OTEL_TRACES_EXPORTER": "console,no_such_exporter"}, 1, 1),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, 0, 0),
    ],
)
def test_a_host_without_a_provider_gets_one_from_its_environment(variables, spans, counted):
    script = (
        "from spanloop.collectors import sdk\n"
        "sdk.instrument()\n"
        "sdk.agent('a').now()\n"
        "from opentelemetry import trace\n"
        "getattr(trace.get_tracer_provider(), 'force_flush', int)()\n"
        "print('failures', sum(sdk.failures().values()))\n"
    )
    environment = {
        **os.environ,
        **variables,
        "OTEL_SERVICE_NAME": "mine",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.count('"name": "invoke_agent a"') == spans
    assert done.stdout.count('"service.name": "mine"') == spans
    assert f"failures {counted}" in done.stdout


# ---------------------------------------------------------------- every kind of function


def test_a_plain_function_keeps_its_name_and_its_result(exporter):
    @sdk.agent
    def scout(question: str) -> str:
        """Looks around."""
        return question.upper()

    assert (scout("x"), scout.__name__, scout.__doc__) == ("X", "scout", "Looks around.")
    assert list(inspect.signature(scout).parameters) == ["question"]
    assert "invoke_agent scout" in spans_of(exporter)


async def test_coroutines_are_recorded_one_by_one(exporter):
    @sdk.agent("worker")
    async def work(n: int) -> int:
        with sdk.tool(f"t{n}"):
            await asyncio.sleep(0)
        return n

    assert inspect.iscoroutinefunction(work)
    with sdk.agent("lead"):
        assert await asyncio.gather(*(work(n) for n in range(5))) == list(range(5))
    assert [parents(exporter)[f"execute_tool t{n}"] for n in range(5)] == ["invoke_agent worker"] * 5
    assert parents(exporter)["invoke_agent worker"] == "invoke_agent lead"


def test_a_generators_block_is_the_callers_no_business(exporter):
    @sdk.agent("counter")
    def count():
        with sdk.tool("inner"):
            got = yield 1
            sdk.guardrail("seen").now()
            yield got
        return "end"

    assert inspect.isgeneratorfunction(count)
    with sdk.agent("lead"):
        steps = count()
        assert next(steps) == 1
        sdk.guardrail("between").now()
        assert steps.send("two") == "two"
        with pytest.raises(StopIteration) as end:
            next(steps)
    assert end.value.value == "end"
    found = parents(exporter)
    assert found["apply_guardrail seen"] == "execute_tool inner"
    assert found["apply_guardrail between"] == "invoke_agent lead"
    assert found["execute_tool inner"] == "invoke_agent counter"


def test_a_generator_that_is_thrown_into_or_closed_behaves_as_without(exporter):
    log = []

    @sdk.tool("steps")
    def steps():
        try:
            yield 1
        except KeyError:
            log.append("caught")
            yield 2
        finally:
            log.append("closed")

    one = steps()
    next(one)
    assert one.throw(KeyError("k")) == 2
    one.close()
    assert log == ["caught", "closed"]
    (span,) = exporter.get_finished_spans()
    assert span.status.is_ok or span.status.status_code.name == "UNSET"
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_async_generators(exporter):
    @sdk.agent("stream")
    async def stream():
        for n in range(3):
            with sdk.tool(f"t{n}"):
                await asyncio.sleep(0)
            yield n

    with sdk.agent("lead"):
        got = []
        async for item in stream():
            got.append(item)
            sdk.guardrail(f"g{item}").now()
    assert got == [0, 1, 2]
    found = parents(exporter)
    assert {found[f"execute_tool t{n}"] for n in range(3)} == {"invoke_agent stream"}
    assert {found[f"apply_guardrail g{n}"] for n in range(3)} == {"invoke_agent lead"}


async def test_an_async_generator_closed_in_another_task_disturbs_nobody(exporter):
    @sdk.agent("stream")
    async def stream():
        yield 1
        yield 2

    steps = stream()
    assert await anext(steps) == 1
    await asyncio.create_task(steps.aclose())
    assert [span.name for span in exporter.get_finished_spans()] == ["invoke_agent stream"]
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_methods_and_several_decorators(exporter):
    class Desk:
        @sdk.delegate("scout")
        @sdk.agent("scout")
        def ask(self, n: int) -> int:
            return n + 1

    with sdk.agent("lead"):
        assert Desk().ask(1) == 2
    (content,) = assembled(exporter)
    assert [(e.agent, e.to) for e in content.events if e.type == "delegate"] == [("lead", "scout")]


# ---------------------------------------------------------------- other threads, tasks, processes


def test_a_pool_of_threads_goes_on_in_the_submitters_context(exporter):
    def work(n: int) -> None:
        with sdk.agent(f"w{n}"):
            pass

    with sdk.agent("lead"), sdk.ThreadPool(4) as pool:
        list(pool.map(work, range(8)))
    assert {parents(exporter)[f"invoke_agent w{n}"] for n in range(8)} == {"invoke_agent lead"}


def test_a_bound_function_may_run_in_many_threads_at_once(exporter):
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait(10)
        with sdk.tool("t"):
            barrier.wait(10)

    with sdk.agent("lead"), ThreadPoolExecutor(4) as pool:
        bound = sdk.bind(work)
        for done in [pool.submit(bound) for _ in range(4)]:
            done.result()
    assert parents(exporter)["execute_tool t"] == "invoke_agent lead"


def test_another_process_goes_on_in_the_same_trace(exporter):
    script = (
        "from sdk_support import recording\n"
        "from spanloop.collectors import sdk\n"
        "with recording() as e:\n"
        "    with sdk.extract(), sdk.agent('child') as run: print(run.trace_id, flush=True)\n"
        "    print(format(e.get_finished_spans()[0].parent.span_id, '016x'))\n"
    )
    with sdk.agent("lead") as lead, sdk.delegate("child") as act:
        headers = {key.upper(): value for key, value in act.carrier.items()}
        path = os.pathsep.join(["tests", *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **headers, "PYTHONPATH": path}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
    assert done.stdout.split() == [lead.trace_id, act.span_id]


@pytest.mark.parametrize("carrier", [{}, {"traceparent": "nonsense"}, {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}])  # fmt: skip
def test_a_carrier_without_a_context_changes_nothing(exporter, carrier):
    with sdk.agent("lead"), sdk.extract(carrier), sdk.tool("t"):
        pass
    sdk.receive(carrier).now()
    assert parents(exporter)["execute_tool t"] == "invoke_agent lead"


def test_a_forked_child_records_and_reports_nothing_of_its_parent(exporter):
    from spanloop.collectors.sdk._outcomes import _sender

    with sdk.agent("lead"):
        _sender._busy = 1
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with sdk.agent("child") as run:
                pass
            os.write(write, f"{run.span_id} {_sender._busy} {len(_sender._items)}".encode())
            os._exit(0)
        _sender._busy = 0
        os.waitpid(child, 0)
        span_id, busy, queued = os.read(read, 100).split()
    assert len(span_id) == 16
    assert (busy, queued) == (b"0", b"0")


# ---------------------------------------------------------------- decisions


def test_a_decision_arrives_with_its_menu_on_the_act_that_it_chose(exporter):
    with sdk.agent("lead"):
        menu = {"options": ["scout", "writer"], "propensities": [0.25, 0.75], "by_policy": False}
        with sdk.delegate("writer", **menu), sdk.agent("writer"):
            pass
    (content,) = assembled(exporter)
    (event,) = [e for e in content.events if e.decision is not None]
    assert (event.type, event.to, event.confidence) == ("delegate", "writer", 1.0)
    told = event.decision
    assert (told.kind, told.chosen, told.options, told.propensities, told.by_policy) == (
        "delegate", "writer", ("scout", "writer"), (0.25, 0.75), False,
    )  # fmt: skip


def test_a_decision_not_to_act_and_the_model_call_that_took_it(exporter):
    with sdk.agent("lead"):
        with sdk.decision("spawn", ["spawn", "wait"], [0.5, 0.5]) as decision:
            with sdk.model_call("m") as call:
                call.response(id="resp-1", input_tokens=5, output_tokens=1)
            assert decision.choose("wait", by_policy=True) == "wait"
        sdk.stop(options=["stop", "go"], call="resp-1").now()
    (content,) = assembled(exporter)
    (event,) = [e for e in content.events if e.type == "orchestrator_decision"]
    assert (event.decision.chosen, event.call_id) == ("wait", "resp-1")
    (stop,) = [e for e in content.events if e.type == "stop"]
    assert (stop.decision.chosen, stop.call_id) == ("stop", "resp-1")


def test_acts_under_a_decision_are_caused_by_it(exporter):
    with sdk.agent("lead"):
        with sdk.decision("delegate", ["a", "b"], [0.5, 0.5], chosen="a") as decision:
            pass
        for _ in range(2):
            with sdk.delegate("a", decision=decision), sdk.agent("a"):
                pass
    (content,) = assembled(exporter)
    by_type = {
        kind: [e.id for e in content.events if e.type == kind]
        for kind in ("orchestrator_decision", "delegate")
    }
    assert len(by_type["orchestrator_decision"]) == 1
    edges = {(e.src, e.dst) for e in content.edges if e.type == "causal"}
    assert {(by_type["orchestrator_decision"][0], d) for d in by_type["delegate"]} <= edges


# ---------------------------------------------------------------- the harness


def harness_of(exporter) -> list[str]:
    return [
        s.attributes.get("spanloop.sdk.harness", "")
        for s in exporter.get_finished_spans()
        if "agent" in s.name
    ]


def test_a_declared_harness_is_the_gateways_definition(exporter):
    with sdk.agent("a", model="m", tools=["search"], system_prompt="Be brief."):
        pass
    body = {"model": "m", "tools": ["search"], "messages": [{"role": "system", "content": "Be brief."}]}
    assert harness_of(exporter) == [harness_fingerprint(body, runtime=sdk.runtime_versions())]
    assert "Be brief." not in repr([dict(s.attributes) for s in exporter.get_finished_spans()])


def test_an_undeclared_harness_is_what_the_run_used(exporter):
    def run(model: str, prompt: str) -> None:
        with sdk.agent("outer"), sdk.agent("inner"), sdk.model_call(model, system_prompt=prompt):
            pass

    for model, prompt in [("m", "p"), ("m", "p"), ("m", "q"), ("n", "p")]:
        run(model, prompt)
    found = harness_of(exporter)
    assert len(set(found[0::2])) == 3
    assert found[0] == found[2]
    assert found[0::2] == found[1::2]


def test_the_key_hides_the_harness():
    found = []
    for key in ("", "secret" * 4, "secret" * 4):
        with recording(hash_key=key) as exporter, sdk.agent("a", model="m"):
            pass
        found += harness_of(exporter)
    assert found[0] != found[1] == found[2]


# ---------------------------------------------------------------- content


@contextmanager
def one_of_each():
    with sdk.agent("a") as run, sdk.tool("t", arguments={"q": "secret text"}) as tool:
        tool.result(["secret text"])
        sdk.message("b", text="secret text").now()
        run.result("secret text")
        yield


def test_texts_stay_in_the_process_unless_asked_for():
    for asked in (False, True):
        with recording(capture_content=asked) as exporter, one_of_each():
            pass
        shown = repr([dict(s.attributes) for s in exporter.get_finished_spans()])
        assert shown.count("secret text") == (4 if asked else 0)


def test_opentelemetrys_variable_asks_for_content(monkeypatch):
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    with recording() as exporter, one_of_each():
        pass
    assert "secret text" in repr([dict(s.attributes) for s in exporter.get_finished_spans()])
