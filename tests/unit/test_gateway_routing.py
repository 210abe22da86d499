"""Routing: deterministic, sticky, with the shares that the log says."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.collectors.harness import harness_fingerprint
from spanloop.collectors.routing import (
    Choice,
    Router,
    StickyKey,
    choose,
    parse_traceparent,
    share_position,
    sticky_key,
)
from spanloop.schemas.events import PolicyPromoted, PolicyRolledBack, RoutingChanged

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def key(text):
    return sticky_key(session=text, trace_id=None, user=None, messages=None)


def router(**more):
    now = [0.0]
    made = Router("policy", lambda: now[0], **more)
    return made, now


@given(st.integers(0, 10**9), st.floats(0, 0.5), st.floats(0, 0.5))
@settings(max_examples=30, deadline=None)
def test_shares_are_kept_within_binomial_bounds(salt, canary, learning):
    routing = RoutingChanged(
        sequence=1, champion=1, learner=2, learning_share=learning, canary=3, canary_share=canary
    )
    n = 2000
    found = [choose(routing, share_position(key(f"{salt}-{i}").value)).route for i in range(n)]
    for route, share in (("canary", canary), ("learning", learning), ("champion", 1 - canary - learning)):
        bound = 6 * math.sqrt(share * (1 - share) / n) + 1e-9
        assert abs(found.count(route) / n - share) <= bound + 1 / n


def test_positions_are_the_same_on_every_machine():
    assert [round(share_position(key(s).value), 6) for s in ("s1", "s2")] == [0.04226, 0.002369]
    assert all(0 <= share_position(str(i)) < 1 for i in range(1000))


def test_canary_comes_first_and_the_champion_keeps_its_minimum():
    routing = RoutingChanged(
        sequence=1,
        champion=1,
        learner=2,
        learning_share=0.9,
        canary=3,
        canary_share=0.25,
        champion_share_min=0.2,
    )
    assert choose(routing, 0.0) == Choice(3, "canary")
    assert choose(routing, 0.25) == Choice(2, "learning")
    assert choose(routing, 0.79) == Choice(2, "learning")
    assert choose(routing, 0.8) == Choice(1, "champion")
    alone = RoutingChanged(sequence=1, champion=1, learning_share=0.9, canary_share=0.5)  # no such versions
    assert choose(alone, 0.0) == Choice(1, "champion")


def test_nothing_is_routed_before_the_first_routing():
    made, _ = router()
    assert made.route("default", key("a")) is None
    made.apply(
        [
            RoutingChanged(tenant="other", sequence=1, champion=1),
            RoutingChanged(policy="p2", sequence=1, champion=1),
        ]
    )
    assert made.route("default", key("a")) is None
    assert made.route("other", key("a")) == Choice(1, "champion")


def test_a_live_key_keeps_its_version_when_routing_changes():
    made, now = router(pin_s=600)
    made.apply([RoutingChanged(sequence=1, champion=1)])
    assert made.route("default", key("a")) == Choice(1, "champion")
    made.apply([RoutingChanged(sequence=2, champion=2)])
    assert made.route("default", key("new")) == Choice(2, "champion")
    now[0] = 500
    assert made.route("default", key("a")) == Choice(1, "champion")
    now[0] = 1099  # still within ten minutes of its last call
    assert made.route("default", key("a")) == Choice(1, "champion")
    now[0] = 1700
    assert made.route("default", key("a")) == Choice(2, "champion")


def test_a_rolled_back_version_loses_its_keys_at_once():
    made, _ = router()
    made.apply([RoutingChanged(sequence=1, champion=1, canary=3, canary_share=1.0)])
    assert made.route("default", key("a")) == Choice(3, "canary")
    made.apply(
        [PolicyRolledBack(epoch=4, version=3, to=1, reason="worse"), RoutingChanged(sequence=2, champion=1)]
    )
    assert made.route("default", key("a")) == Choice(1, "champion")
    made.apply(
        [
            PolicyPromoted(epoch=5, version=3, previous=1, reason="by hand"),
            RoutingChanged(sequence=3, champion=3),
        ]
    )
    assert made.route("default", key("b")) == Choice(3, "champion")
    assert made.route("default", key("a")) == Choice(1, "champion")


def test_an_older_sequence_never_wins():
    made, _ = router()
    made.apply([RoutingChanged(sequence=5, champion=5), RoutingChanged(sequence=4, champion=4)])
    assert made.routing("default").champion == 5


def test_memory_of_keys_is_bounded():
    made, _ = router(pins_max=10)
    made.apply([RoutingChanged(sequence=1, champion=1)])
    for i in range(50):
        made.route("default", key(str(i)))
    assert made.num_pins == 10


def test_what_the_key_is_made_of():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "user", "content": "later"},
    ]
    everything = {"session": "x", "trace_id": TRACE, "user": "me", "messages": messages}
    assert sticky_key(**everything).source == "session"
    assert sticky_key(**{**everything, "session": None}) == StickyKey(
        sticky_key(session=None, trace_id=TRACE, user=None, messages=[]).value, "trace"
    )
    assert sticky_key(**{**everything, "session": None, "trace_id": None}).source == "user"
    prompt = sticky_key(session=None, trace_id=None, user=None, messages=messages)
    assert prompt.source == "prompt"
    assert prompt == sticky_key(session=None, trace_id=None, user="", messages=messages[:2])
    assert prompt != sticky_key(session=None, trace_id=None, user=None, messages=messages[1:])
    for odd in (None, "text", [None, 3], {"role": "user"}):
        assert sticky_key(session=None, trace_id=None, user=None, messages=odd).source == "prompt"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN)),
        (f"cc-{TRACE}-{SPAN}-01-later", (TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-01-later", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_traceparent(header, found):
    assert parse_traceparent(header) == found


def test_the_harness_is_model_tools_prompts_and_runtime():
    body = {
        "model": "policy",
        "tools": [{"a": 1}],
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    }
    found = harness_fingerprint(body, runtime="r")
    assert found == harness_fingerprint(
        {**body, "temperature": 1, "messages": body["messages"][:1]}, runtime="r"
    )
    others = [
        harness_fingerprint({**body, "model": "p"}, runtime="r"),
        harness_fingerprint({**body, "tools": []}, runtime="r"),
        harness_fingerprint({**body, "messages": [{"role": "system", "content": "t"}]}, runtime="r"),
        harness_fingerprint(body, runtime="r2"),
        harness_fingerprint(body, runtime="r", key=b"secret"),
    ]
    assert len({found, *others}) == 6
