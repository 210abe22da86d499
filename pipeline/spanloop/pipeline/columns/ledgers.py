"""Rewards, credits and samples to columns: amounts in units, and as the exact integers of the ledger where sums matter."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from spanloop.pipeline.columns.cells import Columns, Decoded, Owners, flat, times, units

__all__ = ["credit_columns", "reward_columns", "sample_columns"]

_FLOAT, _INT, _STR, _TIME = pa.float64(), pa.int64(), pa.string(), pa.timestamp("us")


def _heads(rows: Decoded) -> Columns:
    return Owners.of([1] * len(rows)).columns(rows)


def reward_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the tables of ``rewards``."""
    rewards: list[Any] = list(flat(event.rewards for _, event in rows))
    return {
        "reward_heads": _heads(rows),
        "rewards": {
            **Owners.of(len(e.rewards) for _, e in rows).columns(
                rows,
                orchestration_revision=([e.orchestration_revision for _, e in rows], _INT),
                team=(units(e.team for _, e in rows), _FLOAT),
                team_micro=([e.team for _, e in rows], _INT),
                team_status=([e.status for _, e in rows], _STR),
                definitions=([e.definitions or None for _, e in rows], _STR),
                computed=(times(r.appended_ns for r, _ in rows), _TIME),
            ),
            "family": [r.family for r in rewards],
            "name": [r.name for r in rewards],
            "unit": [r.unit for r in rewards],
            "unit_id": [r.unit_id for r in rewards],
            "value": units([r.value for r in rewards]),
            "value_micro": [r.value for r in rewards],
            "status": [r.status for r in rewards],
            "estimator": [r.estimator for r in rewards],
            "weight": units([r.weight for r in rewards]),
            "scaffold": [r.scaffold for r in rewards],
            "evidence": [r.evidence for r in rewards],
            "inputs_hash": [r.inputs_hash or None for r in rewards],
        },
    }


def credit_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the tables of ``credits``."""
    nodes: list[Any] = list(flat(event.nodes for _, event in rows))
    return {
        "credit_heads": _heads(rows),
        "credits": {
            **Owners.of(len(e.nodes) for _, e in rows).columns(
                rows,
                orchestration_revision=([e.orchestration_revision for _, e in rows], _INT),
                reward=(units(e.reward for _, e in rows), _FLOAT),
                baseline=(units(e.baseline for _, e in rows), _FLOAT),
                value_model=([e.value_model for _, e in rows], _STR),
            ),
            "node": [n.id for n in nodes],
            "unit": [n.unit for n in nodes],
            "parent": [n.parent for n in nodes],
            "label": [n.label for n in nodes],
            "credit": units([n.credit for n in nodes]),
            "credit_micro": [n.credit for n in nodes],
            "raw": units([n.raw for n in nodes]),
            "variance": [n.variance for n in nodes],
            "estimator": [n.estimator for n in nodes],
            "subject": [n.subject for n in nodes],
        },
    }


def sample_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the tables of ``samples``."""
    samples: list[Any] = list(flat(event.rows for _, event in rows))
    reasons = [(reason, n) for _, event in rows for reason, n in sorted(event.excluded.items())]
    return {
        "sample_heads": _heads(rows),
        "samples": {
            **Owners.of(len(e.rows) for _, e in rows).columns(
                rows,
                group_id=([e.group for _, e in rows], _STR),
                harness=([e.harness for _, e in rows], _STR),
                reward=(units(e.reward for _, e in rows), _FLOAT),
                baseline=(units(e.baseline for _, e in rows), _FLOAT),
                value_model=([e.value_model for _, e in rows], _STR),
                holdout=([e.holdout for _, e in rows], pa.bool_()),
            ),
            "call_id": [s.call_id for s in samples],
            "agent_id": [s.agent_id for s in samples],
            "role": [s.role for s in samples],
            "policy_version": [s.policy_version for s in samples],
            "weight": [s.weight for s in samples],
            "prompt_token_ids": [s.prompt_token_ids for s in samples],
            "response_token_ids": [s.response_token_ids for s in samples],
            "logprobs": [s.logprobs for s in samples],
            "advantages": [units(s.advantages) for s in samples],
            "accounts": [s.accounts for s in samples],
            "menu_ids": [s.menu_ids for s in samples],
            "menu_logprobs": [s.menu_logprobs for s in samples],
            "menu_values": [[units(values) for values in s.menu_values] for s in samples],
        },
        "excluded": {
            **Owners.of(len(e.excluded) for _, e in rows).columns(rows),
            "reason": [reason for reason, _ in reasons],
            "num_calls": [n for _, n in reasons],
        },
    }
