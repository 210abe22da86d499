"""Which orchestrations a batch trains on: roles, sources, late revisions, groups that wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import CONFIG, World, append, learner, traffic

from spanloop.learner.arrays import collate, roles_of, standardised
from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.policy import PolicyNet
from spanloop.learner.trainer import initial_policy
from spanloop.learner.training import Training, replay
from spanloop.learner.update import Hyper, exact_numerics, hyper_of
from spanloop.learner.window import Window, correction
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import BatchCommitted, SamplesBuilt, decode
from spanloop.schemas.settings import load_settings

NET = PolicyNet.initial(CONFIG, 0)


def built(number: int, revision: int = 1, *, advantage: float | None = None, **changes: Any) -> SamplesBuilt:
    world = World()
    world.played = number
    made = msgspec.structs.replace(world.play(NET, 0), revision=revision, **changes)
    if advantage is None:
        return made
    rows = tuple(msgspec.structs.replace(row, advantages=(micro(advantage),)) for row in made.rows)
    return msgspec.structs.replace(made, rows=rows)


def window(**changes: Any) -> Window:
    options: dict[str, Any] = {
        "ledger": {}, "lag": lambda v: 1, "max_staleness": 4, "vocabulary_size": CONFIG.vocabulary_size,
        "context": CONFIG.context, **changes,
    }  # fmt: skip
    return Window(**options)


def rollout(event: SamplesBuilt, **options: Any) -> Rollout:
    made = to_rollout(event, vocabulary_size=CONFIG.vocabulary_size, context=CONFIG.context, **options)
    assert isinstance(made, Rollout)
    return made


def with_roles(event: SamplesBuilt, *roles: str) -> SamplesBuilt:
    rows = [msgspec.structs.replace(row, role=role) for row, role in zip(event.rows, roles, strict=True)]
    return msgspec.structs.replace(event, rows=tuple(rows))


# ---------------------------------------------------------------- roles


def test_frozen_roles_act_and_are_not_taught() -> None:
    event = with_roles(built(0), "boss", "helper")
    both, one = rollout(event), rollout(event, roles={"boss"})
    assert (len(both.calls), len(one.calls), one.frozen) == (2, 1, 1)
    assert one.calls[0].role == "boss"
    taking = window(roles={"nobody"})
    taking.add(event)
    assert taking.dropped() == {"frozen_roles": 1}


def test_a_frozen_row_cannot_spoil_its_orchestration() -> None:
    event = with_roles(built(0), "boss", "helper")
    rows = (
        event.rows[0],
        msgspec.structs.replace(event.rows[1], prompt_token_ids=(99,), policy_version="gpt"),
    )
    assert rollout(msgspec.structs.replace(event, rows=rows), roles={"boss"}).versions == (0,)


def test_each_role_by_its_own_scale() -> None:
    rollouts = [rollout(with_roles(built(i), "boss", "helper")) for i in range(8)]
    small = [
        msgspec.structs.replace(
            r,
            calls=tuple(
                msgspec.structs.replace(
                    c,
                    decisions=tuple(
                        msgspec.structs.replace(
                            d, advantage=d.advantage * (0.01 if c.role == "helper" else 1.0)
                        )
                        for d in c.decisions
                    ),
                )
                for c in r.calls
            ),
        )
        for r in rollouts
    ]
    group_N = roles_of(small)
    assert group_N.tolist() == [0, 1] * 8
    scaled = standardised(collate(small), group_N)
    for role in (0, 1):
        own = scaled.advantage_N[group_N == role]
        assert float(np.sqrt(np.mean(own**2))) == pytest.approx(1.0, rel=1e-5)
    assert np.array_equal(np.sign(scaled.advantage_N), np.sign(collate(small).advantage_N))
    one = standardised(collate(small), np.zeros(16, np.int64))
    np.testing.assert_allclose(one.advantage_N, standardised(collate(small)).advantage_N, rtol=1e-6)


# ---------------------------------------------------------------- sources


def test_no_source_fills_a_batch() -> None:
    taking = window(source_max=2)
    for number in range(5):
        taking.add(built(number, harness="loud"))
    taking.add(built(5, harness="quiet"))
    assert taking.trainable == 3
    assert taking.dropped() == {"source_share": 3}
    taking.add(built(0, 2, harness="loud", rows=()))
    taking.add(built(3, 2, harness="loud"))
    assert taking.trainable == 3, "what was taken back makes room for a later revision"


# ---------------------------------------------------------------- truncated sampling


def test_cut_options_are_trained_on_only_where_they_are_known() -> None:
    event = built(0)
    cut = msgspec.structs.replace(event, rows=tuple(msgspec.structs.replace(r, cut=True) for r in event.rows))
    known = rollout(cut, full_vocabulary=True)
    assert known.calls[0].decisions[0].menu, "a menu of mass 1 is what was left: the ratio is over it"
    bare = tuple(msgspec.structs.replace(r, menu_ids=(), menu_logprobs=(), menu_values=()) for r in cut.rows)
    unknown = msgspec.structs.replace(cut, rows=bare)
    found = to_rollout(unknown, vocabulary_size=11, context=16, full_vocabulary=True)
    assert found == "truncated_sampling"
    whole = msgspec.structs.replace(unknown, rows=tuple(msgspec.structs.replace(r, cut=False) for r in bare))
    assert isinstance(to_rollout(whole, vocabulary_size=11, context=16, full_vocabulary=True), Rollout)


# ---------------------------------------------------------------- late revisions


def test_what_a_late_revision_changes_is_taught() -> None:
    first, late = built(0, advantage=0.5), built(0, 2, advantage=-0.25)
    taking = window(ledger={first.orchestration_id: 3}, taught=lambda _: first)
    assert taking.add(late, 7) == 0, "it does not fill the batch"
    (found,) = taking.rollouts()
    assert found.corrects == 3
    assert [d.advantage for c in found.calls for d in c.decisions] == pytest.approx([-0.75, -0.75])
    assert taking.taught() == {first.orchestration_id: 7}
    assert window(ledger={first.orchestration_id: 3}).add(late) == 0


def test_what_is_joined_elsewhere_is_taken_back() -> None:
    first = built(0, advantage=0.5)
    taking = window(ledger={first.orchestration_id: 1}, taught=lambda _: first)
    taking.add(built(0, 2, rows=()))
    (found,) = taking.rollouts()
    assert [d.advantage for c in found.calls for d in c.decisions] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("late", "options", "reason"),
    [
        (built(0, 2), {}, "used"),
        (built(0, 2, advantage=0.5), {"lag": lambda v: 9}, "stale_correction"),
        (built(0, 2, advantage=0.5), {"taught": lambda _: None}, "used"),
        (built(0, 1, advantage=0.5), {}, "used"),
    ],
)
def test_what_is_not_made_up_for(late: SamplesBuilt, options: dict[str, Any], reason: str) -> None:
    taking = window(**{"ledger": {late.orchestration_id: 1}, "taught": lambda _: built(0), **options})
    taking.add(late)
    assert taking.dropped() == {reason: 1}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-4, 4), st.booleans()), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_what_was_taught_adds_up_to_the_last_revision(told: list[tuple[int, int, bool]]) -> None:
    """Whatever the batches' boundaries: of each decision the advantages taught sum to what its last revision says."""
    ledger: dict[str, int] = {}
    places: dict[str, SamplesBuilt] = {}
    total: dict[tuple[str, int], float] = {}
    last: dict[str, float] = {}
    revision: dict[int, int] = {}
    taking = window(ledger=ledger, taught=places.get)
    pending: dict[str, SamplesBuilt] = {}

    def close() -> None:
        for found in taking.rollouts():
            for call in found.calls:
                for d in call.decisions:
                    key = (f"{found.orchestration_id}/{call.call_id}", d.position)
                    total[key] = total.get(key, 0.0) + d.advantage
            ledger[found.orchestration_id] = 1
            places[found.orchestration_id] = pending[found.orchestration_id]
        pending.clear()

    for number, value, ends in told:
        revision[number] = revision.get(number, 0) + 1
        event = built(number, revision[number], advantage=value / 4)
        taking.add(event)
        pending[event.orchestration_id] = event
        last[event.orchestration_id] = value / 4
        if ends:
            close()
            taking = window(ledger=ledger, taught=places.get)
    close()
    for (name, _), taught in total.items():
        assert taught == pytest.approx(last[name.split("/")[0]])


def test_a_correction_of_nothing_is_none() -> None:
    same = rollout(built(0))
    assert correction(same, same, batch=1) is None


def test_a_late_revision_is_trained_on_once_and_replays(tmp_path: Path) -> None:
    with exact_numerics():
        _late_revisions(tmp_path)


def _late_revisions(tmp_path: Path) -> None:
    log, world = MemoryLog(ManualClock(10**18)), World()
    made = learner(log, tmp_path, gate=False, sentinels=False, advantage="ledger")
    made.step()
    rng = np.random.default_rng(0)
    events = [e for e in traffic(made, world, 60, rng) if not e.holdout]
    append(log, events[:20])
    assert made.step()
    late = [
        msgspec.structs.replace(
            e, revision=2, rows=tuple(msgspec.structs.replace(r, advantages=(micro(-0.9),)) for r in e.rows)
        )
        for e in events[:3]
    ]
    append(log, [*late, *events[20:36]])
    assert made.step()
    report = made.training.state.report
    assert report is not None
    assert (report.orchestrations, report.metrics["orchestrations"], report.metrics["corrections"]) == (
        19,
        16,
        3,
    )
    append(log, late)  # delivered again
    config, _, first = initial_policy(made.settings)
    assert replay(log, config, first) == made.training.weights_hash()
    again = learner(log, tmp_path, gate=False, sentinels=False, advantage="ledger")
    assert again.training.weights_hash() == made.training.weights_hash()
    assert again.training.state.taught == made.training.state.taught


def test_batches_of_before_corrections_replay_as_they_were() -> None:
    old = BatchCommitted(
        policy="policy", batch=1, from_offset=-1, to_offset=3, parent_version=0,
        parameters={k: v for k, v in msgspec.to_builtins(hyper_of(load_settings())).items() if k != "corrections"},
    )  # fmt: skip
    assert not msgspec.convert(old.parameters, Hyper).corrections
    assert hyper_of(load_settings()).corrections


# ---------------------------------------------------------------- groups, and why nothing happens


def test_a_batch_waits_for_its_groups_and_no_longer_than_it_may(tmp_path: Path) -> None:
    clock = ManualClock(10**18)
    log, world = MemoryLog(clock), World()
    made = learner(
        log, tmp_path, clock=clock, gate=False, sentinels=False, advantage="group", group_size=4,
        group_timeout_s=60.0, batch_orchestrations=6,
    )  # fmt: skip
    made.step()
    rng = np.random.default_rng(0)
    events = [e for e in traffic(made, world, 40, rng) if not e.holdout][:16]
    events = [msgspec.structs.replace(e, group=f"g{i // 4}") for i, e in enumerate(events)]
    append(log, events[:6])
    assert not made.step()
    assert made.idle_reason() == "6 orchestrations wait for the rest of their groups"
    append(log, events[6:8])
    assert made.step()
    assert made.training.state.report is not None
    assert made.training.state.report.orchestrations == 8
    append(log, events[8:14])
    assert not made.step()
    clock.advance(seconds=61)
    assert made.step()
    assert made.training.state.report.orchestrations == 6


def test_the_learner_says_why_it_waits(tmp_path: Path) -> None:
    log, world = MemoryLog(ManualClock(10**18)), World()
    made = learner(log, tmp_path, gate=False, sentinels=False)
    made.step()
    append(log, [world.play(NET, 0), world.play(NET, 0, holdout=True)])
    assert not made.step()
    assert made.idle_reason() == "1 of 16 trainable orchestrations have come; left out: 1 holdout"


def test_a_stall_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import threading

    from spanloop.learner.trainer import run

    log = MemoryLog(ManualClock(10**18))
    made = learner(log, tmp_path, gate=False, sentinels=False, stall_s=0.05)
    stop = threading.Event()
    threading.Timer(0.6, stop.set).start()
    run(made, stop, ready=lambda: None)
    assert "no batch was trained for 0 s: 0 of 16 trainable orchestrations have come" in caplog.text
    assert decode(log.read(["policies"], {}, 1)[0].value)
    assert isinstance(made.training, Training)
