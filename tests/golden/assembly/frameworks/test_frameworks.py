"""Runs of agent frameworks at their current versions, recorded with a scripted local model, against what they did.

The truths are written from the scripts, not from the product: who delegated to whom, which tools ran, what failed.
Where a file ``NAME.truth.json`` lies beside a recording, the run's own tools and its model server wrote it.
Each framework was given a local OpenAI-compatible server that answers by the agent and the turn.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.otlp.files import read_spans
from spanloop.schemas.canonical import content_hash

HERE = Path(__file__).parent
ASKED = {
    ("orchestrator_decision", "boss", ""): 2, ("delegate", "boss", "finder"): 1, ("spawn", "boss", "finder"): 1,
    ("delegate", "boss", "adder"): 1, ("spawn", "boss", "adder"): 1, ("tool_call", "finder", "lookup"): 1,
    ("tool_result", "finder", "lookup ok"): 1, ("tool_call", "adder", "add"): 1, ("tool_result", "adder", "add error"): 1,
    ("return", "finder", "boss"): 1, ("return", "adder", "boss"): 1, ("aggregate", "boss", ""): 1,
    ("delegate", "boss", "scribe"): 1, ("spawn", "boss", "scribe"): 1, ("safety_event", "boss", "passed"): 1,
    ("stop", "", "ok"): 1,
}  # fmt: skip
LOOKED = {
    ("tool_call", "finder", "lookup"): 1,
    ("tool_result", "finder", "lookup ok"): 1,
    ("stop", "", "ok"): 1,
}
SWARM = {
    **LOOKED, ("spawn", "swarm", "boss"): 1, ("orchestrator_decision", "boss", ""): 1, ("delegate", "boss", "finder"): 1,
    ("spawn", "boss", "finder"): 1,
}  # fmt: skip
PAUSED = {
    ("tool_call", "cleaner", "lookup"): 1, ("tool_result", "cleaner", "lookup ok"): 1, ("human_intervention", "", ""): 1,
    ("stop", "", "ok"): 3,
}  # fmt: skip
NODES = {
    **LOOKED, **{("spawn", "workflow", n): 1 for n in ("finder", "adder", "scribe")},
    **{("return", n, "workflow"): 1 for n in ("finder", "adder", "scribe")},
}  # fmt: skip
TRUTH = {
    "openai_agents_v2": {**ASKED, ("return", "scribe", "user"): 1},
    "openai_agents_v2_hand_back": {**ASKED, ("delegate", "scribe", "boss"): 1},
    "openai_agents_v2_tripped": {("safety_event", "boss", "triggered"): 1, ("stop", "", "error"): 1},
    "strands_swarm": {**SWARM, ("delegate", "finder", "scribe"): 1, ("spawn", "finder", "scribe"): 1, ("return", "scribe", "swarm"): 1},
    "strands_swarm_hand_back": {**SWARM, ("delegate", "finder", "boss"): 1, ("return", "boss", "swarm"): 1},
    "strands_graph_loop": {
        ("spawn", "graph", "draft"): 1, ("spawn", "graph", "critic"): 1, ("message", "draft", "critic"): 2,
        ("message", "critic", "draft"): 1, ("return", "draft", "graph"): 1, ("return", "critic", "graph"): 1, ("stop", "", "ok"): 1,
    },
    "agent_framework_fan_in": {
        **NODES, ("message", "finder", "scribe"): 1, ("message", "adder", "scribe"): 1, ("aggregate", "scribe", ""): 1,
    },
    "agent_framework_chain": {**NODES, ("message", "finder", "adder"): 1, ("message", "adder", "scribe"): 1},
    "autogen_round_robin": {
        **LOOKED, ("spawn", "finder", "adder"): 1, ("spawn", "finder", "scribe"): 1, ("message", "finder", "adder"): 1,
        ("message", "finder", "scribe"): 1, ("message", "adder", "scribe"): 1,
    },
    "autogen_user_proxy": {
        **LOOKED, ("spawn", "finder", "user_proxy"): 1, ("message", "finder", "user_proxy"): 1, ("human_intervention", "", ""): 1,
    },
    "pydantic_ai_approved": {**PAUSED, ("tool_call", "cleaner", "wipe"): 1, ("tool_result", "cleaner", "wipe ok"): 1},
    "pydantic_ai_denied": PAUSED,
}  # fmt: skip
TOKENS = {
    "openai_agents_v2": (98, 35, 7), "openai_agents_v2_hand_back": (116, 40, 8), "openai_agents_v2_tripped": (0, 0, 0),
    "strands_swarm": (81, 30, 6), "strands_swarm_hand_back": (81, 30, 6), "strands_graph_loop": (50, 20, 4),
    "agent_framework_fan_in": (50, 20, 4), "agent_framework_chain": (50, 20, 4), "autogen_round_robin": (50, 20, 4),
    "autogen_user_proxy": (23, 10, 2),
}  # fmt: skip
"""What the scripted server counted: input, output, calls."""
ORCHESTRATIONS = {"pydantic_ai_approved": 2, "pydantic_ai_denied": 2}
"""Each holds a later run of the same conversation too, which is a job of its own."""

RECORDED = {
    p.name.removesuffix(".truth.json"): json.loads(p.read_text()) for p in sorted(HERE.glob("*.truth.json"))
}
"""What the tools and the scripted model of a run wrote down: rows of ``events`` (type, agent, other, count), ``tokens``."""
UNSEEN = {
    "traceloop_openai_agents": {("safety_event", "lead", "passed")},
    "traceloop_crewai": {
        ("tool_call", "scout", "probe"), ("tool_result", "scout", "probe ok"), ("tool_call", "tally", "weigh"),
        ("tool_result", "tally", "weigh ok"), ("tool_result", "tally", "weigh error"), ("message", "scout", "tally"),
        ("message", "scout", "author"), ("message", "tally", "author"),
    },
    "traceloop_output_tripped": {("safety_event", "lead", "passed"), ("safety_event", "author", "triggered")},
}  # fmt: skip
"""What happened and no span tells: Traceloop drops guardrails, and the tools and the context of a crew."""
UNCOUNTED = {"traceloop_crewai", "traceloop_openai_agents", "traceloop_output_tripped"}
"""Recordings without usage on their model calls."""
for _name, _truth in RECORDED.items():
    _rows = {(kind, agent, other): count for kind, agent, other, count in _truth["events"]}
    TRUTH[_name] = {row: count for row, count in _rows.items() if row not in UNSEEN.get(_name, ())}
    if _truth["tokens"] and _name not in UNCOUNTED:
        TOKENS[_name] = tuple(_truth["tokens"])


def spans_of(name: str) -> list:
    return [s for batch in read_spans(HERE / f"{name}.otlp.jsonl.gz") for s in batch.spans]


def told(contents) -> dict[tuple[str, str, str], int]:
    counts: dict[tuple[str, str, str], int] = {}
    for event in (e for content in contents for e in content.events if e.type != "despawn"):
        nobody = event.type in ("stop", "human_intervention")
        verdict = "" if event.triggered is None else ("triggered" if event.triggered else "passed")
        other = {"stop": event.status, "safety_event": verdict, "human_intervention": "", "tool_call": event.tool,
                 "tool_result": f"{event.tool} {event.status}"}.get(event.type, event.to)  # fmt: skip
        key = (event.type, "" if nobody else event.agent, other)
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_a_run_of_a_framework_is_told_as_it_was(name):
    contents = assemble_spans(spans_of(name), "default")
    assert told(contents) == TRUTH[name]
    assert len(contents) == ORCHESTRATIONS.get(name, 1)


@pytest.mark.parametrize("name", sorted(TOKENS))
def test_tokens_are_what_the_server_counted(name):
    (content,) = assemble_spans(spans_of(name), "default")
    assert (content.tokens.input, content.tokens.output, content.tokens.calls) == TOKENS[name]
    assert content.tokens.unknown_calls == 0


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_order_and_repetition_change_nothing(name):
    spans = spans_of(name)
    rng = random.Random(name)
    again = [*spans, *rng.choices(spans, k=9)]
    rng.shuffle(again)
    expected = [content_hash(c) for c in assemble_spans(spans, "default")]
    assert [content_hash(c) for c in assemble_spans(again, "default")] == expected


def test_calls_after_control_was_passed_on_are_counted_as_dead():
    (content,) = assemble_spans(spans_of("strands_swarm"), "default")
    assert "dead_calls:2" in content.flags
