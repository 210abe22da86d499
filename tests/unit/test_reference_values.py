"""V-trace, GAE, group advantages and off-policy estimates against frozen values of torchrl, verl and obp."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanloop.learner.batches import group_advantages
from spanloop.learner.gate import doubly_robust, ips, snips
from spanloop.pipeline.credit.estimators.gae import gae
from spanloop.pipeline.credit.estimators.groups import group_stats, rloo
from spanloop.pipeline.credit.estimators.vtrace import vtrace
from spanloop.schemas.canonical import micro
from spanloop.schemas.errors import SchemaError

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "objectives" / "reference.json").read_text()
)
SERIES: dict[str, list[float]] = REFERENCE["series"]
RATIOS = [math.exp(pi - mu) for pi, mu in zip(SERIES["pi"], SERIES["mu"], strict=True)]


@pytest.mark.parametrize(("ratio_max", "trace_max"), [(1.0, 1.0), (2.0, 1.5)])
def test_vtrace_is_torchrls(ratio_max: float, trace_max: float) -> None:
    expected = REFERENCE[f"vtrace/{ratio_max}/{trace_max}"]
    found = vtrace(
        SERIES["reward"], SERIES["value"], RATIOS, gamma=0.96875, ratio_max=ratio_max, trace_max=trace_max
    )
    assert found.values == pytest.approx(expected["target"], abs=1e-9)
    assert found.advantages == pytest.approx(expected["advantage"], abs=1e-9)


def test_vtrace_on_policy_is_the_return_less_the_value() -> None:
    found = vtrace(SERIES["reward"], SERIES["value"], [1.0] * len(RATIOS))
    assert found.advantages == pytest.approx(gae(SERIES["reward"], SERIES["value"], smoothing=1.0))


def test_vtrace_refuses_what_does_not_fit() -> None:
    with pytest.raises(SchemaError, match="one of each"):
        vtrace([1.0], [1.0, 2.0], [1.0])
    with pytest.raises(SchemaError, match="never negative"):
        vtrace([1.0], [1.0], [-1.0])


def test_gae_is_torchrls() -> None:
    found = gae(SERIES["reward"], SERIES["value"], gamma=0.96875, smoothing=0.875)
    assert found == pytest.approx(REFERENCE["gae"]["advantage"], abs=1e-9)


def test_group_advantages_are_verls() -> None:
    """verl adds 1e-6 to sigma, and gives a group of one its plain reward; ours gives it 0 and says that it is flat."""
    outcomes, groups = REFERENCE["inputs"]["outcomes"], REFERENCE["inputs"]["groups"]
    for name in sorted(set(groups)):
        members = [i for i, group in enumerate(groups) if group == name]
        rewards = [outcomes[i] for i in members]
        got = group_advantages(rewards)
        stats = group_stats([micro(reward) for reward in rewards])
        if len(members) == 1:
            assert got.flat
            continue
        assert list(got.values) == pytest.approx([REFERENCE["advantage/grpo"][i] for i in members], abs=1e-5)
        assert [rloo(micro(reward), stats).value for reward in rewards] == pytest.approx(
            [REFERENCE["advantage/rloo"][i] for i in members], abs=1e-6
        )


def test_off_policy_estimates_are_obps() -> None:
    ope = REFERENCE["ope"]
    target, q, action = np.array(ope["target"]), np.array(ope["q"]), np.array(ope["action"])
    rows = np.arange(len(action))
    weights = target[rows, action] / np.array(ope["pscore"])
    rewards = np.array(ope["reward"])
    expected = (target * q).sum(1)
    assert ips(weights, rewards).value == pytest.approx(ope["ips"], abs=1e-9)
    assert snips(weights, rewards).value == pytest.approx(ope["snips"], abs=1e-9)
    got = doubly_robust(weights, rewards, q[rows, action], expected)
    assert got.value == pytest.approx(ope["dr"], abs=1e-9)
    normalised = doubly_robust(weights, rewards, q[rows, action], expected, normalise=True)
    assert normalised.value == pytest.approx(ope["sndr"], abs=1e-9)
