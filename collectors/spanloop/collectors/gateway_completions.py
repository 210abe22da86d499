"""OpenAI's older text completions (``/v1/completions``) in the terms of chat completions, and the folding of its chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanloop.collectors.gateway_tokens import TOP_LOGPROBS, Asked
from spanloop.collectors.untyped import maps, number, text, the_map

__all__ = ["CompletionFolder", "ask", "request_view", "response_view", "shown"]

_LISTS = ("tokens", "token_logprobs", "top_logprobs")


def request_view(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as a chat request with the prompt as its message; several prompts, or token ids, are not text of a message."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    return {**body, "messages": messages}


def response_view(response: Mapping[str, Any]) -> dict[str, Any]:
    """The response as a chat.completion."""
    choices = []
    for choice in maps(response.get("choices")):
        message = {"role": "assistant", "content": text(choice.get("text")) or None}
        view = {
            **choice,
            "message": message,
            "logprobs": {"content": _entries(the_map(choice.get("logprobs")))},
        }
        choices.append(view)
    return {**response, "choices": choices}


def _entries(logprobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry a token, as in a chat."""
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
        return []
    tops = logprobs.get("top_logprobs")
    tops = tops if isinstance(tops, list) and len(tops) == len(tokens) else [None] * len(tokens)
    return [
        {
            "token": token,
            "logprob": value,
            "top_logprobs": [{"token": t, "logprob": p} for t, p in the_map(top).items()],
        }
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def ask(body: dict[str, Any], model: str, *, tokens: bool) -> tuple[dict[str, Any], Asked]:
    """The request for the server, as ``gateway_tokens.ask_for_tokens`` does it for a chat. With ``echo`` the log-probabilities
    would be the prompt's too: then none are asked for."""
    options = the_map(body.get("stream_options"))
    asked = Asked(
        logprobs=body.get("logprobs") is not None,
        token_ids=bool(body.get("return_token_ids")),
        usage=bool(options.get("include_usage")),
    )
    asking = {**body, "model": model}
    if tokens and not body.get("echo"):
        asking["return_token_ids"] = True
        if not asked.logprobs:
            asking.update(logprobs=TOP_LOGPROBS, return_tokens_as_token_ids=True)
    if body.get("stream"):
        asking["stream_options"] = {**options, "include_usage": True}
    return asking, asked


def shown(response: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """A response or chunk without what the client did not ask for; shares the rest."""
    copy = dict(response)
    if isinstance(copy.get("choices"), list):
        copy["choices"] = [_choice(choice, asked) for choice in copy["choices"]]
    if not asked.token_ids:
        copy.pop("prompt_token_ids", None)
    return copy


def _choice(choice: Any, asked: Asked) -> Any:
    if not isinstance(choice, dict):
        return choice
    copy = dict(choice)
    if not asked.logprobs and copy.get("logprobs") is not None:
        copy["logprobs"] = None
    if not asked.token_ids:
        for name in ("token_ids", "prompt_token_ids"):
            if copy.get(name) is not None:
                copy[name] = None
    return copy


class CompletionFolder:
    """Folds the chunks of a stream into the text_completion object."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Take in one chunk, as the server sent it."""
        for name in ("id", "created", "model", "usage", "prompt_token_ids"):
            if chunk.get(name) is not None:
                self._head[name] = chunk[name]
        for part in maps(chunk.get("choices")):
            index = int(number(part.get("index")) or 0)
            choice = self._choices.setdefault(index, {"index": index, "text": "", "finish_reason": None})
            choice["text"] += text(part.get("text"))
            if part.get("finish_reason") is not None:
                choice["finish_reason"] = part["finish_reason"]
            if isinstance(part.get("token_ids"), list):
                choice.setdefault("token_ids", []).extend(part["token_ids"])
            if part.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = part["prompt_token_ids"]
            if logprobs := the_map(part.get("logprobs")):
                kept = choice.setdefault("logprobs", {name: [] for name in _LISTS})
                for name in _LISTS:
                    if isinstance(logprobs.get(name), list):
                        kept[name].extend(logprobs[name])

    def response(self) -> dict[str, Any] | None:
        """The response so far; None before the first chunk."""
        if not self._head and not self._choices:
            return None
        return {
            **self._head,
            "object": "text_completion",
            "choices": [self._choices[i] for i in sorted(self._choices)],
        }
