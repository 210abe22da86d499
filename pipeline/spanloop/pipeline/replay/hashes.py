"""Hashes of derived content, for ``verify``, replays and their comparison: equal content is an equal hash.

Revision numbers, provisional or final, and times of processing are no content. Pure.
"""

from __future__ import annotations

import msgspec

from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import CreditAssigned, RewardsComputed, SamplesBuilt

__all__ = ["credit_hash", "rewards_hash", "samples_hash"]


def rewards_hash(event: RewardsComputed | None) -> str:
    """Hash of the rewards' content; revisions, provisional and final are not content."""
    if event is None:
        return ""
    rewards = tuple(msgspec.structs.replace(reward, status="") for reward in event.rewards)
    return content_hash(
        msgspec.structs.replace(event, revision=0, orchestration_revision=0, status="", rewards=rewards)
    )


def credit_hash(event: CreditAssigned | None) -> str:
    """Hash of the ledger, the version of the value model included; void credit is no credit."""
    if event is None or not event.nodes:
        return ""
    return content_hash(msgspec.structs.replace(event, revision=0, orchestration_revision=0))


def samples_hash(event: SamplesBuilt | None) -> str:
    """Hash of the training rows; samples without rows and reasons are none."""
    if event is None or not (event.rows or event.excluded):
        return ""
    return content_hash(msgspec.structs.replace(event, revision=0))
