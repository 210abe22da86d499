"""The history that a model call or a run was given, read from its JSON text without building what nobody asks for.

It is the longest text of a span, and each call repeats all of the ones before it. Only roles, kinds, call ids and the first user
message are decoded, the rest is skipped. A text of another shape than expected is read as a whole (``fields.heard``), so that the
answer does not depend on which way was taken.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from spanloop.pipeline.dialects.fields import RESULT_PARTS, Heard, heard, messages
from spanloop.pipeline.dialects.operation import text_hash

__all__ = ["heard_in", "task_in"]


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
    return Heard(tuple(sorted(found)), tuple(sorted(new)), _task(told))
