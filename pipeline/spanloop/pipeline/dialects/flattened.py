"""Messages flattened into attributes, as OpenInference writes them: ``llm.output_messages.0.message.tool_calls.1...``.

Keys may be missing anywhere (an attribute limit drops them silently) and may be left over from an earlier, longer
list of messages, so every index is optional and nothing is counted that does not name itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from spanloop.pipeline.dialects.fields import calls_hash, messages, text
from spanloop.pipeline.dialects.operation import Asked, text_hash

__all__ = ["Conversation", "asked_in", "read_conversation"]

_OUT = "llm.output_messages."
_IN = "llm.input_messages."
_NAME = ".tool_call.function.name"
_ID = ".tool_call.id"
_ANSWERED = ".message.tool_call_id"
_ROLE = ".message.role"
_TAILS = (_NAME, _ID, _ANSWERED, _ROLE)
_USER = frozenset({"user", "human"})
_MODEL = frozenset({"assistant", "model", "ai"})
_DEPTH = 8


class Conversation(msgspec.Struct, frozen=True):
    """What the flattened messages of one model call tell."""

    asked: tuple[Asked, ...] = ()
    """Tool calls of the answer, in order."""
    answered: tuple[str, ...] = ()
    """Ids of the tool calls whose results stand in the input, sorted."""
    fresh: tuple[str, ...] = ()
    """Those of them behind the last answer, sorted."""
    task_hash: str = ""
    """``text_hash`` of the first user message."""
    turns: int = 0
    """Answers in the input behind the last user message: earlier calls of the same run."""
    answer_hash: str = ""
    """``CallFacts.answer_hash``."""


def read_conversation(attributes: dict[str, Any]) -> Conversation:
    """The flattened messages of a span. A tool call without a name (its key was dropped) still counts by its id."""
    calls: dict[tuple[int, int], list[str]] = {}
    results: dict[int, str] = {}
    roles: dict[int, str] = {}
    for key, value in attributes.items():
        if not key.endswith(_TAILS):
            continue
        if key.startswith(_OUT):
            if key.endswith(_NAME):
                calls.setdefault(_place(key), ["", ""])[1] = text(value)
            elif key.endswith(_ID):
                calls.setdefault(_place(key), ["", ""])[0] = text(value)
        elif key.startswith(_IN):
            if key.endswith(_ANSWERED):
                results[_index(key)] = text(value)
            elif key.endswith(_ROLE):
                roles[_index(key)] = text(value)
    models = [i for i, role in roles.items() if role in _MODEL]
    last = max(models, default=-1)
    users = [i for i, role in roles.items() if role in _USER]
    behind = max(users, default=-1)
    asked = tuple(Asked(*calls[place]) for place in sorted(calls))
    return Conversation(
        asked=asked,
        answered=tuple(sorted(set(results.values()) - {""})),
        fresh=tuple(sorted({call for i, call in results.items() if i > last} - {""})),
        task_hash=_said(attributes, min(users)) if users else "",
        turns=sum(i > behind for i in models),
        answer_hash=_said(attributes, 0, _OUT) or calls_hash(asked),
    )


def _index(key: str) -> int:
    """Number of the message that ``key`` is of, -1 where it has none."""
    number = key.split(".", 3)[2]
    return int(number) if number.isdecimal() and len(number) < 9 else -1


def _place(key: str) -> tuple[int, int]:
    """Numbers of the message and of the tool call in it."""
    parts = key.split(".")
    number = parts[5] if len(parts) > 5 else ""
    return _index(key), int(number) if number.isdecimal() and len(number) < 9 else -1


def _said(attributes: dict[str, Any], i: int, side: str = _IN) -> str:
    """``text_hash`` of message ``i`` of the input, or of the answer."""
    whole = text_hash(attributes.get(f"{side}{i}.message.content"))
    return whole or text_hash(attributes.get(f"{side}{i}.message.contents.0.message_content.text"))


def asked_in(value: Any) -> tuple[Asked, ...]:
    """Tool calls in the raw answer (``output.value``) of the OpenAI, LangChain or Gemini client.

    >>> asked_in('{"content": {"parts": [{"function_call": {"name": "look"}}]}}')
    (Asked(id='', name='look'),)
    """
    answer, _ = messages(value)
    return tuple(_calls(answer, _DEPTH))


def _calls(value: Any, depth: int) -> Iterator[Asked]:
    if depth <= 0:
        return
    if isinstance(value, list):
        for item in value:
            yield from _calls(item, depth - 1)
        return
    if not isinstance(value, dict):
        return
    if value.get("type") == "function_call":
        yield Asked(text(value.get("call_id")) or text(value.get("id")), text(value.get("name")))
        return
    if isinstance(call := value.get("function_call"), dict) and call.get("name"):
        yield Asked(text(call.get("id")), text(call.get("name")))
        return
    calls = value.get("tool_calls")
    if isinstance(calls, list) and calls:
        for call in calls:
            if isinstance(call, dict):
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else call.get("name")
                yield Asked(text(call.get("id")), text(name))
        return
    for key in ("generations", "message", "kwargs", "content", "parts", "output", "choices", "data"):
        if isinstance(inner := value.get(key), list | dict):
            yield from _calls(inner, depth - 1)
