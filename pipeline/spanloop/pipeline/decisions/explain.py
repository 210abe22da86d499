"""The decisions of one orchestration as the log has them: content, ledger, samples, and the version of the decision models that goes with
the ledger.

Reads a log; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spanloop.pipeline.decisions.learner import DecisionModel
from spanloop.pipeline.decisions.objects import DecisionObject, decisions_of
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    DecisionModelPublished,
    Event,
    OrchestrationRevised,
    SamplesBuilt,
    decode,
)

__all__ = ["Explained", "explain_decisions"]


class Explained(msgspec.Struct, frozen=True):
    """Decisions of one orchestration."""

    tenant: str
    orchestration_id: str
    revision: int
    value_model: str
    """That its credit was given by; empty: no credit yet."""
    decision_model: str
    """That values and effects are from; empty: none goes with that value model."""
    trained_on: int
    notes: tuple[str, ...]
    """What the stopping rule rests on."""
    decisions: tuple[DecisionObject, ...]


def explain_decisions(log: Log, prefix: str, *, newest: bool = False, words: Sequence[str] = ()) -> Explained:
    """Decisions of the orchestration whose id (or tenant/id) begins with ``prefix``.

    Args:
        log: to read.
        prefix: of the id.
        newest: ask the tenant's newest decision models instead of those that its credit goes with.
        words: of token ids.

    Raises:
        SchemaError: no orchestration begins with it, or several do.
    """
    revised = _orchestration(log, prefix)
    content = revised.content
    assert content is not None  # noqa: S101 - merged ones were left out
    credit = _last(log, topics.CREDITS, revised.key)
    samples = _last(log, topics.SAMPLES, revised.key)
    value_model = credit.value_model if isinstance(credit, CreditAssigned) else ""
    model = _model(log, revised.tenant, None if newest else value_model)
    return Explained(
        tenant=revised.tenant,
        orchestration_id=revised.orchestration_id,
        revision=revised.revision,
        value_model=value_model,
        decision_model=model.version if model is not None else "",
        trained_on=model.trained_on if model is not None else 0,
        notes=model.stopping.notes if model is not None and model.stopping is not None else (),
        decisions=decisions_of(
            content,
            nodes=credit.nodes if isinstance(credit, CreditAssigned) else (),
            samples=samples.rows if isinstance(samples, SamplesBuilt) else (),
            model=model,
            words=words,
        ),
    )


def _orchestration(log: Log, prefix: str) -> OrchestrationRevised:
    last: dict[str, OrchestrationRevised] = {}
    for record in scan(log, [topics.ORCHESTRATIONS]):
        named = record.key if "/" in prefix else record.key.partition("/")[2]
        if not named.startswith(prefix):
            continue
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        known = last.get(record.key)
        if isinstance(event, OrchestrationRevised) and (known is None or event.revision >= known.revision):
            last[record.key] = event
    found = [event for event in last.values() if event.content is not None]
    exact = [event for event in found if prefix in (event.key, event.orchestration_id)]
    if len(exact or found) != 1:
        what = "no orchestration" if not found else f"{len(found)} orchestrations"
        raise SchemaError(f"{what} with an id that begins with {prefix!r}; `spanloop traces` lists them")
    return (exact or found)[0]


def _last(log: Log, topic: str, key: str) -> Event | None:
    newest: CreditAssigned | SamplesBuilt | None = None
    for record in scan(log, [topic]):
        if record.key != key:
            continue
        event = decode(record.value)
        if isinstance(event, CreditAssigned | SamplesBuilt) and (
            newest is None or event.revision >= newest.revision
        ):
            newest = event
    return newest


def _model(log: Log, tenant: str, value_model: str | None) -> DecisionModel | None:
    """The version published with a value model; None: the newest."""
    found: DecisionModelPublished | None = None
    for record in scan(log, [topics.MODELS]):
        if record.key != tenant:
            continue
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if isinstance(event, DecisionModelPublished) and value_model in (None, event.value_model):
            found = event
    if found is None:
        return None
    return DecisionModel.read(found.version, found.value_model, found.trained_on, found.parameters)
