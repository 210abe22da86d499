"""What a model call was asked and what it answered, as chat messages in the shape of OpenAI's API.

Place in the flow: the read side only; ``source`` gives it stored spans, ``rows`` makes data sets of what comes out. It reads the
GenAI conventions (messages with parts), messages flattened into attributes (OpenInference, Traceloop) and requests and
answers recorded whole (Langfuse, MLflow, the clients' own shapes).

Invariants: pure and total; a conversation is whole or refused with a reason: nothing that was dropped, cut, or is no text is
papered over. Thinking is left out: no client sends it back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.spans import Span

__all__ = ["Conversation", "Message", "conversation_of", "problem_of", "tools_of"]

Message = dict[str, Any]
"""role, content and, where there are some, tool_calls, tool_call_id."""

_ROLES = {
    "assistant": "assistant", "model": "assistant", "ai": "assistant", "user": "user", "human": "user",
    "system": "system", "developer": "system", "tool": "tool", "function": "tool",
}  # fmt: skip
_TEXTS = frozenset({"text", "input_text", "output_text"})
_CALLS = frozenset({"tool_call", "tool-call", "function_call", "tool_use"})
_RESULTS = frozenset({"tool_call_response", "tool-return", "tool_result", "function_call_output"})
_THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_LISTS = ("messages", "choices", "output", "generations", "contents", "input")
_WHOLE = (
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
    ("input.value", "output.value"),
    ("request_data", "response_data"),
    ("input", "output"),
)
"""Attributes that hold a request and its answer as they were recorded."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEPTH_MAX = 8


class Conversation(msgspec.Struct, frozen=True):
    """One model call in words."""

    prompt: tuple[Message, ...]
    answer: Message
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the functions that the model could call, where a span has them."""
    finish: str = ""
    """Why the answer ended: stop, length, tool_calls, ...; empty: not told."""


class _Refused(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def conversation_of(span: Span, *, lossy: bool = False) -> Conversation | str:
    """The conversation of a model call's span, or the reason why it has none.

    Args:
        span: As it came; with its content opened where that was sealed.
        lossy: Attributes of spans of this orchestration were dropped, nobody knows which: messages that are spread over many
            attributes are then not taken for whole.

    >>> span = Span("a" * 32, "b" * 16, "chat", 0, 1, attributes={
    ...     "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "2 + 2?"}]}]',
    ...     "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "4"}]}]'})
    >>> conversation_of(span).answer
    {'role': 'assistant', 'content': '4'}
    """
    attributes = span.attributes
    if span.dropped_attributes or attributes.get("spanloop.truncated"):
        return "truncated"
    if attributes.get("spanloop.sealed.too_large") is True:
        return "too_large"
    try:
        given, said = _told(attributes, lossy=lossy)
        if given is None or said is None:
            return "no_text"
        prompt = [*_instructions(attributes.get("gen_ai.system_instructions")), *_messages(given, "user")]
        answers = _choices(said)
        if len(answers) > 1:
            return "several_answers"
        answer = _merged(_messages(answers, "assistant"))
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            return "no_text" if not answer else "no_single_answer"
    except _Refused as refused:
        return refused.reason
    return Conversation(tuple(_merged(prompt)), answer[0], tools_of(span), _finish(attributes, said))


def _told(attributes: Mapping[str, Any], *, lossy: bool) -> tuple[Any, Any]:
    """(input, output) of the first convention that tells both; None where one is missing."""
    given, said = attributes.get("gen_ai.input.messages"), attributes.get("gen_ai.output.messages")
    if given is None and said is None:
        flat = _flattened(attributes)
        if flat is not None:
            if lossy:
                raise _Refused("truncated")
            return flat
        for before, after in _WHOLE:
            if before in attributes and after in attributes:
                return _parsed(attributes[before]), _parsed(attributes[after])
    return _parsed(given), _parsed(said)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value[:1] not in ("[", "{"):
        return [{"content": value}] if value else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise _Refused("unreadable") from exc


def _instructions(value: Any) -> list[Message]:
    if value in (None, "", []):
        return []
    found = _parsed(value)
    parts = found if isinstance(found, list) else [found]
    if parts and all(isinstance(part, dict) and "role" in part for part in parts):
        return _messages(parts, "system")
    return [{"role": "system", "content": _text(parts)}]


# ---------------------------------------------------------------- messages


def _messages(value: Any, role: str) -> list[Message]:
    """Messages of any of the known shapes; ``role``: of one that has none."""
    found: list[Message] = []
    for item in _listed(value, 0):
        found += _message(item, role)
    return found


def _listed(value: Any, depth: int) -> list[Any]:
    """The messages inside a request or an answer, one after the other."""
    if depth > _DEPTH_MAX:
        raise _Refused("unreadable")
    if isinstance(value, list):
        return [message for item in value for message in _listed(item, depth + 1)]
    if isinstance(value, str):
        return [{"content": value}]
    if not isinstance(value, dict):
        raise _Refused("unreadable")
    _check(value)
    if isinstance(value.get("message"), dict | list):
        return _listed(value["message"], depth + 1)
    if "role" not in value and "type" not in value and "parts" not in value:
        for key in _LISTS:
            if isinstance(value.get(key), list | str):
                return [*_system_of(value), *_listed(value[key], depth + 1)]
    return [value]


def _system_of(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The instructions that stand beside a request's messages (Anthropic's ``system``, Responses' ``instructions``)."""
    told = request.get("system", request.get("instructions"))
    return [{"role": "system", "content": told}] if told else []


def _message(item: Mapping[str, Any], role: str) -> list[Message]:
    kind = _kind(item)
    own = item.get("role")
    role = role if own is None else _ROLES.get(own, "") if isinstance(own, str) else ""
    if not role:
        raise _Refused("unknown_role")
    parts = item.get("parts")
    content = item.get("content")
    if kind in _CALLS | _RESULTS | _THOUGHTS:
        parts = [item]
        role = "assistant" if kind in _CALLS | _THOUGHTS else "tool"
    elif not isinstance(parts, list):
        parts = content if isinstance(content, list) else [] if content is None else [content]
        if role == "tool":
            return [_result(item.get("tool_call_id"), content)]
    calls = [_call(part) for part in parts if isinstance(part, dict) and _kind(part) in _CALLS]
    told = item.get("tool_calls")
    calls += [_call(call) for call in (told if isinstance(told, list) else ()) if isinstance(call, dict)]
    results = [_result_of(part) for part in parts if isinstance(part, dict) and _kind(part) in _RESULTS]
    words = [part for part in parts if not (isinstance(part, dict) and _kind(part) in _CALLS | _RESULTS | _THOUGHTS)]  # fmt: skip
    if role == "tool":
        if words:
            raise _Refused("unreadable")
        return results
    said = _text(words)
    if not said and not calls:
        return results
    message: Message = {"role": role, "content": said or None}
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _kind(part: Mapping[str, Any]) -> str:
    told = part.get("type", "text")
    return told if isinstance(told, str) else ""


def _text(parts: Sequence[Any]) -> str:
    """The words of parts; refused where one is no text, or was not kept."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
            continue
        if not isinstance(part, dict):
            raise _Refused("unreadable")
        _check(part)
        if _kind(part) in _THOUGHTS:
            continue
        if _kind(part) not in _TEXTS:
            raise _Refused("not_text")
        if "text" not in part and "content" not in part:
            raise _Refused("no_text")  # what instrumentations write that were told to leave contents out
        words = part.get("text", part.get("content"))
        if isinstance(words, dict):
            _check(words)
        if not isinstance(words, str):
            raise _Refused("unreadable")
        found.append(words)
    return "\n".join(found)


def _check(value: Any) -> None:
    if isinstance(value, dict) and any(key.startswith("$") for key in value):
        raise _Refused("content_not_kept")


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    inner = part.get("function")
    named: Mapping[str, Any] = inner if isinstance(inner, dict) else part
    arguments = named.get("arguments", named.get("input"))
    identity = part.get("call_id") or part.get("id") or part.get("tool_call_id")
    _whole(arguments)
    if not isinstance(arguments, str):
        arguments = canonical_json({} if arguments is None else arguments).decode()
    return {
        "id": str(identity or ""),
        "type": "function",
        "function": {"name": str(named.get("name") or ""), "arguments": arguments},
    }


def _result_of(part: Mapping[str, Any]) -> Message:
    identity = part.get("tool_use_id") or part.get("call_id") or part.get("id") or part.get("tool_call_id")
    said = next((part[key] for key in ("response", "result", "output", "content") if key in part), None)
    return _result(identity, said)


def _result(identity: Any, said: Any) -> Message:
    _whole(said)
    if isinstance(said, list) and said and all(isinstance(p, dict) and _kind(p) in _TEXTS for p in said):
        said = _text(said)
    if not isinstance(said, str):
        said = "" if said is None else canonical_json(said).decode()
    return {"role": "tool", "content": said, "tool_call_id": str(identity or "")}


def _whole(value: Any, depth: int = 0) -> None:
    """Refuse what was dropped anywhere in a structure."""
    if depth > 64:
        raise _Refused("unreadable")
    if isinstance(value, dict):
        _check(value)
        for item in value.values():
            _whole(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _whole(item, depth + 1)
    elif isinstance(value, str) and '"$redacted"' in value:
        raise _Refused("content_not_kept")


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring pieces of one answer (a text and its tool calls, parallel calls) as the one message that they were."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            found.append(message)
            continue
        said = [part for part in (last["content"], message["content"]) if part]
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        joined: Message = {"role": "assistant", "content": "\n".join(said) or None}
        found[-1] = joined | ({"tool_calls": calls} if calls else {})
    return found


def _choices(said: Any) -> list[Any]:
    """The alternative answers of a recorded output; an output of messages that continue each other is one."""
    if isinstance(said, dict) and isinstance(said.get("choices"), list):
        return said["choices"]
    if isinstance(said, list) and len(said) > 1 and all(_is_choice(item) for item in said):
        return said
    return [said]


def _is_choice(item: Any) -> bool:
    return isinstance(item, dict) and bool(item.get("finish_reason")) and "role" in item


def _finish(attributes: Mapping[str, Any], said: Any) -> str:
    told = attributes.get("gen_ai.response.finish_reasons")
    if isinstance(told, list | tuple) and told and isinstance(told[0], str):
        return told[0]
    first = _choices(said)[0] if said else None
    inner = first[0] if isinstance(first, list) and first else first
    found = inner.get("finish_reason") if isinstance(inner, dict) else ""
    return found if isinstance(found, str) else ""


# ---------------------------------------------------------------- flattened into attributes


def _flattened(attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]] | None:
    for before, after, inner in (
        ("llm.input_messages.", "llm.output_messages.", "message."),
        ("gen_ai.prompt.", "gen_ai.completion.", ""),
    ):
        sides = [_numbered(attributes, prefix) for prefix in (before, after)]
        if any(sides):
            if any(sorted(side) != list(range(len(side))) for side in sides):
                raise _Refused("truncated")
            given, said = (
                [_unflattened(fields, inner) for _, fields in sorted(side.items())] for side in sides
            )
            return given, said
    return None


def _numbered(attributes: Mapping[str, Any], prefix: str) -> dict[int, dict[str, Any]]:
    """Fields by number: ``prefix`` + ``3.role`` is the field role of number 3."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            number, _, field = key[len(prefix) :].partition(".")
            if number.isdecimal() and len(number) < 9 and field:
                found.setdefault(int(number), {})[field] = value
    return found


def _unflattened(fields: Mapping[str, Any], inner: str) -> dict[str, Any]:
    own = {key.removeprefix(inner): value for key, value in fields.items()}
    message: dict[str, Any] = {
        key: own[key] for key in ("role", "content", "tool_call_id", "finish_reason") if key in own
    }
    pieces = _numbered(own, "contents.")
    if "content" not in message and pieces:
        message["content"] = [
            {"type": part.get("message_content.type", "text"), "text": part.get("message_content.text")}
            for _, part in sorted(pieces.items())
        ]
    calls = []
    for _, call in sorted(_numbered(own, "tool_calls.").items()):
        plain = {
            key.removeprefix("tool_call.").removeprefix("function."): value for key, value in call.items()
        }
        calls.append({key: plain.get(key) for key in ("id", "name", "arguments")})
    if calls:
        message["tool_calls"] = calls
    return message


# ---------------------------------------------------------------- tools


def tools_of(span: Span) -> tuple[dict[str, Any], ...]:
    """Function definitions in OpenAI's shape; empty where none is told or one was not kept whole."""
    attributes = span.attributes
    try:
        told = _parsed(attributes.get("gen_ai.tool.definitions") or None)
        if told is None:
            numbered = sorted(_numbered(attributes, "llm.tools.").items())
            told = [_parsed(fields.get("tool.json_schema")) for _, fields in numbered]
            numbered = sorted(_numbered(attributes, "llm.request.functions.").items())
            told += [{**fields, "parameters": _parsed(fields.get("parameters"))} for _, fields in numbered]
        found = [_tool(item) for item in told] if isinstance(told, list) else []
    except _Refused:
        return ()
    return tuple(found)


def _tool(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _Refused("unreadable")
    _whole(item)
    inner = item.get("function")
    own: Mapping[str, Any] = inner if isinstance(inner, dict) else item
    parameters = next(
        (
            own[k]
            for k in ("parameters", "parameters_json_schema", "input_schema")
            if isinstance(own.get(k), dict)
        ),
        {"type": "object", "properties": {}},
    )
    if not isinstance(own.get("name"), str):
        raise _Refused("unreadable")
    function = {"name": own["name"], "parameters": parameters}
    if isinstance(own.get("description"), str) and own["description"]:
        function["description"] = own["description"]
    return {"type": "function", "function": function}


# ---------------------------------------------------------------- rules


def problem_of(conversation: Conversation) -> str:
    """Why OpenAI's fine-tuning would refuse the conversation; empty when it would not.

    Source: its data checks: an answer at the end; content or tool calls in each message; a tool message answers a call
    of the message before it, and every call is answered; function names of 1 to 64 letters, digits, _ and -; arguments are a
    JSON object; called functions are among the defined ones, where there are definitions.
    """
    open_calls: set[str] = set()
    if not any(message["role"] == "user" for message in conversation.prompt):
        return "no_user_message"
    for message in (*conversation.prompt, conversation.answer):
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return "tool_result_without_call"
            open_calls.discard(message["tool_call_id"])
            continue
        if open_calls:
            return "tool_call_without_result"
        calls = message.get("tool_calls", ())
        if not message["content"] and not calls:
            return "empty_message"
        names = {tool["function"]["name"] for tool in conversation.tools}
        for call in calls:
            problem = _call_problem(call, names)
            if problem:
                return problem
        open_calls = {call["id"] for call in calls}
        if len(open_calls) != len(calls):
            return "tool_call_id_twice"
    return ""


def _call_problem(call: Mapping[str, Any], names: set[str]) -> str:
    name = call["function"]["name"]
    if not call["id"]:
        return "tool_call_without_id"
    if not _NAME.fullmatch(name) or (names and name not in names):
        return "unknown_tool"
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return "bad_tool_arguments"
    return "" if isinstance(arguments, dict) else "bad_tool_arguments"
