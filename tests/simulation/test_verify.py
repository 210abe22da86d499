"""``verify`` over the real stages: equal on an honest log, and it names what was changed."""

from __future__ import annotations

import random
from contextlib import closing

import msgspec
import pytest
from simulation.small_system import T0, append, job, outcome, run

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.pipeline.verify import verify
from spanloop.schemas.events import (
    CreditAssigned,
    OrchestrationRevised,
    RewardsComputed,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.settings import load_settings

PIPELINE = load_settings(None, {"pipeline": {"value_every": 8}}).pipeline


def check(path, pipeline=PIPELINE):
    clock = ManualClock(T0)
    with closing(SqliteLog(path, clock, create=False)) as log, closing(SqliteState(path, clock)) as state:
        return verify(log, state, pipeline, clock)


def last(path, kind):
    with closing(SqliteLog(path)) as log:
        found = [e for r in scan(log, [kind.TOPIC]) if isinstance(e := decode(r.value), kind)]
    return found[-1]


@pytest.fixture
def workspace(tmp_path):
    """Forty jobs, in any order, some in two parts with a revision between, feedback early, late and corrected."""
    path, rng = tmp_path / "spanloop.db", random.Random(5)
    jobs = [job(n, helpers=1 + n % 3) for n in range(40)]
    first = [batch for spans in jobs for batch in spans[: max(1, len(spans) - 1)]] + [
        outcome(n, 0.25) for n in range(0, 40, 2)
    ]
    rng.shuffle(first)
    second = [batch for spans in jobs for batch in spans] + [outcome(n, (n % 7) / 7) for n in range(1, 40, 2)]
    second += [outcome(4, 0.75, feedback_id="corrected"), outcome(6, 1.0, kind="response", target="r-6-lead")]
    rng.shuffle(second)
    append(path, first)
    run(path, PIPELINE, batch_max=7, fire_timers=False)
    clock = ManualClock(T0 + 400 * 10**9)  # time-outs close what is incomplete
    with closing(SqliteLog(path, clock)) as log, closing(SqliteState(path, clock)) as state:
        runtime = EmbeddedRuntime(build_stages(PIPELINE), log, state, clock, batch_max=50)
        runtime.restore()
        while runtime.step():
            pass
    for n in range(0, len(second), 20):
        append(path, second[n : n + 20])
        with closing(SqliteLog(path, clock)) as log, closing(SqliteState(path, clock)) as state:
            runtime = EmbeddedRuntime(build_stages(PIPELINE), log, state, clock, batch_max=9)
            runtime.restore()
            for _ in range(3):
                while runtime.step():
                    pass
                clock.advance(seconds=2)
    return path


def test_an_honest_log_replays_to_the_same_content(workspace):
    found = check(workspace)
    assert found.differences == []
    assert (found.orchestrations, found.equal, found.rewards, found.credits) == (40, 40, 40, 40)
    assert (found.open, found.behind, found.unread_records) == (0, 0, 0)
    assert found.models >= 2, (
        "credit must have used several versions, else the recorded version proves nothing"
    )
    assert last(workspace, OrchestrationRevised).revision > 1
    before = last(workspace, RewardsComputed)
    assert check(workspace).differences == []
    assert last(workspace, RewardsComputed) == before, "verify writes nothing"


def test_a_changed_reward_credit_or_orchestration_is_named(workspace):
    rewards = last(workspace, RewardsComputed)
    append(workspace, [msgspec.structs.replace(rewards, revision=99, team=(rewards.team or 0) + 1)])
    credit = last(workspace, CreditAssigned)
    append(workspace, [msgspec.structs.replace(credit, revision=99, baseline=credit.baseline - 1)])
    found = check(workspace)
    assert {(d.what, d.orchestration_id) for d in found.differences} == {
        ("rewards", rewards.orchestration_id), ("credit", credit.orchestration_id),
    }  # fmt: skip
    assert found.equal == 40 - len({rewards.orchestration_id, credit.orchestration_id})
    orchestration = last(workspace, OrchestrationRevised)
    content = msgspec.structs.replace(orchestration.content, flags=("invented",))
    append(workspace, [msgspec.structs.replace(orchestration, revision=99, content=content)])
    assert ("orchestration", orchestration.orchestration_id) in {
        (d.what, d.orchestration_id) for d in check(workspace).differences
    }


def test_status_and_revision_are_no_content(workspace):
    rewards = last(workspace, RewardsComputed)
    append(workspace, [msgspec.structs.replace(rewards, revision=99, status="provisional")])
    assert check(workspace).differences == []


def test_an_orchestration_that_no_span_supports_is_missing_and_a_lost_one_is_extra(workspace):
    invented = msgspec.structs.replace(
        last(workspace, OrchestrationRevised), orchestration_id="ab" * 16, revision=1
    )
    append(workspace, [invented])
    assert [(d.what, d.orchestration_id) for d in check(workspace).differences] == [("missing", "ab" * 16)]


def test_an_orchestration_that_the_log_lost_is_extra(workspace):
    lost = last(workspace, OrchestrationRevised)
    with closing(SqliteLog(workspace)) as log, log._file.transaction() as connection:
        connection.execute("DELETE FROM records WHERE topic = 'orchestrations' AND key = ?", (lost.key,))
    assert [(d.what, d.orchestration_id) for d in check(workspace).differences] == [
        ("extra", lost.orchestration_id)
    ]


def test_what_is_still_open_or_unread_is_not_wrong(tmp_path):
    path = tmp_path / "spanloop.db"
    append(path, [*job(1), *job(2, complete=False), outcome(1, 0.5)])
    run(path, PIPELINE, fire_timers=False)
    found = check(path)
    assert (found.differences, found.orchestrations, found.open) == ([], 0, 2)
    append(path, job(3))
    found = check(path)
    assert (found.differences, found.unread_records) == ([], len(job(3)))


def test_an_empty_workspace_is_equal(tmp_path):
    SqliteLog(tmp_path / "spanloop.db").close()
    found = check(tmp_path / "spanloop.db")
    assert (found.differences, found.orchestrations) == ([], 0)


def test_a_value_model_that_is_not_on_the_log_is_told(workspace):
    version = last(workspace, ValueModelPublished).version
    with closing(SqliteLog(workspace)) as log, log._file.transaction() as connection:
        connection.execute("DELETE FROM records WHERE topic = 'models'")
    found = check(workspace)
    assert version.startswith("value@v")
    assert any("is not on the log" in d.recorded for d in found.differences)


def test_other_settings_are_seen(workspace):
    other = load_settings(None, {"pipeline": {"finish_weight": 0.5, "value_every": 8}}).pipeline
    assert {d.what for d in check(workspace, other).differences} >= {"rewards"}
