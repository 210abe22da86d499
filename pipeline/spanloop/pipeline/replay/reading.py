"""Records of the archive as rows on their way to an orchestration: pure.

Place in the flow: the local driver's passes and the DoFns of one big pipeline call ``read_*`` on each record and send the rows
to the same ``assembling``. A *node* is a trace's place in the shuffle: the 16 bytes of the orchestration id that it would
have alone. An orchestration's id is one of its own nodes, so records that name only the orchestration find it too.

Invariants: a record that cannot be read is a ``Bad`` row, never an exception; a row's bytes are all that assembly needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from spanloop.pipeline.assembly.join import Seen, evidence_of
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import FeedbackReceived, SpansReceived, decode
from spanloop.schemas.ids import is_hex_id, orchestration_id

__all__ = [
    "Bad",
    "FeedbackRow",
    "Piece",
    "Position",
    "Row",
    "SpansRead",
    "SpansRow",
    "VersionRow",
    "decode_row",
    "encode_row",
    "feedback_target",
    "node_of",
    "read_feedback",
    "read_spans",
    "target_key",
]

Node = bytes
Key = bytes


class Position(NamedTuple):
    """Where a record lies and when it was appended."""

    topic: str
    partition: int
    offset: int
    appended_ns: int
    key: str


class SpansRow(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Operations of one trace."""

    tenant: str
    trace_id: str
    partition: int
    offset: int
    appended_ns: int
    operations: tuple[bytes, ...]
    """``encode_operation`` of each."""


class FeedbackRow(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """One feedback, as the bytes of its event."""

    partition: int
    offset: int
    appended_ns: int
    event: bytes


class VersionRow(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """What the stream recorded of an orchestration: the version of the value model, and hashes where they are wanted."""

    topic: str
    tenant: str
    orchestration_id: str
    revision: int
    offset: int
    appended_ns: int
    value_model: str = ""
    hash: str = ""
    told: str = ""
    """Hash that the event itself names; orchestrations only."""
    complete: bool = False
    merged: bool = False


Row = SpansRow | FeedbackRow | VersionRow
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Row)
encode_row: Callable[[Row], bytes] = _encoder.encode
decode_row: Callable[[bytes], Row] = _decoder.decode


class Piece(NamedTuple):
    """One end of a piece of evidence, small enough to sort millions."""

    key: Key
    node: Node
    side: int
    span_id: str
    """With its times it stands for the operation where time decides (``lost_in``); empty where none is needed."""
    start_ns: int
    end_ns: int


class Bad(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record, or a span of one, that gave no row. The bytes stay in the archive, at the place named."""

    topic: str
    partition: int
    offset: int
    key: str
    reason: str
    sha256: str
    size: int
    span_id: str = ""


class SpansRead(NamedTuple):
    """What one record of spans gave."""

    node: Node
    row: SpansRow | None
    pieces: list[Piece]
    linked: list[Node]
    """Nodes of traces that links name."""
    named: list[Key]
    """Wanted keys of feedback targets that the spans have."""
    bad: list[Bad]
    spans: int


def node_of(tenant: str, trace_id: str) -> Node:
    """16 bytes of the orchestration id that a trace alone would have."""
    return bytes.fromhex(orchestration_id(tenant, (trace_id,)))


def target_key(tenant: str, kind: str, name: str) -> Key:
    """16 bytes that stand for a span or response id that feedback names."""
    return bytes.fromhex(digest("target", tenant, kind, name))


def feedback_target(event: FeedbackReceived) -> tuple[Node | None, Key | None]:
    """Node of what feedback is on, or the key of its target where only the spans can tell the node."""
    if event.target_kind == "trace":
        return node_of(event.tenant, event.target_id), None
    if event.target_kind == "span" and event.trace_id:
        return node_of(event.tenant, event.trace_id), None
    if event.target_kind == "orchestration":
        if is_hex_id(event.target_id, 32):
            return bytes.fromhex(event.target_id), None
        return node_of(event.tenant, event.target_id), None
    return None, target_key(event.tenant, event.target_kind, event.target_id)


def read_spans(value: bytes, at: Position, wanted: frozenset[Key] = frozenset()) -> SpansRead:
    """Operations, evidence and links of one record of ``spans``.

    Args:
        value: The event as on the log.
        at: Where it lies.
        wanted: Keys of span and response targets that feedback names.
    """
    try:
        event = decode(value)
    except SchemaError as exc:
        return SpansRead(b"", None, [], [], [], [bad_record(value, at, exc.message)], 0)
    if not isinstance(event, SpansReceived):
        reason = f"a {type(event).__name__} on topic {at.topic}"
        return SpansRead(b"", None, [], [], [], [bad_record(value, at, reason)], 0)
    tenant, node = event.tenant, node_of(event.tenant, event.trace_id)
    bad: list[Bad] = []
    pieces: list[Piece] = []
    linked: list[Node] = []
    named: list[Key] = []
    encoded: list[bytes] = []
    for span in event.spans:
        try:
            operation = operation_of(span, event.source)
            encoded.append(encode_operation(operation))
        except Exception as exc:
            bad.append(_bad_span(span, at, exc))
            continue
        for key, seen in evidence_of(operation):
            pieces.append(_piece(tenant, key, node, seen))
        for trace_id, _ in operation.links:
            if trace_id != operation.trace_id:
                linked.append(node_of(tenant, trace_id))
        if wanted:
            names = [target_key(tenant, "span", operation.span_id)]
            if operation.call is not None and operation.call.response_id:
                names.append(target_key(tenant, "response", operation.call.response_id))
            named += [name for name in names if name in wanted]
    row = SpansRow(tenant, event.trace_id, at.partition, at.offset, at.appended_ns, tuple(encoded))
    return SpansRead(node, row, pieces, linked, named, bad, len(event.spans))


def _piece(tenant: str, key: str, node: Node, seen: Seen) -> Piece:
    hashed = hashlib.blake2b(f"{tenant}/{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    operation = seen.operation
    if operation is None:
        return Piece(hashed, node, seen.side, "", 0, 0)
    return Piece(hashed, node, seen.side, operation.span_id, operation.start_ns, operation.end_ns)


def read_feedback(value: bytes, at: Position) -> FeedbackReceived | Bad:
    """The event of one record of ``feedback``, as far as the signal stage would take it."""
    try:
        event = decode(value)
    except SchemaError as exc:
        return bad_record(value, at, exc.message)
    if not isinstance(event, FeedbackReceived):
        return bad_record(value, at, f"a {type(event).__name__} on topic {at.topic}")
    if not is_usable(event.value):
        return bad_record(value, at, f"value {event.value!r} is not a finite number in range")
    return event


def bad_record(value: bytes, at: Position, reason: str) -> Bad:
    """The note of a record that cannot be read."""
    sha256 = hashlib.sha256(value).hexdigest()
    return Bad(at.topic, at.partition, at.offset, at.key, reason[:500], sha256, len(value))


def _bad_span(span: msgspec.Struct, at: Position, problem: Exception) -> Bad:
    raw = msgspec.json.encode(span)
    reason = f"a span cannot be read: {type(problem).__name__}"
    sha256 = hashlib.sha256(raw).hexdigest()
    return Bad(
        at.topic, at.partition, at.offset, at.key, reason, sha256, len(raw), getattr(span, "span_id", "")
    )
