"""Inputs and outputs of functions as the SDKs of observability products record them (Langfuse, MLflow): arguments by
name, requests and answers of model clients in their own shapes, brought to messages as ``fields`` reads them."""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import (
    answered_calls,
    asked_calls,
    first,
    first_user_hash,
    fresh_answers,
    integer,
    messages,
    texts,
)
from spanloop.pipeline.dialects.operation import CallFacts, text_hash

__all__ = ["argument_texts", "call_facts", "task_hash", "tokens", "unquoted"]

_LISTS = ("messages", "choices", "output", "generations", "contents", "content", "input")
_DEPTH = 4
_ARGUMENTS = 16
_CALLS = {"tool_use": "tool_call", "function_call": "tool_call"}
_RESULTS = {"tool_result": "tool_call_response", "function_call_output": "tool_call_response"}
_TASKS = (
    "messages",
    "input",
    "inputs",
    "query",
    "question",
    "task",
    "prompt",
    "user_input",
    "request",
    "message",
)


def unquoted(value: Any) -> str:
    """A text, also one written as JSON text in quotes.

    >>> unquoted('"LLM"'), unquoted("LLM"), unquoted(3), unquoted('"cut')
    ('LLM', 'LLM', '', '"cut')
    """
    if not isinstance(value, str):
        return ""
    if len(value) > 1 and value[0] == '"' == value[-1]:
        found, _ = messages(f"[{value}]")
        return found[0] if found and isinstance(found[0], str) else value
    return value


def call_facts(given: Any, answer: Any, **known: Any) -> tuple[CallFacts, bool]:
    """A model call's facts from its recorded input and output; False: one of them could not be read."""
    history, history_ok = messages(given)
    output, output_ok = messages(answer)
    before, after = _conversation(history, _DEPTH), _conversation(output, _DEPTH)
    reasons = known.pop("finish_reasons", ()) or texts(_named(output, "finish_reason", "stop_reason"))
    facts = CallFacts(
        finish_reasons=reasons,
        asked=asked_calls(after),
        answered=answered_calls(before),
        task_hash=first_user_hash(before),
        fresh=fresh_answers(before),
        **known,
    )
    return facts, history_ok and output_ok


def _conversation(value: Any, depth: int) -> list[Any]:
    """The messages inside a request or an answer, one after the other."""
    if depth <= 0:
        return []
    if isinstance(value, list):
        return [
            message for item in value for message in _conversation(item, depth - (isinstance(item, list)))
        ]
    if not isinstance(value, dict):
        return []
    inner = value.get("message")
    if isinstance(inner, dict):
        return _conversation(inner, depth - 1)
    if "role" not in value and "type" not in value:
        for key in _LISTS:
            if isinstance(value.get(key), list):
                return _conversation(value[key], depth - 1)
    content = value.get("content")
    if isinstance(content, list) and any(isinstance(part, dict) and _renamed(part) for part in content):
        parts = [_part(part) for part in content if isinstance(part, dict)]
        return [{"role": value.get("role"), "parts": parts}]
    return [_part(value)]


def _renamed(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and (kind in _CALLS or kind in _RESULTS)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a provider's own type under the common name; its id where it is looked for."""
    kind = part.get("type")
    name = (_CALLS.get(kind) or _RESULTS.get(kind)) if isinstance(kind, str) else None
    if name is None:
        return part
    return {**part, "type": name, "id": first(part, "tool_use_id", "call_id", "id")}


def _named(value: Any, *keys: str) -> Any:
    """The first of ``keys`` in an answer or in its first choice."""
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    inner = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return first(value, *keys) or first(inner, *keys)


def task_hash(given: Any) -> str:
    """``text_hash`` of what an agent was asked: its first user message, else its first argument that is a text."""
    value, _ = messages(given)
    found = first_user_hash(_conversation(value, _DEPTH)) if value else ""
    if found or not isinstance(value, dict) or not value:
        return found or text_hash(unquoted(given) if isinstance(given, str) and not value else "")
    for key in _TASKS:
        if text_hash(value.get(key)):
            return text_hash(value[key])
    return next(iter(argument_texts(value)), "") if len(argument_texts(value)) == 1 else ""


def argument_texts(given: Any) -> tuple[str, ...]:
    """``text_hash`` of the texts among a function's arguments, also under ``args`` and ``kwargs``, sorted."""
    value, _ = messages(given)
    if not isinstance(value, dict) or not value:
        return tuple(sorted({text_hash(given)} - {""}))
    candidates: list[Any] = []
    for key, item in value.items():
        if key in ("args", "kwargs", "arguments", "input") and isinstance(item, dict | list):
            candidates += item.values() if isinstance(item, dict) else item
        else:
            candidates.append(item)
    return tuple(sorted({text_hash(item) for item in candidates[:_ARGUMENTS]} - {""}))


def tokens(usage: Any) -> tuple[int | None, int | None]:
    """(input, output) tokens of a usage map under any of its names; unknown is not zero."""
    value, _ = messages(usage)
    if not isinstance(value, dict):
        return None, None
    return (
        integer(first(value, "input_tokens", "input", "prompt_tokens", "promptTokens", "inputTokens")),
        integer(
            first(value, "output_tokens", "output", "completion_tokens", "completionTokens", "outputTokens")
        ),
    )
