"""The dialect of our SDK over spans that nobody promised to write well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanloop.pipeline.dialects import decode_operation, encode_operation, operation_of
from spanloop.schemas import sdk_attributes as names
from spanloop.schemas.orchestration import Decision
from spanloop.schemas.spans import Span, SpanLink, redacted

T, S = "1" * 32, "2" * 16


def span(act: str, **attributes: object) -> Span:
    """An act's span; ``target_id`` for ``spanloop.sdk.target.id`` and so on."""
    keys = {names.PREFIX + key.replace("__", "."): value for key, value in attributes.items()}
    return Span(T, S, "x", 1, 2, attributes={names.ACT: act, **keys}, scope=names.SCOPE)


def test_every_field_is_read():
    op = operation_of(
        span(
            "delegate", target="scout", target__id="a" * 16, decided_by="b" * 16, call="r1", decision="delegate",
            options=["scout", "writer"], propensities=[0.5, 0.5], chosen="scout", by_policy=True,
        )
    )  # fmt: skip
    assert (op.kind, op.handover.target, op.handover.confidence, op.handover.rule) == (
        "handover",
        "scout",
        1.0,
        "said",
    )
    assert (op.said.target_id, op.said.decided_by, op.said.call) == ("a" * 16, "b" * 16, "r1")
    assert op.said.decision == Decision("delegate", "scout", ("scout", "writer"), (0.5, 0.5), True)
    assert op.flags == ()


@pytest.mark.parametrize(("act", "kind"), [("spawn", "handover"), ("message", "message"), ("receive", "message"),
                                           ("aggregate", "act"), ("stop", "act"), ("decision", "act")])  # fmt: skip
def test_kinds(act, kind):
    assert operation_of(span(act)).kind == kind


def test_a_dropped_name_compares_by_its_hash():
    name = redacted(9, "ff" * 16)
    op = operation_of(span("stop", decision="stop", options=[name, "go"], chosen=name))
    assert op.said.decision.chosen == op.said.decision.options[0] == "hmac:" + "ff" * 16
    assert op.flags == ()


def test_whatever_speaks_under_another_scope_is_not_ours():
    assert operation_of(Span(T, S, "x", 1, 2, attributes={names.ACT: "stop"}, scope="other")).said is None
    assert (
        operation_of(Span(T, S, "x", 1, 2, attributes={names.ACT: "dance"}, scope=names.SCOPE)).said is None
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = [names.TARGET, names.TARGET_ID, names.SOURCES, names.DECISION, names.OPTIONS, names.PROPENSITIES, names.CHOSEN,
        names.BY_POLICY, names.STATE_NAMES, names.STATE_VALUES, names.DECIDED_BY, names.CALL, names.HARNESS, names.TRUNCATED, "gen_ai.operation.name",
        "gen_ai.agent.name", "gen_ai.transfer.mode"]  # fmt: skip


@given(st.sampled_from(names.ACTS), st.dictionaries(st.sampled_from(KEYS), JSON))
def test_reading_is_total_and_survives_its_encoding(act, attributes):
    found = operation_of(Span(T, S, "x", 1, 2, attributes={**attributes, names.ACT: act}, scope=names.SCOPE,
                              links=(SpanLink(T, S),)))  # fmt: skip
    assert found.said.act == act
    assert decode_operation(encode_operation(found)) == found
    decision = found.said.decision
    if decision is not None and decision.propensities:
        assert names.menu_problem(decision.options, decision.propensities, decision.chosen) == ""


def test_the_receiver_lets_the_sdks_words_pass_and_the_gateways_not():
    from spanloop.collectors.redaction import Redactor
    from spanloop.schemas.settings import Content

    own = {names.ACT: "stop", names.OPTIONS: ["stop", "go"], names.PROPENSITIES: [0.25, 0.75], names.CHOSEN: "stop",
           names.DECISION: "stop", names.REASON: "because pat@example.com asked"}  # fmt: skip
    claimed = {"spanloop.policy.version": "policy@v9", "spanloop.harness": "x", "spanloop.sdkish": "y"}
    for training in (False, True):
        redactor = Redactor(Content(training=training), b"k" * 32)
        kept = redactor.span(Span(T, S, "stop", 1, 2, attributes={**own, **claimed}, scope=names.SCOPE))
        assert set(kept.attributes) == set(own)
        assert operation_of(kept).said.decision.propensities == (0.25, 0.75)
        assert redactor.reserved_removed == len(claimed)
        assert ("pat@" in repr(kept.attributes)) is training


def test_a_choice_that_could_not_be_drawn_loses_the_propensities_and_is_counted():
    op = operation_of(
        span("stop", decision="stop", options=["stop", "go"], propensities=[0.0, 1.0], chosen="stop")
    )
    assert op.said.decision == Decision("stop", "stop", ("stop", "go"))
    assert op.flags == ("bad_propensities",)


def test_the_state_of_a_decision_is_sorted_and_finite():
    state = {"state__names": ["margin", "budget", "bad"], "state__values": [2, 0.5, float("nan")]}
    op = operation_of(span("stop", decision="stop", chosen="stop", **state))
    assert op.said.decision.state == (("budget", 0.5), ("margin", 2.0))
    op = operation_of(span("stop", decision="stop", chosen="stop", state__names=["a"], state__values=[]))
    assert op.said.decision.state == ()
