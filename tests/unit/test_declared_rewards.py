"""Rewards that settings declare: each family on hand-made orchestrations, schedules, own functions, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanloop.pipeline.rewards.compose import Composite, RewardTerms, compose
from spanloop.pipeline.rewards.registry import reward
from spanloop.pipeline.rewards.shaping import Indicator, advance
from spanloop.pipeline.rewards.tool import ToolTerms, tool_reward
from spanloop.schemas.canonical import MICRO, canonical_json, micro
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import FeedbackReceived, Reward
from spanloop.schemas.orchestration import (
    Agent,
    Edge,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)
from spanloop.schemas.settings import load_settings


def event(name: str, kind: str, agent: str, t: int = 0, **more: Any) -> OrchestrationEvent:
    return OrchestrationEvent(name, kind, agent, t, 1.0, "r", (f"span-{name}",), agent_id=agent, **more)


def call(name: str, agent: str, start: int, model: str = "m") -> ModelCall:
    return ModelCall(
        name, agent, (f"span-{name}",), start, start + 1, model=model, response_id=f"resp-{name}"
    )


CONTENT = OrchestrationContent(
    orchestration_id="o",
    tenant="t",
    trace_ids=("x",),
    agents=(
        Agent("root", "boss", role="boss"),
        Agent("w1", "writer", role="writer", parent_id="root", span_id="span-w1"),
        Agent("w2", "writer", role="writer", parent_id="root", span_id="span-w2"),
        Agent("v", "checker", role="checker", parent_id="root", span_id="span-v"),
    ),
    calls=(call("c0", "root", 0), call("c1", "w1", 1), call("c2", "w2", 2), call("c3", "v", 5, "other")),
    events=(
        event("t1", "tool_call", "w1", 1, tool="search", call_id="c1"),
        event("t2", "tool_result", "w1", 2, tool="search", status="ok"),
        event("t3", "tool_call", "w2", 3, tool="write", call_id="c2"),
        event("t4", "tool_result", "w2", 4, tool="write", status="error"),
    ),
    edges=(Edge("t1", "t2", "tool_dependency"), Edge("t3", "t4", "tool_dependency")),
    tokens=TokenUsage(10, 300, 4),
    started_ns=0,
    ended_ns=6,
)
OUTCOME = FeedbackReceived(feedback_id="out", target_kind="trace", target_id="x", value=1.0, scorer="s")


def told(channel: str, target: str, value: float, number: int = 1, **more: Any) -> FeedbackReceived:
    kind = "response" if target.startswith("resp") else "span"
    return FeedbackReceived(
        feedback_id=f"{channel}-{target}-{number}", target_kind=kind, target_id=target, value=value, name=channel,
        scorer="s", observed_ns=number, **more,
    )  # fmt: skip


def composed(*feedback: FeedbackReceived, progress: int = 0, **term: Any) -> Composite:
    settings = load_settings(flags={"pipeline": {"rewards": [term]}}).pipeline
    return compose(
        CONTENT, [OUTCOME, *feedback], complete=True, terms=RewardTerms.of(settings), progress=progress
    )


def of(found: Composite, family: str, unit: str = "team") -> list[Reward]:
    return [r for r in found.rewards if r.family == family and r.unit == unit]


def test_individual_outcomes_by_agent() -> None:
    found = composed(
        told("agent_outcome", "span-w1", 0.25), told("agent_outcome", "span-w1", 0.5, 2), told("agent_outcome", "resp-c2", 1.0),
        told("agent_outcome", "nobody", 9.0), name="individual/1", weight=0.5,
    )  # fmt: skip
    assert {r.unit_id: r.value for r in of(found, "R2", "agent")} == {"w1": 500_000, "w2": MICRO}
    (team,) = of(found, "R2")
    assert (team.value, team.weight, team.estimator, team.status) == (
        750_000,
        500_000,
        "individual/1",
        "corrected",
    ), "a final score was replaced"
    assert found.team == MICRO + 375_000
    assert of(composed(name="individual/1", weight=0.5), "R2")[0].status == "missing"


def test_the_mean_of_all_agents_waits_for_all() -> None:
    """A scorer who only scores the good ones cannot raise it; the lead's outcome is the team's."""
    some = [told("agent_outcome", "span-w1", 1.0), told("agent_outcome", "resp-c2", 0.5)]
    partly = composed(*some, name="individual/2", weight=0.5)
    assert of(partly, "R2")[0].status == "missing"
    assert partly.team == MICRO
    assert len(of(partly, "R2", "agent")) == 2
    whole = composed(*some, told("agent_outcome", "span-v", 0.0), name="individual/2", weight=0.5)
    assert (of(whole, "R2")[0].value, of(whole, "R2")[0].status) == (500_000, "final")
    writers = {"name": "individual/2", "weight": 0.5, "options": {"roles": ["writer"]}}
    only = composed(*some, told("agent_outcome", "span-v", 0.0), **writers)
    assert of(only, "R2")[0].value == 750_000


@pytest.mark.parametrize(
    ("term", "early", "late"),
    [
        ({"name": "individual/1"}, [("agent_outcome", "span-w1", 1.0)], ("agent_outcome", "span-w2", 0.0)),
        ({"name": "individual/2", "options": {"roles": ["checker"]}}, [("agent_outcome", "span-v", 1.0)], ("agent_outcome", "resp-c3", 0.0)),
        ({"name": "rubric/1", "options": {"role": "writer", "items": {"clarity": 2, "sources": 1}}}, [("clarity", "span-w1", 1.0)],
         ("sources", "span-w1", 0.0)),
        ({"name": "verdict/1"}, [("verdict", "span-v", 0.9)], ("verdict", "resp-c3", 0.1)),
    ],
)  # fmt: skip
def test_what_comes_late_corrects(term: dict[str, Any], early: Any, late: Any) -> None:
    """A late judge is a correction, of the channel and, where it is paid, of the team; what came at one time is not."""
    first = [told(*one, 1) for one in early]
    settled = composed(*first, weight=0.5, **term)
    corrected = composed(*first, told(*late, 2), weight=0.5, **term)
    together = composed(*first, told(*late, 1), weight=0.5, **term)
    family = of(settled, "R2") or of(settled, "R3") or of(settled, "R6")
    name = family[0].family
    assert [of(f, name)[0].status for f in (settled, corrected, together)] == ["final", "corrected", "final"]
    assert [f.status for f in (settled, corrected, together)] == ["final", "corrected", "final"]
    assert of(corrected, name)[0].value == of(together, name)[0].value != of(settled, name)[0].value
    unpaid = composed(*first, told(*late, 2), weight=0.0, **term)
    assert (of(unpaid, name)[0].status, unpaid.status) == ("corrected", "final")


def test_a_corrected_outcome_corrects_what_was_scored_against_it() -> None:
    term = {"name": "verdict/1", "weight": 0.5}
    again = FeedbackReceived(
        feedback_id="again", target_kind="trace", target_id="x", value=0.0, scorer="s", observed_ns=9
    )
    found = composed(told("verdict", "span-v", 0.9), again, **term)
    assert of(found, "R6")[0].status == "corrected"
    assert {r.status for r in of(found, "R5", "tool_call")} == {"corrected"}
    early = msgspec.structs.replace(again, final=False)
    assert of(composed(told("verdict", "span-v", 0.9), early, **term), "R6")[0].status == "provisional"


def test_nothing_made_of_an_incomplete_orchestration_is_final() -> None:
    settings = load_settings(flags={"pipeline": {"rewards": [{"name": "individual/1"}]}}).pipeline
    feedback = [OUTCOME, told("agent_outcome", "span-w1", 1.0)]
    found = compose(CONTENT, feedback, complete=False, terms=RewardTerms.of(settings))
    assert {r.status for r in found.rewards if r.family != "R1"} == {"provisional"}


ALL_TERMS = [
    {"name": "individual/1", "weight": 0.2},
    {"name": "individual/2", "weight": 0.2},
    {"name": "rubric/1", "weight": 0.1, "options": {"role": "writer", "items": {"clarity": 1, "sources": 3}}},
    {"name": "verdict/1", "weight": 0.3},
    {"name": "milestones/1", "options": {"tools": ["search", "write"]}},
]


def test_every_value_says_what_it_was_made_from() -> None:
    feedback = [
        OUTCOME, told("agent_outcome", "span-w1", 0.1), told("clarity", "span-w1", 0.7), told("verdict", "span-v", 0.6),
        told("draft", "span-v", 0.6), told("tone", "resp-c2", 0.2),
    ]  # fmt: skip
    terms = RewardTerms.of(load_settings(flags={"pipeline": {"rewards": ALL_TERMS}}).pipeline)
    found = compose(CONTENT, feedback, complete=True, terms=terms)
    assert {r.family for r in found.rewards if r.value is not None} >= {
        "R1",
        "R2",
        "R3",
        "R4",
        "R5",
        "R6",
        "R7",
    }
    for item in found.rewards:
        assert bool(item.inputs_hash) == (item.value is not None), item
        assert item.estimator
    assert found.definitions == terms.definitions != ""


SCORES = st.lists(
    st.tuples(
        st.sampled_from(["agent_outcome", "clarity", "sources", "verdict"]),
        st.sampled_from(["span-w1", "span-w2", "span-v", "resp-c2", "nobody"]),
        st.sampled_from([0.0, 0.25, 1.0]),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=6,
)


def _composed_of(worlds: list[tuple[str, Any, bool]]) -> Any:
    terms = RewardTerms.of(load_settings(flags={"pipeline": {"rewards": ALL_TERMS}}).pipeline)
    for status, scores, good in worlds:
        events = [
            msgspec.structs.replace(e, status=status) if e.type == "tool_result" else e
            for e in CONTENT.events
        ]
        content = msgspec.structs.replace(CONTENT, events=tuple(events))
        outcome = msgspec.structs.replace(OUTCOME, feedback_id=f"out{good}", value=float(good))
        feedback = [
            told(channel, target, value, number * 10 + int(value * 4), final=final)
            for channel, target, value, number, final in scores
        ]
        yield compose(content, [outcome, *feedback], complete=True, terms=terms)


@given(st.lists(st.tuples(st.sampled_from(["ok", "error"]), SCORES, st.booleans()), min_size=2, max_size=6))
def test_equal_inputs_are_equal_values(worlds: list[tuple[str, Any, bool]]) -> None:
    seen: dict[tuple[str, ...], int | None] = {}
    for found in _composed_of(worlds):
        for item in found.rewards:
            key = (item.name, item.unit, item.unit_id, item.estimator, item.inputs_hash)
            if item.value is not None:
                assert seen.setdefault(key, item.value) == item.value


@pytest.mark.parametrize(
    "change",
    [
        {"tool_price": 0.1}, {"outcome_floor": 0.5}, {"parallel_weight": 0.1}, {"rewards": ALL_TERMS[:4]},
        {"rewards": [*ALL_TERMS[:-1], {"name": "milestones/1", "options": {"tools": ["search"]}}]},
        {"rewards": [{**ALL_TERMS[0], "schedule": "linear"}, *ALL_TERMS[1:]]},
    ],
)  # fmt: skip
def test_another_definition_has_another_digest(change: dict[str, Any]) -> None:
    def digest(pipeline: dict[str, Any]) -> str:
        return RewardTerms.of(load_settings(flags={"pipeline": pipeline}).pipeline).definitions

    base = {"rewards": ALL_TERMS}
    assert digest(base) == digest(base) == digest({**base, "holdout": 0.2})
    assert digest({**base, **change}) != digest(base)


def test_rubrics_weigh_what_was_answered() -> None:
    term = {
        "name": "rubric/1",
        "options": {"role": "writer", "items": {"clarity": 2, "sources": 1, "unasked": 7}},
    }
    found = composed(
        told("clarity", "span-w1", 1.0), told("clarity", "span-w2", 0.5), told("sources", "span-w1", 0.0, final=False),
        told("clarity", "span-v", 0.0), **term,
    )  # fmt: skip
    (role,) = of(found, "R3", "role")
    assert (role.unit_id, role.value, role.status) == ("writer", 500_000, "provisional")
    assert found.team == MICRO
    with pytest.raises(ConfigError, match="items"):
        composed(name="rubric/1")


def test_milestones_are_potentials() -> None:
    found = composed(name="milestones/1", options={"tools": ["search", "write"]})
    steps = {r.unit_id: r.value for r in of(found, "R4", "turn")}
    assert steps == {"c1": 500_000, "c3": -500_000}
    assert sum(steps.values()) == 0


def test_a_verifier_is_scored_by_a_proper_rule() -> None:
    found = composed(told("verdict", "span-v", 0.8), name="verdict/1", weight=1.0)
    assert of(found, "R6")[0].value == 960_000
    dependent = composed(told("verdict", "span-w1", 0.8), name="verdict/1", weight=1.0)
    assert of(dependent, "R6")[0].status == "missing"
    assert of(dependent, "R6", "agent")[0].name == "verdict:dependent"
    assert dependent.team == MICRO
    alone = [told("verdict", f"span-{name}", 1.0) for name in ("c0", "w1", "w2", "v")]
    everybody = composed(*alone, name="verdict/1", weight=1.0)
    assert everybody.team == MICRO, "where all judge, nobody was judged by another"
    allowed = composed(
        told("verdict", "span-w1", 0.8), name="verdict/1", weight=1.0, options={"independent": True}
    )
    assert allowed.team == MICRO + 960_000


@given(st.floats(0, 1), st.floats(0, 1))
def test_what_one_believes_is_the_best_answer(belief: float, stated: float) -> None:
    from spanloop.pipeline.rewards.verifier import brier

    def expected(p: float) -> float:
        return belief * brier(micro(p), MICRO) + (1 - belief) * brier(micro(p), 0)

    assert expected(belief) >= expected(stated) - 3


def test_scaffolds_go_away_with_the_value_model() -> None:
    term = {"name": "individual/1", "weight": 0.5, "schedule": "linear", "length": 10}
    feedback = told("agent_outcome", "span-w1", 1.0)
    paid = [of(composed(feedback, progress=k, **term), "R2")[0] for k in (0, 5, 10)]
    assert [r.weight for r in paid] == [500_000, 250_000, 0]
    assert [r.scaffold for r in paid] == [True, True, False]


def test_the_team_is_provisional_while_something_paid_is() -> None:
    """Nothing is trained on before: samples are built of final rewards only."""
    early = told("agent_outcome", "span-w1", 1.0, final=False)
    assert composed(early, name="individual/1", weight=0.5).status == "provisional"
    assert composed(early, name="individual/1", weight=0.0).status == "final"
    assert (
        composed(early, told("agent_outcome", "span-w1", 0.5, 2), name="individual/1", weight=0.5).status
        == "final"
    )


def test_gated_rewards_are_not_paid_for_failures() -> None:
    feedback = told("agent_outcome", "span-w1", 1.0)
    settings = load_settings(
        flags={"pipeline": {"outcome_floor": 2.0, "rewards": [{"name": "individual/1", "weight": 1.0}]}}
    ).pipeline
    found = compose(CONTENT, [OUTCOME, feedback], complete=True, terms=RewardTerms.of(settings))
    assert (found.team, of(found, "R2")[0].weight) == (MICRO, 0)


def test_own_functions_in_a_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from spanloop.pipeline.rewards.registry import reward\n"
        "@reward('short/1', family='R8')\n"
        "def short(case):\n"
        "    return float(case.content.tokens.output <= case.option('tokens', 200))\n"
        "@reward('broken/1', family='R4')\n"
        "def broken(case):\n"
        "    raise ZeroDivisionError\n"
    )
    flags = {
        "reward_functions": str(path),
        "rewards": [
            {"name": "short/1", "weight": 0.1, "options": {"tokens": 400}},
            {"name": "broken/1", "weight": 0.1},
        ],
    }
    terms = RewardTerms.of(load_settings(flags={"pipeline": flags}).pipeline)
    found = compose(CONTENT, [OUTCOME], complete=True, terms=terms)
    assert found.team == MICRO + 100_000
    (short,) = of(found, "R8")
    assert short.estimator.startswith("short/1@")
    (broken,) = of(found, "R4")
    assert (broken.value, broken.status) == (None, "missing")
    assert broken.estimator.endswith("failed:ZeroDivisionError")


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ({"rewards": [{"name": "nothing/1"}]}, "individual/1"),
        ({"reward_functions": "absent.py"}, "cannot read"),
        ({"rewards": [{"name": "individual/1", "weigth": 1}]}, "weigth"),
        ({"rewards": [{"name": "individual/1", "schedule": "steep"}]}, "schedule"),
    ],
)
def test_what_is_wrong_is_named(pipeline: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardTerms.of(load_settings(flags={"pipeline": pipeline}).pipeline)


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("raise RuntimeError('no')")
    with pytest.raises(ConfigError, match="RuntimeError"):
        RewardTerms.of(load_settings(flags={"pipeline": {"reward_functions": str(path)}}).pipeline)


def test_names_are_registered_once() -> None:
    with pytest.raises(ConfigError, match="version"):
        reward("noversion", family="R4")
    with pytest.raises(ConfigError, match="family"):
        reward("x/1", family="R9")
    with pytest.raises(ConfigError, match="twice"):
        reward("individual/1", family="R2")(lambda case: None)


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_order_and_repetition_of_feedback_do_not_matter(order: list[int], again: list[int]) -> None:
    feedback = [
        told(channel, target, value, number)
        for channel, target, value, number in [
            ("agent_outcome", "span-w1", 0.1, 1), ("agent_outcome", "span-w1", 0.9, 2), ("agent_outcome", "resp-c2", 0.3, 1),
            ("clarity", "span-w1", 0.7, 1), ("clarity", "span-w2", 0.2, 1), ("verdict", "span-v", 0.6, 1),
            ("verdict", "span-v", 0.4, 3), ("sources", "span-w2", 1.0, 1),
        ]
    ]  # fmt: skip
    terms = RewardTerms.of(
        load_settings(
            flags={
                "pipeline": {
                    "rewards": [
                        {"name": "individual/1", "weight": 0.2},
                        {
                            "name": "rubric/1",
                            "weight": 0.1,
                            "options": {"role": "writer", "items": {"clarity": 1, "sources": 3}},
                        },
                        {"name": "verdict/1", "weight": 0.3},
                        {"name": "milestones/1", "options": {"tools": ["search"]}},
                    ]
                }
            }
        ).pipeline
    )
    expected = compose(CONTENT, [OUTCOME, *feedback], complete=True, terms=terms)
    shuffled = [feedback[i] for i in (*order, *again)]
    found = compose(CONTENT, [*shuffled, OUTCOME], complete=True, terms=terms)
    assert canonical_json(found) == canonical_json(expected)


@given(st.integers(0, 20), st.booleans(), st.floats(0.0, 1.0))
def test_calling_more_tools_whose_results_nobody_uses_never_pays(
    extra: int, good: bool, price: float
) -> None:
    terms = ToolTerms(price=price, duplicate_penalty=0.1)
    spam = sum(
        tool_reward(valid=True, used=False, repeated=i > 0, good=good, terms=terms) for i in range(extra)
    )
    assert spam <= 0.0


def test_an_indicator_holds_a_scaffold_until_what_it_holds_up_stands() -> None:
    state = Indicator()
    for _ in range(50):
        state = advance(state, 0.0, tolerance=0.05, target=0.5)
    assert state.progress == 0
    for _ in range(1000):
        state = advance(state, 1.0, tolerance=0.05, target=0.5)
    assert 0 < state.progress < 1000
    msgspec.json.decode(msgspec.json.encode(state), type=Indicator)
