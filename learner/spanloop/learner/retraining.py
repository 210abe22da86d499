"""A policy without some of its samples: the log's batches trained again from the first version, leaving a source out.

Place: behind ``spanloop policies retrain``. Batches keep their boundaries and hyper-parameters, so that every other sample is used as
it was. Invariant: the weights are those of a log that never had the source's samples, bit for bit (on the CPU).

Limits, on purpose: what other samples say was sampled by versions that had learned from the source, and their values may have
been too; the running learner goes on from its own weights. The result is a candidate, to be injected.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spanloop.learner.history import fetcher, read_policies, read_samples
from spanloop.learner.model import Policy, load_artifact
from spanloop.learner.promotion import fold
from spanloop.learner.provenance import lessons_of, policy_config
from spanloop.learner.signing import trust_of
from spanloop.learner.training import Training
from spanloop.pipeline.ports import Log
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import BatchCommitted, SamplesBuilt
from spanloop.schemas.settings import Settings

__all__ = ["KINDS", "Taught", "left_out", "retrain", "taught_by_source"]

KINDS = ("orchestration", "harness", "group")
"""What a source may be, as KIND=VALUE."""


class Taught(msgspec.Struct, frozen=True):
    """What a source taught."""

    orchestrations: tuple[str, ...]
    versions: tuple[int, ...]
    """The versions of the batches that used it, and all that descend from them."""


def left_out(built: SamplesBuilt, sources: Sequence[str]) -> bool:
    """Whether samples are of one of the sources. Raises SchemaError where one is not KIND=VALUE."""
    for source in sources:
        kind, equals, value = source.partition("=")
        if not equals or kind not in KINDS:
            raise SchemaError(f"{source!r} is no source; give {', '.join(f'{k}=VALUE' for k in KINDS)}")
        named = built.orchestration_id if kind == "orchestration" else getattr(built, kind)
        if named == value:
            return True
    return False


def taught_by_source(log: Log, settings: Settings, sources: Sequence[str]) -> Taught:
    """Which orchestrations of the sources were trained on, and which versions they taught."""
    names = {"tenant": settings.tenant, "policy": settings.gateway.policy}
    state = fold(read_policies(log, settings.tenant, settings.gateway.policy))
    used: set[str] = set()
    first = None
    for committed, rollouts, _ in lessons_of(log, policy_config(settings.workspace, state), **names):
        samples = read_samples(log, settings.tenant, committed.from_offset, committed.to_offset)
        theirs = {built.orchestration_id for built, _ in samples if left_out(built, sources)}
        hit = theirs & {r.orchestration_id for r in rollouts}
        if hit and first is None:
            first = committed.batch
        used |= hit
    own = {v for v, c in state.versions.items() if first is not None and not c.injected and c.batch >= first}
    return Taught(tuple(sorted(used)), tuple(sorted(own)))


def retrain(log: Log, settings: Settings, sources: Sequence[str]) -> tuple[Policy, Training]:
    """Train every batch of the log again without the sources; returns the policy and the training it came from.

    Raises SchemaError when there is no policy, or version 0 does not verify."""
    events = read_policies(log, settings.tenant, settings.gateway.policy)
    state = fold(events)
    config = policy_config(settings.workspace, state)
    initial = load_artifact(
        settings.workspace / state.versions[0].path,
        sha256=state.versions[0].sha256,
        trust=trust_of(settings.workspace),
    ).net
    training = Training(config, initial, None)
    for event, _ in events:
        if not isinstance(event, BatchCommitted) or event.batch != training.state.batch + 1:
            continue
        samples = read_samples(log, settings.tenant, event.from_offset, event.to_offset)
        kept = ((built, offset) for built, offset in samples if not left_out(built, sources))
        training.train(event, kept, state.batch_of, fetcher(log, settings.tenant))
    return training.updater.net, training
