"""The decision policy through the learner of any policy: learned, promoted, replayed bit for bit, killed, injected, rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import decision_world
import numpy as np
import pytest
from decision_world import World, share_right
from learner_world import append, counts, drive

from spanloop.learner.history import read_policies
from spanloop.learner.registry import MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner, initial_policy
from spanloop.learner.training import replay
from spanloop.learner.update import exact_numerics
from spanloop.pipeline.clock import ManualClock, SystemClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import PolicyCommand, PolicyCommandFinished, PolicyPromoted


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_numerics():
        yield


def learner(log, workspace: Path, *, registry=None, serving=None, **section) -> Learner:
    made = Learner(
        decision_world.settings(workspace, **section), log=log, registry=registry or MemoryRegistry(),
        serving=serving or MemoryServing(), clock=ManualClock(10**18),
    )  # fmt: skip
    made.start()
    return made


@pytest.mark.parametrize("section", [{}, {"objective": "reinforce"}], ids=["default", "reinforce"])
def test_what_is_learned_holds_for_menus_never_seen(section: dict[str, str], tmp_path: Path) -> None:
    log = MemoryLog(SystemClock())
    made = learner(log, tmp_path, **section)
    before = share_right(made.training.updater.net)
    drive(made, log, World(), 24)  # type: ignore[arg-type]
    assert before < 0.4
    assert share_right(made.training.updater.net) > (0.5 if section else 0.75)


def test_candidates_pass_gate_and_canary_and_the_log_replays_to_the_same_bits(tmp_path: Path) -> None:
    log = MemoryLog(SystemClock())
    made = learner(log, tmp_path)
    drive(made, log, World(), 40)  # type: ignore[arg-type]
    events = [event for event, _ in read_policies(log, "default", "policy")]
    found = counts(events)
    assert found["GateEvaluated"] > 0
    assert found["CanaryFinished"] > 0
    champions = [event.version for event in events if isinstance(event, PolicyPromoted)]
    assert champions[-1] > 0
    assert share_right(made.promoter.net(champions[-1])) > 0.6  # type: ignore[arg-type]
    config, _, first = initial_policy(decision_world.settings(tmp_path))
    assert replay(log, config, first) == made.training.weights_hash()
    assert replay(log, config, first) == made.training.weights_hash()


class Killed(BaseException):
    pass


def test_killed_again_and_again_it_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(workspace: Path, *, kill: bool) -> str:
        log, registry, serving, world = (
            MemoryLog(SystemClock()),
            MemoryRegistry(),
            MemoryServing(),
            World(noise=0.0),
        )
        rng, deaths = np.random.default_rng(5), np.random.default_rng(6)
        made = learner(log, workspace, registry=registry, serving=serving, sentinels=False)
        made.step()
        first = made.promoter.net(0)
        for _ in range(12):
            append(log, [world.play(first, 0, holdout=bool(rng.random() < 0.3)) for _ in range(20)])  # type: ignore[arg-type]
            if kill and deaths.random() < 0.7:
                place = ("train", "save")[int(deaths.integers(2))]
                with monkeypatch.context() as patch:

                    def die(*_: object, **__: object) -> None:
                        raise Killed

                    patch.setattr(made.training, place, die)
                    with contextlib.suppress(Killed):
                        made.step()
                made = learner(log, workspace, registry=registry, serving=serving, sentinels=False)
            made.step()
        return made.training.weights_hash()

    assert run(tmp_path / "killed", kill=True) == run(tmp_path / "calm", kill=False)


def test_injection_and_rollback(tmp_path: Path) -> None:
    log = MemoryLog(SystemClock())
    made = learner(log, tmp_path)
    drive(made, log, World(), 24)  # type: ignore[arg-type]
    outside = tmp_path / "made-elsewhere"
    made.training.updater.net.save(outside, None, {})
    for kind, argument in (
        ("inject", str(outside)),
        ("rollback", "0"),
        ("inject", str(tmp_path / "nothing")),
    ):
        log.append([new_record(PolicyCommand(command_id=kind + argument, kind=kind, argument=argument))])
        made.step()
    done = [e for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyCommandFinished)]
    assert [event.status for event in done] == ["done", "done", "refused"]
    assert made.promoter.state.routing is not None
    assert made.promoter.state.routing.champion == 0


def test_settings_of_another_shape_are_refused(tmp_path: Path) -> None:
    log = MemoryLog(SystemClock())
    learner(log, tmp_path).step()
    with pytest.raises(ConfigError, match="has a policy of"):
        initial_policy(decision_world.settings(tmp_path, width=16))
    with pytest.raises(ConfigError, match="a workspace has one policy"):
        decision_world.settings(tmp_path, vocabulary=["a"])
