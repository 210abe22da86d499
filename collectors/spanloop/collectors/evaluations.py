"""Evaluations among log records (``gen_ai.evaluation.result``) as feedback, where the credential is a scorer's.

An agent may log that it did well: such a record is kept with the spans and says nothing about rewards. A record is a
score only when it came with a key of role ``scorer``; an admin's key and a collector without keys, which agents of
the same machine use as well, do not count (docs/adr/0009).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from spanloop.collectors.auth import Identity
from spanloop.collectors.feedback import parse_feedback
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decoded import Rejected
from spanloop.pipeline.otlp.log_ids import is_told
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.spans import Span

__all__ = ["EVENT", "Scores", "scores_of"]

EVENT = "gen_ai.evaluation.result"
_NAME = re.compile(r"[^A-Za-z0-9_.\-]+")


class Scores(msgspec.Struct):
    """Feedback of the records of one request, and the evaluations that are no scores."""

    events: list[FeedbackReceived]
    rejected: list[Rejected]


def scores_of(records: Iterable[Span], identity: Identity, now_ns: int, redactor: Redactor) -> Scores:
    """Feedback of a scorer's evaluations. One without a number (a label only) is no score and no error.

    Args:
        records: decoded log records, before redaction.
        identity: of the sender; any role but scorer gives nothing.
        now_ns: time of arrival.
        redactor: rules for labels and explanations.
    """
    found = Scores([], [])
    if identity.role != "scorer":
        return found
    for record in records:
        if record.name != EVENT or record.attributes.get("gen_ai.evaluation.score.value") is None:
            continue
        parsed = parse_feedback(
            _item(record), tenant=identity.tenant, scorer=identity.name, now_ns=now_ns, redactor=redactor
        )
        found.events += parsed.events
        for refused in parsed.rejected:
            reason = f"an evaluation is no score: {refused['reason']}"
            found.rejected.append(Rejected(reason, canonical_json(record), "type"))
    return found


def _item(record: Span) -> dict[str, Any]:
    """The record as a feedback item: on the span that it stands under, else on the response that it names."""
    get = record.attributes.get
    name = _NAME.sub("_", str(get("gen_ai.evaluation.name") or "evaluation"))[:64]
    item: dict[str, Any] = {
        "value": get("gen_ai.evaluation.score.value"),
        "name": name,
        "observed_at": record.start_ns,
    }
    for key, source in (("label", "score.label"), ("comment", "explanation")):
        text = get(f"gen_ai.evaluation.{source}")
        if isinstance(text, str):
            item[key] = text[: 64 if key == "label" else 64 * 1024]
    if record.parent_span_id and not is_told(record.trace_id):
        return item | {"trace_id": record.trace_id, "span_id": record.parent_span_id}
    if not is_told(record.trace_id):
        return item | {"trace_id": record.trace_id}
    return item | {"response_id": get("gen_ai.response.id")}
