"""E1 to E4 on orchestrations whose numbers can be worked out by hand; unknown is not zero."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from spanloop.pipeline.rewards.metrics import metrics_of
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import (
    Agent,
    Edge,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)


def event(name: str, kind: str, agent: str, **more: object) -> OrchestrationEvent:
    return OrchestrationEvent(name, kind, agent, 0, 1.0, "r", ("s",), agent_id=agent, **more)  # type: ignore[arg-type]


def call(name: str, agent: str, start: int, end: int, tokens: int | None = 10) -> ModelCall:
    return ModelCall(name, agent, ("s",), start, end, input_tokens=tokens, output_tokens=tokens)


def team() -> OrchestrationContent:
    """A root spawns a and b; a's tool fails and spoils its return, which is aggregated; b returns to nobody."""
    return OrchestrationContent(
        orchestration_id="o",
        tenant="t",
        trace_ids=("x",),
        agents=(
            Agent("root", "root", started_ns=0, ended_ns=10),
            Agent("a", "a", parent_id="root", started_ns=1, ended_ns=6),
            Agent("b", "b", parent_id="root", started_ns=1, ended_ns=4),
        ),
        calls=(
            call("c0", "root", 0, 1),
            call("ca", "a", 1, 6),
            call("cb", "b", 1, 4),
            call("c1", "root", 9, 10),
        ),
        events=(
            event("s1", "spawn", "root", to_id="a", call_id="c0"),
            event("s2", "spawn", "root", to_id="b", call_id="c0"),
            event("t1", "tool_call", "a", call_id="ca"),
            event("t2", "tool_result", "a", status="error"),
            event("r1", "return", "a", to_id="root"),
            event("r2", "return", "b", to_id="root"),
            event("g", "aggregate", "root", call_id="c1"),
            event("e", "stop", "root", call_id="c1"),
            event("h", "human_intervention", "root"),
        ),
        edges=(
            Edge("t1", "t2", "tool_dependency"),
            Edge("t2", "r1", "causal"),
            Edge("r1", "g", "aggregate"),
            Edge("r2", "g", "temporal"),
            Edge("g", "e", "causal"),
        ),
        tokens=TokenUsage(),
        started_ns=0,
        ended_ns=10,
    )


def test_a_team_by_hand() -> None:
    outcome = Reward("R1", "outcome", "team", "", 500_000, "final", "feedback_mean/1")
    found = metrics_of(team(), [outcome], {})
    assert found.success == 0.5
    assert found.parallel_efficiency == 1.0  # 1 + 5 + 3 + 1 of work in 10
    assert found.work_over_span == 10 / 7
    assert found.useful_agents == 2 / 3  # a: one call and one tool call; b: a call that led nowhere
    assert found.protocol_overhead == 2 / 4  # the root's two calls
    assert found.error_amplification == 3.0  # the return, the aggregate, the stop
    assert (found.safety_events, found.interventions) == (0, 1)


def test_unknown_is_not_zero() -> None:
    calls = (call("c0", "root", 0, 0, None),)
    alone = msgspec.structs.replace(team(), agents=(Agent("root", "root"),), calls=calls, events=(), edges=())
    found = metrics_of(alone)
    assert found.success is None
    assert found.parallel_efficiency is None
    assert found.useful_agents is None
    assert found.redundant_messages is None
    assert found.protocol_overhead is None
    assert found.error_amplification is None


def test_messages_that_repeat() -> None:
    messages = tuple(event(f"m{i}", "message", "a", to="b") for i in range(4))
    talking = msgspec.structs.replace(team(), events=messages, edges=())
    texts = {"m0": "hello", "m1": "hello", "m2": "news", "m3": "hello"}
    assert metrics_of(talking, texts=texts).redundant_messages == 0.5


@given(st.randoms(use_true_random=False))
def test_the_order_of_everything_does_not_matter(random: object) -> None:
    content = team()
    shuffled = {}
    for name in ("agents", "calls", "events", "edges"):
        items = list(getattr(content, name))
        random.shuffle(items)  # type: ignore[attr-defined]
        shuffled[name] = tuple(items)
    assert metrics_of(msgspec.structs.replace(content, **shuffled)) == metrics_of(content)
