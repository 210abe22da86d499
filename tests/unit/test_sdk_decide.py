"""sdk.decide: answered by the policy, told as one decision, and never in the host's way."""

import asyncio
import socket
import time

import pytest
from decide_support import deciding
from gateway_support import recorded
from sdk_support import received, recording

from spanloop.collectors import sdk
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.decisions.objects import decisions_of

MENU = ["writer", {"name": "critic", "features": {"load": 3}}, "nobody"]
STATE = {"round": 1, "topic": "tax"}


async def play(url, how):
    """A desk that decides by the policy whom to ask."""
    with sdk.agent("desk"):
        if how == "async":
            decided = await sdk.decide_async("delegate", MENU, state=STATE, default="nobody", endpoint=url)
        else:
            decided = await asyncio.to_thread(
                sdk.bind(sdk.decide), "O2", MENU, state=STATE, default="nobody", endpoint=url
            )
        with sdk.delegate(decided.option, decision=decided), sdk.agent(decided.option):
            pass
    return decided


@pytest.mark.parametrize("how", ["async", "sync"])
async def test_one_decision_with_the_policys_tokens_and_the_act_that_carries_it_out(tmp_path, how):
    async with deciding(tmp_path) as at:
        with recording() as exporter:
            decided = await play(at.url, how)
            mine = received(exporter)
        gateways = await recorded(at.log, 1)
    assert not decided.fallback
    assert decided.policy_version == "policy@v1"
    assert decided.propensity == decided.propensities[decided.option] == decided.propensities[str(decided)]
    for spans in ([*mine, *gateways], gateways, mine):
        (content,) = assemble_spans(spans, "default", "import")
        (event,) = [event for event in content.events if event.decision is not None]
        assert event.decision is not None
        assert (event.decision.kind, event.decision.chosen) == ("delegate", decided.option)
        assert event.decision.propensities == pytest.approx(tuple(decided.propensities.values()))
        assert event.decision.state == (("round", 1.0),)
        if spans is not mine:
            (call,) = content.calls
            assert event.call_id == call.id == decided.id
            assert call.policy_version == "policy@v1"
            assert len(call.menus) == 1
    (content,) = assemble_spans([*mine, *gateways], "default", "import")
    (found,) = [d for d in decisions_of(content) if d.kind == "delegate"]
    assert (found.menu, found.chosen, found.call_id) == ("told", decided.option, decided.id)
    (delegate,) = [event for event in content.events if event.type == "delegate"]
    (cause,) = [edge.src for edge in content.edges if edge.dst == delegate.id and edge.type == "causal"]
    assert cause == found.event_id


def dead() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("instrumented", [True, False])
def test_without_a_gateway_the_default_is_taken_and_told(instrumented):
    if instrumented:
        with recording() as exporter:
            with sdk.agent("desk"):
                decided = sdk.decide("stop", ["stop", "again"], default="again", endpoint=dead())
            (content,) = assemble_spans(received(exporter), "default", "otlp")
        (event,) = [event for event in content.events if event.decision is not None]
        assert event.decision is not None
        assert (event.decision.chosen, event.decision.by_policy) == ("again", False)
        assert event.decision.propensities == (0.0, 1.0)
    else:
        decided = sdk.decide("stop", ["stop", "again"], default="again", endpoint=dead())
    assert (decided.option, decided.fallback, decided.reason) == ("again", True, "unreachable")


def test_a_gateway_that_hangs_is_waited_for_no_longer_than_said():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        decided = sdk.decide(
            "stop", ["stop"], endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2
        )
        assert time.monotonic() - began < 5.0
    assert (decided.option, decided.reason) == ("stop", "timeout")


class Hostile:
    def __str__(self):
        raise RuntimeError("host")

    __repr__ = __iter__ = __len__ = __bool__ = __str__


@pytest.mark.parametrize(
    ("kind", "menu", "more", "expected"),
    [
        ("stop", None, {"default": "go"}, "go"),
        (7, ["a", "b"], {}, "a"),
        ("stop", [{"no": "name"}], {}, ""),
        ("stop", ["a", "b"], {"state": {"x": object()}}, "a"),
        ("stop", ["a", "b"], {"state": {"x": float("nan")}}, "a"),
        ("stop", Hostile(), {"state": Hostile(), "text": Hostile(), "default": Hostile()}, ""),
        ("stop", ["a", "b"], {"endpoint": "ftp://x"}, "a"),
        ("stop", ["a", "b"], {"timeout_s": "soon"}, "a"),
    ],
)
def test_nothing_raises_into_the_host(kind, menu, more, expected):
    more = {"endpoint": dead(), **more}
    before = sum(sdk.failures().values())
    with recording(strict=False):
        decided = sdk.decide(kind, menu, **more)
    assert (decided.option, decided.fallback) == (expected, True)
    assert sum(sdk.failures().values()) >= before


async def test_what_the_gateway_refuses_is_counted_and_falls_back(tmp_path):
    async with deciding(tmp_path) as at:
        before = sdk.failures().get("a decision was refused", 0)
        decided = await sdk.decide_async("stop", [f"o{n}" for n in range(65)], endpoint=at.url)
    assert (decided.option, decided.reason) == ("o0", "gateway_400")
    assert sdk.failures()["a decision was refused"] == before + 1
