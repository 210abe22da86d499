"""POST /v1/decide: which option to take, by the version of the decision policy that routing chooses. Never fails its caller.

Place: the gateway routes it like any call of the policy (champion, canary or learning share, by session), forwards it to serving, and
records the decision as a span of its own: menu, propensities, choice and, where content is kept, the tokens that train the policy.
Invariants: whatever happens behind the gateway, a well-formed request is answered within ``gateway.decide_timeout_s`` and little more:
with the caller's default option where there is no answer, marked as a fallback and recorded as one that no policy took; one decision
id is one draw and one span, so a repeated request changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from spanloop.collectors.gateway_call import Call, bad_request, new_call_id, own_headers, session_of
from spanloop.collectors.gateway_shapes import DECIDE
from spanloop.collectors.gateway_targets import Target
from spanloop.collectors.routing import Router, StickyKey, parse_traceparent, sticky_key
from spanloop.schemas import sdk_attributes as names
from spanloop.schemas.canonical import digest
from spanloop.schemas.decision_tokens import (
    MENU_MAX,
    NAME_CHARS,
    STATE_MAX,
    TEMPERATURE_MAX,
    TEXT_CHARS,
)
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id, policy_name
from spanloop.schemas.settings import Settings

__all__ = ["Decider", "DecisionAsked"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_OF_AN_OPTION = frozenset({"name", "features"})
_HANDED_ON = ("kind", "menu", "state", "text", "temperature")


class DecisionAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request. Its shape is checked here, so that a mistake is one while serving is away too; serving counts features."""

    kind: str
    """O1 to O5, spawn, delegate, message, aggregate, stop, or a name of the caller's own."""
    menu: list[str | dict[str, Any]]
    """Names, or objects with ``name`` and ``features``."""
    state: dict[str, Any] = {}
    text: str = ""
    default: str = ""
    """What is answered where nobody else answers; empty: the first option."""
    id: str = ""
    """Names the decision; empty: made here."""
    user: str = ""
    temperature: float = 1.0


_asked = msgspec.json.Decoder(DecisionAsked)
_answer_of = msgspec.json.Decoder(dict[str, Any])


class Decider:
    """Asks serving for decisions.

    Args:
        settings: The deployment.
        router: Which version answers.
    """

    def __init__(self, settings: Settings, router: Router) -> None:
        self._policy = settings.gateway.policy
        self._router = router
        self._timeout = aiohttp.ClientTimeout(total=settings.gateway.decide_timeout_s)
        host = settings.serving.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings.serving.port}/v1"
        self._target = Target((url,))
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def read(self, request: web.Request, tenant: str, data: bytes, start_ns: int) -> Call:
        """The call of a request. Raises GatewayError (400)."""
        try:
            asked = _asked.decode(data)
        except (msgspec.ValidationError, *_MALFORMED) as exc:
            raise bad_request(f"the request body is no decision: {exc}") from exc
        options = [_name(item) for item in asked.menu]
        _check(asked, options)
        parent = parse_traceparent(request.headers.get("traceparent"))
        session = session_of(request)
        decision_id = asked.id or f"decision-{new_call_id()}"
        key = sticky_key(
            session=session, trace_id=parent[0] if parent else None, user=asked.user, messages=None
        )
        if key.source == "prompt":
            key = StickyKey(digest("conversation", "decision", decision_id), "decision")
        body = {**msgspec.to_builtins(asked), "id": decision_id, "model": self._policy, "options": options}
        body["kind"] = names.kind_of(asked.kind)
        body["default"] = asked.default or options[0]
        call = Call(DECIDE, tenant, body, _encode(body), key=key, target=self._target)
        call.call_id = decision_id
        call.parent = parent
        if parent is None and session:
            call.trace_id = gateway_trace_id(f"session/{tenant}/{key.value}")
        call.start_ns = start_ns
        call.wants_tokens = True
        own_headers(call, request)
        call.runtime = request.headers.get("X-Harness-Runtime") or request.headers.get("User-Agent", "")
        return call

    async def decide(self, call: Call) -> web.Response:
        """The answer. What goes wrong behind the gateway is in it, never instead of it. Raises GatewayError (400)."""
        call.sent = True
        response, reason = None, "no_policy"
        choice = self._router.route(call.tenant, call.key)
        if choice is not None:
            version = policy_name(self._policy, choice.version)
            asking = {name: call.body[name] for name in _HANDED_ON} | {"model": version, "seed": call.call_id}
            if choice.exploration:
                asking["exploration"] = choice.exploration
            try:
                response, reason = await self._ask(asking)
            except TimeoutError:
                reason = "timeout"
            except aiohttp.ClientError:
                reason = "unreachable"
            if response is not None:
                call.route, call.version, call.exploration = choice.route, version, choice.exploration
        if response is None:
            call.route, call.fallback = "fallback", reason
            response = _fallen_back(call.body)
            _log.debug("decision %s falls back on its default: %s", call.call_id, reason)
        call.answer = _encode({**response, "id": call.call_id})
        return web.Response(body=_encode(_shown(call, response)), content_type="application/json")

    async def _ask(self, asking: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Serving's answer, or the reason why there is none. Raises TimeoutError, ClientError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("User-Agent",)
            )
        url, data = self._target.urls[0] + "/decide", _encode(asking)
        try:
            status, data = await _posted(self._session, url, data)
        except aiohttp.ServerDisconnectedError:  # an idle connection that the server had closed: once more
            status, data = await _posted(self._session, url, data)
        if status == 400:
            raise bad_request(_message(data))
        if status != 200:
            return None, f"serving_{status}"
        try:
            found = _answer_of.decode(data)
        except _MALFORMED:
            return None, "serving_malformed"
        return (found, "") if _fits(found, asking) else (None, "serving_malformed")


async def _posted(session: aiohttp.ClientSession, url: str, data: bytes) -> tuple[int, bytes]:
    async with session.post(url, data=data) as answer:
        return answer.status, await answer.read()


def _name(item: str | dict[str, Any]) -> str:
    name = item if isinstance(item, str) else item.get("name")
    if not isinstance(name, str):
        raise bad_request("an option of `menu` is a name, or an object with a `name`")
    return name


def _check(asked: DecisionAsked, options: list[str]) -> None:
    """Raises GatewayError (400)."""
    if not options:
        raise bad_request("`menu` is empty: name the options that are open")
    if len(options) > MENU_MAX:
        raise bad_request(f"`menu` has {len(options)} options, expected 1 to {MENU_MAX}")
    if not all(0 < len(name) <= NAME_CHARS for name in options):
        raise bad_request(f"an option's name in `menu` has 1 to {NAME_CHARS} characters")
    if len(asked.state) > STATE_MAX or len(asked.text) > TEXT_CHARS:
        raise bad_request(
            f"`state` has at most {STATE_MAX} names and `text` at most {TEXT_CHARS} characters: leave some out"
        )
    if not 0.0 <= asked.temperature <= TEMPERATURE_MAX:
        raise bad_request(f"`temperature` is {asked.temperature}, expected 0 to {TEMPERATURE_MAX:g}")
    _check_values(asked.state, "`state`")
    for item in asked.menu:
        if isinstance(item, dict):
            if not item.keys() <= _OF_AN_OPTION:
                raise bad_request(
                    "an option of `menu` has a `name` and `features`; what is known of it stands in `features`"
                )
            _check_values(item.get("features", {}), f"`features` of {item['name']!r}")
    if len(set(options)) != len(options):
        raise bad_request("`menu` names an option twice")
    if asked.default and asked.default not in options:
        raise bad_request(f"`default` is {asked.default!r}, which is not on the menu")
    if asked.id and not _ID.fullmatch(asked.id):
        raise bad_request("`id` has 1 to 128 visible ASCII characters")


def _check_values(values: Any, where: str) -> None:
    """Raises GatewayError (400)."""
    if not isinstance(values, dict):
        raise bad_request(f"{where} is an object of names with values")
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise bad_request(f"{where}: {name[:80]!r} is no number, text, boolean, or list of these")


def _message(data: bytes) -> str:
    try:
        error = _answer_of.decode(data).get("error")
        return str(error["message"]) if isinstance(error, dict) else "serving refuses the decision"
    except (*_MALFORMED, KeyError):
        return "serving refuses the decision"


def _fits(found: Mapping[str, Any], asking: Mapping[str, Any]) -> bool:
    """Whether an answer is a distribution over the menu that was asked about, with a choice that it can make."""
    options, shares, chosen = found.get("options"), found.get("propensities"), found.get("chosen")
    if not isinstance(options, list) or not isinstance(shares, list) or not isinstance(chosen, str):
        return False
    if options != [item if isinstance(item, str) else item["name"] for item in asking["menu"]]:
        return False
    return chosen in options and not names.menu_problem(tuple(options), tuple(shares), chosen)


def _fallen_back(body: Mapping[str, Any]) -> dict[str, Any]:
    chosen = body["default"]
    return {
        "chosen": chosen,
        "propensity": 1.0,
        "options": body["options"],
        "propensities": [1.0 if name == chosen else 0.0 for name in body["options"]],
        "exploration": 0.0,
    }


def _shown(call: Call, response: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller gets; tokens stay here."""
    return {
        "id": call.call_id,
        "object": "decision",
        "kind": call.body["kind"],
        **{k: response[k] for k in ("chosen", "propensity", "options", "propensities", "exploration")},
        "policy_version": call.version,
        "route": call.route,
        "fallback": bool(call.fallback),
        "reason": call.fallback,
        "trace_id": call.parent[0] if call.parent else call.trace_id or gateway_trace_id(call.call_id),
        "span_id": gateway_span_id(call.call_id),
    }
