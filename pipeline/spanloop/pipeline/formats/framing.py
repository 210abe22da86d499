"""Cuts a file into records, streamed, going on behind a bad one.

Framings: JSON one record a line; JSON values one behind the other, over several lines each; one JSON list of records, or an
object whose list is too long to be read as one value; protobuf behind a 4-byte or a varint length; one bare protobuf message.
The bytes tell which. Invariant: the records of a file, their names and their ends are functions of its bytes, so that reading
may go on at any of these ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from spanloop.pipeline.formats.stream import Stream
from spanloop.pipeline.otlp.decode_json import parse_json
from spanloop.pipeline.otlp.files import MAX_RECORD_BYTES, detect_format
from spanloop.pipeline.otlp.wire import WireError, varint
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["DOCUMENT_BYTES", "Place", "Record", "records"]

DOCUMENT_BYTES = 16 * 2**20
"""A longer document of one known list is read element by element."""
_HEAD = 64 * 1024
_KEPT = 64 * 1024
"""Bytes kept of a record that is too long."""
_BOM = b"\xef\xbb\xbf"
_ONE_LIST = re.compile(rb'\s*\{\s*"(resourceSpans|resource_spans|resourceLogs|data|spans)"\s*:\s*\[')
_OTLP_LISTS = frozenset({"resourceSpans", "resource_spans", "resourceLogs"})
_WIRE_FORMATS = frozenset({"length4", "varint", "protobuf"})


class Place(msgspec.Struct, frozen=True):
    """Between which two records of a file reading stands."""

    framing: str = ""
    """lines, values, list, length4, varint, protobuf, or list:KEY; empty: not known yet."""
    number: int = 0
    """Records (or lines) behind it."""


class Record(msgspec.Struct, frozen=True):
    """One record as bytes, and where it stands."""

    where: str
    body: bytes
    json: bool
    place: Place
    """Behind it."""
    problem: str = ""
    """Not empty: it cannot be read, and why."""


def records(stream: Stream, name: str, place: Place | None = None) -> Iterator[Record]:
    """Records of ``stream`` behind ``place``, where it stands. Raises ConfigError for bytes in no framing that we know."""
    if place is None or not place.framing:
        place = Place(_framing(stream, name))
    yield from _READERS[place.framing.partition(":")[0]](stream, name, place)
    if stream.damage:
        yield Record(name, b"", False, place, stream.damage)


def _framing(stream: Stream, name: str) -> str:
    head = stream.head(_HEAD)
    if head.startswith(_BOM):
        stream.take(len(_BOM))
        head = head[len(_BOM) :]
    if not head.strip():
        return "lines"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(f"{name} is UTF-16 text: save it as UTF-8")
    kind = detect_format(head)
    if kind in _WIRE_FORMATS:
        return kind
    if kind != "json":
        raise ConfigError(
            f"{name} is in no format that can be read: expected OTLP (JSON or protobuf), a trace of the openai-agents SDK, a "
            f"Langfuse or Phoenix export, a Who&When or tau-bench log, or a survey trace; it starts with {head[:16]!r}"
        )
    if head.lstrip()[:1] == b"[":
        return "list" if _is_list(stream) else "lines"
    return _object_framing(stream)


def _is_list(stream: Stream) -> bool:
    """Whether the list ahead is the file, and not one list a line."""
    size = stream.line_length(_HEAD)
    if size < 0 or not isinstance(_value(first := stream.head(size)), list):
        return True
    return not stream.head(size + _HEAD)[len(first) :].strip()


def _object_framing(stream: Stream) -> str:
    """lines where a line is a whole object, values where the first object spans lines, a list where it is too long."""
    size = stream.line_length(MAX_RECORD_BYTES if not _ONE_LIST.match(stream.head(256)) else DOCUMENT_BYTES)
    if size >= 0 and isinstance(_value(stream.head(size)), dict):
        return "lines"
    length = stream.value_length(DOCUMENT_BYTES)
    if length == -2:
        if found := _ONE_LIST.match(stream.head(256)):
            stream.take(found.end())
            return "list:" + found.group(1).decode()
        length = stream.value_length(MAX_RECORD_BYTES)
    return "values" if length > 0 and _value(stream.head(length)) is not None else "lines"


def _value(body: bytes) -> object:
    try:
        return parse_json(body)[0]
    except SchemaError:
        return None


def _lines(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    number = place.number
    while True:
        size = stream.line_length(MAX_RECORD_BYTES)
        if size == 0:
            return
        number += 1
        where, after = f"{name} line {number}", Place("lines", number)
        if size < 0:
            body = stream.take(_KEPT)
            stream.skip_line()
            yield Record(where, body, True, after, f"it is longer than {MAX_RECORD_BYTES} bytes")
            continue
        body = stream.take(size)
        if body.strip():
            yield Record(where, body.removeprefix(_BOM), True, after)


def _values(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    number = place.number
    while stream.skip_blank(b"\x1e") >= 0:
        number += 1
        record = _one_value(
            stream, name if number == 1 else f"{name} value {number}", Place("values", number)
        )
        yield record
        if record.problem:
            return


def _list(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    number, key = place.number, place.framing.partition(":")[2]
    if not number and not key and stream.skip_blank() == ord("["):
        stream.take(1)
    while (byte := stream.skip_blank(b",")) >= 0:
        if byte in b"]}":
            return
        number += 1
        where = f"{name} element {number}"
        record = _one_value(stream, where, Place(place.framing, number))
        if key in _OTLP_LISTS and not record.problem:
            record = msgspec.structs.replace(record, body=b'{"%s":[%s]}' % (key.encode(), record.body))
        yield record
        if record.problem:
            return
    yield Record(
        f"{name} behind element {number}", b"", True, Place(place.framing, number), "the list does not end"
    )


def _one_value(stream: Stream, where: str, after: Place) -> Record:
    size = stream.value_length(MAX_RECORD_BYTES)
    if size > 0:
        return Record(where, stream.take(size), True, after)
    problem = {
        -1: "the file ends within it",
        -2: f"it is longer than {MAX_RECORD_BYTES} bytes; the rest of the file cannot be read",
    }.get(size, "no value stands there; the rest of the file cannot be read")
    return Record(where, stream.take(_KEPT), True, after, problem)


def _length4(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    number = place.number
    while prefix := stream.take(4):
        number += 1
        size = int.from_bytes(prefix, "big") if len(prefix) == 4 else -1
        yield (record := _message(stream, f"{name} record {number}", size, Place("length4", number)))
        if record.problem:
            return


def _varints(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    number = place.number
    while prefix := stream.take(1):
        number += 1
        while prefix[-1] >= 0x80 and len(prefix) < 5 and (byte := stream.take(1)):
            prefix += byte
        try:
            size, _ = varint(memoryview(prefix), 0)
        except WireError:
            size = -1
        yield (record := _message(stream, f"{name} record {number}", size, Place("varint", number)))
        if record.problem:
            return


def _message(stream: Stream, where: str, size: int, after: Place) -> Record:
    if not 0 <= size <= MAX_RECORD_BYTES:
        return Record(where, b"", False, after, "its length is damaged; the rest of the file cannot be read")
    body = stream.take(size)
    if len(body) < size:
        return Record(where, body, False, after, f"the file ends after {len(body)} of its {size} bytes")
    return Record(where, body, False, after)


def _bare(stream: Stream, name: str, place: Place) -> Iterator[Record]:
    if place.number:
        return
    body = stream.take(MAX_RECORD_BYTES + 1)
    problem = f"it is longer than {MAX_RECORD_BYTES} bytes: split it" if len(body) > MAX_RECORD_BYTES else ""
    yield Record(name, body, False, Place("protobuf", 1), problem)


_READERS = {
    "lines": _lines,
    "values": _values,
    "list": _list,
    "length4": _length4,
    "varint": _varints,
    "protobuf": _bare,
}
