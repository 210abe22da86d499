"""The learner on a Hugging Face model with LoRA: it learns, promotes, is killed and resumed with the same bits, takes
injections and rollbacks, and refuses a server that answers with other weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_world import HfWorld, first_policy, learner, settings, share_right, tiny
from learner_world import append, counts

from spanloop.learner import checkpoint as checkpoints
from spanloop.learner import hf_base
from spanloop.learner import promoter as promoters
from spanloop.learner.batches import Call, Decision, Rollout, to_rollout
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.history import read_policies
from spanloop.learner.model import load_artifact, save_artifact
from spanloop.learner.provenance import policy_config, provenance
from spanloop.learner.registry import MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner
from spanloop.learner.training import replay
from spanloop.learner.update import Updater, exact_numerics, hyper_of, initialise_torch
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import Log, new_record
from spanloop.schemas.events import PolicyCommand, PolicyCommandFinished


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_numerics():
        yield


def traffic(made: Learner, world: HfWorld, count: int, rng: np.random.Generator) -> list[Any]:
    """``count`` orchestrations, each served as the newest routing says."""
    routing = made.promoter.state.routing
    assert routing is not None
    by_version: dict[int, list[bool]] = {}
    for _ in range(count):
        u = rng.random()
        version = routing.champion
        if u < routing.canary_share:
            version = routing.canary
        elif u < routing.canary_share + routing.learning_share:
            version = routing.learner
        by_version.setdefault(version, []).append(bool(rng.random() < 0.3))
    built = [b for v, held in by_version.items() for b in world.play_many(made.promoter.net(v), v, held)]
    return [built[i] for i in rng.permutation(len(built))]


def drive(made: Learner, log: Log, world: HfWorld, rounds: int, rng: np.random.Generator) -> None:
    made.step()
    for _ in range(rounds):
        append(log, traffic(made, world, 30, rng))
        made.step()


@pytest.mark.parametrize("advantage", ["ledger", "group"])
def test_a_toy_is_learned(model: Path, advantage: str) -> None:
    """Ten batches of 32 orchestrations: from about one in eleven answers right to more than eight in ten."""
    hyper = hyper_of(
        settings(Path("unused"), model, learning_rate=1e-2, advantage=advantage, entropy_start=0.02)
    )
    updater, world = Updater(first_policy(model)), HfWorld()
    assert share_right(updater.net) < 0.4
    for batch in range(1, 16):
        rollouts = [
            to_rollout(b, vocabulary_size=15, context=32, full_vocabulary=True)
            for b in world.play_many(updater.net, batch - 1, [False] * 32)
        ]
        updater.train([r for r in rollouts if not isinstance(r, str)], hyper, batch)
    assert share_right(updater.net) > 0.8


def test_parts_train_as_the_whole_does(model: Path) -> None:
    """Microbatches change the last bits only."""
    world = HfWorld(menus=True)
    built = world.play_many(first_policy(model), 0, [False] * 24)
    rollouts = [to_rollout(b, vocabulary_size=15, context=32, full_vocabulary=True) for b in built]
    weights = []
    for tokens in (16, 100_000):
        updater = Updater(first_policy(model))
        hyper = hyper_of(settings(Path("unused"), model, microbatch_tokens=tokens, learning_rate=1e-3))
        metrics = updater.train([r for r in rollouts if not isinstance(r, str)], hyper, 1)
        weights.append((updater.tensors(), metrics))
    (few, some), (many, all_) = weights
    for name, tensor in few.items():
        if name.startswith("adam/"):
            assert torch.allclose(tensor, many[name], atol=1e-5), name
    assert some == pytest.approx(all_, rel=1e-4, abs=1e-6)


def test_the_loop_with_promotions(model: Path, tmp_path: Path) -> None:
    log, world, rng = MemoryLog(ManualClock(10**18)), HfWorld(), np.random.default_rng(0)
    made = learner(log, tmp_path, model)
    assert made.promoter.state.routing is None
    drive(made, log, world, 20, rng)
    state = made.promoter.state
    assert state.champion > 0
    assert share_right(made.promoter.net(0)) < 0.2
    assert share_right(made.training.updater.net) > 0.6
    found = counts(e for e, _ in read_policies(log, "default", "policy"))
    assert {"GateEvaluated", "CanaryStarted", "CanaryFinished", "PolicyPromoted"} <= found.keys()
    candidate = state.versions[state.champion]
    artifact = load_artifact(tmp_path / candidate.path, sha256=candidate.sha256)
    assert share_right(artifact.net) == share_right(made.promoter.net(state.champion))
    history = provenance(log, policy_config(tmp_path, state), state.champion)
    assert sum(len(b.lessons) for b in history.batches) == 16 * len(history.batches)
    # The same log gives the same bits: in this process, on a base that is opened again ...
    wanted = made.training.weights_hash()
    base = first_policy(model, max_length=32)
    assert replay(log, base.config, base) == wanted
    hf_base._BASES.clear()
    base = first_policy(model, max_length=32)
    assert replay(log, base.config, base) == wanted


def test_another_process_gets_the_same_bits(model: Path, tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "spanloop.db")
    made = learner(log, tmp_path, model)
    drive(made, log, HfWorld(), 3, np.random.default_rng(0))
    assert made.training.state.batch >= 2
    wanted = made.training.weights_hash()
    log.close()
    code = (
        "import sys; from pathlib import Path; from hf_world import settings\n"
        "from spanloop.learner.trainer import initial_policy\n"
        "from spanloop.learner.training import replay\n"
        "from spanloop.pipeline.log.sqlite import SqliteLog\n"
        "config, _, net = initial_policy(settings(Path(sys.argv[1]), Path(sys.argv[2])))\n"
        "print(replay(SqliteLog(Path(sys.argv[1]) / 'spanloop.db'), config, net))"
    )
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(model)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "2"}, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == wanted


# ---------------------------------------------------------------- kills


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way out."""


class Killer:
    """Dies at the n-th outside effect, before or after it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.left = -1

    def wrap(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if self.rng.random() < 0.5:
                    effect(*args, **kwargs)
                raise Killed
            return effect(*args, **kwargs)

        return call


def test_killed_again_and_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    killer = Killer(rng)
    log = MemoryLog(ManualClock(10**18))
    registry, serving, world = MemoryRegistry(), MemoryServing(), HfWorld()
    monkeypatch.setattr(checkpoints, "save", killer.wrap(checkpoints.save))
    monkeypatch.setattr(promoters, "save_artifact", killer.wrap(save_artifact))
    monkeypatch.setattr(registry, "register", killer.wrap(registry.register))
    monkeypatch.setattr(serving, "load", killer.wrap(serving.load))

    def start() -> Learner:
        made = Learner(
            settings(tmp_path, model), log=log, registry=registry, serving=serving, clock=ManualClock(10**18)
        )
        made.start()
        return made

    made, kills = start(), 0
    while made.training.state.batch < 8:
        killer.left = int(rng.integers(1, 8))
        try:
            if made.bootstrapped:
                append(log, traffic(made, world, 30, rng))
            made.step()
        except Killed:
            killer.left = -1
            kills += 1
            made = start()
    assert kills >= 5
    base = first_policy(model, max_length=32)
    assert replay(log, base.config, base) == made.training.weights_hash()
    for version, candidate in made.promoter.state.versions.items():
        artifact = load_artifact(tmp_path / candidate.path, sha256=candidate.sha256)
        assert artifact.net.tensors().keys() == made.promoter.net(version).tensors().keys()
    shutil.rmtree(tmp_path / "checkpoints")
    assert start().training.weights_hash() == made.training.weights_hash()


# ---------------------------------------------------------------- commands, serving


def finished(log: Log) -> list[PolicyCommandFinished]:
    return [e for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyCommandFinished)]


def command(log: Log, kind: str, argument: str = "") -> None:
    number = len(finished(log))
    log.append(
        [new_record(PolicyCommand(policy="policy", command_id=f"c{number}", kind=kind, argument=argument, reason="test"))]
    )  # fmt: skip


def test_injection_and_rollback(model: Path, tmp_path: Path) -> None:
    log = MemoryLog(ManualClock(10**18))
    made = learner(log, tmp_path, model, gate=False)
    made.step()
    better = first_policy(model, max_length=32).twin()
    with torch.no_grad():
        for parameter in better.trainable().values():
            parameter.add_(0.01)
    save_artifact(tmp_path / "other", better, None)
    command(log, "inject", str(tmp_path / "other"))
    made.step()
    made.step()
    assert finished(log)[-1].status == "done"
    assert made.promoter.state.champion == 1
    assert all(torch.equal(t, made.promoter.net(1).tensors()[n]) for n, t in better.tensors().items())
    command(log, "rollback")
    made.step()
    assert made.promoter.state.champion == 0
    save_artifact(tmp_path / "small", first_policy(model, max_length=32, lora_rank=2), None)
    (tmp_path / "other" / "adapter_model.bin").write_bytes(b"")
    for folder in ("small", "other"):
        command(log, "inject", str(tmp_path / folder))
        made.step()
        assert finished(log)[-1].status == "refused"
    assert "do not belong" in finished(log)[-1].message
    assert "another shape" in finished(log)[-2].message


class Deaf(MemoryServing):
    """Loads adapters and goes on answering with the base model."""

    def __init__(self, base: HfPolicy, noise: float) -> None:
        super().__init__()
        self.base = base
        self.noise = noise

    def probe(self, name: str, prompts: Any) -> list[list[float]]:
        return [[x + self.noise for x in row] for row in self.base.probe(prompts)]


def test_a_server_with_other_weights_is_not_routed_to(model: Path, tmp_path: Path) -> None:
    net = first_policy(model, max_length=32)
    for noise, tolerance, ok in ((0.0, 0.0, True), (0.005, 0.0, False), (0.005, 0.01, True)):
        log = MemoryLog(ManualClock(10**18))
        made = Learner(
            settings(tmp_path / f"{noise}-{tolerance}", model, probe_tolerance=tolerance), log=log,
            registry=MemoryRegistry(), serving=Deaf(net, noise), clock=ManualClock(10**18),
        )  # fmt: skip
        made.start()
        made.step()
        assert made.bootstrapped == ok
        if ok:
            drive(made, log, HfWorld(), 3, np.random.default_rng(0))
            assert made.training.state.batch >= 2
            assert made.promoter.deployment.unroutable >= {2}
            routing = made.promoter.state.routing
            assert routing is not None
            assert (
                not {routing.champion, routing.learner, routing.canary} & made.promoter.deployment.unroutable
            )


def test_threads_and_denormals_are_set() -> None:
    initialise_torch(1)
    assert float(torch.tensor([1e-40]) * 1.0) == 0.0
    assert torch.get_num_threads() == 1


def test_packed_trees_train_as_rows_do(model: Path) -> None:
    """Conversations whose turns repeat what was said: the same gradient to 1e-5, from fewer tokens."""
    rng = np.random.default_rng(3)
    rollouts = [_conversation(rng, number) for number in range(6)]
    assert first_policy(model)._base.packs
    found = []
    for packing in (False, True):
        updater = Updater(first_policy(model))
        hyper = hyper_of(
            settings(
                Path("unused"),
                model,
                packing=packing,
                epochs=1,
                minibatch_orchestrations=6,
                learning_rate=1e-3,
            )
        )
        updater.train(rollouts, hyper, 1)
        found.append(updater.tensors())
    rows, trees = found
    for name in rows:
        if name.endswith("/first"):
            scale = float(rows[name].abs().max())
            assert float((rows[name] - trees[name]).abs().max()) <= 1e-5 * scale + 1e-12, name


def _conversation(rng: np.random.Generator, number: int) -> Rollout:
    """Four turns, each with all before it as its prompt."""
    said: list[int] = rng.integers(1, 15, 10).tolist()
    calls = []
    for _ in range(4):
        answer = rng.integers(1, 15, 2).tolist()
        decisions = tuple(
            Decision(len(said) + k - 1, (), 0, -2.0, float(rng.normal())) for k in range(len(answer))
        )
        calls.append(Call((*said, *answer), decisions))
        said = [*said, *answer, *rng.integers(1, 15, 2).tolist()]
    return Rollout(f"o{number}", 1, "g", 0.0, 0.0, (0,), tuple(calls))
