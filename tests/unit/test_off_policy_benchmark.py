"""The lag benchmark: runs lag, and what is kept is a ratio over paired seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import off_policy
from off_policy import CONFIG, Key, Lagging, kept

from spanloop.learner.objectives.registry import OBJECTIVES
from spanloop.learner.policy import PolicyNet


def test_what_is_kept() -> None:
    best = [{"f": 0.8, "ess": 1.0}, {"f": 0.6, "ess": 1.0}]
    found = kept([{"f": 0.7, "ess": 0.5}, {"f": 0.56, "ess": 0.7}], best)
    assert found["kept"] == 0.9
    assert found["difference"] == pytest.approx(-0.07)
    assert found["interval"][0] < -0.07 < found["interval"][1]
    assert kept(best, best)["kept"] == 1.0


def test_tickets_are_worked_by_the_policy_of_so_many_updates_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, objective in off_policy.UNCORRECTED.items():
        monkeypatch.setitem(OBJECTIVES, name, objective)  # taken out again afterwards
    run = Lagging(Key("decoupled", 2, 1), msgspec.structs.replace(CONFIG, batch=8))
    acted, weights = [], []
    played = off_policy.play

    def spy(world: Any, tokenizer: Any, net: PolicyNet, *rest: Any) -> Any:
        acted.append(next(iter(net.trainable().values())).detach().clone())
        return played(world, tokenizer, net, *rest)

    monkeypatch.setattr(off_policy, "play", spy)
    for _ in range(4):
        weights.append(next(iter(run.updater.net.trainable().values())).detach().clone())
        run.step()
    for step, net in enumerate(acted):
        assert net.equal(weights[max(0, step - 2)])
    assert msgspec.structs.asdict(run.hyper)["objective"] == "decoupled_ppo"
