"""Older logs tell no inputs and no definitions: what they do tell is compared as before."""

from __future__ import annotations

import msgspec

from spanloop.pipeline.replay.hashes import rewards_hash, same_inputs
from spanloop.schemas.events import Reward, RewardsComputed

NOW = RewardsComputed(
    orchestration_id="o", revision=2, orchestration_revision=1, team=500_000, status="final", definitions="d1",
    rewards=(Reward("R1", "outcome", "team", "", 500_000, "final", "feedback_mean/1", inputs_hash="i1"),),
)  # fmt: skip
OLD = msgspec.structs.replace(
    NOW, definitions="", rewards=(msgspec.structs.replace(NOW.rewards[0], inputs_hash=""),)
)


def test_an_older_record_equals_its_replay() -> None:
    assert rewards_hash(OLD) == rewards_hash(NOW)
    assert same_inputs(OLD, NOW)


def test_other_inputs_under_the_same_definitions_are_told() -> None:
    other = msgspec.structs.replace(NOW, rewards=(msgspec.structs.replace(NOW.rewards[0], inputs_hash="i2"),))
    assert rewards_hash(other) == rewards_hash(NOW)
    assert not same_inputs(NOW, other)
    assert same_inputs(NOW, msgspec.structs.replace(other, definitions="d2"))
