"""An instrumented SDK whose spans stay in memory, and random programs written with it that keep their own record.

A program is a tree of agents with steps. The record is made by the program itself while it runs, in the words of
``corpora/README.md``; assembly must find the same from the spans alone, after the receiver's redaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spanloop.collectors import sdk
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.schemas.orchestration import Decision, OrchestrationContent
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span

NAMES = ("planner", "scout", "writer")
KINDS = ("spawn", "delegate", "message", "aggregate", "stop")


@contextlib.contextmanager
def recording(*, strict: bool = True, **options: Any):
    """The SDK instrumented into an exporter in memory; ``strict``: internal failures are raised."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sdk.instrument(tracer_provider=provider, **options)
    sdk.raise_in_tests(strict)
    try:
        yield exporter
    finally:
        sdk.raise_in_tests(False)
        sdk.uninstrument()


def received(exporter: InMemorySpanExporter) -> list[Span]:
    """The finished spans as the receiver writes them in its default configuration."""
    message = encode_spans(exporter.get_finished_spans()).SerializeToString()
    redactor = Redactor(Content(), b"k" * 32)
    return [redactor.span(span) for span in decode_protobuf(message, 32).spans]


def assembled(exporter: InMemorySpanExporter) -> list[OrchestrationContent]:
    """The orchestrations that the finished spans tell."""
    return assemble_spans(received(exporter), "default", "otlp")


# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Menu:
    """A menu with its choice, as given to the SDK."""

    options: tuple[str, ...]
    propensities: tuple[float, ...]
    chosen: str
    by_policy: bool | None

    def arguments(self) -> dict[str, Any]:
        return {"options": self.options, "propensities": self.propensities, "chosen": self.chosen,
                "by_policy": self.by_policy}  # fmt: skip

    def told(self, kind: str) -> Decision:
        return Decision(kind, self.chosen, self.options, self.propensities, self.by_policy)


@dataclass(frozen=True)
class Step:
    """One thing that an agent does."""

    kind: str
    name: str = ""
    child: Agent | None = None
    menu: Menu | None = None
    pick: int = 0
    fails: bool = False
    apart: bool = False
    """The decision is told apart from its act."""


@dataclass(frozen=True)
class Agent:
    """An agent's run: its steps, then perhaps a hand-over or a told stop."""

    name: str
    steps: tuple[Step, ...] = ()
    last: Step | None = None
    fails: bool = False


@dataclass
class Record:
    """What happened, by the program's own account: (type, who, to whom, more), runs by span id."""

    events: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    decisions: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    aggregates: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    ghosts: int = 0

    def decided(self, event: str, who: str, kind: str, menu: Menu | None) -> None:
        if menu is not None:
            self.decisions[(event, who, menu.told(kind))] += 1


@st.composite
def menus(draw: st.DrawFn) -> Menu:
    options = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True))
    weights = draw(st.lists(st.integers(1, 9), min_size=len(options), max_size=len(options)))
    shares = tuple(weight / sum(weights) for weight in weights)
    return Menu(
        tuple(options), shares, draw(st.sampled_from(options)), draw(st.sampled_from([True, False, None]))
    )


maybe_menu = st.none() | menus()
leaf_steps = st.one_of(
    st.builds(Step, st.just("tool"), st.sampled_from(["search", "read"]), fails=st.booleans()),
    st.builds(Step, st.just("call")),
    st.builds(Step, st.just("not"), st.sampled_from(KINDS), menu=menus()),
    st.builds(Step, st.just("remote"), menu=maybe_menu),
    st.builds(Step, st.just("note"), menu=maybe_menu),
    st.builds(Step, st.just("ask worker"), menu=maybe_menu, pick=st.integers(0, 3), fails=st.booleans()),
    st.builds(Step, st.just("tell worker"), menu=maybe_menu, pick=st.integers(0, 3), apart=st.booleans()),
    st.builds(Step, st.just("aggregate"), menu=maybe_menu, apart=st.booleans()),
)


def agents(children: st.SearchStrategy[Agent] | None) -> st.SearchStrategy[Agent]:
    """Agents whose sub-agents are ``children``."""
    steps, lasts = leaf_steps, [st.none(), st.builds(Step, st.just("stop"), menu=maybe_menu)]
    if children is not None:
        steps = leaf_steps | st.one_of(
            st.builds(Step, st.just("delegate"), child=children, menu=maybe_menu, apart=st.booleans()),
            st.builds(Step, st.just("direct"), child=children),
            st.builds(Step, st.just("spawn"), child=children, menu=maybe_menu, apart=st.booleans()),
            st.builds(Step, st.just("parallel"), child=children, menu=maybe_menu),
        )
        lasts.append(st.builds(Step, st.just("hand over"), child=children, menu=maybe_menu))
    return st.builds(
        Agent,
        st.sampled_from(NAMES),
        st.lists(steps, max_size=4).map(tuple),
        st.one_of(*lasts),
        st.booleans(),
    )


programs = agents(agents(agents(None)))


class Failed(Exception):
    """An agent or a tool that failed."""


async def run_program(program: Agent) -> Record:
    """Run ``program`` under the SDK; its own record."""
    record = Record()
    with contextlib.suppress(Failed):
        await _agent(program, record, "", "user")
    return record


async def _agent(agent: Agent, record: Record, how: str, waiter: str, source: str = "", ready: Any = None,
                 finish: asyncio.Event | None = None, inbox: asyncio.Queue | None = None) -> None:  # fmt: skip
    """Run an agent. ``how``: delegate, direct, hand over, spawn or, for the entry, empty; ``waiter`` gets its result."""
    status = "error" if agent.fails else "ok"
    with sdk.agent(agent.name) as run:
        me = run.span_id
        if how:
            record.events[("spawn", source, me)] += 1
        if how in ("direct", "delegate", "hand over"):
            mode = "pass_control" if how == "hand over" else "return_to_caller"
            record.events[("delegate", source, me, mode)] += 1
        if ready is not None:
            ready.set_result(me)
        await _Steps(record, run, waiter).run(agent)
        if finish is not None and inbox is not None:
            await _serve(inbox, finish)
        handed_over = agent.last is not None and agent.last.kind == "hand over"
        told = agent.last is not None and agent.last.kind == "stop"
        if told:
            menu = agent.last.menu if agent.last else None
            sdk.stop("done", **(menu.arguments() if menu else {})).now()
            record.events[("stop", me, status)] += 1
            record.decided("stop", me, "stop", menu)
        elif not how:
            record.events[("stop", me, "error" if _failed(agent) else "ok")] += 1
        if how and not handed_over and how != "spawn":
            record.events[("return", me, waiter, status)] += 1
        if agent.fails:
            raise Failed


def _failed(agent: Agent) -> bool:
    """Whether an entry's run ends badly: its own, or that of whoever answers in its place."""
    handed = agent.last is not None and agent.last.kind == "hand over"
    return agent.fails or (handed and _failed(agent.last.child))


async def _serve(inbox: asyncio.Queue, finish: asyncio.Event) -> None:
    """Take messages until the spawner is done."""
    waiting = asyncio.ensure_future(finish.wait())
    while not waiting.done() or not inbox.empty():
        getting = asyncio.ensure_future(inbox.get())
        await asyncio.wait({getting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            continue
        carrier, done = getting.result()
        sdk.receive(carrier).now()
        done.set()


class _Steps:
    def __init__(self, record: Record, run: Any, waiter: str) -> None:
        self.record, self.run_, self.me, self.waiter = record, run, run.span_id, waiter
        self.results: list[Any] = []
        self.workers: list[tuple[Any, str, asyncio.Queue]] = []
        self.tasks: list[tuple[asyncio.Task, asyncio.Event]] = []

    async def run(self, agent: Agent) -> None:
        try:
            for step in agent.steps:
                await getattr(self, "_" + step.kind.replace(" ", "_"))(step)
        finally:
            for task, finish in self.tasks:
                finish.set()
                with contextlib.suppress(Failed):
                    await task
        if agent.last is not None and agent.last.kind == "hand over":
            child, menu = agent.last.child, agent.last.menu
            self.record.decided("delegate", self.me, "delegate", menu)
            with contextlib.suppress(Failed), sdk.delegate(child.name, pass_control=True, **_arguments(menu)):
                await _agent(child, self.record, "hand over", self.waiter, self.me)

    async def _tool(self, step: Step) -> None:
        status = "error" if step.fails else "ok"
        self.record.events[("tool_call", self.me, step.name)] += 1
        self.record.events[("tool_result", self.me, step.name, status)] += 1
        with contextlib.suppress(Failed), sdk.tool(step.name):
            if step.fails:
                raise Failed

    async def _call(self, step: Step) -> None:
        with sdk.model_call("model") as call:
            call.response(input_tokens=1, output_tokens=2)

    async def _not(self, step: Step) -> None:
        assert step.menu is not None
        with sdk.decision(step.name, step.menu.options, step.menu.propensities) as decision:
            decision.choose(step.menu.chosen, by_policy=step.menu.by_policy)
        self.record.decided("orchestrator_decision", self.me, step.name, step.menu)

    async def _delegate(self, step: Step) -> None:
        with (
            self._told("delegate", step) as more,
            sdk.delegate(step.child.name, **more) as act,
            contextlib.suppress(Failed),
        ):
            await _agent(step.child, self.record, "delegate", self.me, self.me)
        self.results.append(act)

    async def _parallel(self, step: Step) -> None:
        one = Step("delegate", child=step.child, menu=step.menu)
        await asyncio.gather(self._delegate(one), self._delegate(one))

    async def _direct(self, step: Step) -> None:
        with contextlib.suppress(Failed):
            await _agent(step.child, self.record, "direct", self.me, self.me)

    async def _spawn(self, step: Step) -> None:
        ready, finish = asyncio.get_running_loop().create_future(), asyncio.Event()
        inbox: asyncio.Queue = asyncio.Queue()
        with self._told("spawn", step) as more, sdk.spawn(step.child.name, **more) as act:
            carrier = act.carrier

        async def work() -> None:
            with sdk.extract(carrier):
                await _agent(step.child, self.record, "spawn", self.me, self.me, ready, finish, inbox)

        self.tasks.append((asyncio.create_task(work()), finish))
        self.workers.append((act, await ready, inbox))

    async def _ask_worker(self, step: Step) -> None:
        if not self.workers:
            return
        worker, who, _ = self.workers[step.pick % len(self.workers)]
        self.record.decided("delegate", self.me, "delegate", step.menu)
        self.record.events[("delegate", self.me, who, "return_to_caller")] += 1
        self.record.events[("return", who, self.me, "error" if step.fails else "ok")] += 1
        with contextlib.suppress(Failed), sdk.delegate(worker, **_arguments(step.menu)):
            if step.fails:
                raise Failed

    async def _tell_worker(self, step: Step) -> None:
        if not self.workers:
            return
        worker, who, inbox = self.workers[step.pick % len(self.workers)]
        self.record.decided("message", self.me, "message", step.menu)
        self.record.events[("message", self.me, who)] += 1
        with sdk.message(worker, **_arguments(step.menu)) as sent:
            if step.apart:  # nobody takes it
                return
            done = asyncio.Event()
            inbox.put_nowait((sent.carrier, done))
        await done.wait()

    async def _note(self, step: Step) -> None:
        self.record.ghosts += 1
        name = f"board{self.record.ghosts}"
        self.record.events[("message", self.me, name)] += 1
        self.record.decided("message", self.me, "message", step.menu)
        sdk.message(name, **_arguments(step.menu)).now()

    async def _remote(self, step: Step) -> None:
        self.record.ghosts += 1
        name = f"remote{self.record.ghosts}"
        self.record.events[("delegate", self.me, name, "return_to_caller")] += 1
        self.record.decided("delegate", self.me, "delegate", step.menu)
        sdk.delegate(name, **_arguments(step.menu)).now()

    async def _aggregate(self, step: Step) -> None:
        with self._told("aggregate", step) as more, sdk.aggregate(self.results, method="join", **more):
            pass
        self.record.aggregates[(self.me, len(self.results))] += 1

    @contextlib.contextmanager
    def _told(self, kind: str, step: Step):
        """Arguments of an act whose decision is told with it or, around it, apart."""
        if step.menu is None or not step.apart:
            self.record.decided(kind, self.me, kind, step.menu)
            yield _arguments(step.menu)
            return
        self.record.decided("orchestrator_decision", self.me, kind, step.menu)
        menu = step.menu
        with sdk.decision(
            kind, menu.options, menu.propensities, chosen=menu.chosen, by_policy=menu.by_policy
        ) as told:
            yield {"decision": told}


def _arguments(menu: Menu | None) -> dict[str, Any]:
    return menu.arguments() if menu is not None else {}


def found_in(content: OrchestrationContent) -> Record:
    """The record that assembly made of the spans."""
    record = Record()
    for event in content.events:
        to = event.to_id or event.to
        if event.type == "spawn":
            record.events[("spawn", event.agent_id, to)] += 1
        elif event.type == "delegate":
            record.events[("delegate", event.agent_id, to, event.mode)] += 1
        elif event.type == "message":
            record.events[("message", event.agent_id, to)] += 1
        elif event.type == "return":
            record.events[("return", event.agent_id, to, event.status)] += 1
        elif event.type == "stop":
            record.events[("stop", event.agent_id, event.status)] += 1
        elif event.type == "tool_call":
            record.events[("tool_call", event.agent_id, event.tool)] += 1
        elif event.type == "tool_result":
            record.events[("tool_result", event.agent_id, event.tool, event.status)] += 1
        elif event.type == "aggregate" and event.rule == "said":
            record.aggregates[(event.agent_id, len(event.evidence) - 1)] += 1
        if event.decision is not None:
            record.decisions[(event.type, event.agent_id, event.decision)] += 1
    return record
