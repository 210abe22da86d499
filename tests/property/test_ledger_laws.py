"""Laws of reconciliation and ledger: conservation, order, null units, locality, retraction."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_orchestrations import make_content

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import Anchored, lessons
from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.ledger import Account, build_ledger, check_ledger, settle
from spanloop.pipeline.credit.orders import average_differences, linear_extensions
from spanloop.pipeline.credit.reconcile import largest_remainder, reconcile
from spanloop.schemas.canonical import canonical_json

MICROS = st.integers(-(10**9), 10**9)
VARIANCES = st.floats(0, 10, allow_nan=False).map(lambda v: round(v, 6))
CHILD = st.tuples(st.one_of(st.none(), MICROS), VARIANCES)
SEEDS = st.integers(0, 10_000)
QUICK = settings(max_examples=60, deadline=None)


def value_of(salt: int):
    """Some deterministic value of a state."""
    return lambda state: random.Random(f"{salt}-{state}").randrange(-(10**6), 10**6)


@given(MICROS, st.lists(st.floats(0.001, 100), min_size=1, max_size=8))
@QUICK
def test_shares_sum_and_stay_within_one_of_their_quota(total: int, weights: list[float]):
    ids = [f"u{i}" for i in range(len(weights))]
    shares = largest_remainder(total, weights, ids)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


@given(MICROS, st.lists(CHILD, min_size=1, max_size=8), st.randoms(use_true_random=False))
@QUICK
def test_reconciled_children_sum_and_do_not_depend_on_order(
    total: int, children: list[tuple], rng: random.Random
):
    ids = [f"u{i}" for i in range(len(children))]
    got = dict(
        zip(ids, reconcile(total, [c[0] for c in children], [c[1] for c in children], ids), strict=True)
    )
    assert sum(got.values()) == total
    order = list(range(len(ids)))
    rng.shuffle(order)
    again = reconcile(
        total, [children[i][0] for i in order], [children[i][1] for i in order], [ids[i] for i in order]
    )
    assert {ids[i]: share for i, share in zip(order, again, strict=True)} == got


@given(MICROS, st.lists(st.tuples(MICROS.filter(bool), VARIANCES), min_size=1, max_size=6), st.integers(0, 6))
@QUICK
def test_a_null_child_gets_exactly_nothing_and_takes_nothing(total: int, children: list[tuple], at: int):
    ids = [f"u{i}" for i in range(len(children))]
    before = reconcile(total, [c[0] for c in children], [c[1] for c in children], ids)
    at = min(at, len(children))
    with_null = [*children[:at], (0, 0.0), *children[at:]]
    after = reconcile(
        total, [c[0] for c in with_null], [c[1] for c in with_null], [*ids[:at], "null", *ids[at:]]
    )
    assert after[at] == 0
    assert after[:at] + after[at + 1 :] == before


@st.composite
def trees(draw: st.DrawFn) -> list[Account]:
    accounts = [Account("0", "team", "", "", Anchored(None, 0.0, None, 0.0, ""))]
    for i in range(1, draw(st.integers(1, 20))):
        parent = str(draw(st.integers(0, i - 1)))
        raw, variance = draw(CHILD)
        accounts.append(Account(str(i), "agent", parent, "", Anchored(raw, variance, raw, variance, "")))
    return accounts


@given(trees(), MICROS, MICROS)
@QUICK
def test_any_tree_is_conserved_at_every_node(accounts: list[Account], reward: int, baseline: int):
    nodes = settle(accounts, reward - baseline)
    assert check_ledger(nodes, reward, baseline) == []


@given(trees(), MICROS, st.integers(1, 1000))
@QUICK
def test_the_check_can_fail(accounts: list[Account], total: int, by: int):
    nodes = list(settle(accounts, total))
    nodes[-1] = msgspec.structs.replace(nodes[-1], credit=nodes[-1].credit + by)
    assert check_ledger(nodes, total, 0)


@given(SEEDS, st.booleans(), st.booleans(), MICROS, st.one_of(st.none(), SEEDS))
@QUICK
def test_every_ledger_is_conserved(seed: int, tokens: bool, branching: bool, reward: int, salt: int | None):
    content = make_content(seed, tokens=tokens, branching=branching)
    ledger = build_ledger(content, reward, None if salt is None else value_of(salt))
    assert check_ledger(ledger.nodes, reward, ledger.baseline) == []
    leaves = {n.id for n in ledger.nodes} - {n.parent for n in ledger.nodes}
    assert sum(n.credit for n in ledger.nodes if n.id in leaves) + ledger.baseline == reward


@given(SEEDS, st.booleans(), st.randoms(use_true_random=False))
@QUICK
def test_the_order_of_what_is_listed_does_not_matter(seed: int, tokens: bool, rng: random.Random):
    content = make_content(seed, tokens=tokens, branching=True)

    def shuffled(items: tuple) -> tuple:
        return tuple(rng.sample(items, len(items)))

    mixed = msgspec.structs.replace(
        content, agents=shuffled(content.agents), calls=shuffled(content.calls), edges=shuffled(content.edges)
    )
    one, two = (build_ledger(c, 123_457, value_of(seed)) for c in (content, mixed))
    assert canonical_json(one.nodes) == canonical_json(two.nodes)


@given(SEEDS, st.booleans(), MICROS, MICROS)
@QUICK
def test_taking_a_reward_back_restores_the_ledger_bit_for_bit(
    seed: int, tokens: bool, first: int, second: int
):
    content = make_content(seed, tokens=tokens)
    value = value_of(seed)
    before = canonical_json(build_ledger(content, first, value).nodes)
    build_ledger(content, second, value)
    assert canonical_json(build_ledger(content, first, value).nodes) == before


@given(SEEDS, MICROS, MICROS)
@QUICK
def test_a_corrected_reward_moves_only_what_came_after_the_last_decision(seed: int, first: int, second: int):
    content = make_content(seed)
    value = value_of(seed)
    old, new = ({n.id: n for n in build_ledger(content, reward, value).nodes} for reward in (first, second))
    for unit in ("token", "message"):
        own = [key for key in new if new[key].unit == unit and new[key].subject.startswith("chatcmpl")]
        assert all(old[key] == new[key] for key in own)


@given(SEEDS)
@QUICK
def test_a_value_model_that_sees_no_difference_leaves_all_to_chance(seed: int):
    """Every account but the environment's (and sub-agents' after the last turn) is a null unit."""
    content = make_content(seed)
    ledger = build_ledger(content, 900_000, lambda state: 400_000)
    for node in ledger.nodes:
        if node.unit in {"token", "message"} and node.subject.startswith("chatcmpl"):
            assert node.credit == 0
    assert ledger.baseline == 400_000


@given(SEEDS, st.booleans())
@QUICK
def test_lessons_are_about_states_that_the_ledger_asks_for(seed: int, tokens: bool):
    content = make_content(seed, tokens=tokens)
    asked: set = set()

    def record(state):
        asked.add(state)
        return 0

    build_ledger(content, 0, record)
    learned = lessons(cast_of(content))
    assert {lesson.state for lesson in learned} <= asked
    assert {option for lesson in learned for option in lesson.options} <= asked


GAMES = st.dictionaries(
    st.frozensets(st.sampled_from("abcd"), min_size=1), st.integers(-(10**6), 10**6), min_size=1, max_size=6
)


def worth(terms: dict):
    return lambda done: sum(v for t, v in terms.items() if t <= done)


@given(GAMES, st.sets(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), max_size=4))
@QUICK
def test_order_averages_are_efficient_and_respect_precedence(terms: dict, pairs: set):
    before: dict[str, set[str]] = {}
    for first, second in pairs:
        if first < second:
            before.setdefault(second, set()).add(first)
    for order in linear_extensions(list("abcd"), before):
        assert sorted(order) == list("abcd")
        assert all(order.index(f) < order.index(s) for s, firsts in before.items() for f in firsts)
    got = average_differences(list("abcd"), before, worth(terms))
    assert sum(got.values()) == worth(terms)(frozenset("abcd"))
    for unit in "abcd":
        if not any(unit in term for term in terms):
            assert got[unit] == 0


@given(GAMES)
@QUICK
def test_leave_one_out_of_a_null_player_is_null_and_shares_nothing(terms: dict):
    units = list("abcd")
    found = leave_one_out(units, worth(terms))
    total = worth(terms)(frozenset(units))
    shares = dict(
        zip(
            units,
            reconcile(total, [found[u].raw for u in units], [found[u].variance for u in units], units),
            strict=True,
        )
    )
    assert sum(shares.values()) == total
    alive = {u for u in units if any(u in term for term in terms)}
    if any(found[u].raw or found[u].variance for u in alive):
        assert all(shares[u] == 0 for u in units if u not in alive)
