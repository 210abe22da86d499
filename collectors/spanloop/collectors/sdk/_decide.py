"""decide(): ask the deployment's decision policy which option to take, and record the decision as any told decision is.

Invariants: it raises nothing into the host and answers within its time-out and little more; where no policy answers, the choice is the
caller's default, told as one that no policy took; one decision is one decision on the log, though the gateway records its part too
(the gateway's span lies inside the block of this one). Connections are kept, one a thread; a forked child makes its own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._blocks import Spec, attributes_of
from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._kinds import Decision
from spanloop.collectors.sdk._menus import add_decision
from spanloop.collectors.sdk._propagation import inject
from spanloop.schemas import sdk_attributes as names

__all__ = ["Decided", "decide", "decide_async"]

TIMEOUT_S = 1.0
ANSWER_BYTES_MAX = 2**20
PLACE = "asking for a decision"
_local = threading.local()


class Decided(Decision):
    """What was decided; give it to the act that carries it out (``decision=``)."""

    __slots__ = ("fallback", "id", "option", "policy_version", "propensities", "propensity", "reason")

    def __init__(self, spec: Spec, option: str) -> None:
        super().__init__(spec)
        self.option = option
        """The option to take."""
        self.propensity = 1.0
        """With which it was drawn."""
        self.propensities: dict[str, float] = {}
        """Of every option."""
        self.policy_version = ""
        """Which version decided; empty: none did."""
        self.fallback = True
        """Whether ``option`` is the caller's default because no policy answered."""
        self.reason = ""
        """Why it is."""
        self.id = ""
        """Of the decision; feedback may name it as ``response_id``."""

    def __str__(self) -> str:
        return self.option


def decide(
    kind: str,
    menu: Any,
    *,
    state: Mapping[str, Any] | None = None,
    text: str = "",
    default: str = "",
    session: str = "",
    task_key: str = "",
    timeout_s: float = TIMEOUT_S,
    endpoint: str = "",
    token: str = "",
) -> Decided:
    """Ask which option of a menu to take.

    Args:
        kind: O1 to O5, spawn, delegate, message, aggregate, stop, or a name of your own.
        menu: the options: names, or mappings with ``name`` and ``features`` (numbers, texts, lists).
        state: what is known: names with numbers, texts or lists.
        text: a text whose words count as known.
        default: what is taken where no policy answers; empty: the first option.
        session: names the job, so that all its decisions come from one version. Default: the trace.
        task_key: jobs of equal key work on the same task and can be compared.
        timeout_s: longest wait.
        endpoint: of the gateway. Default SPANLOOP_GATEWAY_ENDPOINT, else http://127.0.0.1:8787.
        token: an agent's key. Default SPANLOOP_AGENT_TOKEN.
    """
    decided, request = _begun(kind, menu, state, text, default)
    with decided:
        headers = _headers(session, task_key, token)
        answer, reason = _asked(request, headers, timeout_s, endpoint)
        _tell(decided, request, answer, reason)
    return decided


async def decide_async(
    kind: str,
    menu: Any,
    *,
    state: Mapping[str, Any] | None = None,
    text: str = "",
    default: str = "",
    session: str = "",
    task_key: str = "",
    timeout_s: float = TIMEOUT_S,
    endpoint: str = "",
    token: str = "",
) -> Decided:
    """``decide`` for coroutines: the event loop goes on while a thread asks."""
    decided, request = _begun(kind, menu, state, text, default)
    async with decided:
        headers = _headers(session, task_key, token)
        answer, reason = await asyncio.to_thread(_asked, request, headers, timeout_s, endpoint)
        _tell(decided, request, answer, reason)
    return decided


def _begun(kind: Any, menu: Any, state: Any, text: Any, default: Any) -> tuple[Decided, dict[str, Any]]:
    """The open decision, and the body of the request."""
    items: list[Any] = []
    try:
        for item in list(menu):
            named = item if isinstance(item, str) else {"name": item["name"], "features": dict(item.get("features") or {})}  # fmt: skip
            items.append(named)
        options = [item if isinstance(item, str) else str(item["name"]) for item in items]
        request = {
            "kind": kind if isinstance(kind, str) else "",
            "menu": items,
            "state": dict(state or {}),
            "text": text if isinstance(text, str) else "",
            "default": default if isinstance(default, str) and default in options else "",
        }
        option = request["default"] or (options[0] if options else "")
        called = names.kind_of(request["kind"])
        request["kind"] = called
        spec = Spec(f"decide {called}", attributes_of("decision", None) | {names.DECISION: called})
    except Exception as exc:
        failed(PLACE, exc)
        option = default if isinstance(default, str) else ""
        return Decided(Spec("decide", attributes_of("decision", None)), option), {}
    if default and not request["default"]:
        failed(PLACE, "the default is not on the menu; the first option stands in for it")
    return Decided(spec, option), request


def _headers(session: Any, task_key: Any, token: Any) -> dict[str, str]:
    """Headers of the request, with the context of the decision's block."""
    headers: dict[str, str] = {"Content-Type": "application/json"}
    try:
        inject(headers)
        key = token or os.environ.get("SPANLOOP_AGENT_TOKEN", "")
        given = {
            "X-Session-Id": session,
            "X-Task-Key": task_key,
            "Authorization": f"Bearer {key}" if key else "",
        }
        headers |= {name: text for name, text in given.items() if isinstance(text, str) and text}
    except Exception as exc:
        failed(PLACE, exc)
    return headers


def _asked(
    request: dict[str, Any], headers: dict[str, str], timeout_s: float, endpoint: str
) -> tuple[dict[str, Any] | None, str]:
    """The gateway's answer, or why there is none."""
    if not request:
        return None, "malformed"
    try:
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            base = endpoint or os.environ.get("SPANLOOP_GATEWAY_ENDPOINT", "") or "http://127.0.0.1:8787"
            status, data = _post(
                base, json.dumps(request, allow_nan=False).encode(), headers, float(timeout_s)
            )
        finally:
            detach(token)
        if status != 200:
            failed("a decision was refused", f"HTTP {status}: {data[:200].decode('utf-8', 'replace')}")
            return None, f"gateway_{status}"
        answer = json.loads(data)
        options = [item if isinstance(item, str) else item["name"] for item in request["menu"]]
        problem = names.menu_problem(tuple(options), tuple(answer["propensities"]), answer["chosen"])
        if answer["options"] != options or answer["chosen"] not in options or problem:
            failed(PLACE, f"the answer does not fit the menu: {problem}")
            return None, "malformed"
        return answer, ""
    except TimeoutError:
        return None, "timeout"
    except (OSError, http.client.HTTPException):
        return None, "unreachable"
    except Exception as exc:
        failed(PLACE, exc)
        return None, "malformed"


def _post(base: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    """POST over this thread's connection; a kept one that was closed meanwhile is made anew, once."""
    url = urlsplit(base.rstrip("/").removesuffix("/v1") + "/v1/decide")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("the gateway's endpoint is no http address")
    place = (os.getpid(), url.scheme, url.netloc)
    where, connection = getattr(_local, "kept", (None, None))
    _local.kept = (None, None)
    if where == place and connection is not None:
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            return _over(connection, place, url.path, body, headers)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            pass
    maker = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    fresh = maker(url.hostname, url.port, timeout=timeout_s)
    return _over(fresh, place, url.path, body, headers)


def _over(
    connection: http.client.HTTPConnection,
    place: tuple[int, str, str],
    path: str,
    body: bytes,
    headers: dict[str, str],
) -> tuple[int, bytes]:
    """Ask once; a connection that is good for more is kept."""
    try:
        connection.request("POST", path, body=body, headers=headers)
        answer = connection.getresponse()
        data = answer.read(ANSWER_BYTES_MAX)
    except BaseException:
        connection.close()
        raise
    if answer.isclosed():
        _local.kept = (place, connection)
    else:
        connection.close()
    return answer.status, data


def _tell(decided: Decided, request: dict[str, Any], answer: dict[str, Any] | None, reason: str) -> None:
    """Fill in the answer and tell it on the decision's span."""
    try:
        options = [item if isinstance(item, str) else item["name"] for item in request.get("menu", ())]
        if answer is not None:
            decided.option = answer["chosen"]
            decided.policy_version = str(answer.get("policy_version", ""))
            decided.fallback = answer.get("fallback") is not False
            decided.reason = str(answer.get("reason", ""))
            decided.id = str(answer.get("id", ""))
            shares = [float(share) for share in answer["propensities"]]
        else:
            decided.reason = reason
            shares = [1.0 if name == decided.option else 0.0 for name in options]
        decided.propensities = dict(zip(options, shares, strict=True))
        decided.propensity = decided.propensities.get(decided.option, 1.0)
        if options:
            decided._tell(_told(decided, request, options, shares))
    except Exception as exc:
        failed(PLACE, exc)


def _told(
    decided: Decided, request: dict[str, Any], options: list[str], shares: list[float]
) -> dict[str, Any]:
    numbers = {name: float(v) for name, v in request["state"].items() if isinstance(v, bool | int | float)}
    found: dict[str, Any] = {}
    add_decision(
        found,
        request["kind"],
        options,
        shares,
        decided.option,
        by_policy=not decided.fallback,
        state={name: numbers[name] for name in sorted(numbers)[: names.STATE_MAX]},
    )
    _values.add_label(found, names.CALL, decided.id)
    return found
