"""Requests and responses of the embedded server, in vLLM's JSON shapes. Pure.

What vLLM adds to OpenAI's: ``return_token_ids`` gives ``choices[].token_ids`` and ``prompt_token_ids``;
``return_tokens_as_token_ids`` writes tokens as ``token_id:N``; ``prompt_logprobs`` of /v1/completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from spanloop.learner.grammar import fragments
from spanloop.learner.serving.batching import Row, Step
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError

__all__ = ["ChatRequest", "CompletionRequest", "chat_chunks", "chat_response", "check_chat", "error_body"]

TOP_LOGPROBS_MAX = 20
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestEntityTooLarge",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a request."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The part of a chat request that the embedded server reads; other fields are ignored."""

    model: str
    messages: list[dict[str, Any]]
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    """vLLM's field for a server's own sampling arguments; here ``exploration``, the floor of this request."""

    def exploration(self, default: float) -> float:
        """The request's exploration floor. Raises SchemaError when it is out of range."""
        asked = (self.vllm_xargs or {}).get("exploration", default)
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0.0 <= asked <= 0.5:
            raise SchemaError(f"vllm_xargs.exploration = {asked!r} is out of range, expected 0 to 0.5")
        return float(asked)


class CompletionRequest(msgspec.Struct):
    """The part of a completion request that the embedded server reads: scoring of prompts given as token ids."""

    model: str
    prompt: list[int | list[int]]
    """Token ids of one prompt, or a list of such lists."""
    max_tokens: int = 1
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt. Raises SchemaError when ids and lists are mixed."""
        lists = [item for item in self.prompt if isinstance(item, list)]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if lists and ids:
            raise SchemaError("prompt mixes token ids and lists of token ids")
        return lists or [ids]


def check_chat(request: ChatRequest) -> None:
    """Raise SchemaError for values that the embedded server cannot honour."""
    if request.n not in (None, 1):
        raise SchemaError(f"n = {request.n} is not supported: one choice a request")
    if request.temperature is not None and not 0.0 <= request.temperature <= 100.0:
        raise SchemaError(f"temperature = {request.temperature} is out of range, expected 0 to 100")
    if request.top_p is not None and not 0.0 < request.top_p <= 1.0:
        raise SchemaError(f"top_p = {request.top_p} is out of range, expected (0, 1]")
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise SchemaError("top_logprobs needs logprobs = true")
        if not 0 <= request.top_logprobs <= TOP_LOGPROBS_MAX:
            raise SchemaError(
                f"top_logprobs = {request.top_logprobs} is out of range, expected 0 to {TOP_LOGPROBS_MAX}"
            )


def error_body(status: int, message: str, *, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def chat_response(
    request: ChatRequest, row: Row, *, response_id: str, created: int, tokenizer: Tokenizer, num_prompt: int
) -> dict[str, Any]:
    """The chat.completion object of a finished row."""
    call = {
        "id": _call_id(response_id),
        "type": "function",
        "function": {"name": row.nodes[0].fragment, "arguments": fragments(row.nodes)},
    }
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        "logprobs": _logprobs(request, row.steps, tokenizer),
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": [step.token_id for step in row.steps] if request.return_token_ids else None,
    }
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": usage(num_prompt, len(row.steps)),
        "prompt_token_ids": row.ids[:num_prompt] if request.return_token_ids else None,
    }


def chat_chunks(
    request: ChatRequest, row: Row, *, response_id: str, created: int, tokenizer: Tokenizer, num_prompt: int
) -> Iterator[dict[str, Any]]:
    """The chat.completion.chunk objects of a finished row: a head, one a token, the end, usage where asked for."""

    def chunk(delta: dict[str, Any], finish: str | None = None, steps: Sequence[Step] = ()) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if steps:
            choice["logprobs"] = _logprobs(request, steps, tokenizer)
        if request.return_token_ids:
            choice["token_ids"] = [step.token_id for step in steps]
        return {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": request.model,
                "choices": [choice]}  # fmt: skip

    head = chunk({"role": "assistant", "content": ""})
    if request.return_token_ids:
        head["prompt_token_ids"] = row.ids[:num_prompt]
    yield head
    alone = len(row.nodes) == 1
    for index, (node, step) in enumerate(zip(row.nodes, row.steps, strict=True)):
        if index == 0:
            function = {"name": node.fragment, "arguments": "{}" if alone else ""}
            call: dict[str, Any] = {
                "id": _call_id(response_id),
                "type": "function",
                "index": 0,
                "function": function,
            }
        else:
            call = {"index": 0, "function": {"arguments": node.fragment}}
        yield chunk({"tool_calls": [call]}, None, [step])
    yield chunk({}, "tool_calls")
    if request.stream_options is not None and request.stream_options.include_usage:
        end = chunk({})
        end["choices"] = []
        end["usage"] = usage(num_prompt, len(row.steps))
        yield end


def usage(num_prompt: int, num_response: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_response,
        "completion_tokens": num_response,
    }


def _call_id(response_id: str) -> str:
    return "chatcmpl-tool-" + response_id.removeprefix("chatcmpl-")


def _logprobs(request: ChatRequest, steps: Sequence[Step], tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    as_ids = bool(request.return_tokens_as_token_ids)
    count = request.top_logprobs or 0

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token_id}" if as_ids else tokenizer.words[token_id]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content: list[dict[str, Any]] = []
    for step in steps:
        top = sorted(zip(step.menu_logprobs, step.menu, strict=True), key=lambda pair: -pair[0])[:count]
        content.append({**entry(step.token_id, step.logprob), "top_logprobs": [entry(t, p) for p, t in top]})
    return {"content": content}


def completion_response(
    request: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    scores: Sequence[Sequence[Sequence[float]]],
    *,
    response_id: str,
    created: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The text_completion object that carries prompt log-probabilities (first position: null, as in vLLM)."""
    choices: list[dict[str, Any]] = []
    for index, (prompt, score_TV) in enumerate(zip(prompts, scores, strict=True)):
        positions: list[Any] | None = None
        if request.prompt_logprobs is not None:
            positions = [None]
            for token_id, score_V in zip(prompt[1:], score_TV, strict=False):
                positions.append(_position(token_id, score_V, request.prompt_logprobs, tokenizer))
        choices.append({
            "index": index, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
            "prompt_logprobs": positions, "token_ids": [] if request.return_token_ids else None,
            "prompt_token_ids": list(prompt) if request.return_token_ids else None,
        })  # fmt: skip
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": usage(sum(len(p) for p in prompts), 0),
    }


def _position(token_id: int, score_V: Sequence[float], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    order = sorted(range(len(score_V)), key=lambda i: -score_V[i])
    rank = {token: place + 1 for place, token in enumerate(order)}
    shown = dict.fromkeys([token_id, *order[:count]])
    return {
        str(t): {"logprob": score_V[t], "rank": rank[t], "decoded_token": tokenizer.words[t]} for t in shown
    }
