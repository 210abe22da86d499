"""Which estimator shares what agents brought side by side (METHODS 3.5), through the ledger."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from spanloop.pipeline.credit import value_model
from spanloop.pipeline.credit.anchors import Choice
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import estimate, lessons
from spanloop.pipeline.credit.ledger import build_ledger, check_ledger
from spanloop.pipeline.credit.progress import Bag
from spanloop.pipeline.credit.states import State, step_feature
from spanloop.pipeline.credit.value_model import StepReader, ValueModel
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.schemas.orchestration import (
    Agent,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

GAME = {"": 0.0, "a": 0.1, "b": 0.2, "c": 0.0, "ab": 0.6, "ac": 0.3, "bc": 0.2, "abc": 1.0}
"""METHODS 3.2 f."""


def team(*agents: tuple[str, str, str]) -> OrchestrationContent:
    """An orchestrator whose one turn is followed by agents (id, role, parent) that only return."""
    mains = [Agent("main", "main", "main")]
    others = [Agent(i, role, role, parent or "main", started_ns=10) for i, role, parent in agents]
    events = [
        OrchestrationEvent(f"spawn-{i}", "spawn", "main", 12, 1.0, "t", (), to_id=i, call_id="c1")
        for i, _, parent in agents
        if not parent
    ]
    return OrchestrationContent(
        orchestration_id="o",
        tenant="default",
        trace_ids=("t",),
        events=tuple(events),
        edges=(),
        agents=(*mains, *others),
        calls=(ModelCall("c1", "main", ("s1",), 10, 11),),
        tokens=TokenUsage(),
        started_ns=0,
        ended_ns=30,
    )


def game_value(features: dict[str, int]):
    """V of a state by which agents' features are in it."""

    def value(state: State) -> int:
        done = "".join(name for name, feature in sorted(features.items()) if feature in state)
        return round(GAME[done] * 1_000_000)

    return value


def nodes_of(content: OrchestrationContent, value, *, agents: str = "auto", seed: str = ""):
    ledger = build_ledger(content, 1_500_000, value, choice=Choice(agents, seed=seed))
    assert check_ledger(ledger.nodes, ledger.reward, ledger.baseline) == []
    return {node.id: node for node in ledger.nodes}


def features(content: OrchestrationContent) -> dict[str, int]:
    return {
        agent.id: step_feature(f"return/{agent.role}/{agent.status}", 1)
        for agent in content.agents
        if agent.id != "main"
    }


def test_strangers_get_their_shapley_values():
    content = team(("a", "ra", ""), ("b", "rb", ""), ("c", "rc", ""))
    found = nodes_of(content, game_value(features(content)))
    assert [found[f"agent:{i}"].credit for i in "abc"] == [416_666, 416_667, 166_667]
    assert [found[f"agent:{i}"].raw for i in "abc"] == [416_667, 416_667, 166_667]
    assert {found[f"agent:{i}"].estimator for i in "abc"} == {"shapley/1"}
    assert found["environment"].credit == 500_000


def test_who_is_spawned_comes_after_its_spawner():
    """a spawned b and c: (.1, .6, .3)."""
    content = team(("a", "ra", ""), ("b", "rb", "a"), ("c", "rc", "a"))
    found = nodes_of(content, game_value(features(content)))
    assert [found[f"agent:{i}"].credit for i in "abc"] == [100_000, 600_000, 300_000]
    assert {found[f"agent:{i}"].estimator for i in "abc"} == {"precedence_shapley/1"}


def test_roles_share_first():
    """b and c of one role: V counts the role's returns. Roles get the Shapley values of the quotient game."""
    content = team(("a", "one", ""), ("b", "two", ""), ("c", "two", ""))
    one, first, second = (
        step_feature(f"return/{role}/{content.agents[1].status}", n)
        for role, n in (("one", 1), ("two", 1), ("two", 2))
    )
    table = {(): 0, (one,): 100_000, (first,): 200_000, (first, second): 200_000}
    both = {(one, first): 450_000, (one, first, second): 1_000_000}

    def value(state: State) -> int:
        return {**table, **both}[tuple(f for f in (one, first, second) if f in state)]

    found = nodes_of(content, value)
    assert found["role:one"].credit == 450_000
    assert found["role:two"].credit == 550_000
    assert found["agent:b"].credit == found["agent:c"].credit == 275_000
    assert found["agent:b"].estimator == "owen/1"


def test_leave_one_out_by_name():
    content = team(("a", "ra", ""), ("b", "rb", ""), ("c", "rc", ""))
    found = nodes_of(content, game_value(features(content)), agents="leave_one_out")
    assert [found[f"agent:{i}"].raw for i in "abc"] == [800_000, 700_000, 400_000]
    assert {found[f"agent:{i}"].estimator for i in "abc"} == {"leave_one_out/1"}


def test_an_agent_without_effect_gets_exactly_nothing():
    content = team(("a", "ra", ""), ("b", "rb", ""), ("c", "rc", ""))
    some = {name: f for name, f in features(content).items() if name != "c"}
    found = nodes_of(content, game_value(some))
    assert (found["agent:c"].credit, found["agent:c"].variance) == (0, 0.0)
    assert found["agent:a"].credit + found["agent:b"].credit == 600_000


@pytest.mark.parametrize("count", [20, 100])
def test_many_are_sampled_with_error_bars_and_the_same_each_time(count: int):
    content = team(*((f"a{i:03d}", f"r{i:03d}", "") for i in range(count)))
    of = features(content)
    half = sorted(of.values())[: count // 2]

    def value(state: State) -> int:
        here = len(set(half).intersection(state))
        return 10_000 * here + (200_000 if here > count // 4 else 0)

    found = nodes_of(content, value, seed="o")
    again = nodes_of(content, value, seed="o")
    assert found == again
    shares = [found[f"agent:{name}"] for name in of]
    assert {node.estimator for node in shares} == {"shapley_sampled/1"}
    truth = 10_000 + 200_000 / len(half)
    for name, feature in of.items():
        node = found[f"agent:{name}"]
        if feature in half:
            assert abs((node.raw or 0) - truth) < 5 * node.variance**0.5 * 1e6 + 1
        else:
            assert node.raw == 0
    assert sum(node.credit for node in shares) == 10_000 * len(half) + 200_000
    other = nodes_of(content, value, seed="p")
    assert [found[f"agent:{n}"].raw for n in of] != [other[f"agent:{n}"].raw for n in of]


def test_a_sampled_tree_and_sampled_roles_are_named():
    tree = team(("a00", "r0", ""), *((f"a{i:02d}", f"r{i}", "a00") for i in range(1, 12)))
    roles = team(*((f"a{i:02d}", f"r{i % 3}", "") for i in range(12)))
    for content, name in ((tree, "precedence_sampled/1"), (roles, "owen_sampled/1")):
        found = nodes_of(content, lambda state: 1000 * len(state) ** 2)
        assert {n.estimator for n in found.values() if n.unit == "agent" and n.id != "agent:main"} == {name}


def test_above_a_hundred_each_is_left_out():
    content = team(*((f"a{i:03d}", f"r{i:03d}", "") for i in range(120)))
    found = nodes_of(content, lambda state: 1000 * len(state))
    assert found["agent:a000"].estimator == "leave_one_out/1"
    assert found["agent:a000"].credit == 1000


def test_the_model_s_own_doubt_is_the_variance():
    content = team(("a", "ra", ""), ("b", "rb", ""), ("c", "rc", ""))
    trainer = ValueTrainer.fresh(256)
    learned = tuple(lessons(cast_of(content)))
    trainer.update([Example(f"o{i}", learned, i * 100_000) for i in range(8)], steps=20)
    asking = Asking(trainer.model)
    cast = cast_of(content)
    estimate(cast, 1_000_000, asking)
    asking.answer()
    found = estimate(cast, 1_000_000, asking)
    assert all(found.agents[i].variance > 0 for i in "abc")
    assert sum(found.agents[i].anchor or 0 for i in "abc") == pytest.approx(
        sum(found.agents[i].raw or 0 for i in "abc"), abs=3
    )
    direct = np.array(trainer.model.predict_micro([lesson.state for lesson in learned]))
    assert abs(direct[0] - found.baseline) <= 2


def test_turn_level_gae_by_name():
    content = msgspec.structs.replace(
        team(), calls=tuple(ModelCall(f"c{i}", "main", (f"s{i}",), i, i + 1) for i in range(3))
    )
    kind = f"turn/main/{content.calls[0].status}/"
    steps = [step_feature(kind, n) for n in (1, 2, 3)]
    values = [400_000, 500_000, 800_000, 900_000]

    def value(state: State) -> int:
        return values[sum(step in state for step in steps)]

    ledger = build_ledger(content, 1_000_000, value, choice=Choice(turns="gae", smoothing=0.95))
    assert check_ledger(ledger.nodes, 1_000_000, ledger.baseline) == []
    turns = [n for n in ledger.nodes if n.unit == "message"]
    assert [(n.raw, n.estimator) for n in turns] == [(a, "gae/1") for a in (565_500, 490_000, 200_000)]


def test_counted_and_gathered_embeddings_sum_to_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    model = ValueModel.fresh(512)
    model.add_features([range(900)])
    rng = np.random.default_rng(0)
    asked = [
        (Bag(None, 0, rng.permutation(900)[:20].tolist()), rng.permutation(900)[:150].tolist())
        for _ in range(300)
    ]
    counted = StepReader(model).predict(asked)
    monkeypatch.setattr(value_model, "DENSE_FROM", 10**9)
    gathered = StepReader(model).predict(asked)
    assert counted[0] == gathered[0]
    assert (counted[1] == gathered[1]).all()


def test_what_a_like_gap_gave_is_used_again_and_changes_nothing():
    """Teams of the same shape under other ids, and of like shapes: one reader of the model for all gives what a new one gives."""
    shapes = [
        [("ra", ""), ("rb", "")], [("ra", ""), ("ra", "")], [("ra", ""), ("ra", ""), ("rb", "")], [("ra", ""), ("rb", "0")],
        [("rb", ""), ("ra", "")], [("ra", "")],
    ]  # fmt: skip
    teams = [
        team(
            *[
                (f"{name}{i}", role, f"{name}{parent}" if parent else "")
                for i, (role, parent) in enumerate(shape)
            ]
        )
        for name in ("p", "q", "a")
        for shape in shapes
    ]
    trainer = ValueTrainer.fresh(256)
    examples = [
        Example(f"o{n}", tuple(lessons(cast_of(content))), 1_000_000 * (n % 3))
        for n, content in enumerate(teams)
    ]
    trainer.update(examples, 60)

    def answered(asking: Asking, content: OrchestrationContent):
        cast = cast_of(content)
        estimate(cast, 1_500_000, asking)
        asking.answer()
        return estimate(cast, 1_500_000, asking)

    shared = Asking(trainer.model)
    for content in [*teams, *teams]:
        assert answered(shared, content) == answered(Asking(trainer.model), content)
    assert shared.recalled > len(teams)
