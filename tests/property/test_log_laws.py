"""Laws of log records: one meaning in two wire forms, bytes of any kind are answered, a bad record costs itself, no
text leaks, and mixed with spans in any order, repetition and batching they make the same orchestrations."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from coding_agent_spans import coding_agent_item
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_requests import logs_json, logs_protobuf, record
from made_spans import Desk, hashes
from otlp_requests import TRACE

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_any import decode_any_json, decode_any_protobuf
from spanloop.pipeline.otlp.decode_logs_json import decode_logs_json
from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf
from spanloop.pipeline.otlp.log_ids import identified
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import SpansReceived, decode, encode
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import LOG

LAW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), TEXT, st.binary(max_size=8)
)
VALUE = st.recursive(
    SCALAR, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(TEXT, v, max_size=3)), max_leaves=6
)
TIMES = st.one_of(st.integers(0, 2**62), st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]))
RECORDS = st.lists(
    st.builds(
        lambda name, attributes, marked, **k: record(
            name, attributes=attributes | ({"gen_ai.x": 1} if marked else {}), **k
        ),
        name=st.sampled_from(["", "gen_ai.choice", "codex.x", "other"]) | TEXT,
        attributes=st.dictionaries(TEXT, VALUE, max_size=4), marked=st.booleans(), body=VALUE, time=TIMES,
        observed=TIMES, severity=st.integers(0, 24), trace_id=st.sampled_from([TRACE, "", "0" * 32, "ab"]),
        span_id=st.sampled_from(["00f067aa0ba902b7", "", "0" * 16, "ab" * 3]),
    ),
    max_size=4,
)  # fmt: skip


@LAW
@given(RECORDS)
def test_json_and_protobuf_mean_the_same_and_each_record_stands_alone(records: list[dict[str, Any]]) -> None:
    by_json = decode_logs_json(logs_json(records))
    by_protobuf = decode_logs_protobuf(logs_protobuf(records))
    assert by_json.spans == by_protobuf.spans
    assert [r.kind for r in by_json.rejected] == [r.kind for r in by_protobuf.rejected]
    assert len(by_json.spans) + len(by_json.rejected) + by_json.ignored == len(records)
    alone = [d for r in records for d in decode_logs_json(logs_json([r])).spans]
    assert alone == by_json.spans
    for found in by_json.spans:
        assert (found.kind, found.start_ns) == (LOG, found.end_ns)
        assert identified(found) == found
        event = SpansReceived(trace_id=found.trace_id, spans=(found,))
        assert decode(encode(event)) == event


@LAW
@given(st.one_of(st.binary(max_size=200), st.builds(bytes, st.lists(st.sampled_from(b"\x0a\x12\x1a\x09\x00\x01\x10{}[],:\"a"), max_size=60))))  # fmt: skip
def test_any_bytes_are_records_or_a_schema_error(body: bytes) -> None:
    for read in (decode_logs_json, decode_logs_protobuf, decode_any_json, decode_any_protobuf):
        with contextlib.suppress(SchemaError):
            read(body)


@LAW
@given(st.data())
def test_damaged_requests_never_raise_anything_else(data: st.DataObject) -> None:
    write, read = data.draw(
        st.sampled_from([(logs_json, decode_any_json), (logs_protobuf, decode_any_protobuf)])
    )
    body = bytearray(write([record(), record("codex.x", body={"a": ["x", 1.5]}), record(time=3)]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SchemaError):
        for found in read(bytes(body)).spans:
            event = SpansReceived(trace_id=found.trace_id, spans=(found,))
            assert decode(encode(event)) == event


OPAQUE = st.text("ghijkmnopqrstuvwxyz", min_size=12, max_size=20)


@LAW
@given(OPAQUE, st.data())
def test_no_text_of_a_record_is_stored_without_consent(secret: str, data: st.DataObject) -> None:
    key = data.draw(
        st.sampled_from(
            ["prompt", "arguments", "output", "x.y", "gen_ai.evaluation.explanation", "error.message"]
        )
    )
    body = data.draw(st.sampled_from([
        secret, {"content": secret}, {"role": "user", "content": [{"type": "text", "text": secret}]},
        {"message": {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": secret}}]}}, [secret],
    ]))  # fmt: skip
    sent = record("gen_ai.choice", attributes={key: f"see {secret}"}, body=body, trace_id="", span_id="")
    intake = Intake(Redactor(Content(), b"k" * 32), 4096, keep_content=False)
    made = intake.prepare(decode_logs_json(logs_json([sent])), tenant="t", source="otlp").records
    assert len(made) == 1
    assert secret.encode() not in made[0].value


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(coding_agent_item(), min_size=1, max_size=16), st.integers(0, 2**32))
def test_records_and_spans_in_any_order_repetition_batching_and_crash(items: list[Any], seed: int) -> None:
    rng = random.Random(seed)
    queue = [*items, *rng.choices(items, k=5)]
    rng.shuffle(queue)
    assert hashes(queue) == hashes(items)
    desk = Desk(quiet_s=1, timeout_s=50, retention_s=1e6)
    while queue:
        size = rng.randint(1, 5)
        batch, queue = queue[:size], queue[size:]
        desk.send(*batch)
        desk.later(rng.choice([0, 0.5, 2, 100]))
        if rng.random() < 0.3:
            desk.restart()
    desk.later(200)
    assert {k: e.content_hash for k, e in desk.live().items()} == hashes(items)
