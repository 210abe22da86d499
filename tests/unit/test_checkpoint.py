"""Checkpoints: whole or not at all, verified on load, never with a number that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_world import CONFIG, World

from spanloop.learner import checkpoint as checkpoints
from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.checkpoint import BatchReport, Checkpoint, LearnerState, load_latest, save, tensors_hash
from spanloop.learner.policy import PolicyNet
from spanloop.learner.update import Updater, exact_numerics, hyper_of
from spanloop.schemas.errors import TerminalError, TransientError
from spanloop.schemas.settings import Settings

HYPER = hyper_of(Settings())


def rollouts(count: int = 12) -> list[Rollout]:
    world, net = World(), PolicyNet.initial(CONFIG, 0)
    made = [
        to_rollout(world.play(net, 0), vocabulary_size=CONFIG.vocabulary_size, context=CONFIG.context)
        for _ in range(count)
    ]
    return [r for r in made if isinstance(r, Rollout)]


def trained(batches: int) -> Updater:
    updater = Updater(PolicyNet.initial(CONFIG, 0))
    for batch in range(1, batches + 1):
        updater.train(rollouts(), HYPER, batch)
    return updater


def at(batch: int, updater: Updater) -> Checkpoint:
    report = BatchReport(12, 0, {"stale": 1}, {"loss": 0.5})
    state = LearnerState(batch, 7, {"o": batch}, updater.steps, updater.skipped, report)
    return Checkpoint(state, updater.tensors())


def test_round_trip_continues_bit_for_bit(tmp_path: Path) -> None:
    first = trained(1)
    save(tmp_path, at(1, first))
    found = load_latest(tmp_path)
    assert found is not None
    assert found.state == at(1, first).state
    resumed = Updater(PolicyNet.initial(CONFIG, 5))
    resumed.restore(found.tensors, steps=found.state.steps, skipped=found.state.skipped)
    resumed.train(rollouts(), HYPER, 2)
    assert tensors_hash(resumed.tensors()) == tensors_hash(trained(2).tensors())


def test_keeps_three_and_sweeps_unfinished(tmp_path: Path) -> None:
    updater = trained(0)
    (tmp_path / ".building-batch-00000001-dead").mkdir(parents=True)
    for batch in range(1, 6):
        save(tmp_path, at(batch, updater))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"batch-{b:08d}" for b in (3, 4, 5)]


@pytest.mark.parametrize("damage", ["flip", "truncate", "no_state", "no_tensors", "garbage_state"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    updater = trained(0)
    save(tmp_path, at(1, updater))
    last = save(tmp_path, at(2, updater))
    tensors, state = last / "tensors.safetensors", last / "state.json"
    data = bytearray(tensors.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        tensors.write_bytes(data)
    elif damage == "truncate":
        tensors.write_bytes(data[:-4])
    elif damage == "no_tensors":
        tensors.unlink()
    else:
        state.write_text("{") if damage == "garbage_state" else state.unlink()
    found = load_latest(tmp_path)
    assert found is not None
    assert found.state.batch == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None


def test_non_finite_tensors_are_refused(tmp_path: Path) -> None:
    bad = at(1, trained(0))
    bad.tensors["policy/head.bias"][0] = float("inf")
    with pytest.raises(TerminalError, match=r"head\.bias"):
        save(tmp_path, bad)
    assert load_latest(tmp_path) is None


def test_disk_full_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = trained(0)
    save(tmp_path, at(1, updater))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_durably", full)
    with pytest.raises(TransientError, match="No space left"):
        save(tmp_path, at(2, updater))
    assert [p.name for p in tmp_path.iterdir()] == ["batch-00000001"]


@pytest.mark.parametrize("where", ["loss", "gradient", "update"])
def test_a_bad_step_is_skipped_and_leaves_weights_and_optimiser(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 35: loss, gradient and parameters are checked before the step is kept."""
    updater = trained(1)
    before, steps = tensors_hash(updater.tensors()), updater.steps
    if where == "loss":
        original = torch.Tensor.sum
        monkeypatch.setattr("spanloop.learner.update.policy_loss", _poisoned)
        assert original is torch.Tensor.sum
    elif where == "gradient":
        updater.net.head.bias.register_hook(lambda g: g * float("nan"))
    else:
        monkeypatch.setattr(Updater, "_adam", _exploding)
    metrics = updater.train(rollouts(), HYPER, 2)
    assert updater.skipped == HYPER.epochs * 1
    assert updater.steps == steps
    assert tensors_hash(updater.tensors()) == before
    assert "loss" not in metrics


def _poisoned(theta: torch.Tensor, **arguments: torch.Tensor):
    from spanloop.learner.losses import policy_loss

    advantage = arguments["advantage_N"] * float("nan")
    return policy_loss(theta, **{**arguments, "advantage_N": advantage})  # type: ignore[arg-type]


def _exploding(self: Updater, gradients: list[torch.Tensor], hyper: object):
    updated = [p.detach() * float("inf") for p in self._parameters]
    return updated, dict(self._moments)


def test_exact_numerics_are_given_back() -> None:
    """Flushed denormals are a state of the thread: other tests and libraries must not meet it."""
    smallest = float.fromhex("0x0.0000000000001p-1022")
    with exact_numerics():
        assert smallest * 1.0 == 0.0
        with exact_numerics():
            assert torch.are_deterministic_algorithms_enabled()
        assert smallest * 1.0 == 0.0
    assert smallest * 1.0 != 0.0
    assert not torch.are_deterministic_algorithms_enabled()
