"""OTLP protobuf straight to the canonical JSON of what may be written: decoding, redaction and limits in one walk over the bytes.

Place in the flow: ``Intake.take_protobuf``, for requests of spans where nothing is sealed. Spans of one program say the same again
and again: an attribute's bytes are remembered with the JSON that is written for them, a map's keys with the order in which they
stand. What is rare (events, links, reserved keys, values that need a repair, anything over a limit) goes the long way, span by
span: ``decode_protobuf.read_span``, ``Redactor.span``, the limits, the encoder.
Invariant: the records are those of the long way, byte for byte (tests/property/test_direct_laws.py). Memory is bounded.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from sys import intern
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from spanloop.collectors.labels import HEX_BYTES
from spanloop.collectors.limits import KEY_MAX, longest
from spanloop.collectors.redaction import GATEWAY, Redactor
from spanloop.pipeline.otlp.decode_protobuf import (
    STATUS,
    read_pair,
    read_resource,
    read_scope,
    read_span,
    refusal,
)
from spanloop.pipeline.otlp.decoded import MAX_TIME_NS, BadSpanError, Origin, Rejected
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.spans import Span

__all__ = ["DirectWriter", "Written"]

PART_MAX = 16_384
"""Attributes up to so many bytes are remembered."""
KNOWN_BYTES_MAX = 8 * 2**20
"""Bytes of attributes and of what is written for them that are remembered; then all are forgotten."""
_ENTRY = 256
"""What remembering costs beside the bytes."""
SHAPES_MAX = 4 * 2**20
"""The same of sets of keys: characters, and ``_ENTRY`` more for each key."""
NAMES_MAX = 4_096

_MARKS = 6
"""Bytes of an attribute with a short text, beside its key and the text: tags and lengths."""
_ONE_BYTE = 127
"""The longest length that one byte tells."""
_ZERO_TRACE, _ZERO_SPAN = bytes(16), bytes(8)
_KINDS = (b"", *(b',"kind":%d' % kind for kind in range(1, 6)))
_STATUS = {
    code: b"" if name == "unset" else b',"status":"%b"' % name.encode() for code, name in STATUS.items()
}


class Written(msgspec.Struct):
    """What became of one request."""

    traces: dict[str, list[bytes]]
    """Canonical JSON of its spans by trace id."""
    rejected: list[Rejected]


class _Shape(msgspec.Struct, frozen=True):
    """The keys of an attribute map in the order in which they came."""

    usual: bool
    """No key is reserved, repeated, overlong or looks at its neighbours."""
    order: Callable[[Sequence[bytes]], tuple[bytes, ...]]
    """Their values' JSON in the order of the keys as they are written."""


class _Head(msgspec.Struct, frozen=True):
    """How attributes with a short text under one key begin, up to the text."""

    key: str
    written: bytes
    """JSON of the key."""
    size: int
    """Bytes of such an attribute."""


class _Place(msgspec.Struct, frozen=True):
    """What the spans of one scope share, and its JSON."""

    origin: Origin
    usual: bool
    resource: bytes
    scope: bytes


class _Unusual(Exception):  # not an error: the long way
    """This span goes the long way."""


class DirectWriter:
    """Writes the spans of requests.

    Args:
        redactor: what may be written.
        encoded: canonical JSON of a redacted span within limits: the long way's last step.
        max_bytes: a span with more goes the long way.
        max_attributes: the same for one with more attributes.
    """

    def __init__(
        self, redactor: Redactor, encoded: Callable[[Span], bytes], *, max_bytes: int, max_attributes: int
    ) -> None:
        self._redactor = redactor
        self._encoded = encoded
        self._max_bytes = max_bytes
        self._max_attributes = max_attributes
        self._known: dict[bytes, tuple[str, bytes]] = {}
        self._heads: dict[bytes, _Head] = {}
        self._known_bytes = 0
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._shapes_size = 0
        self._names: dict[bytes, bytes] = {}
        self._place: tuple[object, _Place | None] = (None, None)
        self._depth = -1

    def write(self, request: Any, depth: int, labels: Mapping[str, str]) -> Written:
        """The spans of a parsed request (``decode_protobuf.parsed``).

        Args:
            request: the request.
            depth: levels in one attribute value.
            labels: resource attributes for all of them, where they have none of that name.
        """
        if depth != self._depth:  # what is remembered is of one depth
            self._forget()
            self._depth = depth
        found = Written({}, [])
        traces: dict[bytes, list[bytes]] = {}
        for group in request.resource_spans:
            parts = list(group.resource)
            for scopes in group.scope_spans:
                place = self._placed(parts, list(scopes.scope), depth, labels)
                self._write_spans(scopes.spans, place, depth, traces, found.rejected)
        found.traces = {trace.hex(): spans for trace, spans in traces.items()}
        return found

    def _write_spans(
        self,
        spans: Iterable[Any],
        place: _Place,
        depth: int,
        traces: dict[bytes, list[bytes]],
        rejected: list[Rejected],
    ) -> None:
        for raw in spans:
            trace = raw.trace_id
            try:
                written = self._usual(raw, trace, place, depth)
            except (_Unusual, UnicodeDecodeError, DecodeError, BadSpanError):
                found = self._long(raw, place, depth)
                if isinstance(found, Rejected):
                    rejected.append(found)
                    continue
                written = found
            own = traces.get(trace)
            if own is None:
                traces[trace] = [written]
            else:
                own.append(written)

    def _long(self, raw: Any, place: _Place, depth: int) -> bytes | Rejected:
        """The long way, which tells also what is wrong with a span."""
        try:
            span = read_span(raw, place.origin, depth)
        except (BadSpanError, DecodeError, UnicodeDecodeError) as exc:
            return refusal(raw, exc)
        return self._encoded(self._redactor.span(span))

    def _usual(self, raw: Any, trace: bytes, place: _Place, depth: int) -> bytes:
        span, parent = raw.span_id, raw.parent_span_id
        start, end = raw.start_time_unix_nano, raw.end_time_unix_nano
        if (
            len(trace) != 16
            or len(span) != 8
            or trace == _ZERO_TRACE
            or span == _ZERO_SPAN
            or start > MAX_TIME_NS
            or end > MAX_TIME_NS
            or not place.usual
            or raw.events
            or raw.links
        ):
            raise _Unusual
        if parent:
            if len(parent) != 8:
                raise _Unusual
            parent = b"" if parent == _ZERO_SPAN else b',"parent_span_id":"%b"' % hexlify(parent)
        status, kind, dropped = raw.status, raw.kind, raw.dropped_attributes_count
        message = status.message
        name = raw.name
        written = b'{%b%b"end_ns":%d%b%b%b%b%b,"span_id":"%b","start_ns":%d%b%b,"trace_id":"%b"}' % (
            self._attributes(raw.attributes, depth),
            b'"dropped_attributes":%d,' % dropped if dropped else b"",
            end,
            _KINDS[kind] if 0 <= kind <= 5 else b"",
            self._names.get(name) or self._name(name),
            parent,
            place.resource,
            place.scope,
            hexlify(span),
            start,
            _STATUS.get(status.code, b""),
            self._message(message) if message else b"",
            hexlify(trace),
        )
        if len(written) > self._max_bytes:
            raise _Unusual
        return written

    def _attributes(self, parts: Iterable[bytes], depth: int) -> bytes:
        listed = list(parts)
        if not listed:
            return b""
        pairs = list(map(self._known.get, listed))
        if None in pairs:
            pairs = [pair or self._new(part, depth) for part, pair in zip(listed, pairs, strict=True)]
        names, values = zip(*pairs, strict=True)
        shape = self._shapes.get(names) or self._new_shape(names)
        if not shape.usual:
            raise _Unusual
        return b'"attributes":{%b},' % b",".join(shape.order(values))

    def _new(self, part: bytes, depth: int) -> tuple[str, bytes]:
        """Key and JSON of an attribute that is not remembered."""
        found = self._id(part) or self._read(part, depth)
        size = len(part)
        if size <= PART_MAX:
            self._known_bytes += size + len(found[1]) + _ENTRY
            if self._known_bytes > KNOWN_BYTES_MAX:
                self._forget()
                self._known_bytes = size + len(found[1]) + _ENTRY
            self._known[part] = found
        return found

    def _forget(self) -> None:
        self._known.clear()
        self._heads.clear()
        self._known_bytes = 0

    def _id(self, part: bytes) -> tuple[str, bytes] | None:
        """An id in hex under a key whose ids stay; known by the bytes before it. None: something else."""
        if len(part) < 2:
            return None
        start = part[1] + _MARKS
        head = self._heads.get(part[:start])
        if head is None or head.size != len(part) or not HEX_BYTES.match(part, start):
            return None
        return head.key, b'%b"%b"' % (head.written, part[start:])

    def _read(self, part: bytes, depth: int) -> tuple[str, bytes]:
        flags: list[str] = []
        key, value = read_pair(part, depth, flags)
        redactor = self._redactor
        if flags or not redactor.is_alone(key):
            raise _Unusual
        key = intern(key)
        start, size = len(key) + _MARKS, len(part)
        if type(value) is str and redactor.keeps_ids(key) and part == _text_part(key, value):
            self._known_bytes += start + _ENTRY
            self._heads[part[:start]] = _Head(key, canonical_json(key) + b":", size)
        return key, canonical_json(redactor.attributes({key: value}))[1:-1]

    def _new_shape(self, keys: tuple[str, ...]) -> _Shape:
        written = [self._redactor.written_key(key) for key in keys]
        usual = (
            len(set(written)) == len(keys) <= self._max_attributes
            and max(map(len, written)) <= KEY_MAX
            and all(map(self._redactor.is_alone, keys))
        )
        places = sorted(range(len(keys)), key=written.__getitem__)
        shape = _Shape(usual, itemgetter(*places) if len(places) > 1 else tuple)
        self._shapes_size += sum(map(len, keys)) + _ENTRY * len(keys)
        if self._shapes_size > SHAPES_MAX:
            self._shapes.clear()
            self._shapes_size = 0
        self._shapes[keys] = shape
        return shape

    def _name(self, raw: bytes) -> bytes:
        found = b',"name":' + canonical_json(self._redactor.name(raw.decode()))
        if len(raw) <= _ENTRY:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            self._names[raw] = found
        return found

    def _message(self, raw: bytes) -> bytes:
        return b',"status_message":' + canonical_json(self._redactor.message(raw.decode()))

    def _placed(
        self, resource: list[bytes], scope: list[bytes], depth: int, labels: Mapping[str, str]
    ) -> _Place:
        """What the spans of a scope share: done once for neighbours, also of other requests."""
        wanted = (resource, scope, depth, labels)
        known, place = self._place
        if place is None or known != wanted:
            place = self._new_place(resource, scope, depth, labels)
            self._place = ((resource, scope, depth, dict(labels)), place)
        return place

    def _new_place(
        self, parts: list[bytes], scope: list[bytes], depth: int, labels: Mapping[str, str]
    ) -> _Place:
        resource = read_resource(parts, depth)
        for key, value in labels.items():
            resource.setdefault(key, value)
        name, version = read_scope(scope)
        redactor = self._redactor
        shown = redactor.resource(resource)
        texts = ((b"scope", redactor.name(name)), (b"scope_version", redactor.name(version)))
        return _Place(
            Origin(resource, name, version),
            name != GATEWAY and longest(shown) <= KEY_MAX,
            b',"resource":' + canonical_json(shown) if shown else b"",
            b"".join(b',"%b":%b' % (field, canonical_json(text)) for field, text in texts if text),
        )


def _text_part(key: str, text: str) -> bytes:
    """An attribute with a short text as encoders write it; of a longer one, no attribute."""
    name, value = key.encode(), text.encode()
    if len(name) > _ONE_BYTE or len(value) > _ONE_BYTE - 2:
        return b""
    return b"\x0a%c%b\x12%c\x0a%c%b" % (len(name), name, len(value) + 2, len(value), value)
