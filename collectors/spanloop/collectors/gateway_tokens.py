"""What the gateway asks a server for beyond the client's request, and how it takes it out of the answer. Pure.

Token ids and behaviour log-probabilities in vLLM's shapes. Invariant: a client gets the fields that it would have
got without the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spanloop.collectors.untyped import maps, number, text, the_map

__all__ = [
    "Asked",
    "CallTokens",
    "ask_for_tokens",
    "call_tokens",
    "is_greedy",
    "shown_chat",
    "shown_chat_bytes",
    "strip_choice",
    "strip_response",
]

TOP_LOGPROBS = 20
"""The most that OpenAI and vLLM give by default; a menu of more options is not recorded whole, unless the request lists them."""
TOKEN_IDS_MAX = 128
"""Token ids of which vLLM reports the log-probability at each position."""
GREEDY_BELOW = 1e-5
"""At a smaller temperature a server takes the likeliest token."""
MASKED_BELOW = -9000.0
"""vLLM writes -9999.0 for the logarithm of zero: such an option was not open."""
MENU_MASS = 1e-3
"""Entries that leave out more probability than this are not a menu."""

TOKENS_MAX = 65_536
"""Prompt and response tokens of a call that are recorded; the arrays of a longer one are left out."""
OPTIONS_MAX = 65_536
"""Menu entries of a call that are recorded; the menus of one with more are left out."""


_NULL = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class Asked(msgspec.Struct, frozen=True):
    """What the client asked for itself."""

    logprobs: bool
    token_ids: bool
    usage: bool
    """``stream_options.include_usage``."""
    top_logprobs: Any = None
    """Of a Responses request, which the answer repeats."""


class CallTokens(msgspec.Struct, frozen=True):
    """Tokens of a call; arrays have one entry for each response token. ``problem``: why something is missing."""

    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    menus: tuple[tuple[tuple[int, float], ...], ...] = ()
    problem: str = ""
    gave_none: bool = False
    """The server gave no token ids, or none of their log-probabilities."""


def ask_for_tokens(body: dict[str, Any], model: str, *, tokens: bool) -> tuple[dict[str, Any], Asked]:
    """The request for the server: another model name and, for training, token ids and log-probabilities.

    A client that asks for log-probabilities itself keeps its own choice of them; then there is no menu. Where the request
    names the tokens that it allows, all of these are asked for, however many they are (vLLM's ``logprob_token_ids``).
    """
    options = the_map(body.get("stream_options"))
    asked = Asked(
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        usage=bool(options.get("include_usage")),
    )
    asking = {**body, "model": model}
    if tokens:
        asking["return_token_ids"] = True
        if not asked.logprobs:
            asking.update(logprobs=True, top_logprobs=TOP_LOGPROBS, return_tokens_as_token_ids=True)
            allowed = _ids(body.get("allowed_token_ids"))
            if TOP_LOGPROBS < len(allowed) <= TOKEN_IDS_MAX and not body.get("logprob_token_ids"):
                asking["logprob_token_ids"] = list(allowed)
    if body.get("stream"):
        asking["stream_options"] = {**options, "include_usage": True}
    return asking, asked


def strip_choice(choice: dict[str, Any], asked: Asked) -> None:
    """Remove from a choice (of a response or a chunk) what the client did not ask for."""
    if not asked.logprobs and choice.get("logprobs") is not None:
        choice["logprobs"] = None
    if not asked.token_ids:
        choice.pop("token_ids", None)


def strip_response(response: dict[str, Any], asked: Asked) -> None:
    """Remove from a response (or chunk) what the client did not ask for."""
    if not asked.token_ids:
        response.pop("prompt_token_ids", None)
    for choice in maps(response.get("choices")):
        strip_choice(choice, asked)


def shown_chat(response: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The client's copy of a response or chunk; it shares what is not removed with the record's."""
    copy = dict(response)
    if isinstance(response.get("choices"), list):
        copy["choices"] = [dict(c) if isinstance(c, dict) else c for c in response["choices"]]
    strip_response(copy, asked)
    return copy


def shown_chat_bytes(data: bytes, asked: Asked, *, event: bool = False) -> bytes:
    """The client's copy of a response, or of the data of a stream's event, without reading what is not changed: log-probabilities
    are most of an answer, and reading those of a long one takes as long as some calls do. ``data`` itself where nothing is taken
    out; empty: an event that is not for the client.

    Raises:
        msgspec.DecodeError: it is not JSON, or not what a chat answers; ``shown_chat`` can tell what it is.
    """
    body = _fields(data)
    if event and _is_error(body):
        return data
    changed = not asked.token_ids and body.pop("prompt_token_ids", None) is not None
    choices = _choices(body["choices"]) if "choices" in body else []
    for choice in choices:
        if not asked.logprobs and choice.get("logprobs", _NULL) != _NULL:
            choice["logprobs"] = _NULL
            changed = True
        if not asked.token_ids and choice.pop("token_ids", None) is not None:
            changed = True
    if event and not asked.usage:
        usage = body.pop("usage", None)
        if not choices and usage is not None and usage != _NULL:
            return b""
        changed = changed or usage is not None
    if not changed:
        return data
    if choices:
        body["choices"] = msgspec.Raw(_encode(choices))
    return _encode(body)


def _is_error(body: Mapping[str, msgspec.Raw]) -> bool:
    told = (_decode(body[name]) if name in body else None for name in ("error", "type"))
    return bool(next(told)) or next(told) == "error"


def is_greedy(request: Mapping[str, Any]) -> bool:
    """Whether the request's answer is not sampled.

    >>> is_greedy({"temperature": 0}), is_greedy({})
    (True, False)
    """
    temperature = number(request.get("temperature"))
    return temperature is not None and temperature < GREEDY_BELOW


def call_tokens(response: Mapping[str, Any], *, greedy: bool = False) -> CallTokens:
    """Tokens of a complete response; parts that do not fit each other are left out and named in ``problem``.

    ``greedy``: the likeliest tokens were taken, so that each had probability 1, whatever the server reports (vLLM: the
    distribution that it did not sample from).
    """
    choices = maps(response.get("choices"))
    if len(choices) != 1:
        return CallTokens(problem=f"{len(choices)} choices", gave_none=not choices)
    choice = choices[0]
    prompt_ids = _ids(response.get("prompt_token_ids") or choice.get("prompt_token_ids"))
    response_ids = _ids(choice.get("token_ids"))
    if not prompt_ids or not response_ids:
        return CallTokens(problem="the server gave no token ids", gave_none=True)
    if len(prompt_ids) + len(response_ids) > TOKENS_MAX:
        return CallTokens(problem=f"more than {TOKENS_MAX} tokens")
    entries = maps(the_map(choice.get("logprobs")).get("content"))
    if len(entries) != len(response_ids):
        problem = f"{len(response_ids)} token ids but {len(entries)} log-probabilities"
        return CallTokens(prompt_ids, response_ids, problem=problem, gave_none=not entries)
    found = [number(entry.get("logprob")) for entry in entries]
    logprobs = tuple(float(value) for value in found if value is not None and math.isfinite(value))
    if len(logprobs) != len(found):
        return CallTokens(prompt_ids, response_ids, problem="a log-probability is not finite")
    if greedy:
        menus = tuple(((token_id, 0.0),) for token_id in response_ids)
        return CallTokens(prompt_ids, response_ids, (0.0,) * len(response_ids), menus)
    menus = tuple(
        _menu(token_id, logprob, maps(entry.get("top_logprobs")))
        for token_id, logprob, entry in zip(response_ids, logprobs, entries, strict=True)
    )
    if sum(len(menu) for menu in menus) > OPTIONS_MAX:
        return CallTokens(
            prompt_ids, response_ids, logprobs, problem=f"menus of more than {OPTIONS_MAX} options"
        )
    return CallTokens(prompt_ids, response_ids, logprobs, menus)


def _menu(token_id: int, logprob: float, top: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """All open options with their log-probabilities, or only the sampled one where the list is not complete."""
    options: dict[int, float] = {}
    for entry in top:
        token, value = text(entry.get("token")), number(entry.get("logprob"))
        digits = token.removeprefix("token_id:")
        if digits == token or not digits.isdecimal() or value is None:
            return ((token_id, logprob),)
        if math.isfinite(value) and value > MASKED_BELOW:
            options[int(digits)] = float(value)
    options.setdefault(token_id, logprob)
    if abs(sum(math.exp(p) for p in options.values()) - 1.0) > MENU_MASS:
        return ((token_id, logprob),)
    return tuple(sorted(options.items()))


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids; empty when the value is not a list of integers."""
    return tuple(value) if isinstance(value, list) and all(type(item) is int for item in value) else ()
