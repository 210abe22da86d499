"""Samples: a credited orchestration as training rows, one row a model call, each token trained from one account only.

Place in the flow: after the ledger, before the learner. A token's advantage is its account's credit, with ``[pipeline]
credit_trace`` also a share of what followed it. A call without token ids, behaviour log-probabilities or a policy
version gives no row and is counted under its reason; nothing is imputed.
Invariants: pure; rows are ordered by (time, id); weights of an orchestration's rows sum to 1; whether an orchestration is
held out is a function of its id only, so no revision ever moves it from one side to the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from spanloop.pipeline.credit.ledger import Ledger, account_of
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.ids import policy_number
from spanloop.schemas.orchestration import ModelCall, OrchestrationContent

__all__ = ["Asked", "build_samples", "exclusion", "group_of", "group_of_calls", "is_holdout"]


def is_holdout(orchestration_id: str, share: float) -> bool:
    """Whether an orchestration is kept for the gate and never trained on, by a hash of its id.

    >>> is_holdout("a", 0.0), is_holdout("a", 0.999999)
    (False, True)
    """
    return int(digest("holdout", orchestration_id)[:12], 16) < share * 16**12


def exclusion(call: ModelCall) -> str:
    """Why a call gives no row; empty when it gives one."""
    count = len(call.response_token_ids)
    if call.status == "error":
        return "error"
    if policy_number(call.policy_version) < 0:
        return "no_policy_version"
    if not call.prompt_token_ids or not count:
        return "erased" if call.sealed else "no_token_ids"
    if len(call.logprobs) != count:
        return "no_logprobs"
    if not all(math.isfinite(value) and value <= 1e-4 for value in call.logprobs):
        return "bad_logprobs"
    return ""


class Asked(Protocol):
    """What of a model call says what it may be compared with."""

    @property
    def policy_version(self) -> str: ...
    @property
    def harness(self) -> str: ...
    @property
    def task_key(self) -> str: ...


def group_of(content: OrchestrationContent) -> tuple[str, str]:
    """``group_of_calls`` of an orchestration."""
    return group_of_calls(content.tenant, content.orchestration_id, content.calls)


def group_of_calls(tenant: str, orchestration_id: str, calls: Sequence[Asked]) -> tuple[str, str]:
    """(group, harness): what may be compared with what. The group of a task is a digest of its key and the harness, of the calls
    that a policy of ours answered if there are any, else of all; without a single task key it is the orchestration's own id."""
    served = [call for call in calls if policy_number(call.policy_version) >= 0] or calls
    harnesses = sorted({call.harness for call in served})
    keys = {call.task_key for call in served if call.task_key}
    harness = harnesses[0] if len(harnesses) == 1 else digest("harnesses", *harnesses) if harnesses else ""
    if len(keys) != 1:
        return orchestration_id, harness
    return digest("group", tenant, keys.pop(), harness), harness


def build_samples(
    content: OrchestrationContent,
    ledger: Ledger,
    *,
    revision: int,
    value_model: str,
    holdout: float,
    credit: str,
    traces: Mapping[str, tuple[int, ...]] | None = None,
) -> SamplesBuilt:
    """Rows of one orchestration.

    Args:
        content: What happened.
        ledger: Its settled ledger.
        revision: The rewards' revision.
        value_model: Version that the ledger used.
        holdout: Share of orchestrations kept for the gate.
        credit: "ledger": each token's own account; "team": the team's account for all.
        traces: What is added to the accounts of a call's tokens (``credit.trace``), by call id; not with "team".
    """
    level = "team" if credit == "team" else ""
    followed = {} if traces is None or level else traces
    credit_of: dict[str, int] = {}
    roles: dict[str, str] = {}
    excluded: dict[str, int] = {}
    rows: list[Sample] = []
    for call in sorted(content.calls, key=lambda c: (c.start_ns, c.id)):
        reason = exclusion(call)
        if reason:
            excluded[reason] = excluded.get(reason, 0) + 1
        else:
            if not rows:
                credit_of = {node.id: node.credit for node in ledger.nodes}
                roles = {agent.id: agent.role or agent.name.lower() for agent in content.agents}
            row = _row(call, ledger, level, credit_of, roles.get(call.agent_id, ""))
            trace = followed.get(call.id)
            if trace is not None:
                summed = tuple(own + after for own, after in zip(row.advantages, trace, strict=True))
                row = msgspec.structs.replace(row, advantages=summed)
            rows.append(row)
    group, harness = group_of(content)
    return SamplesBuilt(
        tenant=content.tenant,
        orchestration_id=content.orchestration_id,
        revision=revision,
        group=group,
        harness=harness,
        reward=ledger.reward,
        baseline=ledger.baseline,
        value_model=value_model,
        holdout=is_holdout(content.orchestration_id, holdout),
        rows=tuple(_closed(row) for row in _weighted(rows)),
        excluded=dict(sorted(excluded.items())),
    )


def _row(call: ModelCall, ledger: Ledger, level: str, credit_of: Mapping[str, int], role: str) -> Sample:
    accounts = tuple(account_of(ledger, call.id, i, level) for i in range(len(call.response_token_ids)))
    values = ledger.estimates.calls.get(call.id)
    has_menus = len(call.menus) == len(call.response_token_ids)
    return Sample(
        call_id=call.id,
        agent_id=call.agent_id,
        role=role,
        policy_version=call.policy_version,
        prompt_token_ids=call.prompt_token_ids,
        response_token_ids=call.response_token_ids,
        logprobs=call.logprobs,
        advantages=tuple(credit_of[account] for account in accounts),
        accounts=accounts,
        menu_ids=tuple(tuple(o.token_id for o in menu) for menu in call.menus) if has_menus else (),
        menu_logprobs=tuple(tuple(o.logprob for o in menu) for menu in call.menus) if has_menus else (),
        menu_values=values.menus if values is not None else (),
        sealed=call.sealed,
        cut=_is_cut(call.sampling),
    )


def _is_cut(sampling: Mapping[str, Any]) -> bool:
    """Whether options were taken away before sampling by their probability."""
    top_p, top_k, min_p = (sampling.get(name) for name in ("top_p", "top_k", "min_p"))
    return any(
        isinstance(value, int | float) and low < value < high
        for value, low, high in ((top_p, -math.inf, 1.0), (top_k, 0.0, math.inf), (min_p, 0.0, math.inf))
    )


def _closed(row: Sample) -> Sample:
    """A row as it may be written: where the call came sealed, its token arrays go on sealed."""
    if not row.sealed:
        return row
    return msgspec.structs.replace(
        row, prompt_token_ids=(), response_token_ids=(), logprobs=(), menu_ids=(), menu_logprobs=()
    )


def _weighted(rows: list[Sample]) -> tuple[Sample, ...]:
    """Rows with weights: 1 / agents, spread over an agent's rows by their response tokens.

    Source: WideSeek-R1's loss weights (METHODS 2.5), up to the number of rollouts in a batch.
    """
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.agent_id] = tokens.get(row.agent_id, 0) + len(row.response_token_ids)
    return tuple(
        msgspec.structs.replace(
            row, weight=len(row.response_token_ids) / (tokens[row.agent_id] * len(tokens))
        )
        for row in rows
    )
