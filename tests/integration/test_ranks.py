"""A batch on two CPU ranks: the weights of one process, the base sharded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hf_world import HfWorld, first_policy, settings, tiny

from spanloop.learner import ranks as ranked
from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.ranks import train_on_ranks
from spanloop.learner.update import Updater, exact_numerics, hyper_of
from spanloop.schemas.errors import TerminalError

pytestmark = pytest.mark.slow


def rollouts(model: Path, count: int) -> list[Rollout]:
    net, world = first_policy(model), HfWorld()
    made = [
        to_rollout(world.play(net, 0), vocabulary_size=15, context=32, full_vocabulary=True)
        for _ in range(count)
    ]
    return [r for r in made if isinstance(r, Rollout)]


@pytest.mark.parametrize("packing", [True, False])
def test_two_ranks_are_one_process(tmp_path: Path, packing: bool) -> None:
    model = tiny(tmp_path / "base")
    hyper = hyper_of(
        settings(tmp_path, model, packing=packing, microbatch_tokens=32, epochs=1, minibatch_orchestrations=5)
    )
    taught = rollouts(model, 9)
    with exact_numerics():
        alone = Updater(first_policy(model))
        expected = alone.train(taught, hyper, 1)
    together = Updater(first_policy(model))
    metrics = train_on_ranks(together, taught, hyper, 1, device="cpu", ranks=2)
    assert (together.steps, together.skipped) == (alone.steps, alone.skipped) == (2, 0)
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(together.tensors()[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    for name in ("gradient_norm", "entropy", "kl", "clipped", "ess", "loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_base_is_sharded_and_a_dead_rank_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tmp_path / "base")
    hyper = hyper_of(settings(tmp_path, model, epochs=1))
    net = first_policy(model)
    held: list[int] = []
    decode = msgspec.json.decode

    def spy(data: bytes, **kind: object) -> object:
        found = decode(data, **kind)
        held.append(getattr(found, "sharded", 0))
        return found

    monkeypatch.setattr(ranked.msgspec.json, "decode", spy)
    train_on_ranks(Updater(net), rollouts(model, 4), hyper, 1, device="cpu", ranks=2)
    layers = net._base._decoder.layers
    whole = sum(p.numel() for n, p in layers.named_parameters() if ".lora_" not in n)
    assert held[-1] == pytest.approx(whole / 2, rel=0.05)
    monkeypatch.undo()
    updater = Updater(net)
    before = updater.tensors()
    (model / "model.safetensors").unlink()
    with pytest.raises(TerminalError, match="2 ranks could not train batch 1"):
        train_on_ranks(updater, rollouts(tiny(tmp_path / "other"), 4), hyper, 1, device="cpu", ranks=2)
    assert all(torch.equal(before[n], t) for n, t in updater.tensors().items())
