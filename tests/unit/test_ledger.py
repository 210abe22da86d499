"""The ledger on orchestrations that are easy to reason about, and the reconciliation's corners."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from synthetic_orchestrations import make_content

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import Lesson, lessons
from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.ledger import account_of, build_ledger, check_ledger
from spanloop.pipeline.credit.orders import average_differences, linear_extensions
from spanloop.pipeline.credit.reconcile import largest_remainder, reconcile
from spanloop.pipeline.credit.states import RAW, Encoder
from spanloop.pipeline.credit.value_model import ValueModel, pack_array, unpack_array
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
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
    RAW((1,), ()): 100_000,
    RAW((1,), (50,)): 150_000,
    RAW((1,), (50, 51)): 300_000,
    RAW((2,), ()): 700_000,
    RAW((2,), (52,)): 650_000,
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

    def test_the_last_turns_tool_is_unidentified_and_takes_no_luck(self):
        tool = OrchestrationEvent(
            "e", "tool_call", "main", 22, 1.0, "t", (), agent_id="main", tool="stop", call_id="c2"
        )
        ledger = build_ledger(two_turns(events=(tool,)), 1_000_000, VALUES.__getitem__)
        node = next(n for n in ledger.nodes if n.id == "tool:e")
        assert (node.credit, node.raw, node.estimator) == (0, None, "unidentified/1")
        assert credit(two_turns(events=(tool,)))["environment"] == 750_000

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

    def test_a_forced_token_is_exactly_null_and_a_menu_is_the_baseline_of_its_token(self):
        """The option taken is worth .3, the other 0; the behaviour took it three times in four: mean .225, credit .075."""
        menus = ((MenuOption(50, 0.0),), (MenuOption(51, math.log(0.75)), MenuOption(60, math.log(0.25))))
        content = msgspec.structs.replace(two_turns(), calls=(turn(1, (50, 51), menus), turn(2, (52,))))
        values = {**VALUES, RAW((1,), (50, 60)): 0}
        ledger = build_ledger(content, 1_000_000, values.__getitem__)
        got = {node.id: node for node in ledger.nodes}
        assert (got["token:c1/0"].credit, got["token:c1/0"].variance) == (0, 0.0)
        assert got["token:c1/1"].credit == 75_000
        assert ledger.baseline == 225_000
        assert ledger.estimates.calls["c1"].menus == ((150_000,), (300_000, 0))
        assert check_ledger(ledger.nodes, 1_000_000, 225_000) == []

    def test_what_neighbouring_values_do_not_agree_on_is_nobodys(self):
        """After the first token the model says .15, before the second .2: the drift of .05 falls to the environment."""
        menus = (
            (MenuOption(50, math.log(0.5)), MenuOption(60, math.log(0.5))),
            (MenuOption(51, math.log(0.5)), MenuOption(61, math.log(0.5))),
        )
        content = msgspec.structs.replace(two_turns(), calls=(turn(1, (50, 51), menus), turn(2, (52,))))
        values = {**VALUES, RAW((1,), (60,)): 50_000, RAW((1,), (50, 61)): 100_000}
        ledger = build_ledger(content, 1_000_000, values.__getitem__)
        got = {node.id: node.credit for node in ledger.nodes}
        assert (got["token:c1/0"], got["token:c1/1"]) == (50_000, 100_000)
        assert ledger.estimates.calls["c1"].drift == 50_000
        assert check_ledger(ledger.nodes, 1_000_000, ledger.baseline) == []

    def test_a_long_response_is_valued_and_trained_as_a_whole(self):
        long = turn(1, tuple(range(100)))
        content = msgspec.structs.replace(two_turns(), calls=(long,))
        values = {RAW((1,), ()): 100_000, RAW((1,), tuple(range(100))): 400_000}
        ledger = build_ledger(content, 500_000, values.__getitem__)
        got = {node.id: node.credit for node in ledger.nodes}
        assert got["message:c1"] == 300_000
        assert account_of(ledger, "c1", 7) == "message:c1"

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
        assert account_of(ledger, "c1", 0) == "team"
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
            units |= {n.unit for n in build_ledger(make_content(seed), 1, len).nodes}
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


class TestEncoder:
    WORDS = ("deep", "a-yes", "b-no", "agree-a", "spawn", "a", "b", "stop", "c-yes")
    UNITS = ("a", "b", "c")

    def state(self, prompt: str, response: str = "") -> tuple[int, ...]:
        encode = Encoder(self.UNITS, self.WORDS)
        index = {word: i for i, word in enumerate(self.WORDS)}
        return encode(tuple(index[w] for w in prompt.split()), [index[w] for w in response.split()])

    def test_units_are_interchangeable(self):
        """Renaming a to b and b to a, in prompt and response alike, is the same state."""
        names = {"a-yes": "b-yes", "b-no": "a-no", "agree-a": "agree-b", "a": "b", "b": "a"}
        encode = Encoder(self.UNITS, self.WORDS)
        renamed = Encoder(self.UNITS, [names.get(word, word) for word in self.WORDS])
        for prompt in ((0, 1, 2), (0, 1, 2, 3)):
            for response in ((), (4,), (4, 5), (4, 6)):
                assert renamed(prompt, response) == encode(prompt, response)

    def test_facts_are_of_the_chosen_the_subject_or_the_others(self):
        assert self.state("a-yes b-no", "spawn a") != self.state("a-yes b-no", "spawn b")
        assert self.state("a-yes b-no agree-a") != self.state("a-yes b-no")
        assert self.state("a-yes c-yes", "spawn a") != self.state("a-yes", "spawn a")

    def test_unknown_ids_are_words_of_their_own(self):
        encode = Encoder(self.UNITS, self.WORDS)
        assert encode((77,), ()) != encode((78,), ())


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
        got = average_differences(
            ["a", "n", "b"], {}, lambda s: {0: 0, 1: 1, 2: 2}[len(s - {"n"})] + ("b" in s)
        )
        assert got["n"] == 0
        assert sum(got.values()) == 3

    def test_unknown_partial_values_leave_the_residual(self):
        found = leave_one_out(["a", "b"], lambda s: {0: 0, 2: 10}.get(len(s)))
        assert {e.raw for e in found.values()} == {None}


def flat(states: list[tuple[int, ...]], reward: int, oid: str = "o") -> Example:
    return Example(oid, tuple(Lesson(state, ()) for state in states), reward)


class TestValueModel:
    def test_it_learns_a_simple_game(self):
        """Token 1 is worth .8, token 2 is worth 0: after a few updates the model tells them apart."""
        trainer = ValueTrainer.fresh(64)
        examples = [flat([RAW((p,), (t,))], 800_000 * (t == 1), f"{p}{t}") for p in range(8) for t in (1, 2)]
        for _ in range(6):
            trainer.update(examples)
        good, bad = trainer.model.predict([RAW((0,), (1,)), RAW((0,), (2,))])
        assert good - bad > 0.6

    def test_a_bad_end_does_not_taint_the_choice_before_it(self):
        """The first choice leads to a second with options worth 1 and 0; that the bad one was taken as often is no fault of it."""
        trainer = ValueTrainer.fresh(64)
        first, good, bad = RAW((1,), (5,)), RAW((2,), (6,)), RAW((2,), (7,))
        examples = [
            Example(f"{i}", (Lesson(first, (good, bad)), Lesson(end, ())), reward)
            for i in range(20)
            for end, reward in ((good, 1_000_000), (bad, 0))
        ]
        for _ in range(12):
            trainer.update(examples)
        assert trainer.model.predict([first])[0] > 0.85

    def test_json_round_trip_is_exact(self):
        trainer = ValueTrainer.fresh(64, Encoder(("a",), ("x", "a-b")))
        trainer.update([flat([(1, 2), (3,)], 500_000)], steps=3)
        again = ValueModel.from_dict(msgspec.json.decode(msgspec.json.encode(trainer.model.to_dict())))
        states = [(1, 2), (3,), (), (99,)]
        assert again.predict_micro(states) == trainer.model.predict_micro(states)
        assert again.encoder((1,), ()) == trainer.model.encoder((1,), ())
        assert ValueTrainer.from_dict(trainer.to_dict()).to_dict() == trainer.to_dict()

    def test_predictions_do_not_depend_on_the_batch(self):
        trainer = ValueTrainer.fresh(512)
        states = [tuple(sorted({(i * 7 + j * j) % 300 for j in range(13)})) for i in range(700)]
        trainer.update([flat([s], i * 1000, str(i)) for i, s in enumerate(states)], steps=4)
        together = trainer.model.predict(states)
        alone = [trainer.model.predict([s])[0] for s in states[::37]]
        assert list(together[::37]) == alone

    def test_menu_values_are_those_of_the_samples(self):
        trainer = ValueTrainer.fresh(256)
        content = make_content(5)
        trainer.update([Example("o", tuple(lessons(cast_of(content))), 500_000)], steps=3)
        model = trainer.model
        ledger = build_ledger(content, 0, lambda state: model.predict_micro([state])[0], model.encoder)
        for call in (c for c in content.calls if c.menus):
            found = model.menu_values(
                call.prompt_token_ids,
                call.response_token_ids,
                [[o.token_id for o in menu] for menu in call.menus],
            )
            assert [[round(v * 1e6) for v in menu] for menu in found] == [
                list(menu) for menu in ledger.estimates.calls[call.id].menus
            ]

    def test_malformed_models_are_refused(self):
        good = ValueTrainer.fresh(8).model.to_dict()
        for bad in ({}, {**good, "kind": "other/1"}, {**good, "weights": good["weights"][:2]}):
            with pytest.raises(SchemaError):
                ValueModel.from_dict(bad)
        with pytest.raises(SchemaError, match="not finite"):
            unpack_array(pack_array(np.array([float("nan")])))

    def test_a_bad_update_is_undone(self):
        trainer = ValueTrainer.fresh(8)
        trainer.update([flat([(1,)], 10)], steps=1)
        before = trainer.model.predict_micro([(1,)])
        trainer.moments[2][1][:] = float("nan")
        assert trainer.update([flat([(1,)], 10)], steps=1) == float("inf")
        assert trainer.model.predict_micro([(1,)]) == before
