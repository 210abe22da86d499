"""Provenance both ways: which orchestrations taught a version, and which versions an orchestration taught.

Place: read side of the learner. Nothing is stored for it: the log's batch boundaries are folded again with the code that
trained (``training.select``), without training. Needs the samples topic and version 0's artifact (for the shape).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from spanloop.learner.batches import Rollout
from spanloop.learner.history import fetcher, read_policies, read_samples
from spanloop.learner.model import Shape, read_manifest
from spanloop.learner.promotion import PromotionState, fold
from spanloop.learner.training import select
from spanloop.pipeline.log import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import BatchCommitted, CandidateRegistered, OrchestrationRevised, decode

__all__ = ["Lesson", "Provenance", "TaughtBatch", "lessons_of", "policy_config", "provenance", "taught_by"]


class Lesson(msgspec.Struct, frozen=True):
    """One orchestration that a batch trained on."""

    orchestration_id: str
    revision: int
    reward: float
    acted_by: tuple[int, ...]
    """Policy versions that answered its calls."""
    decisions: int
    trace_ids: tuple[str, ...] = ()


class TaughtBatch(msgspec.Struct, frozen=True):
    """One batch in a version's history."""

    batch: int
    version: int
    from_offset: int
    to_offset: int
    lessons: tuple[Lesson, ...]
    dropped: dict[str, int] = {}


class Provenance(msgspec.Struct, frozen=True):
    """Where a version comes from; ``batches`` oldest first."""

    version: int
    candidate: CandidateRegistered
    lineage: tuple[int, ...]
    """The versions it descends from by training, oldest first, itself last."""
    batches: tuple[TaughtBatch, ...]


def policy_config(workspace: Path, state: PromotionState) -> Shape:
    """Shape of the workspace's policy. Raises SchemaError when version 0 is not there."""
    first = state.versions.get(0)
    if first is None:
        raise SchemaError(
            "this workspace has no policy yet: the learner makes the first one, and `spanloop doctor` says what it still needs"
        )
    return read_manifest(workspace / first.path).config


def lessons_of(
    log: Log, config: Shape, *, tenant: str, policy: str
) -> list[tuple[BatchCommitted, list[Rollout], dict[str, int]]]:
    """Every batch on the log with the rollouts it trained on and what it dropped."""
    events = read_policies(log, tenant, policy)
    state = fold(events)
    found: list[tuple[BatchCommitted, list[Rollout], dict[str, int]]] = []
    ledger: dict[str, int] = {}
    taught: dict[str, int] = {}
    for event, _ in events:
        if not isinstance(event, BatchCommitted) or (found and event.batch <= found[-1][0].batch):
            continue
        samples = read_samples(log, tenant, event.from_offset, event.to_offset)
        chosen = select(
            event,
            samples,
            ledger=ledger,
            batch_of=state.batch_of,
            config=config,
            taught=taught,
            fetch=fetcher(log, tenant),
        )
        ledger, taught = chosen.ledger, chosen.taught
        found.append((event, chosen.rollouts, chosen.window.dropped()))
    return found


def provenance(
    log: Log, config: Shape, version: int, *, tenant: str = "default", policy: str = "policy"
) -> Provenance:
    """History of a version. An injected version descends from nothing on this log.

    Raises:
        SchemaError: the version is not registered.
    """
    state = fold(read_policies(log, tenant, policy))
    candidate = state.versions.get(version)
    if candidate is None:
        raise SchemaError(f"version {version} is not registered; `spanloop policies` lists what is")
    if candidate.injected:
        return Provenance(version, candidate, (version,), ())
    own = {c.batch: v for v, c in state.versions.items() if not c.injected and c.batch <= candidate.batch}
    lessons = [
        item
        for item in lessons_of(log, config, tenant=tenant, policy=policy)
        if item[0].batch <= candidate.batch
    ]
    traces = _trace_ids(log, tenant, {r.orchestration_id for _, rollouts, _ in lessons for r in rollouts})
    batches = tuple(
        TaughtBatch(
            batch=committed.batch,
            version=own.get(committed.batch, -1),
            from_offset=committed.from_offset,
            to_offset=committed.to_offset,
            lessons=tuple(
                Lesson(
                    r.orchestration_id, r.revision, r.reward, r.versions, r.num_decisions,
                    traces.get(r.orchestration_id, ()),
                )
                for r in rollouts
            ),
            dropped=dropped,
        )
        for committed, rollouts, dropped in lessons
    )  # fmt: skip
    return Provenance(version, candidate, tuple(own[b] for b in sorted(own)), batches)


def taught_by(
    log: Log, config: Shape, prefix: str, *, tenant: str = "default", policy: str = "policy"
) -> tuple[str, int, tuple[int, ...]]:
    """(id, batch, versions) that the orchestration whose id begins with ``prefix`` taught: the batch's own version and all
    that descend from it. Batch -1 and the prefix itself when no batch used such a one.

    Raises:
        SchemaError: batches used several that begin with it.
    """
    state = fold(read_policies(log, tenant, policy))
    batches: dict[str, int] = {}
    for committed, rollouts, _ in lessons_of(log, config, tenant=tenant, policy=policy):
        for rollout in rollouts:
            if rollout.orchestration_id.startswith(prefix):
                batches.setdefault(rollout.orchestration_id, committed.batch)
    found = [prefix] if prefix in batches else sorted(batches)
    if len(found) > 1:
        raise SchemaError(
            f"{prefix!r} is ambiguous: batches were trained on {len(found)} orchestrations whose ids begin with it "
            f"({', '.join(found[:3])}, ...); give more of the id"
        )
    if not found:
        return prefix, -1, ()
    batch = batches[found[0]]
    own = (v for v, c in state.versions.items() if not c.injected and c.batch >= batch)
    return found[0], batch, tuple(sorted(own))


def _trace_ids(log: Log, tenant: str, wanted: set[str]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for record in scan(log, [topics.ORCHESTRATIONS]):
        if record.key.removeprefix(f"{tenant}/") not in wanted:
            continue
        event = decode(record.value)
        if isinstance(event, OrchestrationRevised) and event.content is not None:
            found[event.orchestration_id] = event.content.trace_ids
    return found
