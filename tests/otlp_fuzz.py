"""Corrupted OTLP requests: mutations of valid ones, with what must survive each.

Three kinds. *inside*: bytes of one span are changed and its length, in protobuf, is left true; every other span must
survive, where the request can still be read at all (JSON whose syntax is gone is refused whole). *item*: one span is
replaced by something that is no span, the request around it is sound; every other span must survive. *anywhere*:
bytes of the whole body are changed, cut, repeated or swapped; it must be answered.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any, NamedTuple

from otlp_requests import as_json, as_protobuf, span

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import DeadLettered, SpansReceived, decode
from spanloop.schemas.settings import Content

__all__ = ["Attempt", "attempt", "intakes", "outcome"]

HANG_S = 5.0
"""Seconds of CPU: a shared machine may stand still for longer, and nothing here waits."""

VALUES: list[Any] = [
    "x", "", 7, -(2**63), 2.5, float("nan"), True, None, b"\0\xff", ["a", 1, [2.5, None]], {"k": {"z": True}}, [],
    {}, "\U0001f98a text", "y" * 300,
]  # fmt: skip
KEYS = [
    "gen_ai.operation.name",
    "gen_ai.usage.input_tokens",
    "gen_ai.input.messages",
    "tool.name",
    "",
    "k" * 40,
]
JUNK: list[Any] = [
    None, 7, "span", [], {}, [[]], True, {"traceId": 5}, {"attributes": 7}, {"attributes": [7]}, {"name": {}},
    {"attributes": [{"key": "a", "value": {"arrayValue": 7}}]}, {"startTimeUnixNano": "soon"}, {"status": []},
    {"traceId": "zz", "spanId": "yy"}, {"events": [{}, 7]}, {"links": {}}, -1e308,
]  # fmt: skip
SPECIAL = (
    b"",
    b"\0",
    b"\xff" * 9,
    b"\x0a\xff\xff\xff\xff\x0f",
    b"{" * 50,
    b"[" * 3_000,
    b'"',
    b"\\ud800",
    b"\x12\x00",
)


class Attempt(NamedTuple):
    """One corrupted request."""

    kind: str
    json: bool
    body: bytes
    survivors: frozenset[str]
    """Ids of spans that must be accepted; those of *inside* in JSON only where the body still parses."""


def attempt(seed: int) -> Attempt:
    """The corrupted request of a seed; the same on any machine."""
    rng = random.Random(seed)
    spans = [_span(rng, number) for number in range(1, rng.randint(2, 6) + 1)]
    as_text = rng.random() < 0.5
    kind = rng.choice(("inside", "item", "anywhere"))
    victim = rng.randrange(len(spans))
    others = frozenset(s["span_id"] for n, s in enumerate(spans) if n != victim)
    body = as_json(spans) if as_text else as_protobuf(spans)
    if kind == "anywhere":
        return Attempt(kind, as_text, _damage(rng, body), frozenset())
    if kind == "item" and as_text:
        data = json.loads(body)
        data["resourceSpans"][0]["scopeSpans"][0]["spans"][victim] = rng.choice(JUNK)
        return Attempt(kind, True, json.dumps(data).encode(), others)
    if as_text:
        start, end = _json_place(body, victim)
        return Attempt(kind, True, body[:start] + _flip(rng, body[start:end]) + body[end:], others)
    whole, part = as_protobuf(spans), _protobuf_span(spans[victim])
    at = whole.find(part)
    assert at > 0
    if kind == "item":
        return Attempt(kind, False, _with_item(spans, victim, _damage(rng, part)), others)
    return Attempt(kind, False, whole[:at] + _flip(rng, part) + whole[at + len(part) :], others)


def intakes() -> tuple[Intake, Intake]:
    """One that keeps content and one that does not."""
    return tuple(  # type: ignore[return-value]
        Intake(Redactor(Content(training=kept), b"k" * 32), 4_096, keep_content=kept)
        for kept in (False, True)
    )


def outcome(tried: Attempt, intake: Intake) -> str:
    """What became of a request in decoder and intake: refused, whole or partial.

    Raises:
        AssertionError: a valid neighbour was lost, a record cannot be read back, or it took longer than HANG_S.
    """
    began = time.thread_time()
    try:
        batch = (decode_json if tried.json else decode_protobuf)(tried.body)
    except SchemaError:
        assert not tried.survivors or (tried.kind == "inside" and tried.json and not _same_shape(tried)), (
            "a request whose frame is sound was refused"
        )
        return "refused"
    found = {span.span_id for span in batch.spans}
    lost = tried.survivors - found
    assert not lost or (tried.kind == "inside" and tried.json and not _same_shape(tried)), (
        f"valid neighbours were lost: {sorted(lost)}"
    )
    prepared = intake.prepare(batch, tenant="t", source="otlp")
    events = [decode(record.value) for record in prepared.records]
    stored = sum(len(e.spans) for e in events if isinstance(e, SpansReceived))
    letters = sum(isinstance(e, DeadLettered) for e in events)
    assert (stored, letters) == (len(batch.spans), len(batch.rejected))
    assert time.thread_time() - began < HANG_S, "it took too long"
    return "partial" if batch.rejected else "whole"


def _same_shape(tried: Attempt) -> bool:
    """Whether damaged JSON still is a request of as many spans: a quote that became something else may have swallowed some."""
    try:
        data = json.loads(tried.body.decode("utf-8", "surrogateescape"))
        (group,) = data["resourceSpans"]
        (scope,) = group["scopeSpans"]
        return len(scope["spans"]) == len(tried.survivors) + 1
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _span(rng: random.Random, number: int) -> dict[str, Any]:
    attributes = {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.randint(0, 4))}
    events = [("e", 5, {"k": rng.choice(VALUES)})] if rng.random() < 0.3 else []
    links = [("ab" * 16, "cd" * 8, {"l": 1})] if rng.random() < 0.2 else []
    return span(number, attributes=attributes, events=events, links=links, message=rng.choice(["", "boom"]))


def _flip(rng: random.Random, part: bytes) -> bytes:
    """The same length, some bytes changed."""
    found = bytearray(part)
    for _ in range(rng.randint(1, 6)):
        found[rng.randrange(len(found))] = rng.choice((rng.randrange(256), 0, 0xFF, 0x0A, 0x7B, 0x22))
    return bytes(found)


def _damage(rng: random.Random, body: bytes) -> bytes:
    """Bytes changed, cut out, repeated, swapped or put in."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.randrange(len(body) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:
                body = _flip(rng, body) if body else body
            case 1:
                body = body[:a] + body[b:]
            case 2:
                body = body[:b] + body[a:b] * rng.randint(1, 3) + body[b:]
            case 3:
                body = body[b:] + body[:a]
            case 4:
                body = body[:a] + rng.choice(SPECIAL) + body[a:]
            case _:
                body = body[:a]
    return body


def _json_place(body: bytes, victim: int) -> tuple[int, int]:
    """Where the text of one span stands in a request as ``as_json`` writes it."""
    data = json.loads(body)
    text = json.dumps(data["resourceSpans"][0]["scopeSpans"][0]["spans"][victim]).encode()
    at = body.find(text)
    assert at > 0
    return at, at + len(text)


def _protobuf_span(one: dict[str, Any]) -> bytes:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(as_protobuf([one]))
    return request.resource_spans[0].scope_spans[0].spans[0].SerializeToString()


def _with_item(spans: list[dict[str, Any]], victim: int, item: bytes) -> bytes:
    """The request with other bytes for one span, all lengths true."""
    parts = [item if n == victim else _protobuf_span(s) for n, s in enumerate(spans)]
    scope = b"".join(b"\x12" + _varint(len(p)) + p for p in parts)
    group = b"\x12" + _varint(len(scope)) + scope
    return b"\x0a" + _varint(len(group)) + group


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
