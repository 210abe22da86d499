"""The learner killed at every effect it has: the same weights as an undisturbed replay, and log, alias and routing agree.

An effect is an append to the log, a checkpoint, an artifact, a call to MLflow or to serving. The process "dies" just before
or just after the chosen one; a new Learner starts on what is durable: log, workspace, registry and serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_world import CONFIG, World, append, counts, learner, share_right, traffic

from spanloop.learner import checkpoint as checkpoints
from spanloop.learner import promoter as promoters
from spanloop.learner.history import read_policies, read_samples
from spanloop.learner.policy import PolicyNet, save_artifact
from spanloop.learner.promotion import desired_routing, fold
from spanloop.learner.registry import ALIASES, MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.training import Training, replay
from spanloop.learner.update import exact_numerics
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import Appended, NewRecord, new_record
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.events import (
    BatchCommitted,
    PolicyCommand,
    PolicyPromoted,
    PolicyRolledBack,
    SamplesBuilt,
)


@pytest.fixture(autouse=True)
def _numerics() -> Iterator[None]:
    """As in the learner's process."""
    with exact_numerics():
        yield


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Effects:
    """Counts effects and dies at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.die_at = -1
        self.after = False

    def do(self, effect: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count != self.die_at:
            return effect()
        if self.after:
            effect()
        raise Killed


class FragileLog(MemoryLog):
    def __init__(self, effects: Effects) -> None:
        super().__init__(ManualClock(10**18))
        self.effects = effects

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        if any(r.topic == "policies" for r in records):
            return self.effects.do(lambda: MemoryLog.append(self, records))
        return super().append(records)


class FragileRegistry(MemoryRegistry):
    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects

    def register(self, *args: Any, **kwargs: Any) -> str:
        return self.effects.do(lambda: MemoryRegistry.register(self, *args, **kwargs))

    def point(self, *args: Any, **kwargs: Any) -> None:
        return self.effects.do(lambda: MemoryRegistry.point(self, *args, **kwargs))


class FragileServing(MemoryServing):
    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects

    def load(self, name: str, path: Path) -> None:
        return self.effects.do(lambda: MemoryServing.load(self, name, path))


class System:
    """Durable parts, and a learner on them that may be killed and started again."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> None:
        self.effects = Effects()
        self.workspace = tmp_path
        self.log = FragileLog(self.effects)
        self.registry = FragileRegistry(self.effects)
        self.serving = FragileServing(self.effects)
        self.world = World(noise=0.02)
        self.rng = np.random.default_rng(0)
        self.section = section
        save = checkpoints.save
        monkeypatch.setattr(checkpoints, "save", lambda *a: self.effects.do(lambda: save(*a)))
        monkeypatch.setattr(
            promoters, "save_artifact", lambda *a, **k: self.effects.do(lambda: save_artifact(*a, **k))
        )
        self.made = self.start()

    def start(self):
        return learner(self.log, self.workspace, registry=self.registry, serving=self.serving, **self.section)

    def run(self, rounds: int, *, die_at: int = -1, after: bool = False) -> int:
        """Rounds of traffic and steps; dies once at effect ``die_at`` from now. Returns the effects seen."""
        begin = self.effects.count
        self.effects.die_at, self.effects.after = begin + die_at if die_at > 0 else -1, after
        for _ in range(rounds):
            try:
                if self.made.bootstrapped:
                    append(self.log, traffic(self.made, self.world, 30, self.rng))
                self.made.step()
            except Killed:
                self.effects.die_at = -1
                self.made = self.start()
        return self.effects.count - begin

    def check(self) -> None:
        """What must hold after any history."""
        made, state = self.made, self.made.promoter.state
        events = read_policies(self.log, "default", "policy")
        assert replay(self.log, CONFIG, PolicyNet.initial(CONFIG, 0)) == made.training.weights_hash()
        assert fold(events) == state
        epochs = [e.epoch for e, _ in events if isinstance(e, PolicyPromoted | PolicyRolledBack)]
        assert epochs == list(range(1, len(epochs) + 1))
        batches = [e for e, _ in events if isinstance(e, BatchCommitted)]
        assert [b.batch for b in batches] == list(range(1, len(batches) + 1))
        assert [b.from_offset for b in batches[1:]] == [b.to_offset for b in batches[:-1]]
        assert {c.batch for c in state.versions.values() if not c.injected} == set(range(len(batches) + 1))
        assert {alias: self.registry.pointed(alias) for alias in ALIASES} == {
            "champion": state.champion, "challenger": state.challenger, "candidate": state.newest,
        }  # fmt: skip
        assert desired_routing(state, made.settings.learner, tenant="default", policy="policy") is None
        assert state.routing is not None
        names = {state.routing.champion, state.routing.learner, state.routing.canary} - {-1}
        assert {f"policy@v{v}" for v in names} <= set(self.serving.loaded())
        taught = taught_by_batch(self.log, batches)
        assert len(taught) == len(set(taught))


def taught_by_batch(log: MemoryLog, batches: Sequence[BatchCommitted]) -> list[str]:
    """Orchestration ids that the batches used, with repetition."""
    training = Training(CONFIG, PolicyNet.initial(CONFIG, 0), None)
    state = fold(read_policies(log, "default", "policy"))
    used: list[str] = []
    for committed in batches:
        training.train(
            committed,
            read_samples(log, "default", committed.from_offset, committed.to_offset),
            state.batch_of,
        )
        used += [name for name, batch in training.state.ledger.items() if batch == committed.batch]
    return used


def test_undisturbed_run_learns_and_promotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(24)
    system.check()
    state = system.made.promoter.state
    assert state.champion > 0
    assert share_right(system.made.training.updater.net) > 0.6
    assert share_right(system.made.promoter.net(state.champion)) > 0.36
    found = counts(e for e, _ in read_policies(system.log, "default", "policy"))
    assert {"GateEvaluated", "CanaryStarted", "CanaryFinished", "PolicyPromoted"} <= found.keys()


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """One long run, killed once in each stretch, at a later effect of the round every time."""
    with monkeypatch.context() as patch:
        effects = System(tmp_path / "dry", patch).run(2)
    assert effects > 10
    for at in range(1, effects + 1):
        with monkeypatch.context() as patch:
            system = System(tmp_path / f"boot-{at}", patch)
            system.run(3, die_at=at, after=after)
            system.check()
            assert system.made.training.state.batch > 0


def test_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    rng = np.random.default_rng(5)
    for _ in range(12):
        system.run(2, die_at=int(rng.integers(1, 14)), after=bool(rng.random() < 0.5))
    system.run(1)
    system.check()


def test_lost_checkpoints_are_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(6)
    before = system.made.training.weights_hash()
    for path in sorted((tmp_path / "checkpoints").iterdir())[-2:]:
        (path / "tensors.safetensors").write_bytes(b"torn")
    system.made = system.start()
    assert system.made.training.weights_hash() == before
    system.run(1)
    system.check()


def test_the_log_does_not_forget_hyper_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(4)
    system.section = {"learning_rate": 1e-4, "epochs": 1}
    system.made = system.start()
    system.run(3)
    system.check()


@pytest.mark.parametrize("part", ["registry", "serving"])
def test_an_outage_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(3)
    broken = system.registry if part == "registry" else system.serving
    name = "register" if part == "registry" else "load"

    def away(*_: Any, **__: Any) -> Any:
        raise TransientError("not now")

    with monkeypatch.context() as outage:
        outage.setattr(broken, name, away)
        for _ in range(4):
            append(system.log, traffic(system.made, system.world, 25, system.rng))
            try:
                system.made.step()
            except TransientError:
                continue
    system.run(3)
    system.check()


def test_rollback_works_while_mlflow_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, gate=False)
    system.run(3)
    champion, previous = system.made.promoter.state.champion, system.made.promoter.state.previous_champion

    def away(*_: Any, **__: Any) -> Any:
        raise TransientError("not now")

    system.log.append([new_record(PolicyCommand(command_id="f", kind="freeze"))])
    system.log.append([new_record(PolicyCommand(command_id="r", kind="rollback", reason="test"))])
    monkeypatch.setattr(system.registry, "point", away)
    with pytest.raises(TransientError):
        system.made.step()
    state = system.made.promoter.state
    assert (state.champion, state.routing.champion if state.routing else None) == (previous, previous)
    assert champion in state.retired


def test_serving_that_answers_with_other_weights_is_not_routed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 37: load answers 200, but what is served is not what was trained."""
    system = System(tmp_path, monkeypatch)
    system.run(2)
    probe = system.serving.probe
    monkeypatch.setattr(system.serving, "probe", lambda n, p: probe("policy@v0", p))
    before = system.made.promoter.state.routing
    system.run(3)
    after = system.made.promoter.state.routing
    assert before is not None
    assert after is not None
    assert after.learner == before.learner
    assert system.made.promoter.deployment.unroutable
    assert not {f"policy@v{v}" for v in system.made.promoter.deployment.unroutable} & set(
        system.serving.loaded()
    )


def test_refused_artifacts_are_not_routed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(2)

    def refuse(name: str, path: Path) -> None:
        raise SchemaError(f"{name} at {path}: shape mismatch")

    routed = system.made.promoter.state.routing
    monkeypatch.setattr(system.serving, "load", refuse)
    system.run(2)
    state = system.made.promoter.state
    assert state.routing == routed
    assert state.last_batch is not None
    assert state.last_batch.batch == system.made.training.state.batch


def test_bad_samples_never_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch)
    system.run(1)
    system.log.append([NewRecord("samples", "default/x", "bad-1", b"{not json")])
    system.log.append([NewRecord("samples", "default/x", "bad-2", b'{"type":"samples_built"}')])
    other = SamplesBuilt(
        tenant="other", orchestration_id="x", revision=1, group="g", harness="h", reward=1, baseline=0, value_model="v",
        holdout=False, rows=(),
    )  # fmt: skip
    system.log.append([new_record(other)])
    system.run(3)
    assert system.made.training.state.batch > 0
    system.check()
