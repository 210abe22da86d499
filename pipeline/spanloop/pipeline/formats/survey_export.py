"""Orchestrations of a log in the survey's format: one that was imported from it as the document stood, any other as
``assembly/survey`` tells it, with the rewards that are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spanloop.pipeline.assembly.logged import IMPORTED
from spanloop.pipeline.assembly.survey import survey_of, to_survey
from spanloop.pipeline.formats.survey import document_of, is_survey_span
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import RewardsComputed, SpansReceived, decode
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.spans import Span

__all__ = ["survey_documents"]


def survey_documents(
    log: Log, some: Sequence[tuple[OrchestrationContent, RewardsComputed | None]]
) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """(document, what is to be said of it) of each orchestration; None: the format cannot tell it."""
    spans = _imported_spans(log, [content for content, _ in some])
    for content, rewards in some:
        own = [s for trace in content.trace_ids for s in spans.get((content.tenant, trace), ())]
        try:
            if own:
                document, gone = document_of(own)
                note = (
                    f"{gone} texts of {content.orchestration_id} were not kept by this deployment"
                    if gone
                    else ""
                )
                yield document, note
            else:
                yield to_survey(survey_of(content, _known(rewards))), ""
        except SchemaError as exc:
            yield None, f"left out {content.orchestration_id}: {exc.message}"


def _known(rewards: RewardsComputed | None) -> dict[str, float]:
    """Rewards by name; what is missing is absent."""
    if rewards is None:
        return {}
    found = {r.name: unmicro(r.value) for r in rewards.rewards if r.value is not None and r.unit == "team"}
    return found | ({"team": unmicro(rewards.team)} if rewards.team is not None else {})


def _imported_spans(log: Log, contents: Iterable[OrchestrationContent]) -> dict[tuple[str, str], list[Span]]:
    """Spans of the orchestrations that came from such documents, each once, by tenant and trace."""
    wanted = {
        f"{content.tenant}/{trace}"
        for content in contents
        if content.events and all(event.rule == IMPORTED for event in content.events)
        for trace in content.trace_ids
    }
    found: dict[tuple[str, str], dict[str, Span]] = defaultdict(dict)
    for record in scan(log, (topics.SPANS,)) if wanted else ():
        if record.key not in wanted:
            continue
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if isinstance(event, SpansReceived):
            found[(event.tenant, event.trace_id)] |= {s.span_id: s for s in event.spans if is_survey_span(s)}
    return {key: list(spans.values()) for key, spans in found.items()}
