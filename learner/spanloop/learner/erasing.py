"""Erasing a subject: find every trace that is about them, destroy the keys, say so on the log.

Place: read side of the learner (it knows what taught which version) with one write, ``SubjectErased``. Traces are those in which
spans named the subject, and all traces that assembly joined with them: an orchestration is erased as a whole, since its calls
quote each other. Invariants: nothing on the log, in state or archive is rewritten, so every content hash, reward and credit
stays as it is; a repeated erasure destroys nothing more. The versions are read before the keys are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from spanloop.pipeline.log import scan
from spanloop.pipeline.ports import Log, new_record
from spanloop.pipeline.sealing.vault import Vault
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, SpanloopError
from spanloop.schemas.events import (
    DecisionModelPublished,
    OrchestrationRevised,
    SubjectErased,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.settings import Settings

__all__ = ["Plan", "erase", "plan_erasure", "subjects_of"]

_LOG = logging.getLogger(__name__)
TRACE = "trace"
ORCHESTRATION = "orchestration"


class Plan(msgspec.Struct, frozen=True):
    """What an erasure would do."""

    tenant: str
    subjects: tuple[str, ...]
    """Keyed hashes; empty where a trace or an orchestration was named."""
    trace_ids: tuple[str, ...]
    orchestration_ids: tuple[str, ...]
    keys: int
    """Keys that are there to be destroyed."""
    clear: tuple[str, ...]
    """Traces among them that never had a key: what is on the log of these was written in the clear, or without content."""
    versions: tuple[int, ...] = ()
    value_models: tuple[str, ...] = ()


class _Seen(msgspec.Struct):
    traces: set[str]
    orchestrations: set[str]
    first_ns: int


def subjects_of(vault: Vault, tenant: str, subject: str, attributes: Sequence[str]) -> tuple[str, ...]:
    """Names in the key store of ``ATTRIBUTE=VALUE``, or of a bare value under each of the attributes."""
    attribute, equals, value = subject.partition("=")
    if equals and attribute in attributes:
        return (vault.keys.subject(tenant, attribute, value),)
    return tuple(vault.keys.subject(tenant, name, subject) for name in attributes)


def plan_erasure(log: Log, vault: Vault, settings: Settings, subject: str, *, tenant: str) -> Plan:
    """Find what is about a subject.

    Args:
        log: of the deployment.
        vault: its vault.
        settings: its settings.
        subject: a value of one of ``content.subjects``, ATTRIBUTE=VALUE, trace=ID or orchestration=ID.
        tenant: whose subject it is.

    Raises:
        SchemaError: nothing is known of the subject.
    """
    kind, equals, name = subject.partition("=")
    seen = _Seen(set(), set(), 0)
    subjects: tuple[str, ...] = ()
    if equals and kind == TRACE:
        seen.traces.add(name)
    elif equals and kind == ORCHESTRATION:
        seen.orchestrations.add(name)
    else:
        subjects = subjects_of(vault, tenant, subject, settings.content.subjects)
        seen.traces |= vault.keys.traces_of(tenant, subjects)
    _close(log, tenant, seen)
    if not seen.traces:
        raise SchemaError(
            f"no trace of tenant {tenant!r} names {subject!r} in {', '.join(settings.content.subjects)}; "
            "give ATTRIBUTE=VALUE, trace=ID or orchestration=ID, and --tenant"
        )
    known = vault.keys.known(tenant, seen.traces)
    versions = _versions(log, settings, tenant, seen.orchestrations)
    return Plan(
        tenant=tenant,
        subjects=subjects,
        trace_ids=tuple(sorted(seen.traces)),
        orchestration_ids=tuple(sorted(seen.orchestrations)),
        keys=sum(vault.keys.find(tenant, trace) is not None for trace in seen.traces),
        clear=tuple(sorted(seen.traces - known)),
        versions=versions,
        value_models=_value_models(log, tenant, seen.first_ns) if seen.first_ns else (),
    )


def erase(
    log: Log, vault: Vault, plan: Plan, *, erasure_id: str, subject: str, policy: str, now_ns: int
) -> SubjectErased:
    """Destroy the keys and record it. A crash in between leaves keys destroyed and no event: erase again.

    Args:
        log: of the deployment.
        vault: its vault.
        plan: what to erase.
        erasure_id: names this erasure.
        subject: as the caller named it; a trace or an orchestration is recorded as such, a person as a keyed hash.
        policy: whose versions the plan lists.
        now_ns: processing time.
    """
    keys = vault.keys.destroy(plan.tenant, plan.trace_ids, plan.subjects, now_ns)
    event = SubjectErased(
        tenant=plan.tenant,
        policy=policy,
        erasure_id=erasure_id,
        subject=subject if not plan.subjects else "+".join(plan.subjects),
        trace_ids=plan.trace_ids,
        orchestration_ids=plan.orchestration_ids,
        keys=keys,
        versions=plan.versions,
        value_models=plan.value_models,
        erased_ns=now_ns,
    )
    log.append([new_record(event)])
    return event


def _close(log: Log, tenant: str, seen: _Seen) -> None:
    """All traces and orchestrations that hang together with those seen, over every revision on the log."""
    revisions: list[tuple[str, str, tuple[str, ...], int]] = []
    for record in scan(log, [topics.ORCHESTRATIONS]):
        if not record.key.startswith(f"{tenant}/"):
            continue
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if isinstance(event, OrchestrationRevised):
            traces = event.content.trace_ids if event.content is not None else ()
            revisions.append((event.orchestration_id, event.merged_into, traces, record.appended_ns))
    grown = True
    while grown:
        before = len(seen.traces) + len(seen.orchestrations)
        for name, heir, traces, _ in revisions:
            if (
                name in seen.orchestrations
                or heir in seen.orchestrations
                or not seen.traces.isdisjoint(traces)
            ):
                seen.orchestrations.add(name)
                seen.orchestrations.update([heir] if heir else [])
                seen.traces.update(traces)
        grown = len(seen.traces) + len(seen.orchestrations) > before
    seen.first_ns = min((ns for name, _, _, ns in revisions if name in seen.orchestrations), default=0)


def _versions(log: Log, settings: Settings, tenant: str, orchestrations: Iterable[str]) -> tuple[int, ...]:
    """Versions that any of the orchestrations taught; empty where there is no policy."""
    wanted = set(orchestrations)
    try:
        from spanloop.learner.history import read_policies
        from spanloop.learner.promotion import fold
        from spanloop.learner.provenance import lessons_of, policy_config

        state = fold(read_policies(log, tenant, settings.gateway.policy))
        config = policy_config(settings.workspace, state)
        batches = [
            committed.batch
            for committed, rollouts, _ in lessons_of(
                log, config, tenant=tenant, policy=settings.gateway.policy
            )
            if any(rollout.orchestration_id in wanted for rollout in rollouts)
        ]
    except SpanloopError as exc:
        _LOG.info("no policy versions: %s", exc.message)
        return ()
    if not batches:
        return ()
    return tuple(sorted(v for v, c in state.versions.items() if not c.injected and c.batch >= min(batches)))


def _value_models(log: Log, tenant: str, since_ns: int) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for record in scan(log, [topics.MODELS]):
        if record.appended_ns < since_ns:
            continue
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if isinstance(event, ValueModelPublished | DecisionModelPublished) and event.tenant == tenant:
            found[event.version] = None
    return tuple(found)
