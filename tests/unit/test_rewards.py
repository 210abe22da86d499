"""Rewards as functions of content and feedback: what is paid, what is missing, what is gated."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from synthetic_orchestrations import make_content, make_feedback

from spanloop.pipeline.rewards.compose import RewardTerms, compose, paid
from spanloop.pipeline.rewards.orchestration import Stage, orchestration_rewards, stages_of
from spanloop.pipeline.rewards.outcome import channel_rewards, outcome_reward
from spanloop.pipeline.rewards.tool import ToolTerms, tool_rewards
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.orchestration import (
    Agent,
    Edge,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
    ToolCall,
)

CONTENT = make_content(2)


def feedback(n: int, value: float, **fields: object) -> FeedbackReceived:
    return make_feedback(CONTENT, n, value=value, **fields)


class TestOutcome:
    def test_missing_is_not_zero(self):
        reward = outcome_reward([])
        assert (reward.value, reward.status) == (None, "missing")

    def test_latest_by_observation_wins_whatever_the_order(self):
        early, late = feedback(1, 0.2), feedback(2, 0.7)
        for items in ([early, late], [late, early]):
            reward = outcome_reward(items)
            assert (reward.value, reward.status) == (700_000, "corrected")
            assert reward.evidence == (late.feedback_id,)

    def test_same_observation_time_is_decided_by_id(self):
        a = feedback(1, 0.2, feedback_id="a", observed_ns=5)
        b = feedback(2, 0.7, feedback_id="b", observed_ns=5)
        assert outcome_reward([b, a]).value == 700_000

    def test_same_value_again_corrects_nothing(self):
        assert outcome_reward([feedback(1, 0.5), feedback(2, 0.5)]).status == "final"

    def test_scorers_are_averaged(self):
        items = [feedback(1, 0.0, scorer="a"), feedback(2, 1.0, scorer="b"), feedback(3, 1.0, scorer="c")]
        assert outcome_reward(items).value == 666_667

    def test_provisional_until_all_that_count_are_final(self):
        first = feedback(1, 0.2, final=False)
        assert outcome_reward([first]).status == "provisional"
        assert outcome_reward([first, feedback(2, 0.4)]).status == "final"

    def test_values_that_are_no_score_are_ignored(self):
        items = [feedback(1, float("nan"), scorer="x"), feedback(2, float("inf"), scorer="y")]
        assert outcome_reward(items).status == "missing"
        assert outcome_reward([*items, feedback(3, 1e300, scorer="z"), feedback(4, 0.5)]).value == 500_000

    def test_small_shaping_values_survive(self):
        assert outcome_reward([feedback(1, -0.2)]).value == -200_000

    def test_other_names_are_channels_and_not_paid(self):
        items = [feedback(1, 0.9, name="tone"), feedback(2, 0.1)]
        (channel,) = channel_rewards(items)
        assert (channel.name, channel.value, channel.weight) == ("tone", 900_000, 0)
        composite = compose(CONTENT, items, complete=True, terms=RewardTerms())
        assert composite.team == 100_000


def small(edges: tuple[Edge, ...], status: str = "ok") -> OrchestrationContent:
    """Two tool calls, each with its result, and a stop."""

    def event(name: str, kind: str, t: int, **fields: object) -> OrchestrationEvent:
        return OrchestrationEvent(name, kind, "a", t, 1.0, "test", (name[-1],), agent_id="A", **fields)  # type: ignore[arg-type]

    return OrchestrationContent(
        orchestration_id="o",
        tenant="default",
        trace_ids=("t",),
        events=(
            event("call1", "tool_call", 1, tool="look"),
            event("result1", "tool_result", 2, status=status, tool="look"),
            event("call2", "tool_call", 3, tool="look"),
            event("result2", "tool_result", 4, status="ok", tool="look"),
            event("stop", "stop", 5, status="ok"),
        ),
        edges=edges,
        agents=(Agent("A", "a"),),
        calls=(),
        tokens=TokenUsage(),
        started_ns=0,
        ended_ns=5,
    )


class TestTool:
    def test_a_rejected_call_counts_as_invalid_without_being_an_event(self):
        asked = (ToolCall("t1", "look", "rejected"), ToolCall("t2", "look", "ok"))
        content = msgspec.structs.replace(
            small(self.USED), calls=(ModelCall("m", "A", (), 0, 1, tool_calls=asked),)
        )
        rewards = tool_rewards(content, 1_000_000, 0.0)
        assert [(r.unit_id, r.value) for r in rewards] == [
            ("call1", 1_000_000), ("call2", 0), ("m/t1", 0), ("", 333_333),
        ]  # fmt: skip

    USED = (Edge("call1", "result1", "causal"), Edge("result1", "stop", "tool_dependency"))

    def values(self, *args: object, **options: object) -> list[int | None]:
        rewards = tool_rewards(*args, **options)  # type: ignore[arg-type]
        return [r.value for r in rewards if r.unit == "tool_call"]

    def test_only_used_and_valid_calls_are_paid(self):
        assert self.values(small(self.USED), 500_000, 0.0) == [1_000_000, 0]
        assert self.values(small(self.USED, status="error"), 500_000, 0.0) == [0, 0]

    def test_nothing_below_the_floor(self):
        assert self.values(small(self.USED), 400_000, 0.5) == [0, 0]

    def test_a_temporal_edge_is_no_use(self):
        assert self.values(small((Edge("result1", "stop", "temporal"),)), 1_000_000, 0.0) == [0, 0]

    def test_missing_outcome_leaves_all_missing(self):
        rewards = tool_rewards(small(self.USED), None, 0.0)
        assert {(r.value, r.status) for r in rewards} == {(None, "missing")}

    def test_price_and_repetition_cost(self):
        terms = ToolTerms(price=0.125, duplicate_penalty=0.5)
        same = {"call1": "h", "call2": "h"}
        assert self.values(small(self.USED), 1_000_000, 0.0, terms=terms, arguments=same) == [
            875_000,
            -625_000,
        ]

    @given(st.integers(1, 6), st.floats(0, 0.5), st.floats(0, 0.5), st.booleans())
    def test_calls_that_nobody_uses_never_raise_the_sum(self, more, price, penalty, ok):
        terms = ToolTerms(price, penalty)

        def total(content: OrchestrationContent) -> int:
            arguments = {event.id: "same" for event in content.events if event.type == "tool_call"}
            return sum(v or 0 for v in self.values(content, 1_000_000, 0.0, terms=terms, arguments=arguments))

        content = small(self.USED)
        spam = [
            OrchestrationEvent(
                f"{kind}-x{n}", kind, "a", 1, 1.0, "test", (f"x{n}",), tool="look",
                status=("ok" if ok else "error") if kind == "tool_result" else "",
            )
            for n in range(more)
            for kind in ("tool_call", "tool_result")
        ]  # fmt: skip
        edges = [Edge(f"tool_call-x{n}", f"tool_result-x{n}", "causal") for n in range(more)]
        spammed = msgspec.structs.replace(
            content, events=(*content.events, *spam), edges=(*content.edges, *edges)
        )
        assert total(spammed) <= total(content)

    def test_more_unused_calls_never_pay(self):
        """The hacking risk of R5: an unused call can only lower the mean."""
        rewards = tool_rewards(small(self.USED), 1_000_000, 0.0)
        assert rewards[-1].unit == "team"
        assert rewards[-1].value == 500_000


def family(
    *agents: Agent, calls: tuple[ModelCall, ...], spawns: dict[str, str] | None = None
) -> OrchestrationContent:
    events = tuple(
        OrchestrationEvent(f"s-{to}", "spawn", "main", 0, 1.0, "test", (), to_id=to, call_id=call)
        for to, call in (spawns or {}).items()
    )
    return OrchestrationContent("o", "default", ("t",), events, (), agents, calls, TokenUsage(), 0, 100)


def call(agent: str, n: int, start: int = 0, end: int = 1) -> ModelCall:
    return ModelCall(f"{agent}{n}", agent, (), start, end)


class TestOrchestration:
    def kimi(self) -> OrchestrationContent:
        """Stages (1,[]),(1,[5,9,4]),(2,[3,3]),(1,[]): the first two are one stage of two main steps, C is the same."""
        subs = {"a": 5, "b": 9, "c": 4, "d": 3, "e": 3}
        spawns = {name: "m2" if name in "abc" else "m4" for name in subs}
        agents = [Agent(name, name, parent_id="m", started_ns=50) for name in subs]
        calls = [call("m", n, n * 10) for n in range(1, 6)]
        calls += [call(name, n, 50) for name, count in subs.items() for n in range(count)]
        return family(Agent("m", "main"), *agents, calls=tuple(calls), spawns=spawns)

    def test_stages_come_from_the_spawning_turns(self):
        stages = stages_of(self.kimi())
        assert [(s.main, s.subs) for s in stages] == [(2, (5, 9, 4)), (2, (3, 3)), (1, ())]
        rewards = {r.name: r.value for r in orchestration_rewards(self.kimi(), (0, 0))}
        assert rewards["critical_steps"] == 17_000_000
        assert rewards["parl_parallel"] == 413_793

    def test_nested_spawns_count_with_their_own_critical_steps(self):
        content = family(
            Agent("m", "main"),
            Agent("s", "sub", parent_id="m"),
            Agent("x", "leaf", parent_id="s"),
            Agent("y", "leaf", parent_id="s"),
            calls=(call("m", 1), call("s", 1), call("x", 1), call("x", 2), call("y", 1)),
            spawns={"s": "m1", "x": "s1", "y": "s1"},
        )
        assert stages_of(content) == [Stage(1, (3,), (4,))]

    def test_finish_rate_counts_spawned_agents_that_ended_ok(self):
        content = family(
            Agent("m", "main"),
            Agent("a", "a", parent_id="m"),
            Agent("b", "b", parent_id="m", status="error"),
            calls=(call("m", 1),),
        )
        rewards = {r.name: r for r in orchestration_rewards(content, (0, 0))}
        assert rewards["parl_finish"].value == 500_000

    def test_nothing_spawned_is_zero_and_says_so(self):
        rewards = {r.name: r for r in orchestration_rewards(family(Agent("m", "m"), calls=()), (0, 0))}
        assert rewards["parl_finish"].value == 0
        assert rewards["parl_finish"].estimator == "parl/1:nothing_spawned"

    def test_calls_of_an_agent_without_a_span_count(self):
        rewards = {
            r.name: r.value for r in orchestration_rewards(family(calls=(call("", 1), call("", 2))), (0, 0))
        }
        assert rewards["critical_steps"] == 2_000_000

    def test_a_parent_cycle_ends(self):
        content = family(
            Agent("a", "a", parent_id="b"), Agent("b", "b", parent_id="a"), calls=(call("a", 1),)
        )
        assert orchestration_rewards(content, (0, 0))

    def test_work_and_span_follow_structure_and_not_clocks(self):
        """The sub-agent's clock is an hour off; its work still lies between the two turns."""
        hour = 3600
        content = family(
            Agent("m", "main"),
            Agent("a", "a", parent_id="m", started_ns=hour),
            Agent("b", "b", parent_id="m"),
            calls=(
                call("m", 1, 0, 2),
                call("m", 2, 20, 22),
                call("a", 1, hour, hour + 6),
                call("b", 1, 3, 9),
            ),
            spawns={"a": "m1", "b": "m1"},
        )
        rewards = {r.name: r.value for r in orchestration_rewards(content, (0, 0))}
        assert rewards["work_span"] == 1_600_000


class TestComposite:
    TERMS = RewardTerms(parallel=0.25, finish=0.125, tool=0.5, floor=0.3)

    def find(self, predicate) -> OrchestrationContent:
        return next(c for c in (make_content(seed) for seed in range(200)) if predicate(c))

    def test_structural_terms_are_paid_above_the_floor_only(self):
        content = self.find(lambda c: any(a.parent_id for a in c.agents))
        good = compose(content, [make_feedback(content, value=0.4)], complete=True, terms=self.TERMS)
        bad = compose(content, [make_feedback(content, value=0.2)], complete=True, terms=self.TERMS)
        by_name = {r.name: r.value for r in good.rewards if r.family == "R7"}
        parts = [400_000, round(0.25 * by_name["parl_parallel"]), round(0.125 * by_name["parl_finish"])]
        tools = [r.value for r in good.rewards if r.family == "R5" and r.unit == "team" and r.value]
        assert good.team == sum(parts) + sum(round(0.5 * v) for v in tools)
        assert good.team > 400_000
        assert bad.team == 200_000
        assert {r.name: r.value for r in bad.rewards if r.family == "R7"} == by_name

    def test_weight_on_the_event_is_what_was_paid(self):
        content = self.find(lambda c: any(a.parent_id for a in c.agents))
        for value in (0.2, 0.4):
            composite = compose(
                content, [make_feedback(content, value=value)], complete=True, terms=self.TERMS
            )
            assert paid(composite.rewards) == composite.team

    def test_incomplete_stays_provisional(self):
        composite = compose(CONTENT, [feedback(1, 0.5)], complete=False, terms=self.TERMS)
        assert (composite.status, composite.rewards[0].status) == ("provisional", "final")

    def test_no_outcome_no_team_reward(self):
        composite = compose(CONTENT, [feedback(1, 0.5, name="tone")], complete=True, terms=self.TERMS)
        assert (composite.team, composite.status) == (None, "missing")

    def test_agents_cannot_write_their_own_reward(self):
        """Nothing in the content changes R1: only feedback does."""
        forged = msgspec.structs.replace(CONTENT, flags=("outcome:1.0", "reward:999"))
        assert compose(forged, [], complete=True, terms=RewardTerms()).team is None
