"""A run that pauses for tool calls that somebody else decides, and the run that goes on with what was decided.

Read from one conversation each: calls that the last answer asked for and that no result follows are pending; results
that stand before a resumed run's first own answer are what it resumes with.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import answered_calls, asked_calls

__all__ = ["open_calls", "resumed_calls"]

_CALLS = 32
"""Calls of one pause that are remembered."""


def _speaks(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("assistant", "model")


def open_calls(conversation: Any) -> tuple[str, ...]:
    """Ids of the tool calls of the last answer that no result follows, sorted.

    >>> asked = {"role": "assistant", "parts": [{"type": "tool_call", "id": "a"}, {"type": "tool_call", "id": "b"}]}
    >>> open_calls([asked, {"role": "user", "parts": [{"type": "tool_call_response", "id": "a"}]}])
    ('b',)
    """
    tail: list[Any] = []
    for message in reversed(conversation) if isinstance(conversation, list) else ():
        if _speaks(message):
            asked = {call.id for call in asked_calls([message])} - {""}
            return tuple(sorted(asked - set(answered_calls(tail))))[:_CALLS]
        tail.append(message)
    return ()


def resumed_calls(conversation: Any, begin: int) -> tuple[str, ...]:
    """Ids of the tool calls whose results begin the new messages, from index ``begin`` on, of a run; sorted.

    >>> result = {"role": "user", "parts": [{"type": "tool_call_response", "id": "b"}]}
    >>> resumed_calls([{"role": "user"}, result, {"role": "assistant"}], 1)
    ('b',)
    """
    found: list[Any] = []
    for message in conversation[begin:] if isinstance(conversation, list) else ():
        if _speaks(message):
            break
        found.append(message)
    return answered_calls(found)[:_CALLS]
