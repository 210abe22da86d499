"""The direct way from OTLP protobuf to records gives what decoding, redaction and limits give one after the other, byte for byte."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_fuzz import attempt
from otlp_requests import TRACE, as_protobuf, span

from spanloop.collectors import direct
from spanloop.collectors.batches import Intake, Prepared, label_spans
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import Content

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), TEXT, st.binary(max_size=8),
        st.sampled_from(
            ["9117daa988c2f2aadbc0d4e6a95ba9f9", "00f067aa0ba902b7", "ab" * 40, "1" * 16, "run it", "pat@example.invalid",
             '[{"role":"user","content":"hi"}]', '{"a":1,"b":["x"]}', "{broken", "y" * 300, "x\u00e9\U0001f98a", "a\"b\\c\n"]
        ),
    ),
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(TEXT, v, max_size=3)),
    max_leaves=5,
)  # fmt: skip
KEY = st.one_of(
    TEXT,
    st.sampled_from(
        ["gen_ai.response.id", "gen_ai.agent.name", "gen_ai.input.messages", "gen_ai.tool.call.arguments", "tool.name",
         "gen_ai.usage.input_tokens", "mlflow.chat.tokenUsage", "mlflow.spanInputs", "anything", "name", "logfire.msg_template",
         "spanloop.policy_version", "spanloop.sdk.kind", "spanloop.flags", "spanloop.task.key", "allowed.key", "my.own",
         "pat@example.invalid", "k" * 1100, "k" * 126, "k" * 127, "k" * 128, "\u00e9.key", "a", "a.b", "a b"]
    ),
)  # fmt: skip
ATTRIBUTES = st.dictionaries(KEY, VALUE, max_size=5)
TIMES = st.sampled_from([0, 1_000, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
IDS = st.sampled_from(["00f067aa0ba902b7", "00f067aa0ba902b8", "", "0" * 16, "ab" * 3])
SPANS = st.lists(
    st.builds(
        lambda **k: span(1, **k), trace_id=st.sampled_from([TRACE, TRACE, "ab" * 16, "0" * 32, ""]),
        span_id=st.one_of(st.just("00f067aa0ba902b7"), IDS), parent_id=IDS,
        name=st.one_of(TEXT, st.sampled_from(["chat policy", "n" * 300, "pat@example.invalid"])),
        kind=st.integers(0, 7), start=TIMES, end=TIMES, attributes=ATTRIBUTES,
        events=st.lists(st.tuples(TEXT, TIMES, ATTRIBUTES), max_size=1),
        links=st.lists(st.tuples(st.sampled_from([TRACE, "ab"]), IDS, ATTRIBUTES), max_size=1),
        status=st.integers(0, 3), message=TEXT,
    ),
    max_size=5,
)  # fmt: skip


def _intake(content: Content, limit: int, most: int) -> tuple[Intake, Redactor]:
    redactor = Redactor(content, b"k" * 32)
    return Intake(redactor, limit, keep_content=content.clear, max_attributes=most), redactor


def _long_way(intake: Intake, body: bytes, labels: dict[str, str], depth: int) -> Prepared:
    batch = decode_protobuf(body, depth)
    label_spans(batch, labels)
    return intake.prepare(batch, tenant="t", source="otlp")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(SPANS, ATTRIBUTES, st.sampled_from([64, 64, 3])), min_size=1, max_size=3),
    st.sampled_from([Content(), Content(training=True), Content(allow=("allowed.key", "my.*"))]),
    st.sampled_from([65_536, 400]),
    st.sampled_from([2_048, 2]),
    st.sampled_from([{}, {"mlflow.experiment_id": "7"}]),
)
def test_direct_is_the_long_way(
    requests: list[tuple[list[dict[str, Any]], dict[str, Any], int]],
    content: Content,
    limit: int,
    most: int,
    labels: dict[str, str],
) -> None:
    long, long_redactor = _intake(content, limit, most)
    short, redactor = _intake(content, limit, most)
    for spans, resource, depth in [*requests, *requests]:  # the second time from memory
        body = as_protobuf(spans, resource or None)
        counted: list[int] = []
        found = short.take_protobuf(
            body, tenant="t", source="otlp", max_nesting=depth, labels=labels, check=counted.append
        )
        assert found == _long_way(long, body, labels, depth)
        assert counted == [len(spans)]
    assert redactor.reserved_removed == long_redactor.reserved_removed


@pytest.mark.parametrize("kept", [False, True])
def test_damaged_requests_are_taken_alike(kept: bool) -> None:
    long, _ = _intake(Content(training=kept), 4_096, 2_048)
    short, _ = _intake(Content(training=kept), 4_096, 2_048)
    for body in (attempt(seed).body for seed in range(600)):
        with contextlib.suppress(SchemaError):
            found = _long_way(long, body, {}, 64)
            assert short.take_protobuf(body, tenant="t", source="otlp") == found
            continue
        with pytest.raises(SchemaError):
            short.take_protobuf(body, tenant="t", source="otlp")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KNOWN_BYTES_MAX", 4_096)
    monkeypatch.setattr(direct, "SHAPES_MAX", 4_096)
    monkeypatch.setattr(direct, "NAMES_MAX", 4)
    intake, _ = _intake(Content(), 65_536, 2_048)
    other, _ = _intake(Content(), 65_536, 2_048)
    for number in range(200):
        one = span(
            1,
            name=f"run {number}",
            attributes={f"key.{number}": "x" * 50, "gen_ai.response.id": f"{number:032x}a"},
        )
        body = as_protobuf([one])
        assert intake.take_protobuf(body, tenant="t", source="otlp") == _long_way(other, body, {}, 64)
        writer = intake._direct
        assert writer is not None
        assert sum(len(part) for part in writer._known) <= 4_096
        assert len(writer._shapes) <= 16
        assert len(writer._names) <= 4
