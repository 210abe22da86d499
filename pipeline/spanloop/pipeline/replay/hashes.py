"""Hashes of derived content, for ``verify``, replays and their comparison: equal content is an equal hash.

Revision numbers, provisional or final, and times of processing are no content. Pure.
"""

from __future__ import annotations

import msgspec

from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import CreditAssigned, RewardsComputed, SamplesBuilt

__all__ = ["credit_hash", "plain_credit", "plain_samples", "rewards_hash", "samples_hash"]


def rewards_hash(event: RewardsComputed | None) -> str:
    """Hash of the rewards' content; revisions, provisional and final are not content."""
    if event is None:
        return ""
    rewards = tuple(msgspec.structs.replace(reward, status="") for reward in event.rewards)
    return content_hash(
        msgspec.structs.replace(event, revision=0, orchestration_revision=0, status="", rewards=rewards)
    )


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
