"""Logs of Who&When (failed multi-agent conversations with a labelled culprit): a history of turns, nothing else. One turn is one
event, with its text and its number in the history; there are no times, only the order.

Two notations: speakers in ``role`` as Magentic-One writes them ("X (thought)", "X (-> Y)", "X (termination condition)", "human"),
or in ``name``, as a group chat writes them. The labels (who was wrong, when, why, the right answer) are not read at all: only
``history``, ``question_ID`` and ``system_prompt`` are. Source: ag2ai/Agents_Failure_Attribution at f4d2b6da.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.formats.event_spans import STEP_NS, event_span, log_span
from spanloop.pipeline.formats.values import Read, flagged, json_text, plain, words
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.errors import SchemaError

__all__ = ["NAME", "matches", "read"]

NAME = "who-and-when"
_NOTED = re.compile(r"(.+?)\s*\(([^()]*)\)\s*\Z", re.DOTALL)
_TO = re.compile(r"->\s*(.+?)\s*\Z", re.DOTALL)
_USER = "user"


def matches(value: dict[str, Any]) -> bool:
    """A history of turns with the question that it is about."""
    history = value.get("history")
    return (
        isinstance(history, list)
        and bool(history)
        and isinstance(history[0], dict)
        and "content" in history[0]
        and ("question_ID" in value or "mistake_step" in value)
    )


def read(value: dict[str, Any]) -> Read:
    """The log's spans. Raises SchemaError."""
    history = value["history"]
    if not all(isinstance(turn, dict) for turn in history):
        raise SchemaError("history holds something that is no turn (an object with role and content)")
    flags: list[str] = []
    turns = plain(history, flags, "history")
    question = words(value.get("question_ID"))
    trace = digest("who_and_when", question, canonical_json(turns))
    attributes: dict[str, Any] = {"event_log.format": NAME, "event_log.turns": len(turns)}
    if question:
        attributes["spanloop.task.key"] = f"{NAME}/{question}"
    if value.get("system_prompt"):
        attributes["gen_ai.system_instructions"] = json_text(value["system_prompt"], flags, "system_prompt")
    spans = [log_span(trace, NAME, STEP_NS, (len(turns) + 2) * STEP_NS, flagged(attributes, flags))]
    for number, (turn, told) in enumerate(zip(turns, _told(turns), strict=True)):
        own: dict[str, Any] = {f"event_log.{key}": text for key, text in told.items() if text}
        own["event_log.turn"] = number
        own["output.value"] = words(turn.get("content")) or json_text(turn.get("content"), [], "content")
        start = (number + 2) * STEP_NS
        spans.append(
            event_span(
                trace, number, told["type"], start_ns=start, end_ns=start + STEP_NS // 2, attributes=own
            )
        )
    return Read(spans, [])


def _told(turns: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Type and parties of each turn's event."""
    if any(isinstance(turn.get("name"), str) and turn["name"] for turn in turns):
        return _chat([words(turn.get("name")) or words(turn.get("role")) or _USER for turn in turns])
    return _ledger([words(turn.get("role")).strip() for turn in turns])


def _chat(speakers: list[str]) -> list[dict[str, str]]:
    """Everybody hears everybody: a turn is a message to who speaks next, the last one a return to the user."""
    told = []
    for number, speaker in enumerate(speakers):
        heard = next((name for name in speakers[number + 1 :] if name != speaker), "")
        kind = "message" if number + 1 < len(speakers) else "return"
        told.append({"type": kind, "agent": speaker, "to": heard or _USER})
    return told


def _ledger(roles: list[str]) -> list[dict[str, str]]:
    """An orchestrator that thinks, calls on others one by one and ends it."""
    told: list[dict[str, str]] = []
    caller: dict[str, str] = {}
    for number, role in enumerate(roles):
        found = _NOTED.match(role)
        name, note = (found.group(1), found.group(2).strip()) if found else (role, "")
        if name.lower() in ("human", _USER):
            after = next((_speaker(r) for r in roles[number + 1 :] if _speaker(r).lower() != "human"), "")
            kind = "human_intervention" if number else "message"
            told.append({"type": kind, "agent": _USER, "to": after})
        elif to := _TO.match(note):
            caller[to.group(1)] = name
            told.append({"type": "delegate", "agent": name, "to": to.group(1), "mode": "return_to_caller"})
        elif note.startswith("terminat"):
            told.append({"type": "stop", "agent": name, "status": "ok"})
        elif note:
            told.append({"type": "orchestrator_decision", "agent": name})
        elif name in caller:
            told.append({"type": "return", "agent": name, "to": caller[name], "status": "ok"})
        else:
            after = next((_speaker(r) for r in roles[number + 1 :] if _speaker(r) != name), _USER)
            told.append({"type": "message", "agent": name, "to": after})
    return told


def _speaker(role: str) -> str:
    found = _NOTED.match(role)
    return found.group(1) if found else role
