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
_decode_pieces = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode = msgspec.json.Decoder().decode


def heard_in(history: Any) -> tuple[Heard, bool]:
    """(``heard`` of a model call's input, whether it could be read)."""
    told = _read(history)
    if told is not None:
        return _heard(told), True
    conversation, readable = messages(history)
    return heard(conversation), readable


def task_in(history: Any) -> str:
    """``first_user_hash`` of a run's messages; those behind the first user's are not built."""
    if isinstance(history, str) and history[:1] == "[":
        try:
            for piece in _decode_pieces(history):
                message = _decode_message(piece)
                if message.role == "user" and (found := _user_text(message)) is not None:
                    return found
        except (msgspec.DecodeError, RecursionError):
            return heard(messages(history)[0]).task_hash
        return ""
    return heard(messages(history)[0]).task_hash


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
        parts = message.parts
        for part in (message,) if parts is UNSET else parts:
            if part.tool_calls is not UNSET:
                return None
            kind = part.type
            if kind in CALL_PARTS:
                asked.append(Asked(part.id or part.tool_call_id or "", part.name or ""))
            elif not first and (kind is UNSET or kind == "text"):
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


def _user_text(message: _Message) -> str | None:
    """Hash of the first text of a user's message; None: it has none."""
    parts = message.parts
    for part in (message,) if parts is UNSET else parts:
        if part.type is UNSET or part.type == "text":
            return _hash(part.content)
    return None


def _hash(content: msgspec.Raw | UnsetType) -> str:
    if content is UNSET:
        return ""
    try:
        return text_hash(_decode(content))
    except (msgspec.DecodeError, RecursionError):
        return ""


def _heard(told: list[_Message]) -> Heard:
    found: list[str] = []
    new = 0
    task: str | None = None
    for message in told:
        role, parts = message.role, message.parts
        from_model = role in ("assistant", "model")
        if from_model:
            new = len(found)
        elif task is None and role == "user":
            task = _user_text(message)
        for part in (message,) if parts is UNSET else parts:
            if part.type in RESULT_PARTS:
                call_id = part.id or part.tool_call_id
            elif role == "tool" and part.tool_call_id is not UNSET:
                call_id = part.tool_call_id
            else:
                continue
            if call_id:
                found.append(call_id)
        if from_model:
            new = len(found)
    if not found:
        return Heard((), (), task or "")
    return Heard(_in_order(found), _in_order(found[new:]), task or "")


def _in_order(ids: list[str]) -> tuple[str, ...]:
    """Sorted, each once."""
    return tuple(ids) if len(ids) < 2 else tuple(sorted(set(ids)))
