"""OpenAI's Responses API (``/v1/responses``) in the terms of chat completions, and the folding of its events. Pure.

A record knows one shape; what is told of a call here is what the same call would have been as a chat. Token ids come from vLLM's
``enable_response_messages``, log-probabilities from ``include``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanloop.collectors.gateway_tokens import TOP_LOGPROBS, Asked
from spanloop.collectors.untyped import maps, number, text, the_map

__all__ = ["ResponseFolder", "ask", "request_view", "response_view", "shown"]

INCLUDE = "message.output_text.logprobs"
ITEMS_MAX = 1024
"""Output items of a response that are folded from events."""
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def request_view(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as a chat request: ``instructions`` and ``input`` as messages."""
    messages: list[dict[str, Any]] = []
    if instructions := text(body.get("instructions")):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    messages += [message for item in maps(given) if (message := _message(item))]
    view = {
        "model": body.get("model"),
        "messages": messages,
        "tools": body.get("tools"),
        "response_format": the_map(body.get("text")).get("format"),
        "max_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
    }
    return {**body, **{name: value for name, value in view.items() if value is not None}}


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = text(item.get("type"))
    if kind == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [_tool_call(item)]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": text(item.get("call_id")), "content": item.get("output")}
    if kind in ("", "message") and text(item.get("role")):
        return {"role": text(item.get("role")), "content": item.get("content")}
    return None


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": text(item.get("name")), "arguments": text(item.get("arguments"))}
    return {"id": text(item.get("call_id")) or text(item.get("id")), "type": "function", "function": function}


def response_view(response: Mapping[str, Any]) -> dict[str, Any]:
    """The response as a chat.completion with one choice."""
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for item in maps(response.get("output")):
        if item.get("type") == "function_call":
            calls.append(_tool_call(item))
        for part in maps(item.get("content")) if item.get("type") == "message" else ():
            said.append(text(part.get("text")) or text(part.get("refusal")))
            entries += maps(part.get("logprobs"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said) or None}
    if calls:
        message["tool_calls"] = calls
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": _finish(response, bool(calls))}
    if entries:
        choice["logprobs"] = {"content": entries}
    outputs = maps(response.get("output_messages"))
    if len(outputs) == 1 and isinstance(outputs[0].get("tokens"), list):
        choice["token_ids"] = outputs[0]["tokens"]
    view: dict[str, Any] = {
        "id": text(response.get("id")),
        "model": text(response.get("model")),
        "choices": [choice],
    }
    inputs = maps(response.get("input_messages"))
    if len(inputs) == 1 and isinstance(inputs[0].get("tokens"), list):
        view["prompt_token_ids"] = inputs[0]["tokens"]
    if usage := the_map(response.get("usage")):
        view["usage"] = {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
        }
    return view


def _finish(response: Mapping[str, Any], called: bool) -> str | None:
    status = text(response.get("status"))
    if status == "completed":
        return "tool_calls" if called else "stop"
    if status == "incomplete":
        reason = text(the_map(response.get("incomplete_details")).get("reason"))
        return _FINISH.get(reason, reason) or "length"
    return "error" if status == "failed" else None


def ask(body: dict[str, Any], model: str, *, tokens: bool) -> tuple[dict[str, Any], Asked]:
    """The request for the server, as ``gateway_tokens.ask_for_tokens`` does it for a chat."""
    include = body.get("include")
    included = [item for item in include if isinstance(item, str)] if isinstance(include, list) else []
    asked = Asked(
        logprobs=INCLUDE in included,
        token_ids=bool(body.get("enable_response_messages")),
        usage=True,
        top_logprobs=body.get("top_logprobs"),
    )
    asking = {**body, "model": model}
    if tokens:
        asking["enable_response_messages"] = True
        if not asked.logprobs:
            asking.update(include=[*included, INCLUDE], top_logprobs=TOP_LOGPROBS)
    return asking, asked


def shown(event: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """A response, or an event of its stream, without what the client did not ask for; shares the rest."""
    copy = dict(event)
    if isinstance(copy.get("response"), dict):
        copy["response"] = _without(copy["response"], asked)
    elif copy.get("object") == "response":
        return _without(copy, asked)
    if not asked.logprobs:
        if copy.get("logprobs"):
            copy["logprobs"] = []
        if isinstance(copy.get("part"), dict):
            copy["part"] = _plain_part(copy["part"])
        if isinstance(copy.get("item"), dict):
            copy["item"] = _plain_item(copy["item"])
    return copy


def _without(response: dict[str, Any], asked: Asked) -> dict[str, Any]:
    copy = dict(response)
    if not asked.token_ids:
        for name in ("input_messages", "output_messages"):
            if copy.get(name) is not None:
                copy[name] = None
    if not asked.logprobs:
        if copy.get("top_logprobs") is not None and copy["top_logprobs"] != asked.top_logprobs:
            copy["top_logprobs"] = asked.top_logprobs
        if isinstance(copy.get("output"), list):
            copy["output"] = [_plain_item(item) for item in copy["output"]]
    return copy


def _plain_item(item: Any) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get("content"), list):
        return item
    return {**item, "content": [_plain_part(part) for part in item["content"]]}


def _plain_part(part: Any) -> Any:
    return {**part, "logprobs": None} if isinstance(part, dict) and part.get("logprobs") else part


class ResponseFolder:
    """Folds the events of a stream into the response object. The last event carries all of it; of a stream that was cut off the
    parts that came are kept."""

    def __init__(self) -> None:
        self._response: dict[str, Any] | None = None
        self._whole = False
        self._items: dict[int, dict[str, Any]] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Take in one event, as the server sent it."""
        kind = text(event.get("type"))
        if isinstance(event.get("response"), dict):
            self._response = event["response"]
            self._whole = kind in ("response.completed", "response.incomplete", "response.failed")
            return
        index = number(event.get("output_index"))
        if not isinstance(index, int) or not 0 <= index < ITEMS_MAX:
            return
        if kind in ("response.output_item.added", "response.output_item.done") and isinstance(
            event.get("item"), dict
        ):
            self._items[index] = dict(event["item"])
        elif kind == "response.output_text.delta" and (item := self._items.get(index)) is not None:
            parts = item["content"] = [dict(part) for part in maps(item.get("content"))] or [
                {"type": "output_text", "text": ""}
            ]
            parts[-1]["text"] = text(parts[-1].get("text")) + text(event.get("delta"))
        elif (
            kind == "response.function_call_arguments.delta" and (item := self._items.get(index)) is not None
        ):
            item["arguments"] = text(item.get("arguments")) + text(event.get("delta"))

    def response(self) -> dict[str, Any] | None:
        """The response so far; None before the first event."""
        if self._response is None and not self._items:
            return None
        response = dict(self._response or {})
        if not self._whole or (not response.get("output") and self._items):
            response["output"] = [self._items[index] for index in sorted(self._items)]
        return response
