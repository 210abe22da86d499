"""Hashes of derived content, for ``verify``, replays and their comparison: equal content is an equal hash.

Revision numbers, provisional or final, and times of processing are no content; nor is under which definitions and from which inputs
a reward was computed, which older logs do not tell and ``same_inputs`` compares. Pure.
"""

from __future__ import annotations

import msgspec

from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import CreditAssigned, RewardsComputed, SamplesBuilt

__all__ = ["credit_hash", "plain_credit", "plain_samples", "rewards_hash", "same_inputs", "samples_hash"]


def rewards_hash(event: RewardsComputed | None) -> str:
    """Hash of the rewards' content: values, weights and what each rests on."""
    if event is None:
        return ""
    rewards = tuple(msgspec.structs.replace(reward, status="", inputs_hash="") for reward in event.rewards)
    plain = msgspec.structs.replace(
        event, revision=0, orchestration_revision=0, status="", definitions="", rewards=rewards
    )
    return content_hash(plain)


def same_inputs(recorded: RewardsComputed, again: RewardsComputed) -> bool:
    """Whether two that tell the same values tell the same inputs, where the record tells any and under the same definitions."""
    if not recorded.definitions or recorded.definitions != again.definitions:
        return True
    pairs = zip(recorded.rewards, again.rewards, strict=False)
    return all(one.inputs_hash == other.inputs_hash for one, other in pairs)


def plain_credit(event: CreditAssigned) -> CreditAssigned:
    """The ledger without revision numbers: what its hash is of."""
    return msgspec.structs.replace(event, revision=0, orchestration_revision=0)


def plain_samples(event: SamplesBuilt) -> SamplesBuilt:
    """Training rows without revision number: what their hash is of."""
    return msgspec.structs.replace(event, revision=0)


def credit_hash(event: CreditAssigned | None) -> str:
    """Hash of the ledger, the version of the value model included; void credit is no credit."""
    return content_hash(plain_credit(event)) if event is not None and event.nodes else ""


def samples_hash(event: SamplesBuilt | None) -> str:
    """Hash of the training rows; samples without rows and reasons are none."""
    return content_hash(plain_samples(event)) if event is not None and (event.rows or event.excluded) else ""
