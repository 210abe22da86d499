"""The spans that our own gateway records, one a model call, with what no instrumentation keeps.

The same call usually has a span of the agent's framework as well; assembly joins the two by the response id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import text
from spanloop.pipeline.dialects.operation import GatewayFacts, Operation, Said
from spanloop.pipeline.dialects.spanloop_sdk import decision_told
from spanloop.schemas import sdk_attributes as names
from spanloop.schemas.spans import Span

__all__ = ["NAME", "SCOPE", "SEALED_TOKENS", "UNFIT", "TokenArrays", "matches", "read", "token_arrays"]

NAME = "gateway"
SCOPE = "spanloop.gateway"
SEALED_TOKENS = "spanloop.sealed.tokens"
"""Attribute: the token arrays, sealed."""
UNFIT = "spanloop.sealed.unfit"
"""Attribute: of the sealed arrays some did not fit together and were left out."""

_SAMPLING = ("frequency_penalty", "max_tokens", "presence_penalty", "seed", "temperature", "top_k", "top_p")
_OWN_SAMPLING = ("min_p", "min_tokens", "repetition_penalty")


def matches(span: Span) -> bool:
    """The gateway's scope."""
    return span.scope == SCOPE


def read(span: Span) -> Operation:
    """A model call with the gateway's facts. Arrays that do not fit together are dropped and flagged."""
    operation = genai.read(span)
    if operation.kind != "model_call" or operation.call is None:
        return operation
    attributes = span.attributes
    prompt, response, logprobs, menus, fit = token_arrays(attributes)
    flags = operation.flags if fit else (*operation.flags, "token_arrays_differ")
    sampling = {
        name: value
        for prefix, names in (("gen_ai.request.", _SAMPLING), ("spanloop.request.", _OWN_SAMPLING))
        for name in names
        if isinstance(value := attributes.get(prefix + name), int | float)
    }
    facts = GatewayFacts(
        policy_version=text(attributes.get("spanloop.policy.version")),
        route=text(attributes.get("spanloop.policy.route")),
        harness=text(attributes.get("spanloop.harness")),
        task_key=text(attributes.get("spanloop.task.key")),
        sampling=sampling,
        prompt_token_ids=prompt,
        response_token_ids=response,
        logprobs=logprobs,
        menus=menus,
        asked_model=text(attributes.get("gen_ai.request.model")),
        sealed=text(attributes.get(SEALED_TOKENS)),
    )
    if attributes.get("spanloop.backend_gave_none") is True:
        flags = (*flags, "backend_gave_none")
    call = msgspec.structs.replace(operation.call, gateway=facts)
    if attributes.get("spanloop.response_id.repeated") is True:
        call = msgspec.structs.replace(call, response_id="")
        flags = (*flags, "repeated_response_id")
    if attributes.get(names.ACT) == "decision":
        decision, doubts = decision_told(attributes)
        said = Said("decision", call=call.response_id, decision=decision)
        operation = msgspec.structs.replace(operation, said=said)
        call = msgspec.structs.replace(call, input_tokens=0, output_tokens=0)  # known: no model read or wrote
        flags = (*flags, *doubts)
    return msgspec.structs.replace(operation, flags=flags, call=call)


class TokenArrays(NamedTuple):
    """Token arrays that fit together."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    menus: tuple[tuple[tuple[int, float], ...], ...]
    fit: bool
    """False: some did not, and were left out."""


def token_arrays(attributes: Mapping[str, Any]) -> TokenArrays:
    """The gateway's token arrays. Those that do not fit together are left out; one that says so was sealed without them."""
    prompt = _ints(attributes.get("spanloop.prompt_token_ids"))
    response = _ints(attributes.get("spanloop.response_token_ids"))
    logprobs = _floats(attributes.get("spanloop.response_logprobs"))
    menus = _menus(attributes.get("spanloop.menus"))
    if len(logprobs) != len(response):
        return TokenArrays((), (), (), (), False)
    if menus and len(menus) != len(response):
        return TokenArrays(prompt, response, logprobs, (), False)
    return TokenArrays(prompt, response, logprobs, menus, attributes.get(UNFIT) is not True)


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        return ()
    return tuple(value)


def _floats(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        return ()
    if not all(isinstance(item, int | float) and math.isfinite(item) for item in value):
        return ()
    return tuple(float(item) for item in value)


def _menus(value: Any) -> tuple[tuple[tuple[int, float], ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    menus = []
    for menu in value:
        options = _menu(menu)
        if options is None:
            return ()
        menus.append(options)
    return tuple(menus)


def _menu(value: Any) -> tuple[tuple[int, float], ...] | None:
    if not isinstance(value, list | tuple):
        return None
    options = []
    for option in value:
        if not isinstance(option, list | tuple) or len(option) != 2 or type(option[0]) is not int:
            return None
        if not isinstance(option[1], int | float) or not math.isfinite(option[1]):
            return None
        options.append((option[0], float(option[1])))
    return tuple(options)
