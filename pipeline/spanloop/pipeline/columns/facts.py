"""Policies, feedback, value models and dead letters to columns: one row an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanloop.pipeline.columns.cells import Columns, Decoded, int64, json_text, plain_text, times, units
from spanloop.pipeline.decisions.learner import effects_in
from spanloop.schemas.events import DecisionModelPublished

__all__ = ["dead_letter_columns", "feedback_columns", "model_columns", "policy_columns"]

_AGAINST = ("against", "previous", "to", "parent", "parent_version", "champion")
_SHARE = ("share", "learning_share")
_VERSION = ("version", "learner")


def _records(rows: Decoded, when: str) -> Columns:
    """Where each event stands on the log, and when it was appended."""
    return {
        "tenant": [e.tenant for _, e in rows],
        when: times(r.appended_ns for r, _ in rows),
        "partition": [r.partition for r, _ in rows],
        "offset": [r.offset for r, _ in rows],
    }


def _first(event: Any, names: Sequence[str]) -> Any:
    return next((getattr(event, name) for name in names if hasattr(event, name)), None)


def policy_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the table ``policies``: what the types of events have in common under one name."""
    events = [event for _, event in rows]

    def of(name: str) -> list[Any]:
        return [getattr(event, name, None) for event in events]

    estimates = [_first(event, ("estimate", "difference")) for event in events]
    return {
        "policies": {
            **_records(rows, "logged"),
            "policy": of("policy"),
            "type": [str(type(event).__struct_config__.tag) for event in events],
            "version": [_first(event, _VERSION) for event in events],
            "against": [_first(event, _AGAINST) for event in events],
            "epoch": of("epoch"),
            "batch": of("batch"),
            "canary": of("canary"),
            "share": [_first(event, _SHARE) for event in events],
            "verdict": of("verdict"),
            "passed": of("passed"),
            "estimate": units(estimates),
            "lower": units(of("lower")),
            "upper": units(of("upper")),
            "n": [_first(event, ("n", "n_version", "orchestrations")) for event in events],
            "reason": [_first(event, ("reason", "injected")) for event in events],
            "details": [json_text(event) for event in events],
        }
    }


def feedback_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the table ``feedback``."""
    events = [event for _, event in rows]
    return {
        "feedback": {
            **_records(rows, "received"),
            "feedback_id": [e.feedback_id for e in events],
            "target_kind": [e.target_kind for e in events],
            "target_id": [e.target_id for e in events],
            "trace_id": [e.trace_id for e in events],
            "name": [e.name for e in events],
            "value": [e.value for e in events],
            "label": [e.label for e in events],
            "comment": [plain_text(e.comment) for e in events],
            "scorer": [e.scorer for e in events],
            "final": [e.final for e in events],
            "observed": times(e.observed_ns for e in events),
            "observed_ns": int64(e.observed_ns for e in events),
        }
    }


def model_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the tables ``models`` and ``decision_effects``."""
    events = [event for _, event in rows]
    return {
        "models": {
            **_records(rows, "published"),
            "version": [e.version for e in events],
            "kind": [e.kind for e in events],
            "trained_on": [e.trained_on for e in events],
            "parameters": [json_text(e.parameters) for e in events],
        },
        "decision_effects": _effects(rows),
    }


_EFFECT = ("taken", "value", "value_error", "effect", "error", "low", "high", "naive", "status", "reason")


def _effects(rows: Decoded) -> Columns:
    """One row an option in a context of a version of decision models; what is malformed gives none."""
    listed = [
        ((record, event), group, context, effect)
        for record, event in rows
        if isinstance(event, DecisionModelPublished)
        for group, context, effects in effects_in(event.parameters)
        for effect in effects
    ]
    owners = [owner for owner, *_ in listed]
    found = _records(owners, "published")
    del found["published"]
    return {
        **found,
        "version": [event.version for _, event in owners],
        "value_model": [event.value_model for _, event in owners],
        "decision_group": [group for _, group, _, _ in listed],
        "context": [context for _, _, context, _ in listed],
        "option": [effect.option for *_, effect in listed],
        **{name: [getattr(effect, name) for *_, effect in listed] for name in _EFFECT},
    }


def dead_letter_columns(rows: Decoded) -> dict[str, Columns]:
    """Columns of the table ``dead_letters``."""
    events = [event for _, event in rows]
    return {
        "dead_letters": {
            **_records(rows, "logged"),
            "source": [e.source for e in events],
            "reason": [e.reason for e in events],
            "size": [e.size for e in events],
            "sha256": [e.sha256 for e in events],
            "details": [json_text(e.details) for e in events],
            "data": [e.data for e in events],
        }
    }
