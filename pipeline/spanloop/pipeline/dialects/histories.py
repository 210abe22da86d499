"""What a model call was given and what it answered, read from JSON texts without building what nobody asks for.

The history is the longest text of a span, and each call repeats all of the ones before it. Only roles, kinds, call ids and the first
texts are decoded, the rest is skipped. A text of another shape than expected is read as a whole (``fields``), so that the result
does not depend on which way was taken.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from spanloop.pipeline.dialects.fields import (
    CALL_PARTS,
    RESULT_PARTS,
    Heard,
    answer_hash,
    asked_calls,
    heard,
    messages,
)
from spanloop.pipeline.dialects.operation import Asked, text_hash

__all__ = ["Answer", "answer_in", "heard_in", "task_in"]


class _Part(msgspec.Struct, gc=False):
    """A part of a message; its members are left out where the text has none."""

    type: str | UnsetType = UNSET
    id: str | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    content: msgspec.Raw | UnsetType = UNSET


class _Message(_Part, gc=False):
    """A message; one without parts is its own part."""

    role: str | UnsetType | None = UNSET
    parts: list[_Part] | UnsetType = UNSET


class _SaidPart(_Part, gc=False):
    """A part of an answer."""

    name: str | UnsetType | None = UNSET
    tool_calls: msgspec.Raw | UnsetType = UNSET


class _SaidMessage(_SaidPart, gc=False):
    """A message of an answer."""

    parts: list[_SaidPart] | UnsetType = UNSET


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the output of a model call tells."""

    asked: tuple[Asked, ...] = ()
    """``asked_calls``."""
    text_hash: str = ""
    """Of the first text."""
    is_empty: bool = False
    """No message at all."""


_decode_answer = msgspec.json.Decoder(list[_SaidMessage]).decode
_decode_history = msgspec.json.Decoder(list[_Message]).decode
_decode = msgspec.json.Decoder().decode
_MODEL = frozenset({"assistant", "model"})


def heard_in(history: Any) -> tuple[Heard, bool]:
    """(``heard`` of a model call's input, whether it could be read)."""
    told = _read(history)
    if told is not None:
        return _heard(told), True
    conversation, readable = messages(history)
    return heard(conversation), readable


def task_in(history: Any) -> str:
    """``first_user_hash`` of a run's messages."""
    return _task(told) if (told := _read(history)) is not None else heard(messages(history)[0]).task_hash


def answer_in(answer: Any) -> tuple[Answer, bool]:
    """(what a model call's output tells, whether it could be read)."""
    told = _said(answer)
    if told is not None:
        return told, True
    conversation, readable = messages(answer)
    if not conversation:
        return Answer(is_empty=True), readable
    return Answer(asked_calls(conversation), answer_hash(conversation)), readable


def _said(answer: Any) -> Answer | None:
    """What a JSON text of the usual shape tells; None: read it as a whole."""
    if not isinstance(answer, str) or answer[:1] != "[":
        return None
    try:
        told = _decode_answer(answer)
    except (msgspec.DecodeError, RecursionError):
        return None
    asked: list[Asked] = []
    first = ""
    for message in told:
        for part in (message,) if message.parts is UNSET else message.parts:
            if part.tool_calls is not UNSET:
                return None
            if part.type in CALL_PARTS:
                asked.append(Asked(part.id or part.tool_call_id or "", part.name or ""))
            elif not first and (part.type is UNSET or part.type == "text"):
                first = _hash(part.content)
    return Answer(tuple(asked), first, not told)


def _read(history: Any) -> list[_Message] | None:
    """The messages of a JSON text; None: not of the usual shape, or no text."""
    if not isinstance(history, str) or history[:1] != "[":
        return None
    try:
        return _decode_history(history)
    except (msgspec.DecodeError, RecursionError):
        return None


def _task(told: list[_Message]) -> str:
    for message in told:
        if message.role == "user":
            for part in (message,) if message.parts is UNSET else message.parts:
                if part.type is UNSET or part.type == "text":
                    return _hash(part.content)
    return ""


def _hash(content: msgspec.Raw | UnsetType) -> str:
    try:
        return "" if content is UNSET else text_hash(_decode(content))
    except (msgspec.DecodeError, RecursionError):
        return ""


def _heard(told: list[_Message]) -> Heard:
    found: set[str] = set()
    new: set[str] = set()
    for message in told:
        from_model = message.role in _MODEL
        if from_model:
            new.clear()
        for part in (message,) if message.parts is UNSET else message.parts:
            if part.type in RESULT_PARTS:
                call_id = part.id or part.tool_call_id
            elif message.role == "tool" and part.tool_call_id is not UNSET:
                call_id = part.tool_call_id
            else:
                continue
            if call_id:
                found.add(call_id)
                if not from_model:
                    new.add(call_id)
    return Heard(tuple(sorted(found)) if found else (), tuple(sorted(new)) if new else (), _task(told))
