"""Orchestrations of any size in the shapes that agents make, as spans. They know nothing of the code under test.

A shape is a function of a number and a span count; it gives about so many spans of one orchestration, children before their
parents, as exporters send them. The ids come from the number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from spanloop.schemas.spans import Span, SpanLink

__all__ = ["SHAPES", "Made"]

_MS = 1_000_000
_BASE = 1_790_000_000_000_000_000


class Made:
    """Spans of one orchestration under construction; every step moves its clock on."""

    def __init__(self, number: int, scope: str = "bench") -> None:
        self.number, self.scope = number, scope
        self.spans: list[Span] = []
        self.now = _BASE
        self._ids = 0

    def id(self) -> str:
        """A span id."""
        self._ids += 1
        return f"{self.number + 1:08x}{self._ids:08x}"

    def trace(self, n: int = 0) -> str:
        """A trace id."""
        return f"{self.number + 1:016x}{n + 1:016x}"

    def step(self) -> int:
        """The next moment, ns."""
        self.now += _MS
        return self.now

    def add(self, own: str, parent: str, name: str, start: int, attributes: dict[str, Any], *, trace: int = 0,
            links: tuple[SpanLink, ...] = ()) -> None:  # fmt: skip
        """A span that ends now."""
        self.spans.append(
            Span(
                trace_id=self.trace(trace), span_id=own, parent_span_id=parent or None, name=name, start_ns=start,
                end_ns=self.step(), attributes=attributes, links=links, scope=self.scope,
                resource={"service.name": "bench", "process.pid": 7},
            )
        )  # fmt: skip

    def run(self, own: str, parent: str, name: str, start: int, more: dict[str, Any] | None = None) -> None:
        """An agent's run."""
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name, **(more or {})}
        self.add(own, parent, f"invoke_agent {name}", start, attributes)

    def chat(self, parent: str, *calls: tuple[str, str], trace: int = 0) -> None:
        """A model call that asks for ``calls``, each (id, tool)."""
        parts = [{"type": "tool_call", "id": i, "name": tool} for i, tool in calls]
        own = self.id()
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "small",
            "gen_ai.response.id": f"resp-{own}",
            "gen_ai.usage.input_tokens": 120,
            "gen_ai.usage.output_tokens": 30,
            "gen_ai.input.messages": json.dumps(
                [{"role": "user", "parts": [{"type": "text", "content": own}]}]
            ),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}]),
        }
        self.add(own, parent, "chat small", self.step(), attributes, trace=trace)

    def tool(
        self, parent: str, call_id: str, name: str, *, own: str = "", start: int = 0, trace: int = 0
    ) -> None:
        """A tool call; one that encloses others is given its id and start."""
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.call.arguments": json.dumps({"query": f"{name} {call_id}"}),
        }
        self.add(
            own or self.id(), parent, f"execute_tool {name}", start or self.step(), attributes, trace=trace
        )

    def work(self, parent: str, steps: int, *, trace: int = 0) -> None:
        """``steps`` leaf tools, each asked for by a call, and a last call: 2 * steps + 1 spans."""
        for n in range(steps):
            call_id = f"{parent}-{n}"
            self.chat(parent, (call_id, "look"), trace=trace)
            self.tool(parent, call_id, "look", trace=trace)
        self.chat(parent, trace=trace)


def deep(number: int, size: int) -> list[Span]:
    """Each agent calls the next by a tool: 8 spans a level, two of them nested, so size / 4 deep."""
    made = Made(number)
    levels = max(size // 8, 1)
    ids = [made.id() for _ in range(levels)]
    tools = [made.id() for _ in range(levels)]
    starts = []
    for n in range(levels):
        starts.append(made.step())
        made.chat(ids[n], (f"leaf-{n}", "look"), (f"down-{n}", "ask"))
        made.tool(ids[n], f"leaf-{n}", "look")
        starts.append(made.step())
    for n in reversed(range(levels)):
        above = tools[n - 1] if n else ""
        made.tool(ids[n], f"down-{n}", "ask", own=tools[n], start=starts[2 * n + 1])
        made.chat(ids[n], (f"after-{n}", "look"))
        made.tool(ids[n], f"after-{n}", "look")
        made.chat(ids[n])
        made.run(ids[n], above, f"agent-{n % 7}", starts[2 * n])
    return made.spans


def hub(number: int, size: int) -> list[Span]:
    """One orchestrator, 299 other agents by name; a step is a turn that delegates to four of them side by side."""
    made = Made(number)
    root, begin = made.id(), made.step()
    steps = max(size // 33, 1)
    for n in range(steps):
        calls = [(f"c-{n}-{k}", "ask") for k in range(4)]
        made.chat(root, *calls)
        starts = [made.step() for _ in calls]
        for k, (call_id, tool) in enumerate(calls):
            around, run = made.id(), made.id()
            made.work(run, 2)
            if k == 0:
                made.tool(run, "extra", "look")
            made.run(run, around, f"agent-{(4 * n + k) % 299}", starts[k] + 1)
            made.tool(root, call_id, tool, own=around, start=starts[k])
    made.chat(root)
    made.run(root, "", "orchestrator", begin)
    return made.spans


def team(number: int, size: int) -> list[Span]:
    """At most 300 agents that live on, a turn each step; a message of the topic to each next one, a trace of its own."""
    made = Made(number, scope="autogen-core")
    agents = 300 if size > 2400 else 3
    turns = max(size // 8, 1)
    for n in range(turns):
        name = f"agent_{n % agents}"
        run, begin = made.id(), made.step()
        made.work(run, 2)
        instance = f"{name}_t{number}/team{number}"
        made.run(run, "", name, begin, {"gen_ai.agent.id": instance})
        for receiver in (n + 1, n + 2):
            address = f"agent_{receiver % agents}_t{number}.(team{number})-A"
            made.add(made.id(), "", "autogen process", made.step(), {
                "messaging.operation": "process", "messaging.destination": address,
                "sender_agent_type": f"{name}_t{number}", "gen_ai.system": "autogen",
            })  # fmt: skip
    return made.spans


def relay(number: int, size: int) -> list[Span]:
    """Agents that hand over to each other, each turn a run below one workflow (openai-agents by OpenInference)."""
    made = Made(number, scope="openinference.instrumentation.openai_agents")
    root, begin = made.id(), made.step()
    kind = "openinference.span.kind"
    turns = max(size // 4, 1)
    agents = 300 if size > 2400 else 5
    for n in range(turns):
        run, start = made.id(), made.step()
        name, following = f"agent {n % agents}", f"agent {(n + 1) % agents}"
        for _ in range(2):
            made.add(made.id(), run, "response", made.step(), {
                kind: "LLM", "llm.model_name": "small", "llm.token_count.prompt": 12, "llm.token_count.completion": 3,
                "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": f"{number} {n}",
                "llm.output_messages.0.message.tool_calls.0.tool_call.id": f"c{n}",
                "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": f"transfer_to_{following}",
            })  # fmt: skip
        if n < turns - 1:
            made.add(made.id(), run, f"handoff to {following}", made.step(), {kind: "TOOL"})
        made.add(run, root, name, start, {kind: "AGENT", "graph.node.id": name})
    made.add(root, "", "flow", begin, {kind: "AGENT"})
    return made.spans


def hidden(number: int, size: int) -> list[Span]:
    """Hand-overs that do not say to whom, to the agents that begin next beside (Traceloop)."""
    made = Made(number, scope="opentelemetry.instrumentation.openai_agents")
    root, begin = made.id(), made.step()
    turns = max(size // 3, 1)
    for n in range(turns):
        run, start = made.id(), made.step()
        name = f"agent {n % 5}"
        made.chat(run)
        made.add(made.id(), run, f"{name} → unknown.handoff", made.step(), {"traceloop.span.kind": "handoff"})
        made.add(
            run, root, f"{name}.agent", start, {"traceloop.span.kind": "agent", "gen_ai.agent.name": name}
        )
    made.add(root, "", "Agent Workflow", begin, {"traceloop.span.kind": "workflow"})
    return made.spans


def graph(number: int, size: int) -> list[Span]:
    """A supervisor graph: one node sends the engine to the next, which comes back (LangGraph by OpenInference)."""
    made = Made(number, scope="openinference.instrumentation.langchain")
    kind = "openinference.span.kind"
    root, begin = made.id(), made.step()
    steps = max(size // 4, 1)
    workers = 299 if size > 2400 else 3
    for n in range(steps):
        node, start = made.id(), made.step()
        name = "supervisor" if n % 2 == 0 else f"worker {n // 2 % workers}"
        goes = f"worker {n // 2 % workers}" if n % 2 == 0 else "supervisor"
        metadata = json.dumps(
            {"langgraph_node": name, "langgraph_step": n, "langgraph_checkpoint_ns": f"{name}:{number}-{n}"}
        )
        for _ in range(2):
            made.add(made.id(), node, "ChatOpenAI", made.step(), {
                kind: "LLM", "llm.model_name": "small", "llm.token_count.prompt": 12, "llm.token_count.completion": 3,
                "metadata": metadata,
            })  # fmt: skip
        made.add(
            made.id(), node, "look", made.step(), {kind: "TOOL", "tool.name": "look", "metadata": metadata}
        )
        made.add(node, root, name, start, {
            kind: "CHAIN", "metadata": metadata, "output.value": json.dumps({"goto": goes}),
        })  # fmt: skip
    made.add(root, "", "LangGraph", begin, {kind: "CHAIN"})
    return made.spans


def nodes(number: int, size: int) -> list[Span]:
    """An engine whose nodes repeat each other's answers in their inputs (Strands' graph)."""
    made = Made(number, scope="strands.telemetry.tracer")
    root, begin = made.id(), made.step()
    turns = max(size // 6, 1)
    said = "nothing was said so far"
    for n in range(turns):
        run, start = made.id(), made.step()
        heard, said = said, f"answer {n} of orchestration {number}"
        made.work(run, 2)
        made.run(run, root, f"agent_{n % (300 if size > 1800 else 4)}", start, {
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": f"From x:\n{heard}"}]}]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": said}]}]),
        })  # fmt: skip
    made.add(root, "", "invoke_graph", begin, {"gen_ai.operation.name": "invoke_graph"})
    return made.spans


def traces(number: int, size: int) -> list[Span]:
    """Runs in traces of their own, each linked to the one before."""
    made = Made(number)
    before: tuple[SpanLink, ...] = ()
    for n in range(max(size // 8, 1)):
        run, start = made.id(), made.step()
        made.work(run, 3, trace=n)
        made.add(run, "", "run", start, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"agent-{n % 9}"},
                 trace=n, links=before)  # fmt: skip
        before = (SpanLink(made.trace(n), run),)
    return made.spans


def tasks(number: int, size: int) -> list[Span]:
    """Sub-agents that hang off the root: only their task tells which tool call, around them in time, runs them."""
    made = Made(number)
    root, begin = made.id(), made.step()
    for n in range(max(size // 7, 1)):
        made.chat(root, (f"c{n}", "ask"))
        tool, around = made.id(), made.step()
        run, start = made.id(), made.step()
        made.work(run, 2)
        task = json.dumps([{"role": "user", "parts": [{"type": "text", "content": f"ask c{n}"}]}])
        made.run(run, "", f"agent-{n % 5}", start, {"gen_ai.input.messages": task})
        made.tool(root, f"c{n}", "ask", own=tool, start=around)
    made.run(root, "", "orchestrator", begin)
    return made.spans


def flat(number: int, size: int) -> list[Span]:
    """One agent that works on alone."""
    made = Made(number)
    root, begin = made.id(), made.step()
    made.work(root, max((size - 2) // 2, 1))
    made.run(root, "", "agent", begin)
    return made.spans


SHAPES: dict[str, Callable[[int, int], list[Span]]] = {
    "deep": deep, "hub": hub, "team": team, "relay": relay, "hidden": hidden, "graph": graph, "nodes": nodes,
    "traces": traces, "tasks": tasks, "flat": flat,
}  # fmt: skip
