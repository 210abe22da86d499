"""The ledger on orchestrations that are easy to reason about, and the reconciliation's corners."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from synthetic_orchestrations import make_content

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.ledger import account_of, build_ledger, check_ledger
from spanloop.pipeline.credit.orders import average_differences, linear_extensions
from spanloop.pipeline.credit.reconcile import largest_remainder, reconcile
from spanloop.pipeline.credit.states import extended, prompt_state
from spanloop.pipeline.credit.value_model import ValueModel, pack_array, unpack_array
from spanloop.pipeline.credit.value_training import ValueTrainer
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.orchestration import (
    Agent,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)


def turn(n: int, response: tuple[int, ...], menus: tuple[tuple[MenuOption, ...], ...] = ()) -> ModelCall:
    return ModelCall(
        f"c{n}",
        "main",
        (f"s{n}",),
        n * 10,
        n * 10 + 1,
        policy_version="policy@v1",
        prompt_token_ids=(n,),
        response_token_ids=response,
        logprobs=(-0.5,) * len(response),
        menus=menus,
    )


def two_turns(*extra: Agent, events: tuple[OrchestrationEvent, ...] = ()) -> OrchestrationContent:
    return OrchestrationContent(
        orchestration_id="o",
        tenant="default",
        trace_ids=("t",),
        events=events,
        edges=(),
        agents=(Agent("main", "main", "main"), *extra),
        calls=(turn(1, (50, 51)), turn(2, (52,))),
        tokens=TokenUsage(),
        started_ns=0,
        ended_ns=30,
    )


VALUES = {
    prompt_state((1,)): 100_000,
    extended(prompt_state((1,)), (50,)): 150_000,
    extended(prompt_state((1,)), (50, 51)): 300_000,
    prompt_state((2,)): 700_000,
    extended(prompt_state((2,)), (52,)): 650_000,
}


def credit(content: OrchestrationContent, reward: int = 1_000_000) -> dict[str, int]:
    ledger = build_ledger(content, reward, VALUES.__getitem__)
    assert check_ledger(ledger.nodes, ledger.reward, ledger.baseline) == []
    assert ledger.baseline == 100_000
    return {node.id: node.credit for node in ledger.nodes}


def spawned(name: str, call_id: str) -> OrchestrationEvent:
    return OrchestrationEvent(f"spawn-{name}", "spawn", "main", 12, 1.0, "t", (), to_id=name, call_id=call_id)


class TestTokenLedger:
    def test_tokens_are_value_differences_and_the_rest_is_chance(self):
        got = credit(two_turns())
        assert got["team"] == 900_000
        assert (got["token:c1/0"], got["token:c1/1"], got["token:c2/0"]) == (50_000, 150_000, -50_000)
        assert got["orchestrator"] == 150_000
        assert got["environment"] == 400_000 + 350_000

    def test_what_an_agent_did_between_two_turns_is_its_own(self):
        """Leave-one-out of the only worker: V(next turn) - V(state before its return)."""
        got = credit(two_turns(Agent("x", "specialist", "specialist", "main"), events=(spawned("x", "c1"),)))
        assert got["role:specialist"] == got["agent:x"] == 400_000
        assert got["orchestrator"] == 150_000
        assert got["environment"] == 350_000

    def test_side_by_side_without_a_value_of_one_alone_is_split_by_variance(self):
        agents = (Agent("x", "a", "a", "main"), Agent("y", "b", "b", "main"))
        got = credit(two_turns(*agents, events=(spawned("x", "c1"), spawned("y", "c1"))))
        assert (got["agent:x"], got["agent:y"]) == (200_000, 200_000)

    def test_an_agent_after_the_last_turn_shares_with_chance(self):
        got = credit(two_turns(Agent("x", "a", "a", "main"), events=(spawned("x", "c2"),)))
        assert (got["agent:x"], got["environment"]) == (175_000, 175_000 + 400_000)

    def test_a_late_agent_leaves_the_orchestrator_and_other_gaps_alone(self):
        base = two_turns(Agent("x", "a", "a", "main"), events=(spawned("x", "c1"),))
        late = two_turns(
            Agent("x", "a", "a", "main"),
            Agent("y", "b", "b", "main"),
            events=(spawned("x", "c1"), spawned("y", "c1")),
        )
        before, after = credit(base), credit(late)
        changed = {key for key in after if before.get(key) != after[key]}
        assert changed == {"role:a", "agent:x", "role:b", "agent:y"}

    def test_a_forced_token_is_exactly_null(self):
        menus = ((MenuOption(50, 0.0),), (MenuOption(51, -0.5), MenuOption(60, -0.9)))
        content = msgspec.structs.replace(two_turns(), calls=(turn(1, (50, 51), menus), turn(2, (52,))))
        values = {**VALUES, extended(prompt_state((1,)), (50, 60)): 0}
        ledger = build_ledger(content, 1_000_000, values.__getitem__)
        got = {node.id: node for node in ledger.nodes}
        assert (got["token:c1/0"].credit, got["token:c1/0"].variance) == (0, 0.0)
        assert ledger.baseline == 150_000
        assert ledger.estimates.calls["c1"].menus == ((150_000,), (300_000, 0))

    def test_a_failed_call_decides_nothing(self):
        failed = ModelCall("c9", "main", ("s9",), 15, 16, status="error")
        content = msgspec.structs.replace(two_turns(), calls=(turn(1, (50, 51)), turn(2, (52,)), failed))
        got = credit(content)
        assert got["turn:c9"] == 0

    def test_a_trained_sub_agents_tokens_keep_their_differences(self):
        """What the report brought beyond its decisions falls on the report, not on the tokens."""
        sub = msgspec.structs.replace(turn(1, (50, 51)), id="sub", agent_id="x", start_ns=12)
        content = two_turns(Agent("x", "a", "a", "main"), events=(spawned("x", "c1"),))
        content = msgspec.structs.replace(content, calls=(*content.calls, sub))
        got = credit(content)
        assert (got["token:sub/0"], got["token:sub/1"]) == (50_000, 150_000)
        assert got["report:x"] == 400_000 - 200_000


class TestOtherLevels:
    def test_without_a_model_all_is_even_and_the_team_trains(self):
        content = two_turns(Agent("x", "a", "a", "main"), events=(spawned("x", "c1"),))
        ledger = build_ledger(content, 600_000, None)
        got = {node.id: node.credit for node in ledger.nodes}
        assert (ledger.baseline, ledger.level) == (0, "team")
        assert (got["orchestrator"], got["role:a"]) == (300_000, 300_000)
        assert account_of(ledger.level, "c1", 0) == "team"
        assert check_ledger(ledger.nodes, 600_000, 0) == []

    def test_without_token_ids_turns_tools_and_agents_get_value_differences(self):
        content = next(
            c
            for c in (make_content(seed, tokens=False) for seed in range(99))
            if {"tool_call", "spawn"} <= {e.type for e in c.events}
        )
        ledger = build_ledger(content, 500_000, lambda state: 1000 * len(state))
        assert ledger.level == "message"
        assert check_ledger(ledger.nodes, ledger.reward, ledger.baseline) == []
        units = {node.unit for node in ledger.nodes if node.credit}
        assert {"orchestrator", "role", "agent", "turn", "message", "tool_call"} <= units

    def test_nothing_happened(self):
        empty = OrchestrationContent("o", "default", ("t",), (), (), (), (), TokenUsage(), 0, 0)
        for value in (None, lambda state: 7):
            ledger = build_ledger(empty, 10, value)
            assert check_ledger(ledger.nodes, 10, ledger.baseline) == []

    def test_all_eight_units_occur(self):
        units: set[str] = set()
        for seed in range(20):
            units |= {n.unit for n in build_ledger(make_content(seed), 1, lambda s: len(s)).nodes}
        assert units == {"team", "orchestrator", "role", "agent", "turn", "message", "tool_call", "token"}


class TestCast:
    def test_every_party_has_one_place(self):
        for seed in range(40):
            content = make_content(seed, branching=bool(seed % 2))
            cast = cast_of(content)
            placed = [c.id for calls in cast.turns.values() for c in calls]
            assert sorted(placed) == sorted(c.id for c in content.calls)
            tools = [e.id for events in cast.tools.values() for e in events]
            assert sorted(tools) == sorted(e.id for e in content.events if e.type == "tool_call")
            assert {a.id for a in cast.others} == {a.id for a in content.agents if a.parent_id}

    def test_a_helper_without_parent_is_a_role(self):
        """An application that runs its checker as a run of its own beside the orchestrator's."""
        content = two_turns(Agent("z", "checker", "checker", started_ns=12, ended_ns=13))
        cast = cast_of(content)
        assert [a.id for a in cast.orchestrators] == ["main"]
        assert cast.gap_of == {"z": 0}

    def test_calls_of_an_unknown_agent_are_not_lost(self):
        content = msgspec.structs.replace(two_turns(), agents=())
        assert [c.id for c in cast_of(content).line] == ["c1", "c2"]


class TestReconcile:
    def test_no_children_for_something_is_an_error(self):
        with pytest.raises(SchemaError, match="no children"):
            reconcile(5, [], [], [])
        assert reconcile(0, [], [], []) == []

    def test_negative_totals_mirror(self):
        assert largest_remainder(-530_001, [3, 2, 2], ["a", "b", "c"]) == [-227_143, -151_429, -151_429]

    def test_no_variances_leaves_nulls_null(self):
        assert reconcile(10, [4, 0, 4], [0, 0, 0], ["a", "b", "c"]) == [5, 0, 5]
        assert reconcile(9, [None, None, None], [0, 0, 0], ["a", "b", "c"]) == [3, 3, 3]

    def test_bad_weights(self):
        with pytest.raises(SchemaError, match="not usable"):
            largest_remainder(5, [1, -1], ["a", "b"])


class TestOrders:
    def test_a_cycle_ends(self):
        forward, _ = linear_extensions(["a", "b"], {"a": {"b"}, "b": {"a"}})
        assert sorted(forward) == ["a", "b"]

    def test_null_step_is_exactly_null_next_to_odd_differences(self):
        got = average_differences(["a", "n", "b"], {}, lambda s: {0: 0, 1: 1, 2: 2}[len(s - {"n"})] + ("b" in s))
        assert got["n"] == 0
        assert sum(got.values()) == 3

    def test_unknown_partial_values_leave_the_residual(self):
        found = leave_one_out(["a", "b"], lambda s: {0: 0, 2: 10}.get(len(s)))
        assert {e.raw for e in found.values()} == {None}


class TestValueModel:
    def test_it_learns_a_simple_game(self):
        """Token 1 is worth .8, token 2 is worth 0: after a few updates the model tells them apart."""
        trainer = ValueTrainer.fresh(64)
        examples = [(((2 * p, 2 * token + 1),), 800_000 * (token == 1)) for p in range(4) for token in (1, 2)]
        for _ in range(6):
            error = trainer.update(examples)
        assert error < 0.01
        good, bad = trainer.model.predict([(0, 3), (0, 5)])
        assert good - bad > 0.6

    def test_json_round_trip_is_exact(self):
        trainer = ValueTrainer.fresh(64)
        trainer.update([(((1, 2), (3,)), 500_000)], steps=3)
        again = ValueModel.from_dict(msgspec.json.decode(msgspec.json.encode(trainer.model.to_dict())))
        states = [(1, 2), (3,), (), (99,)]
        assert again.predict_micro(states) == trainer.model.predict_micro(states)
        assert ValueTrainer.from_dict(trainer.to_dict()).to_dict() == trainer.to_dict()

    def test_predictions_do_not_depend_on_the_batch(self):
        trainer = ValueTrainer.fresh(512)
        states = [tuple(sorted({(i * 7 + j * j) % 300 for j in range(13)})) for i in range(700)]
        trainer.update([((s,), i * 1000) for i, s in enumerate(states)], steps=4)
        together = trainer.model.predict(states)
        alone = [trainer.model.predict([s])[0] for s in states[::37]]
        assert list(together[::37]) == alone

    def test_malformed_models_are_refused(self):
        good = ValueTrainer.fresh(8).model.to_dict()
        for bad in ({}, {**good, "kind": "other/1"}, {**good, "weights": good["weights"][:2]}):
            with pytest.raises(SchemaError):
                ValueModel.from_dict(bad)
        with pytest.raises(SchemaError, match="not finite"):
            unpack_array(pack_array(np.array([float("nan")])))

    def test_a_bad_update_is_undone(self):
        trainer = ValueTrainer.fresh(8)
        trainer.update([(((1,),), 10)], steps=1)
        before = trainer.model.predict_micro([(1,)])
        trainer.moments[2][1][:] = float("nan")
        assert trainer.update([(((1,),), 10)], steps=1) == float("inf")
        assert trainer.model.predict_micro([(1,)]) == before
