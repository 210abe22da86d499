"""The gateway's /v1/decide: served, forwarded, recorded, and never failing its caller."""

import asyncio
import math

import pytest
from aiohttp import web
from decide_support import ASKED, PARENT, TRACE, deciding, told_by
from gateway_support import recorded

from spanloop.schemas.decision_tokens import is_decision


async def ask(at, body=ASKED, path="/v1/decide", **headers):
    async with at.client.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_an_answer_is_a_distribution_over_the_menu_and_the_span_tells_it(tmp_path):
    async with deciding(tmp_path) as at:
        status, got = await ask(at, **PARENT)
        span = (await recorded(at.log, 1))[0]
    assert status == 200
    assert got["options"] == ["writer", "critic", "nobody"]
    assert got["chosen"] in got["options"]
    assert math.isclose(sum(got["propensities"]), 1.0, abs_tol=1e-9)
    assert got["propensity"] == got["propensities"][got["options"].index(got["chosen"])]
    assert (got["policy_version"], got["fallback"], got["reason"]) == ("policy@v1", False, "")
    assert (got["trace_id"], got["span_id"]) == (TRACE, span.span_id)
    assert span.parent_span_id == "b7ad6b7169203331"
    decision, facts, call = told_by(span)
    assert call == got["id"]
    assert (decision.kind, decision.chosen, decision.by_policy) == ("delegate", got["chosen"], True)
    assert decision.options == tuple(got["options"])
    assert decision.propensities == pytest.approx(got["propensities"])
    assert decision.state == (("round", 1.0), ("urgent", 1.0))
    assert facts.policy_version == "policy@v1"
    assert is_decision(facts.prompt_token_ids)
    assert len(facts.response_token_ids) == 1
    assert math.isclose(math.exp(facts.logprobs[0]), got["propensity"], rel_tol=1e-5)
    assert len(facts.menus[0]) == 3


async def test_the_same_id_is_the_same_draw_and_the_menus_order_changes_nothing(tmp_path):
    async with deciding(tmp_path) as at:
        body = {**ASKED, "id": "d-1"}
        first = await ask(at, body)
        again = await ask(at, {**body, "menu": list(reversed(ASKED["menu"]))})
        drawn = {(await ask(at, {**ASKED, "id": f"d-{n}"}))[1]["chosen"] for n in range(40)}
    assert first[1]["chosen"] == again[1]["chosen"]
    assert dict(zip(first[1]["options"], first[1]["propensities"], strict=True)) == dict(
        zip(again[1]["options"], again[1]["propensities"], strict=True)
    )
    assert drawn == {"writer", "critic", "nobody"}


async def test_without_content_no_feature_is_kept_and_the_decision_still_is_told(tmp_path):
    async with deciding(tmp_path, training=False) as at:
        _, got = await ask(at)
        span = (await recorded(at.log, 1))[0]
    assert not [name for name in span.attributes if "token" in name and "usage" not in name]
    assert "tax" not in str(span.attributes)
    assert told_by(span)[0].chosen == got["chosen"]


async def slow(_):
    await asyncio.sleep(30)


async def broken(_):
    return web.Response(status=500)


async def odd(_):
    return web.json_response({"chosen": "writer", "options": ["writer"], "propensities": [1.0]})


def application(handler):
    app = web.Application()
    app.router.add_post("/v1/decide", handler)
    return app


@pytest.mark.parametrize(
    ("serving", "routing", "reason"),
    [
        ("down", True, "unreachable"),
        ("up", False, "no_policy"),
        (slow, True, "timeout"),
        (broken, True, "serving_500"),
        (odd, True, "serving_malformed"),
    ],
)
async def test_where_nobody_answers_the_caller_gets_its_default(tmp_path, serving, routing, reason):
    app = serving if isinstance(serving, str) else application(serving)
    async with deciding(tmp_path, serving=app, routing=routing, timeout_s=0.2) as at:
        status, got = await ask(at)
        _, first = await ask(at, {**ASKED, "default": ""})
        spans = await recorded(at.log, 2)
    assert status == 200
    assert (got["chosen"], got["propensity"], got["fallback"], got["reason"]) == ("nobody", 1.0, True, reason)
    assert first["chosen"] == "writer"
    decision, facts, _ = told_by(spans[0])
    assert decision.by_policy is False
    assert decision.propensities == (0.0, 0.0, 1.0)
    assert not facts.policy_version
    assert not facts.prompt_token_ids


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "stop", "menu": []},
        {"kind": "stop", "menu": ["a", "a"]},
        {"kind": "stop", "menu": ["a"], "default": "b"},
        {"kind": "stop", "menu": [{"features": {}}]},
        {"kind": "stop", "menu": ["a", "b"], "else": 1},
        {"kind": "stop", "menu": [f"o{n}" for n in range(65)]},
        {"kind": "stop", "menu": ["a", "b"], "state": {f"n{i}": 1 for i in range(65)}},
        {"kind": "stop", "menu": ["a", "b"], "temperature": -1},
        {"kind": "", "menu": ["a", "b"], "state": {"nested": {"a": 1}}},
        {"kind": "stop", "menu": ["a", "b"], "state": {"nested": [[1]]}},
        {"kind": "stop", "menu": ["a", {"name": "b", "features": {"nested": {"a": 1}}}]},
        {"kind": "stop", "menu": ["a", {"name": "b", "features": [1]}]},
        {"kind": "stop", "menu": ["a", {"name": "b", "busy": 1}]},
        {"kind": "stop", "menu": ["a", ""]},
        {"kind": "stop", "menu": ["a", "b" * 129]},
        {"kind": "stop", "menu": ["a", "b"], "text": "w" * 16_385},
        {"kind": "stop", "menu": ["a", "b"], "temperature": 101},
    ],
)
@pytest.mark.parametrize("routing", [True, False])
async def test_a_malformed_request_is_the_callers_mistake(tmp_path, body, routing):
    """Whether somebody serves or not: else it would come out on the first day that somebody does."""
    async with deciding(tmp_path, routing=routing) as at:
        status, got = await ask(at, body)
    assert status == 400
    assert got["error"]["code"] == "invalid_request"


async def test_decisions_of_a_session_without_trace_context_are_one_trace(tmp_path):
    async with deciding(tmp_path) as at:
        _, one = await ask(at, path="/sessions/t-1/v1/decide")
        _, two = await ask(at, **{"X-Session-Id": "t-1"})
        _, other = await ask(at, **{"X-Session-Id": "t-2"})
        spans = await recorded(at.log, 3)
    assert one["trace_id"] == two["trace_id"] != other["trace_id"]
    assert sorted(span.trace_id for span in spans) == sorted(x["trace_id"] for x in (one, two, other))


@pytest.mark.parametrize(("role", "expected"), [("agent", 200), ("reader", 403), (None, 401)])
async def test_an_agents_key_may_ask(tmp_path, role, expected):
    credentials = [{"key": f"key-{name}", "role": name} for name in ("agent", "reader")]
    async with deciding(tmp_path, credentials=credentials) as at:
        headers = {} if role is None else {"Authorization": f"Bearer key-{role}"}
        status, _ = await ask(at, **headers)
    assert status == expected
