"""Batches: who is trained on, what is dropped under which reason, advantages, arrays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from learner_world import CONFIG, World

from spanloop.learner.arrays import collate, minibatches, standardised, take
from spanloop.learner.batches import Rollout, group_advantages, to_rollout, with_advantages
from spanloop.learner.policy import PolicyNet
from spanloop.learner.window import Window
from spanloop.schemas.events import SamplesBuilt

NET = PolicyNet.initial(CONFIG, 0)
CASE = Path(__file__).parents[3] / "shared" / "cases" / "35-nan-reward-poisons-training.json"


def built(number: int = 0, version: int = 0, **changes: Any) -> SamplesBuilt:
    world = World()
    world.played = number
    return msgspec.structs.replace(world.play(NET, version), **changes)


def row_changed(event: SamplesBuilt, **changes: Any) -> SamplesBuilt:
    rows = (msgspec.structs.replace(event.rows[0], **changes), *event.rows[1:])
    return msgspec.structs.replace(event, rows=rows)


def rollout(event: SamplesBuilt) -> Rollout | str:
    return to_rollout(event, vocabulary_size=CONFIG.vocabulary_size, context=CONFIG.context)


def rollouts(count: int) -> list[Rollout]:
    made = [rollout(built(i)) for i in range(count)]
    return [r for r in made if isinstance(r, Rollout)]


def window(**changes: Any) -> Window:
    options: dict[str, Any] = {
        "ledger": {}, "lag": lambda v: 5 - v if v <= 5 else None, "max_staleness": 2,
        "vocabulary_size": CONFIG.vocabulary_size, "context": CONFIG.context, **changes,
    }  # fmt: skip
    return Window(**options)


def test_each_reason_to_drop() -> None:
    fine = built(0, 5)
    taking = window(ledger={built(1).orchestration_id: 3})
    cases = {
        "": fine,
        "used": built(1, 5),
        "holdout": built(2, 5, holdout=True),
        "stale": built(3, 2),
        "unknown_version": built(4, 9),
        "no_rows": built(5, 5, rows=()),
        "non_finite": row_changed(built(6, 5), logprobs=(math.nan,)),
        "foreign_policy": row_changed(built(7, 5), policy_version="gpt-5"),
        "vocabulary": row_changed(built(8, 5), prompt_token_ids=(1, 99, 3)),
        "too_long": row_changed(built(9, 5), prompt_token_ids=(1,) * 40),
        "malformed": row_changed(built(10, 5), response_token_ids=(2,)),
        "menu_cut": row_changed(built(11, 5), menu_logprobs=((-2.0, -2.0, -2.0),)),
        "no_menu": row_changed(built(12, 5), menu_ids=(), menu_logprobs=(), menu_values=()),
    }
    for event in cases.values():
        taking.add(event)
    assert taking.trainable == 1
    assert [r.orchestration_id for r in taking.rollouts()] == [fine.orchestration_id]
    assert taking.dropped() == {reason: 1 for reason in sorted(cases) if reason}


@pytest.mark.parametrize(
    "changes", [{"advantages": (10**36,)}, {"menu_values": ((0, 10**30, 0),)}, {"weight": math.inf}]
)
def test_absurd_numbers_are_refused(changes: dict[str, Any]) -> None:
    assert rollout(row_changed(built(0), **changes)) == "non_finite"


def test_a_later_revision_replaces_and_may_take_back() -> None:
    taking = window()
    first = built(0, 5)
    assert taking.add(first) == 1
    assert taking.add(msgspec.structs.replace(first, revision=2, reward=7)) == 1
    assert taking.add(first) == 1
    assert taking.rollouts()[0].reward == 7e-6
    assert taking.add(msgspec.structs.replace(first, revision=3, rows=())) == 0
    assert taking.dropped() == {"no_rows": 1, "superseded": 2}


def test_forced_tokens_are_no_decisions() -> None:
    event = row_changed(
        built(0), menu_ids=((8,),), response_token_ids=(8,), logprobs=(0.0,), menu_logprobs=((0.0,),)
    )
    made = rollout(event)
    assert isinstance(made, Rollout)
    assert (made.num_decisions, made.forced) == (1, 1)


@pytest.mark.skipif(not CASE.exists(), reason="the case files are not here")
def test_case_35_groups() -> None:
    case = json.loads(CASE.read_text())
    groups = [[None if r is None else float(r) for r in g] for g in case["training_groups"]]
    got = [group_advantages(g) for g in groups]
    assert sum(g.dropped for g in got) == case["checks"]["dropped_samples"]
    assert all(v is None or math.isfinite(v) for g in got for v in g.values)
    finite = [v for v in got[0].values if v is not None]
    assert len(finite) == 5
    assert math.fsum(finite) == pytest.approx(0)
    assert [g.flat for g in got] == [False, True, True, False]
    assert got[1].values == (0.0,)
    assert got[3].values == pytest.approx((math.sqrt(0.5), -math.sqrt(0.5)))


def test_group_mode_reports_singletons() -> None:
    a, b, c = rollouts(3)
    pair = [
        msgspec.structs.replace(a, group="g", reward=1.0),
        msgspec.structs.replace(b, group="g", reward=0.0),
        c,
    ]
    mapped, notes = with_advantages(pair, "group")
    assert notes == {"flat_groups": 1}
    assert [r.calls[0].decisions[0].advantage for r in mapped] == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5), 0]
    )


def test_ledger_mode_forgets_values_and_all_action_counts_missing_ones() -> None:
    made = rollouts(2)
    ledger, _ = with_advantages(made, "ledger")
    assert not any(d.values for r in ledger for c in r.calls for d in c.decisions)
    same, notes = with_advantages([*made, *ledger], "all_action")
    assert same == [*made, *ledger]
    assert notes == {"decisions_without_values": 4}


@pytest.mark.parametrize("weighting", ["decision", "rollout"])
def test_arrays_hold_the_decisions(weighting: str) -> None:
    made = rollouts(6)
    arrays = collate(made, weighting=weighting)
    assert float(arrays.weight_N.sum()) == pytest.approx(1)
    flat = [(c, d) for r in made for c in r.calls for d in c.decisions]
    for n, (call, d) in enumerate(flat):
        row = arrays.row_N[n]
        assert tuple(arrays.ids_BT[row, : arrays.lengths_B[row]]) == call.ids
        assert arrays.ids_BT[row, arrays.position_N[n] + 1] == d.menu[d.chosen]
        assert tuple(arrays.menu_NK[n][arrays.open_NK[n]]) == d.menu


def test_take_is_a_smaller_collate() -> None:
    made = rollouts(7)
    part = [1, 4, 6]
    few, index_N = take(collate(made), part)
    alone = collate([made[i] for i in part])
    for name in few.__struct_fields__:
        if name != "rollout_B":
            np.testing.assert_allclose(getattr(few, name), getattr(alone, name), rtol=1e-6)
    assert index_N.tolist() == [2, 3, 8, 9, 12, 13]


def test_standardised_scales_advantages_only() -> None:
    arrays = collate(rollouts(8))
    scaled = standardised(arrays)
    assert float(np.sqrt(np.mean(scaled.advantage_N**2))) == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(
        scaled.advantage_N / scaled.advantage_N[0], arrays.advantage_N / arrays.advantage_N[0], rtol=1e-5
    )
    np.testing.assert_array_equal(scaled.values_NK, arrays.values_NK)
    still = msgspec.structs.replace(arrays, advantage_N=np.zeros_like(arrays.advantage_N))
    assert standardised(still) is still


def test_minibatches_are_a_seeded_partition() -> None:
    split = minibatches(10, 4, seed=(0, 1, 2))
    assert split == minibatches(10, 4, seed=(0, 1, 2)) != minibatches(10, 4, seed=(0, 1, 3))
    assert sorted(i for part in split for i in part) == list(range(10))
    assert [len(part) for part in split] == [4, 4, 2]
