"""Laws of the collectors over random spans: one meaning in two wire forms, one bad span costs one, no secret survives,
bytes of any kind are answered and never raise."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_requests import TRACE, as_json, as_protobuf, span

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import SpansReceived, decode, encode
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), TEXT, st.binary(max_size=8)
)
VALUE = st.recursive(
    SCALAR, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(TEXT, v, max_size=3)), max_leaves=6
)
ATTRIBUTES = st.dictionaries(TEXT, VALUE, max_size=4)
TIMES = st.one_of(st.integers(0, 2**62), st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]))
HEX8 = st.sampled_from(["00f067aa0ba902b7", "00f067aa0ba902b8", "f" * 16, "", "0" * 16, "ab" * 3])
SPANS = st.lists(
    st.builds(
        lambda **k: span(1, **k), trace_id=st.sampled_from([TRACE, "ab" * 16, "0" * 32, ""]), span_id=HEX8,
        parent_id=HEX8, name=TEXT, kind=st.integers(0, 5), start=TIMES, end=TIMES, attributes=ATTRIBUTES,
        events=st.lists(st.tuples(TEXT, TIMES, ATTRIBUTES), max_size=2),
        links=st.lists(st.tuples(st.sampled_from([TRACE, "ab"]), HEX8, ATTRIBUTES), max_size=2),
        status=st.integers(0, 2), message=TEXT,
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(SPANS, ATTRIBUTES)
def test_json_and_protobuf_mean_the_same(spans: list[dict[str, Any]], resource: dict[str, Any]) -> None:
    by_json = decode_json(as_json(spans, resource or None))
    by_protobuf = decode_protobuf(as_protobuf(spans, resource or None))
    assert by_json.spans == by_protobuf.spans
    assert [r.kind for r in by_json.rejected] == [r.kind for r in by_protobuf.rejected]
    assert len(by_json.spans) + len(by_json.rejected) == len(spans)
    alone = [d for s in spans for d in decode_json(as_json([s], resource or None)).spans]
    assert alone == by_json.spans, "a span is decoded the same in any company"
    if by_json.spans:
        event = SpansReceived(trace_id=TRACE, spans=tuple(by_json.spans))
        assert decode(encode(event)) == event


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.builds(bytes, st.lists(st.sampled_from(b"\x0a\x12\x1a\x00\x01\x10{}[],:\"a"), max_size=60))))  # fmt: skip
def test_any_bytes_are_spans_or_a_schema_error(body: bytes) -> None:
    for read in (decode_json, decode_protobuf):
        with contextlib.suppress(SchemaError):
            read(body)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_requests_never_raise_anything_else(data: st.DataObject) -> None:
    write, read = data.draw(st.sampled_from([(as_json, decode_json), (as_protobuf, decode_protobuf)]))
    body = bytearray(write([span(1, attributes={"a": ["x", {"b": 1.5}]}), span(2), span(3)]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SchemaError):
        for found in read(bytes(body)).spans:
            assert decode(encode(SpansReceived(trace_id=TRACE, spans=(found,)))).spans[0] == found  # type: ignore[attr-defined]


SECRETS = st.sampled_from(
    [
        "pat@example.invalid", "4111 1111 1111 1111", "+1 555 0100 222", "Bearer eyJ.fake.fake", "sk-fake-000000",
        "https://u:hunter2@example.invalid/x", "my mother's maiden name is Doe and so on", "line one\nline two",
    ]
)  # fmt: skip
STRUCTURE = st.sampled_from(
    [
        "gen_ai.agent.name",
        "gen_ai.tool.name",
        "gen_ai.response.id",
        "session.id",
        "service.name",
        "role",
        "error.type",
    ]
)
CONTENT = st.sampled_from(
    ["gen_ai.input.messages", "gen_ai.output.messages", "pydantic_ai.all_messages", "gen_ai.tool.call.arguments",
     "input.value", "metadata", "llm.input_messages.0.message.content", "exception.message", "anything", "x.y"]
)  # fmt: skip
OPAQUE = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=12, max_size=20)


@st.composite
def _hidden(draw: st.DrawFn, secret: str) -> Any:
    """``secret`` somewhere inside a value, bare, in lists and maps, or in JSON text of them."""
    value: Any = draw(st.sampled_from([secret, f"see {secret} there"]))
    for _ in range(draw(st.integers(0, 4))):
        key = draw(
            st.sampled_from(["content", "parts", "arguments", "name", "text", "result", "tool_calls", "k"])
        )
        value = draw(
            st.sampled_from(
                [
                    [value],
                    {key: value},
                    {"role": "user", key: value},
                    {"type": "text", key: [value]},
                    [1, value, None],
                ]
            )
        )
        if draw(st.booleans()):
            value = json.dumps(value)
    return value


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_secret_survives_wherever_it_is_put(data: st.DataObject) -> None:
    opaque = data.draw(st.booleans())
    secret = data.draw(OPAQUE if opaque else SECRETS)
    hidden = data.draw(_hidden(secret))
    key = data.draw(CONTENT) if opaque else data.draw(st.one_of(CONTENT, STRUCTURE))
    attributes = {key: hidden}
    place = data.draw(st.sampled_from(["attributes", "event", "link", "resource", "status"] + ([] if opaque else ["name", "scope", "event name", "key"])))  # fmt: skip
    fields: dict[str, Any] = {"attributes": {}}
    match place:
        case "attributes" | "resource":
            fields[place] = attributes
        case "event":
            fields["events"] = (
                SpanEvent(data.draw(st.sampled_from(["exception", "gen_ai.choice"])), 1, attributes),
            )
        case "link":
            fields["links"] = (SpanLink("a" * 32, "b" * 16, attributes),)
        case "status":
            fields["status_message"] = f"failed: {secret}"
        case "event name":
            fields["events"] = (SpanEvent(secret),)
        case "key":
            fields["attributes"] = {secret: 1, "input.value": {secret: 2}}
        case _:
            fields[place] = f"run {secret}"
    raw = Span("a" * 32, "b" * 16, fields.pop("name", "n"), 1, 2, **fields)
    written = encode(SpansReceived(trace_id="a" * 32, spans=(Redactor(Content(), b"k" * 32).span(raw),)))
    for form in (secret, json.dumps(secret)[1:-1]):
        assert form not in written.decode()
    kept = encode(
        SpansReceived(trace_id="a" * 32, spans=(Redactor(Content(training=True), b"k" * 32).span(raw),))
    )
    assert secret.split()[0].encode() in kept


@settings(max_examples=60, deadline=None)
@given(SPANS, st.booleans())
def test_the_same_request_gives_the_same_records(spans: list[dict[str, Any]], training: bool) -> None:
    intake = Intake(Redactor(Content(training=training), b"k" * 32), 4096, keep_content=training)
    first = intake.prepare(decode_json(as_json(spans)), tenant="t", source="otlp")
    again = intake.prepare(decode_protobuf(as_protobuf(spans)), tenant="t", source="otlp")
    events = [r.event_id for r in first.records if r.topic == "spans"]
    assert events == [r.event_id for r in again.records if r.topic == "spans"]
    other = intake.prepare(decode_json(as_json(spans)), tenant="u", source="otlp")
    assert not {r.event_id for r in other.records} & {r.event_id for r in first.records}
    assert all(r.key.startswith("u") for r in other.records)
