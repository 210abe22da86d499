"""Laws of the learner: folds do not care how their input is cut or repeated; advantages are centred; weights replay."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import CONFIG, World

from spanloop.learner.batches import group_advantages
from spanloop.learner.canary import Arm
from spanloop.learner.gate import balance_weights, snips
from spanloop.learner.policy import PolicyNet
from spanloop.learner.promotion import Facts, PromotionState, apply, decide, fold
from spanloop.learner.window import Window
from spanloop.schemas.events import (
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    Event,
    GateEvaluated,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
    PolicyRolledBack,
    SamplesBuilt,
    decode,
    encode,
)  # fmt: skip
from spanloop.schemas.settings import Learner

VERSIONS = st.integers(0, 5)
NET = PolicyNet.initial(CONFIG, 0)


def _event(draw: st.DrawFn) -> Event:
    v, w, n = draw(VERSIONS), draw(VERSIONS), draw(st.integers(0, 4))
    kind = draw(st.integers(0, 7))
    injected = draw(st.sampled_from(["", "x"]))
    verdict = draw(st.sampled_from(["promote", "reject", "inconclusive"]))
    return [
        CandidateRegistered(version=v, parent=w, batch=v, mlflow_version="1", path="p", sha256="s", orchestrations=1, injected=injected),
        GateEvaluated(version=v, against=w, attempt=n, estimate=5, lower=1, ess=9.0, n=9, passed=draw(st.booleans())),
        CanaryStarted(canary=n, version=v, against=w, share=0.2, from_offset=1),
        CanaryFinished(canary=n, version=v, against=w, verdict=verdict, n_version=1, n_against=1, difference=0, lower=0, upper=0),
        PolicyPromoted(epoch=n, version=v, previous=w, reason="r"),
        PolicyRolledBack(epoch=n, version=v, to=w, reason="r"),
        PolicyCommand(command_id=str(n), kind=draw(st.sampled_from(["freeze", "unfreeze", "inject"]))),
        PolicyCommandFinished(command_id=str(n), status="done", version=v),
    ][kind]  # fmt: skip


EVENTS = st.lists(st.composite(_event)(), max_size=25)


@given(EVENTS, st.integers(0, 25))
@settings(max_examples=60, deadline=None)
def test_promotion_folds_by_prefix_and_from_bytes(events: list[Event], cut: int) -> None:
    """Restart at any prefix, with events read back from the log: the same state."""
    whole = fold((e, 0) for e in events)
    again = fold(((decode(encode(e)), 0) for e in events[cut:]), fold((e, 0) for e in events[:cut]))
    assert whole == again


@given(EVENTS)
@settings(max_examples=60, deadline=None)
def test_promotion_ignores_repeats(events: list[Event]) -> None:
    state = PromotionState()
    for event in events:
        once = apply(state, event)
        assert apply(once, event) == once
        assert once.epoch >= state.epoch
        state = once


@given(EVENTS, st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_no_retired_version_is_promoted(events: list[Event], heldout: int) -> None:
    state = fold((e, 0) for e in events)
    for gate in (True, False):
        action = decide(state, Facts(heldout=heldout), Learner(gate=gate))  # type: ignore[call-arg]
        version = getattr(action, "version", -1)
        pending = state.verdict is not None and state.verdict.version == version
        assert pending or version < 0 or version not in state.retired or state.champion < 0


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=9),
    st.randoms(),
)
@settings(max_examples=80, deadline=None)
def test_group_advantages_are_finite_centred_and_order_free(
    rewards: list[float | None], rng: random.Random
) -> None:
    got = group_advantages(rewards)
    kept = [v for v in got.values if v is not None]
    assert len(kept) + got.dropped == len(rewards)
    assert all(map(math.isfinite, kept))
    assert abs(math.fsum(kept)) < 1e-6
    order = list(range(len(rewards)))
    rng.shuffle(order)
    moved = group_advantages([rewards[i] for i in order])
    assert [moved.values[k] for k in range(len(order))] == [got.values[i] for i in order]


def _samples(count: int) -> list[SamplesBuilt]:
    world = World()
    made = [world.play(NET, i % 4, holdout=i % 5 == 0) for i in range(count)]
    extra = [
        msgspec.structs.replace(made[i], revision=2, rows=() if i % 2 else made[i].rows)
        for i in range(0, count, 3)
    ]
    return made + extra


@given(st.integers(1, 12), st.lists(st.integers(0, 15), max_size=4))
@settings(max_examples=20, deadline=None)
def test_a_window_does_not_see_duplicates(count: int, repeats: list[int]) -> None:
    def run(samples: list[SamplesBuilt]) -> Window:
        window = Window(
            ledger={},
            lag=lambda v: 3 - v,
            max_staleness=2,
            vocabulary_size=CONFIG.vocabulary_size,
            context=CONFIG.context,
        )
        for built in samples:
            window.add(built)
        return window

    samples = _samples(count)
    noisy = [copy for i, built in enumerate(samples) for copy in [built] * (1 + repeats.count(i))]
    clean, dirty = run(samples), run(noisy)
    assert clean.rollouts() == dirty.rollouts()
    assert clean.dropped() == dirty.dropped()
    assert clean.trainable == len(clean.rollouts())


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(-(10**6), 10**6)), max_size=20),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_an_arm_is_its_last_revisions(rows: list[tuple[int, int, int]], rng: random.Random) -> None:
    facts = {(o, r): g for o, r, g in rows}
    order = list(facts)
    rng.shuffle(order)
    arm = Arm()
    for o, r in order:
        arm.add(str(o), r, facts[o, r])
    last = {o: facts[o, max(r for p, r in facts if p == o)] for o, _ in facts}
    assert arm.count == len(last)
    assert arm.mean == (sum(last.values()) / len(last) / 1e6 if last else 0.0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_balance_weights_are_bounded_and_snips_is_shift_equivariant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loggers = np.log(rng.dirichlet(np.ones(40), 3).T)
    shares = rng.dirichlet(np.ones(3))
    weights = balance_weights(loggers[:, 1], loggers, shares)
    assert float(weights.max()) <= 1 / shares[1] * (1 + 1e-9)
    gains = rng.normal(size=40)
    assert math.isclose(snips(weights, gains + 3.0).value, snips(weights, gains).value + 3.0, abs_tol=1e-9)
