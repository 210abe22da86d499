"""Files of OTLP trace requests: find out the format, stream requests, go on after a bad record.

Formats: OTLP/JSON, one request a line (the collector's file exporter) or one document; protobuf requests, each behind
a 4-byte big-endian length or behind a varint length; one bare protobuf request. Any of them gzipped. The format is
told by the bytes, never by the name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from spanloop.pipeline.otlp.decode_json import decode_json, parse_json
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch, Rejected
from spanloop.pipeline.otlp.wire import WireError, varint
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["MAX_RECORD_BYTES", "RawRequest", "decode", "detect_format", "read_requests", "read_spans"]

MAX_RECORD_BYTES = 256 * 2**20
"""A longer record means that the lengths are no lengths, or a file that has to be split."""
_PEEK = 4096
_BOM = b"\xef\xbb\xbf"


class RawRequest(msgspec.Struct, frozen=True):
    """One request of a file as bytes, and where it stands."""

    where: str
    """File name and line or record number."""
    body: bytes
    json: bool
    problem: str = ""
    """Not empty: the bytes from here on are no request, and why."""


def read_spans(path: Path | str, max_nesting: int = MAX_NESTING) -> Iterator[DecodedBatch]:
    """Decoded requests of ``path`` in file order. A record that is no request becomes one Rejected whose reason
    names file and line, and reading goes on.

    Raises:
        ConfigError: the file cannot be read, or is in no format that we know.
    """
    for request in read_requests(path):
        yield decode(request, max_nesting)


def decode(request: RawRequest, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans of one request of a file; never raises for its content."""
    if request.problem:
        return DecodedBatch([], [Rejected(f"{request.where}: {request.problem}", request.body, "request")])
    try:
        if request.json:
            return decode_json(request.body, max_nesting)
        from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf

        return decode_protobuf(request.body, max_nesting)
    except SchemaError as exc:
        return DecodedBatch([], [Rejected(f"{request.where}: {exc.message}", request.body, "request")])


def read_requests(path: Path | str) -> Iterator[RawRequest]:
    """Requests of ``path`` as bytes, streamed. Raises ConfigError as ``read_spans``."""
    path = Path(path)
    if path.is_fifo():
        raise ConfigError(
            f"cannot read {path}: it is a pipe, and the format is told by reading twice; save it to a file first"
        )
    try:
        with path.open("rb") as plain:
            if plain.read(2) == b"\x1f\x8b":
                plain.seek(0)
                with gzip.open(plain) as unzipped:
                    yield from _read(cast(BinaryIO, unzipped), path)
            else:
                plain.seek(0)
                yield from _read(plain, path)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except (EOFError, zlib.error) as exc:
        yield RawRequest(f"{path.name}", b"", False, f"the gzip stream is damaged: {exc}")


def _read(handle: BinaryIO, path: Path) -> Iterator[RawRequest]:
    head = handle.read(_PEEK)
    handle.seek(0)
    kind = detect_format(head) if head.strip() else ""
    reader = _READERS.get(kind)
    if reader is None:
        if not head.strip():
            return
        raise ConfigError(
            f"{path} is in no format that can be read: expected OTLP/JSON (one request a line, or one document) or "
            f"OTLP protobuf requests behind lengths; it starts with {head[:16]!r}"
        )
    yield from reader(handle, path.name)


def detect_format(head: bytes) -> str:
    """json, length4, varint, protobuf, or empty text (none of them), from the first bytes of a file.

    >>> detect_format(b'{"resourceSpans":[]}')
    'json'
    """
    if head.removeprefix(_BOM).lstrip()[:1] in (b"{", b"["):
        return "json"
    if head[:1] == b"\x0a" and _starts_request(head):
        return "protobuf"
    if len(head) > 4 and head[0] < 0x0A and _starts_request(head[4:]):
        return "length4"
    ends = next((i for i, byte in enumerate(head[:5]) if byte < 0x80), 5)
    return "varint" if _starts_request(head[ends + 1 :]) else ""


def _starts_request(message: bytes) -> bool:
    """Whether a ResourceSpans (field 1) starts here that itself starts with one of its own fields."""
    if message[:1] != b"\x0a":
        return False
    ends = next((i for i, byte in enumerate(message[1:6], 1) if byte < 0x80), 6)
    return message[ends + 1 : ends + 2] in (b"\x0a", b"\x12", b"\x1a")


def _json_requests(handle: BinaryIO, name: str) -> Iterator[RawRequest]:
    """One request a line, unless the whole file is one value: a document or a list of requests."""
    first = next((line for line in handle if line.strip()), b"")
    value = _json_or_none(first)
    if not isinstance(value, dict):
        handle.seek(0)
        body = handle.read(MAX_RECORD_BYTES + 1)
        value = _json_or_none(body) if len(body) <= MAX_RECORD_BYTES else None
        if isinstance(value, list):
            for number, item in enumerate(value, 1):
                yield RawRequest(f"{name} element {number}", json.dumps(item).encode("ascii"), True)
            return
        if isinstance(value, dict):
            yield RawRequest(name, body.removeprefix(_BOM), True)
            return
    handle.seek(0)
    for number, line in enumerate(handle, 1):
        if line.strip():
            yield RawRequest(f"{name} line {number}", line.removeprefix(_BOM), True)


def _json_or_none(body: bytes) -> Any:
    try:
        return parse_json(body.removeprefix(_BOM))[0]
    except SchemaError:
        return None


def _length4_requests(handle: BinaryIO, name: str) -> Iterator[RawRequest]:
    number = 0
    while prefix := handle.read(4):
        number += 1
        size = int.from_bytes(prefix, "big") if len(prefix) == 4 else -1
        yield (request := _record(handle, f"{name} record {number}", size))
        if request.problem:
            return


def _varint_requests(handle: BinaryIO, name: str) -> Iterator[RawRequest]:
    number = 0
    while byte := handle.read(1):
        number += 1
        prefix = byte
        while prefix[-1] >= 0x80 and len(prefix) < 5 and (byte := handle.read(1)):
            prefix += byte
        try:
            size, _ = varint(memoryview(prefix), 0)
        except WireError:
            size = -1
        yield (request := _record(handle, f"{name} record {number}", size))
        if request.problem:
            return


def _record(handle: BinaryIO, where: str, size: int) -> RawRequest:
    if not 0 <= size <= MAX_RECORD_BYTES:
        return RawRequest(where, b"", False, "its length is damaged; the rest of the file cannot be read")
    body = handle.read(size)
    if len(body) < size:
        return RawRequest(where, body, False, f"the file ends after {len(body)} of its {size} bytes")
    return RawRequest(where, body, False)


def _bare_request(handle: BinaryIO, name: str) -> Iterator[RawRequest]:
    body = handle.read(MAX_RECORD_BYTES + 1)
    problem = f"it is longer than {MAX_RECORD_BYTES} bytes: split it" if len(body) > MAX_RECORD_BYTES else ""
    yield RawRequest(name, body, False, problem)


_READERS: dict[str, Callable[[BinaryIO, str], Iterator[RawRequest]]] = {
    "json": _json_requests,
    "length4": _length4_requests,
    "varint": _varint_requests,
    "protobuf": _bare_request,
}
