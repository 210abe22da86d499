"""Laws of traces: what each end of lambda gives, conservation beside them, order, and that only what was caused flows back."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_orchestrations import make_content

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.ledger import Ledger, build_ledger, check_ledger
from spanloop.pipeline.credit.states import RAW, is_forced
from spanloop.pipeline.credit.trace import traces_of
from spanloop.pipeline.samples import build_samples
from spanloop.schemas.events import SamplesBuilt
from spanloop.schemas.orchestration import (
    Agent,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

SEEDS = st.integers(0, 10_000)
LAMBDAS = st.sampled_from([0.1, 0.5, 0.9, 1.0])
QUICK = settings(max_examples=60, deadline=None)
REWARD = 700_000


def value_of(salt: int):
    """Some deterministic value of a state."""
    return lambda state: random.Random(f"{salt}-{state}").randrange(-(10**6), 10**6)


def without_menus(content: OrchestrationContent) -> OrchestrationContent:
    calls = tuple(msgspec.structs.replace(call, menus=()) for call in content.calls)
    return msgspec.structs.replace(content, calls=calls)


def rows_of(content: OrchestrationContent, ledger: Ledger, smoothing: float) -> SamplesBuilt:
    traces = traces_of(ledger, cast_of(content), smoothing)
    return build_samples(
        content, ledger, revision=1, value_model="v", holdout=0.0, credit="ledger", traces=traces
    )


def decisions(content: OrchestrationContent) -> list[tuple[ModelCall, int]]:
    return [
        (c, i) for c in cast_of(content).line for i in range(len(c.response_token_ids)) if not is_forced(c, i)
    ]


@given(SEEDS, SEEDS)
@QUICK
def test_with_lambda_0_samples_are_those_of_the_accounts(seed: int, salt: int):
    content = make_content(seed)
    ledger = build_ledger(content, REWARD, value_of(salt))
    plain = build_samples(content, ledger, revision=1, value_model="v", holdout=0.0, credit="ledger")
    assert rows_of(content, ledger, 0.0) == plain


@given(SEEDS, SEEDS)
@QUICK
def test_with_lambda_1_a_token_without_menu_gets_outcome_less_value(seed: int, salt: int):
    content = without_menus(make_content(seed))
    ledger = build_ledger(content, REWARD, value_of(salt))
    values = ledger.estimates.calls
    for row in rows_of(content, ledger, 1.0).rows:
        starts = values[row.call_id].starts
        assert list(row.advantages) == [REWARD - start for start in starts]


@given(SEEDS, SEEDS)
@QUICK
def test_with_lambda_1_a_choice_from_a_menu_gets_outcome_less_value_less_later_choices(seed: int, salt: int):
    content = make_content(seed)
    ledger = build_ledger(content, REWARD, value_of(salt))
    values = ledger.estimates.calls
    advantages = {row.call_id: row.advantages for row in rows_of(content, ledger, 1.0).rows}
    made = decisions(content)
    for at, (call, i) in enumerate(made):
        later = sum(values[c.id].tokens[j] for c, j in made[at + 1 :])
        assert advantages[call.id][i] == REWARD - values[call.id].starts[i] - later


@given(SEEDS, SEEDS, LAMBDAS)
@QUICK
def test_the_ledger_is_conserved_beside_it_and_forced_tokens_get_nothing(
    seed: int, salt: int, smoothing: float
):
    content = make_content(seed)
    ledger = build_ledger(content, REWARD, value_of(salt))
    traces = traces_of(ledger, cast_of(content), smoothing)
    assert check_ledger(ledger.nodes, ledger.reward, ledger.baseline) == []
    calls = {call.id: call for call in content.calls}
    for call_id, amounts in traces.items():
        for i, amount in enumerate(amounts):
            assert amount == 0 or not is_forced(calls[call_id], i)


@given(SEEDS, SEEDS, LAMBDAS, st.randoms(use_true_random=False))
@QUICK
def test_the_order_of_what_is_told_does_not_matter(
    seed: int, salt: int, smoothing: float, rng: random.Random
):
    content = make_content(seed)
    shuffled = {name: list(getattr(content, name)) for name in ("calls", "events", "agents")}
    for part in shuffled.values():
        rng.shuffle(part)
    other = msgspec.structs.replace(content, **{name: tuple(part) for name, part in shuffled.items()})
    got, again = (rows_of(c, build_ledger(c, REWARD, value_of(salt)), smoothing) for c in (content, other))
    assert [row.advantages for row in got.rows] == [row.advantages for row in again.rows]


@given(SEEDS, SEEDS, SEEDS)
@QUICK
def test_the_last_decision_keeps_lambda_of_what_the_outcome_added(seed: int, salt: int, share: int):
    smoothing = share / 10_000
    content = make_content(seed)
    ledger = build_ledger(content, REWARD, value_of(salt))
    made = decisions(content)
    if not made:
        return
    call, i = made[-1]
    values = ledger.estimates.calls[call.id]
    row = next(r for r in rows_of(content, ledger, smoothing).rows if r.call_id == call.id)
    assert row.advantages[i] == values.tokens[i] + round(smoothing * (REWARD - values.end))


# ---------------------------------------------------------------- worked values

HALF = math.log(0.5)


def turn(
    n: int, response: tuple[int, ...], menus: tuple[tuple[MenuOption, ...], ...] = (), agent: str = "main"
) -> ModelCall:
    name = f"{agent}{n}"
    return ModelCall(
        name, agent, (name,), n * 10, n * 10 + 1, policy_version="policy@v1", prompt_token_ids=(n,), response_token_ids=response,
        logprobs=(-0.5,) * len(response), menus=menus,
    )  # fmt: skip


def played(*calls: ModelCall, agents: tuple[Agent, ...] = ()) -> OrchestrationContent:
    events = tuple(
        OrchestrationEvent(f"e{a.id}", "spawn", "main", 11, 1.0, "t", (), agent_id="main", to_id=a.id, call_id="main1")
        for a in agents
    )  # fmt: skip
    return OrchestrationContent(
        orchestration_id="o", tenant="default", trace_ids=("t",), events=events, edges=(),
        agents=(Agent("main", "main", "main"), *agents), calls=calls, tokens=TokenUsage(), started_ns=0, ended_ns=90,
    )  # fmt: skip


def test_three_turns_without_menus_are_gae():
    """METHODS 3.2 (i): r = (0, 0, 1), V = (.4, .5, .8), lambda 1: (.6, .5, .2). In between, an account is whole and what lay behind
    it counts lambda: V rises within turns by .05, .1 and .1, then by .05, .2 and .1."""
    values = {
        RAW((1,), ()): 400_000, RAW((1,), (50,)): 450_000, RAW((2,), ()): 500_000, RAW((2,), (50,)): 600_000,
        RAW((3,), ()): 800_000, RAW((3,), (50,)): 900_000,
    }  # fmt: skip
    content = played(*(turn(n, (50,)) for n in (1, 2, 3)))
    ledger = build_ledger(content, 1_000_000, values.__getitem__)
    got = {s: [row.advantages[0] for row in rows_of(content, ledger, s).rows] for s in (0.0, 0.5, 1.0)}
    assert got[1.0] == [600_000, 500_000, 200_000]
    assert got[0.0] == [50_000, 100_000, 100_000]
    third = 0.5 * 0.1
    second = 0.5 * (0.2 + 0.1 + third)
    first = 0.5 * (0.05 + 0.1 + second)
    assert got[0.5] == [round(1e6 * x) for x in (0.05 + first, 0.1 + second, 0.1 + third)]


def test_the_luck_of_a_later_draw_does_not_flow_back():
    """Two decisions from menus; only what happened between and after them flows back, not that the second drew the better option."""
    menu = (MenuOption(50, HALF), MenuOption(60, HALF))
    content = played(turn(1, (50,), (menu,)), turn(2, (50,), (menu,)))
    values = {
        RAW((1,), (50,)): 500_000, RAW((1,), (60,)): 300_000, RAW((2,), (50,)): 800_000, RAW((2,), (60,)): 400_000,
    }  # fmt: skip
    ledger = build_ledger(content, 900_000, values.__getitem__)
    first, second = rows_of(content, ledger, 0.5).rows
    assert second.advantages == (200_000 + 50_000,)
    assert first.advantages == (100_000 + round(1e6 * (0.5 * 0.1 + 0.25 * 0.1)),)


def test_what_a_sibling_did_beside_it_does_not_reach_a_sub_agents_tokens():
    """Two sub-agents work side by side. Each has what its own report brought and what came after both; how well the policy's
    choices in the sibling were has no part in it."""
    pair = (Agent("x", "a", "a", "main"), Agent("y", "b", "b", "main"))

    def advantage(in_sibling: int) -> tuple[int, ...]:
        content = played(
            turn(1, (50,)), turn(2, (50,)), turn(5, (70,), agent="x"), turn(6, (in_sibling,), agent="y"), agents=pair
        )  # fmt: skip
        values = {
            RAW((1,), ()): 100_000, RAW((1,), (50,)): 200_000, RAW((2,), ()): 600_000, RAW((2,), (50,)): 700_000,
            RAW((5,), ()): 300_000, RAW((5,), (70,)): 350_000, RAW((6,), ()): 300_000, RAW((6,), (80,)): 390_000,
            RAW((6,), (81,)): 10_000,
        }  # fmt: skip
        ledger = build_ledger(content, 1_000_000, values.__getitem__)
        credit = {node.id: node.credit for node in ledger.nodes}
        assert credit["agent:x"] == credit["agent:y"] == 200_000
        assert credit["report:x"] == 150_000
        return next(row for row in rows_of(content, ledger, 0.5).rows if row.agent_id == "x").advantages

    later = 0.1 + 0.5 * 0.3
    assert advantage(80) == advantage(81) == (50_000 + round(1e6 * 0.5 * (0.15 + later)),)


def test_a_long_response_is_followed_as_a_whole():
    long = turn(1, tuple(range(100)))
    values = {RAW((1,), ()): 100_000, RAW((1,), tuple(range(100))): 400_000}
    content = played(long)
    ledger = build_ledger(content, 500_000, values.__getitem__)
    (row,) = rows_of(content, ledger, 0.5).rows
    assert set(row.advantages) == {300_000 + 50_000}


@pytest.mark.parametrize("credit", ["ledger", "team"])
def test_other_levels_have_no_traces(credit: str):
    content = make_content(3)
    ledger = build_ledger(content, 500_000, None if credit == "ledger" else value_of(1))
    assert credit == "team" or traces_of(ledger, cast_of(content), 1.0) == {}
    traces = traces_of(ledger, cast_of(content), 1.0)
    built = build_samples(
        content, ledger, revision=1, value_model="v", holdout=0.0, credit=credit, traces=traces
    )
    assert {a for row in built.rows for a in row.advantages} == {ledger.reward - ledger.baseline}
