"""Promotion rules: the fold's cases and what is decided next."""

from __future__ import annotations

from typing import Any

import pytest

from spanloop.learner.canary import Verdict
from spanloop.learner.promotion import (
    EvaluateGate,
    Facts,
    FinishCanary,
    Promote,
    PromotionState,
    StartCanary,
    Withdraw,
    decide,
    desired_routing,
    fold,
)  # fmt: skip
from spanloop.schemas.events import (
    BatchCommitted,
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    Event,
    GateEvaluated,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
    PolicyRolledBack,
    RoutingChanged,
)  # fmt: skip
from spanloop.schemas.settings import Learner

SETTINGS = Learner(gate_every=2)  # type: ignore[call-arg]
READY = Facts(heldout=100)


def candidate(
    version: int, batch: int | None = None, injected: str = "", **changes: Any
) -> CandidateRegistered:
    return CandidateRegistered(
        version=version, parent=version - 1, batch=version if batch is None else batch, mlflow_version=str(version + 1),
        path=f"policies/policy@v{version}", sha256="0" * 64, orchestrations=8, injected=injected, **changes,
    )  # fmt: skip


def gate(
    version: int,
    *,
    passed: bool = True,
    against: int = 0,
    attempt: int = 0,
    estimate: int = 50,
    lower: int = 10,
) -> GateEvaluated:
    return GateEvaluated(
        version=version,
        against=against,
        attempt=attempt,
        estimate=estimate,
        lower=lower,
        ess=50.0,
        n=60,
        passed=passed,
    )


def started(canary: int, version: int, against: int = 0) -> CanaryStarted:
    return CanaryStarted(canary=canary, version=version, against=against, share=0.25, from_offset=9)


def finished(canary: int, version: int, verdict: str, against: int = 0) -> CanaryFinished:
    return CanaryFinished(
        canary=canary, version=version, against=against, verdict=verdict, n_version=60, n_against=60, difference=1,
        lower=0, upper=2, reason="why",
    )  # fmt: skip


def promoted(epoch: int, version: int, previous: int = -1) -> PolicyPromoted:
    return PolicyPromoted(epoch=epoch, version=version, previous=previous, reason="r")


def after(*events: Event) -> PromotionState:
    return fold((e, i) for i, e in enumerate(events))


BOOT = (candidate(0), promoted(1, 0))


def test_first_version_is_promoted_at_once() -> None:
    assert decide(PromotionState(), Facts(), SETTINGS) is None
    assert decide(after(candidate(0)), Facts(), SETTINGS) == Promote(0, "bootstrap")
    assert decide(after(*BOOT), READY, SETTINGS) is None


def test_newest_is_gated_every_so_many_batches() -> None:
    assert decide(after(*BOOT, candidate(1)), READY, SETTINGS) is None
    two = after(*BOOT, candidate(1), candidate(2))
    assert decide(two, READY, SETTINGS) == EvaluateGate(2, 0)
    assert decide(two, Facts(heldout=5), SETTINGS) is None
    failed = after(*BOOT, candidate(1), candidate(2), gate(2, passed=False), candidate(3))
    assert decide(failed, READY, SETTINGS) is None


def test_gate_canary_promotion() -> None:
    events: list[Event] = [*BOOT, candidate(2), gate(2)]
    assert decide(after(*events), READY, SETTINGS) == StartCanary(2)
    events.append(started(0, 2))
    assert decide(after(*events), READY, SETTINGS) is None
    won = Verdict("promote", 0.1, 0.01, 0.2, 60, 60, "above")
    assert decide(after(*events), Facts(canary=won), SETTINGS) == FinishCanary(won)
    events.append(finished(0, 2, "promote"))
    assert decide(after(*events), READY, SETTINGS) == Promote(2, "canary 0: why")
    events.append(promoted(2, 2, 0))
    state = after(*events)
    assert (state.champion, state.epoch, state.champions, state.verdict) == (2, 2, (0, 2), None)
    assert decide(state, READY, SETTINGS) is None


def test_a_losing_canary_is_withdrawn_and_never_comes_back() -> None:
    events = [*BOOT, candidate(2), gate(2), started(0, 2), finished(0, 2, "reject")]
    assert decide(after(*events), READY, SETTINGS) == Withdraw(2, "canary 0: why")
    state = after(*events, PolicyRolledBack(epoch=2, version=2, to=0, reason="lost"))
    assert (state.champion, state.epoch, state.retired) == (0, 2, frozenset({2}))
    assert state.newest == 0
    assert decide(state, READY, SETTINGS) is None


def test_injected_goes_first_and_is_tried_once() -> None:
    events = [
        *BOOT,
        candidate(1),
        candidate(2),
        candidate(3, batch=2, injected="demo"),
        candidate(4, batch=3),
    ]
    assert decide(after(*events), READY, SETTINGS) == EvaluateGate(3, 0)
    refused = after(*events, gate(3, passed=False))
    assert 3 in refused.retired
    assert decide(refused, READY, SETTINGS) == EvaluateGate(4, 0)
    passed = after(*events, gate(4), gate(3))
    assert decide(passed, READY, SETTINGS) == StartCanary(3)
    undecided = after(*events, gate(3), started(0, 3), finished(0, 3, "inconclusive"))
    assert 3 in undecided.retired


def test_an_injected_version_is_gated_before_a_waiting_own_version_gets_the_canary() -> None:
    events = [*BOOT, candidate(2), gate(2), candidate(3, batch=2, injected="demo")]
    assert after(*events).ready == 2
    assert decide(after(*events), READY, SETTINGS) == EvaluateGate(3, 0)
    assert decide(after(*events), Facts(heldout=5), SETTINGS) == StartCanary(2)
    assert decide(after(*events, gate(3)), READY, SETTINGS) == StartCanary(3)
    assert decide(after(*events, gate(3, passed=False)), READY, SETTINGS) == StartCanary(2)


def test_a_passed_injected_version_is_gated_again_when_the_champion_changed() -> None:
    events = [*BOOT, candidate(2), gate(2), started(0, 2), candidate(3, batch=2, injected="demo"), gate(3)]
    assert after(*events).queue == (3,)
    state = after(*events, finished(0, 2, "promote"), promoted(2, 2, 0))
    assert state.queue == ()
    assert decide(state, READY, SETTINGS) == EvaluateGate(3, 1)


def test_a_much_better_candidate_supersedes_an_own_canary_only() -> None:
    base = [*BOOT, candidate(2), gate(2, estimate=100, lower=50), started(0, 2), candidate(4)]
    better, alike = gate(4, estimate=300, lower=200), gate(4, estimate=110, lower=90)
    action = decide(after(*base, better), READY, SETTINGS)
    assert isinstance(action, FinishCanary)
    assert "better by its gate" in action.verdict.reason
    assert decide(after(*base, alike), READY, SETTINGS) is None
    seen = Facts(heldout=100, canary=Verdict("", 0.0001, -0.1, 0.1, 60, 60))
    assert decide(after(*base, better), seen, SETTINGS) is None
    injected = [*BOOT, candidate(2, injected="x"), gate(2), started(0, 2), candidate(4), better]
    assert decide(after(*injected), READY, SETTINGS) is None


def test_canary_ends_when_its_ground_changes() -> None:
    base = [*BOOT, candidate(1), candidate(2), gate(2), started(0, 2)]
    away = after(*base, PolicyRolledBack(epoch=2, version=0, to=1, reason="by hand"))
    for state, facts in (
        (away, READY),
        (after(*base), Facts(unroutable=frozenset({2}))),
        (after(*base, PolicyCommand(command_id="c", kind="freeze"), PolicyCommandFinished(command_id="c", status="done")), READY),
    ):  # fmt: skip
        action = decide(state, facts, SETTINGS)
        assert isinstance(action, FinishCanary)
        assert action.verdict.verdict == "inconclusive"


def test_gate_off_promotes_the_newest() -> None:
    off = SETTINGS.model_copy(update={"gate": False})
    state = after(*BOOT, candidate(1), candidate(2))
    assert decide(state, Facts(), off) == Promote(2, "gate is off")
    assert decide(state, Facts(unroutable=frozenset({2})), off) == Promote(1, "gate is off")


def test_rollback_takes_the_bad_champion_out_of_history() -> None:
    state = after(*BOOT, candidate(1), promoted(2, 1, 0), candidate(2), promoted(3, 2, 1))
    assert state.previous_champion == 1
    back = fold([(PolicyRolledBack(epoch=4, version=2, to=1, reason="bad"), 0)], state)
    assert (back.champion, back.previous_champion, back.retired) == (1, 0, frozenset({2}))


def test_of_two_promoters_the_first_record_of_an_epoch_counts() -> None:
    state = after(*BOOT, candidate(1), candidate(2), promoted(2, 1, 0), promoted(2, 2, 0))
    assert (state.champion, state.epoch) == (1, 2)
    assert promoted(2, 1).event_id == promoted(2, 2).event_id
    assert promoted(2, 1).event_id == PolicyRolledBack(epoch=2, version=1, to=0, reason="").event_id


def route(state: PromotionState, **changes: Any) -> RoutingChanged | None:
    return desired_routing(state, SETTINGS.model_copy(update=changes), tenant="default", policy="policy")


def test_routing() -> None:
    assert route(PromotionState()) is None
    first = route(after(*BOOT))
    assert first is not None
    assert (first.sequence, first.champion, first.learner, first.champion_share_min) == (0, 0, -1, 1.0)
    assert route(after(*BOOT, first)) is None
    state = after(*BOOT, first, candidate(1), candidate(2), gate(1), started(0, 1))
    both = route(state)
    assert both is not None
    assert (both.sequence, both.learner, both.learning_share, both.canary, both.canary_share) == (
        1,
        2,
        0.5,
        1,
        0.25,
    )
    assert both.champion_share_min == 0.25
    crowded = route(state, learning_share=0.9)
    assert crowded is not None
    assert crowded.champion_share_min == pytest.approx(crowded.canary_share)
    refused = desired_routing(state, SETTINGS, tenant="default", policy="policy", unroutable={2})
    assert refused is not None
    assert refused.learner == 1
    frozen = fold(
        [
            (PolicyCommand(command_id="c", kind="freeze"), 0),
            (PolicyCommandFinished(command_id="c", status="done"), 0),
        ],
        fold([(both, 0)], state),
    )
    calm = route(frozen)
    assert calm is not None
    assert (calm.champion, calm.learner, calm.canary) == (0, -1, -1)


def test_commands_are_taken_once() -> None:
    asked = PolicyCommand(command_id="c", kind="inject", argument="x")
    state = after(*BOOT, asked, asked)
    assert len(state.commands) == 1
    did = after(*BOOT, asked, candidate(1, injected="x", command="c"))
    assert did.commanded == {"c": 1}
    assert len(did.commands) == 1
    done = after(*BOOT, asked, PolicyCommandFinished(command_id="c", status="refused"), asked)
    assert done.commands == ()


def test_batches_are_remembered() -> None:
    one = BatchCommitted(batch=1, from_offset=-1, to_offset=5, parent_version=0)
    two = BatchCommitted(batch=2, from_offset=5, to_offset=9, parent_version=1)
    assert after(one, two, one).last_batch == two
