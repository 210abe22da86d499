"""Reading attribute values of unknown type: what more than one dialect needs.

Every function is total: a value of the wrong type is absent, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from spanloop.pipeline.dialects.operation import Asked, text_hash
from spanloop.schemas.canonical import digest
from spanloop.schemas.spans import Span

__all__ = [
    "CALL_PARTS",
    "RESULT_PARTS",
    "Heard",
    "answer_hash",
    "answered_calls",
    "argument_hashes",
    "asked_calls",
    "base_fields",
    "calls_hash",
    "first",
    "first_user_hash",
    "fresh_answers",
    "heard",
    "integer",
    "messages",
    "says_error",
    "text",
    "text_at",
    "texts",
]

_decode = msgspec.json.Decoder().decode
CALL_PARTS = frozenset({"tool_call", "tool-call", "function_call"})
"""Kinds of the parts of an answer that ask for a tool call."""
RESULT_PARTS = frozenset({"tool_call_response", "tool-return", "tool_result"})
"""Kinds of the parts of a message that are the results of tool calls."""
_ARGUMENT_TEXTS = 16
"""Texts of one tool call's arguments that are hashed; more are no evidence of a delegation."""
_LINKS = 128
_NO_ID = frozenset({""})
_FAILED = frozenset({"error", "failed", "failure"})


def text(value: Any) -> str:
    """A text as it is, a number as text, anything else empty."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def text_at(attributes: dict[str, Any], *keys: str) -> str:
    """``text`` of the first of ``keys`` that is there and not None."""
    for key in keys:
        value = attributes.get(key)
        if type(value) is str:
            return value
        if value is not None:
            return text(value)
    return ""


def integer(value: Any) -> int | None:
    """A count, also one written as text or float; None where it is none. Unknown is not zero."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, float):
        return int(value) if value >= 0 and value.is_integer() else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    return None


def first(attributes: dict[str, Any], *keys: str) -> Any:
    """Value of the first of ``keys`` that is there and not None."""
    for key in keys:
        value = attributes.get(key)
        if value is not None:
            return value
    return None


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts, also one written as JSON text or as a single text."""
    if value is None:
        return ()
    if isinstance(value, str):
        if value.startswith("["):
            value, _ = messages(value)
        else:
            return (value,) if value else ()
    if not isinstance(value, list | tuple):
        return ()
    return tuple(item for item in value if isinstance(item, str))


def messages(value: Any) -> tuple[Any, bool]:
    """(value as lists and dicts, whether it could be read). JSON text is decoded; absent reads as empty. A text
    dropped as a whole was no JSON (any more): the collectors keep the structure of what they can read."""
    if isinstance(value, str):
        if not value or value[0] not in "[{":
            return [], not value
        try:
            return _decode(value), True
        except (msgspec.DecodeError, RecursionError):
            return [], False
    if value is None:
        return [], True
    if not isinstance(value, list | dict) or "$redacted" in value:
        return [], False
    return value, True


def _process(resource: dict[str, Any]) -> str:
    """Which process a resource is; empty where it does not tell."""
    instance = resource.get("service.instance.id")
    if instance and (type(instance) is str or (instance := text(instance))):
        return _short_id(instance)
    pid = text(resource.get("process.pid"))
    return _short_id(f"{text(resource.get('host.name'))}/{pid}") if pid else ""


@lru_cache(256)
def _short_id(name: str) -> str:
    return digest(name)[:12]


def _parts(conversation: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(role, part) of all messages; a message without parts is its own part."""
    for message in conversation if isinstance(conversation, list) else [conversation]:
        if not isinstance(message, dict):
            continue
        role = text(message.get("role"))
        parts = message.get("parts")
        for part in parts if isinstance(parts, list) else [message]:
            if isinstance(part, dict):
                yield role, part


def asked_calls(conversation: Any) -> tuple[Asked, ...]:
    """Tool calls that the messages of a model's answer ask for, in order."""
    found = []
    for _, part in _parts(conversation):
        if text(part.get("type")) in CALL_PARTS:
            found.append(
                Asked(text(part.get("id")) or text(part.get("tool_call_id")), text(part.get("name")))
            )
        calls = part.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else call.get("name")
                found.append(Asked(text(call.get("id")), text(name)))
    return tuple(found)


def answered_calls(conversation: Any) -> tuple[str, ...]:
    """Ids of the tool calls whose results stand in the messages, sorted."""
    found = set()
    for role, part in _parts(conversation):
        if text(part.get("type")) in RESULT_PARTS:
            found.add(text(part.get("id")) or text(part.get("tool_call_id")))
        elif role == "tool" and "tool_call_id" in part:
            found.add(text(part["tool_call_id"]))
    found.discard("")
    return tuple(sorted(found))


class Heard(msgspec.Struct, frozen=True, gc=False):
    """What the input of a model call tells."""

    answered: tuple[str, ...]
    """``answered_calls``."""
    fresh: tuple[str, ...]
    """``fresh_answers``."""
    task_hash: str
    """``first_user_hash``."""


def heard(conversation: Any) -> Heard:
    """``answered_calls``, ``fresh_answers`` and ``first_user_hash`` of a model call's input, read once: it is the longest text there is."""
    if not isinstance(conversation, list):
        return Heard(answered_calls(conversation), (), first_user_hash(conversation))
    found: set[str] = set()
    new: set[str] = set()
    task: str | None = None
    for message in conversation:
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        from_model = role in ("assistant", "model")
        if from_model:
            new.clear()
        parts = message.get("parts")
        for part in parts if isinstance(parts, list) else (message,):
            if not isinstance(part, dict):
                continue
            kind = part.get("type", "text")
            if type(kind) is str and kind in RESULT_PARTS:
                call_id = text(part.get("id")) or text(part.get("tool_call_id"))
            elif role == "tool" and "tool_call_id" in part:
                call_id = text(part["tool_call_id"])
            else:
                if task is None and role == "user" and kind == "text":
                    task = text_hash(part.get("content"))
                continue
            found.add(call_id)
            if not from_model:
                new.add(call_id)
    return Heard(tuple(sorted(found - _NO_ID)), tuple(sorted(new - _NO_ID)), task or "")


def fresh_answers(conversation: Any) -> tuple[str, ...]:
    """Ids of the tool calls whose results stand behind the last thing that the model said, sorted."""
    tail: list[Any] = []
    for message in reversed(conversation) if isinstance(conversation, list) else ():
        if isinstance(message, dict) and message.get("role") in ("assistant", "model"):
            break
        tail.append(message)
    return answered_calls(tail)


def first_user_hash(conversation: Any) -> str:
    """``text_hash`` of the first user message's text."""
    for role, part in _parts(conversation):
        if role == "user" and part.get("type", "text") == "text":
            return text_hash(part.get("content"))
    return ""


def answer_hash(conversation: Any, asked: tuple[Asked, ...] = ()) -> str:
    """``text_hash`` of the first text in a model's answer; without one, a hash of the ids of the tool calls that it asks for."""
    for _, part in _parts(conversation):
        if part.get("type", "text") == "text" and (found := text_hash(part.get("content"))):
            return found
    return calls_hash(asked)


def calls_hash(asked: tuple[Asked, ...]) -> str:
    """A hash of the ids of tool calls that an answer asks for; empty where one has none."""
    ids = [call.id for call in asked]
    return "calls:" + digest(*ids)[:16] if ids and all(ids) else ""


def argument_hashes(arguments: Any) -> tuple[str, ...]:
    """``text_hash`` of the texts among a tool call's arguments (one level deep), sorted."""
    value, _ = messages(arguments)
    candidates = list(value.values())[:_ARGUMENT_TEXTS] if isinstance(value, dict) else [arguments]
    found = [hashed for item in candidates if (hashed := text_hash(item))]
    return tuple(found) if len(found) < 2 else tuple(sorted(set(found)))


class _Outcome(msgspec.Struct, gc=False):
    """What of a tool's result, as JSON text, tells whether the tool failed."""

    isError: Any = None
    is_error: Any = None
    status: Any = None
    result: msgspec.Raw = msgspec.Raw()


_decode_outcome = msgspec.json.Decoder(_Outcome).decode


def says_error(result: Any) -> bool:
    """Whether a tool's result says that the tool failed, by the keys that frameworks and MCP use for it.

    >>> says_error('{"status": "error", "error_message": "no such city"}'), says_error({"isError": True})
    (True, True)
    >>> says_error("error"), says_error({"status": "ok"}), says_error({"error": None})
    (False, False, False)
    """
    if isinstance(result, str):
        return result[:1] == "{" and _says_error(result)
    if not isinstance(result, dict) or "$redacted" in result:
        return False
    for _ in range(2):
        if not isinstance(result, dict):
            return False
        if _failed(result.get("isError"), result.get("is_error"), result.get("status")):
            return True
        result = result.get("result")
    return False


def _says_error(result: str) -> bool:
    """``says_error`` of a JSON object's text: what else stands in it, perhaps much, is not built."""
    inner: str | msgspec.Raw = result
    for _ in range(2):
        try:
            told = _decode_outcome(inner)
        except (msgspec.DecodeError, RecursionError):
            return False
        if _failed(told.isError, told.is_error, told.status):
            return True
        inner = told.result
    return False


def _failed(is_error: Any, is_error_too: Any, status: Any) -> bool:
    return is_error is True or is_error_too is True or (isinstance(status, str) and status.lower() in _FAILED)


def base_fields(span: Span) -> dict[str, Any]:
    """The fields of an operation that no dialect changes."""
    attributes, flags = span.attributes, ()
    if span.dropped_attributes or (attributes.get("spanloop.truncated")):
        flags = ("truncated_attributes",)
    if attributes.get("spanloop.flags"):
        flags = (*flags, "repaired_attributes")
    fields: dict[str, Any] = {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_span_id or "",
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "name": span.name,
        "layer": span.scope,
        "flags": flags,
    }
    if span.status == "error":
        fields["status"] = "error"
    if span.resource:
        fields["resource"] = _process(span.resource)
    if span.links:
        fields["links"] = tuple(sorted({(link.trace_id, link.span_id) for link in span.links})[:_LINKS])
    return fields
