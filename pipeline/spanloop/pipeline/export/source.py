"""Credited model calls of a deployment and their words, read by SQL over log and archive (``query.session``).

Place in the flow: ``calls_of`` reads everything but texts and is small; ``spans_of`` then reads the spans of a few calls at a time.
Invariants: at each orchestration's last revision; the order is by time and id, whatever of it is archived; sealed content is
opened with the deployment's keys, and where a key was destroyed that is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from spanloop.pipeline.export.messages import Conversation, conversation_of, tools_of
from spanloop.pipeline.export.rows import Call
from spanloop.pipeline.query.session import Query
from spanloop.pipeline.samples import group_of_calls, is_holdout
from spanloop.pipeline.sealing.vault import Vault
from spanloop.schemas.spans import Span

__all__ = ["calls_of", "offsets_of", "words_of_calls"]

GATEWAY = "spanloop.gateway"
_CALLS = """
WITH nodes AS (SELECT tenant, orchestration_id, node, unit, parent, label, subject, credit_micro FROM credits
    WHERE unit IN ('team', 'orchestrator', 'role', 'agent', 'turn') OR (unit = 'message' AND label = 'decision')),
  ledger AS (SELECT t.tenant, t.orchestration_id, t.subject AS id, t.credit_micro AS turn, m.credit_micro AS message,
      a.credit_micro AS agent, r.credit_micro AS role, w.credit_micro AS team
    FROM nodes t
    LEFT JOIN nodes m ON m.tenant = t.tenant AND m.orchestration_id = t.orchestration_id AND m.parent = t.node AND m.unit = 'message'
    LEFT JOIN nodes a ON a.tenant = t.tenant AND a.orchestration_id = t.orchestration_id AND a.node = t.parent AND a.unit = 'agent'
    LEFT JOIN nodes r ON r.tenant = t.tenant AND r.orchestration_id = t.orchestration_id AND r.node = a.parent
    LEFT JOIN nodes w ON w.tenant = t.tenant AND w.orchestration_id = t.orchestration_id AND w.unit = 'team'
    WHERE t.unit = 'turn'),
  paid AS (SELECT tenant, orchestration_id, any_value(team_micro) AS reward, any_value(team_status) AS status FROM rewards GROUP BY ALL),
  kept AS (SELECT DISTINCT tenant, orchestration_id FROM samples WHERE holdout)
SELECT o.tenant, o.orchestration_id, epoch_ns(o.started) AS started_ns, c.id AS call_id, epoch_ns(c.started) AS call_ns,
  coalesce(a.name, '') AS agent, coalesce(nullif(a.role, ''), lower(a.name), '') AS role, c.model, c.policy_version, c.harness,
  c.task_key, c.status, c.span_ids, o.trace_ids, list_contains(o.flags, 'truncated_attributes')
    OR len(list_filter(o.flags, lambda f: f LIKE 'truncated_attributes:%')) > 0 AS lossy,
  p.reward, p.status AS reward_status, l.turn, l.message, l.agent AS of_agent, l.role AS of_role, l.team, k.tenant IS NOT NULL AS held
FROM calls c JOIN orchestrations o ON o.tenant = c.tenant AND o.orchestration_id = c.orchestration_id
LEFT JOIN agents a ON a.tenant = c.tenant AND a.orchestration_id = c.orchestration_id AND a.id = c.agent_id
LEFT JOIN paid p ON p.tenant = c.tenant AND p.orchestration_id = c.orchestration_id
LEFT JOIN ledger l ON l.tenant = c.tenant AND l.orchestration_id = c.orchestration_id AND l.id = c.id
LEFT JOIN kept k ON k.tenant = c.tenant AND k.orchestration_id = c.orchestration_id
{where}
ORDER BY started_ns, o.tenant, o.orchestration_id, call_ns, c.id"""
_OFFSETS = 'SELECT partition, max("offset") FROM {view} GROUP BY 1 ORDER BY 1'


class _Task(NamedTuple):
    """What ``group_of_calls`` looks at."""

    policy_version: str
    harness: str
    task_key: str


def offsets_of(query: Query) -> dict[str, dict[str, int]]:
    """The last offset of each topic's partitions that a data set made now contains at least."""
    found: dict[str, dict[str, int]] = {}
    for topic in ("spans", "orchestrations", "rewards", "credits"):
        _, rows = query.run(_OFFSETS.format(view=f"{topic}_all"))
        found[topic] = {str(partition): offset for partition, offset in rows}
    return found


def calls_of(query: Query, *, holdout: float, since: str = "", until: str = "") -> Iterator[Call]:
    """All model calls of the window in order.

    Args:
        query: Over the deployment.
        holdout: ``[pipeline] holdout``: an orchestration is held out if that says so or if a sample of it was.
        since: First start of an orchestration, ISO time.
        until: First start that is too late.
    """
    bounds = [
        f"o.started {sign} {_quoted(when)}::TIMESTAMP" for sign, when in ((">=", since), ("<", until)) if when
    ]
    where = "WHERE " + " AND ".join(bounds) if bounds else ""
    names, rows = query.run(_CALLS.format(where=where))
    records = (dict(zip(names, row, strict=True)) for row in rows)
    for _, group in groupby(records, key=lambda r: (r["tenant"], r["orchestration_id"])):
        own = list(group)
        tasks = [_Task(r["policy_version"] or "", r["harness"] or "", r["task_key"] or "") for r in own]
        head = own[0]
        task, _ = group_of_calls(head["tenant"], head["orchestration_id"], tasks)
        held_out = bool(head["held"]) or is_holdout(head["orchestration_id"], holdout)
        traces = frozenset(head["trace_ids"] or ())
        for record in own:
            yield _call(record, task, held_out=held_out, traces=traces)


def _call(record: dict[str, Any], group: str, *, held_out: bool, traces: frozenset[str]) -> Call:
    return Call(
        tenant=record["tenant"],
        orchestration_id=record["orchestration_id"],
        started_ns=record["started_ns"],
        call_id=record["call_id"],
        call_ns=record["call_ns"],
        agent=record["agent"],
        role=record["role"],
        model=record["model"] or "",
        policy_version=record["policy_version"] or "",
        status=record["status"] or "",
        span_ids=tuple(record["span_ids"] or ()),
        trace_ids=traces,
        group=group,
        held_out=held_out,
        lossy=bool(record["lossy"]),
        reward=record["reward"],
        reward_status=record["reward_status"] or "",
        scores={
            "team": record["team"],
            "role": record["of_role"],
            "agent": record["of_agent"],
            "turn": record["turn"],
            "message": record["message"],
        },
    )


def words_of_calls(
    query: Query, calls: Sequence[Call], vault: Vault | None
) -> Iterator[tuple[Call, Conversation | str]]:
    """Each call with its conversation, or with the reason why there is none."""
    by_id: dict[tuple[str, str], list[Span | None]] = {}
    traces: dict[tuple[str, str], list[str]] = {}
    for tenant, span in _spans(query, calls):
        opened = span if vault is None else vault.open_span(tenant, span)
        key = (tenant, span.span_id)
        by_id.setdefault(key, []).append(opened)
        traces.setdefault(key, []).append(span.trace_id)
    for call in calls:
        own: list[Span | None] = []
        for span_id in call.span_ids:
            key = (call.tenant, span_id)
            found = zip(by_id.get(key, ()), traces.get(key, ()), strict=True)
            own += [span for span, trace in found if trace in call.trace_ids]
        yield call, _conversation(own, lossy=call.lossy)


def _conversation(spans: Iterable[Span | None], *, lossy: bool) -> Conversation | str:
    """The words of a call out of its spans: the gateway's, else the first that has them; tools from whichever tells them."""
    own = list(spans)
    kept = sorted((s for s in own if s is not None), key=lambda s: (s.scope != GATEWAY, s.span_id))
    found = [conversation_of(span, lossy=lossy) for span in kept]
    whole = next((one for one in found if isinstance(one, Conversation)), None)
    if whole is None:
        reasons = [one for one in found if isinstance(one, str)]
        if len(kept) < len(own):
            return "erased"
        return next((reason for reason in reasons if reason != "no_text"), "no_text")
    if whole.tools:
        return whole
    tools = next((told for span in kept if (told := tools_of(span))), ())
    return Conversation(whole.prompt, whole.answer, tools, whole.finish)


def _spans(query: Query, calls: Sequence[Call]) -> Iterator[tuple[str, Span]]:
    """(tenant, span) of all spans of some calls. No column says how many attributes a sender dropped: ``Call.lossy`` does."""
    ids = sorted({span_id for call in calls for span_id in call.span_ids})
    if not ids:
        return
    wanted = ", ".join(map(_quoted, ids))
    _, rows = query.run(
        "SELECT tenant, trace_id, span_id, name, start_ns, end_ns, status_message, scope, attributes FROM spans "  # noqa: S608
        f"WHERE span_id IN ({wanted}) ORDER BY tenant, trace_id, span_id"
    )
    for tenant, trace_id, span_id, name, start_ns, end_ns, message, scope, attributes in rows:
        yield (
            tenant,
            Span(
                trace_id,
                span_id,
                name,
                start_ns,
                end_ns,
                status_message=message or "",
                attributes=json.loads(attributes),
                scope=scope or "",
            ),
        )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
