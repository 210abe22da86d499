"""Files of OTLP trace requests: find out the format, stream requests, go on after a bad record.

Formats: OTLP/JSON, one request a line (the collector's file exporter) or one document; protobuf requests, each behind
a 4-byte big-endian length or behind a varint length; one bare protobuf request. Any of them gzipped. The format is
told by the bytes, never by the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from spanloop.pipeline.otlp.decode_any import decode_any_json, decode_any_protobuf
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch, Rejected
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["MAX_RECORD_BYTES", "RawRequest", "decode", "detect_format", "read_requests", "read_spans"]

MAX_RECORD_BYTES = 256 * 2**20
"""A longer record means that the lengths are no lengths, or a file that has to be split."""
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
        decode_any = decode_any_json if request.json else decode_any_protobuf
        return decode_any(request.body, max_nesting)
    except SchemaError as exc:
        return DecodedBatch([], [Rejected(f"{request.where}: {exc.message}", request.body, "request")])


def read_requests(path: Path | str) -> Iterator[RawRequest]:
    """Requests of ``path`` as bytes, streamed. Raises ConfigError as ``read_spans``."""
    from spanloop.pipeline.formats.framing import records
    from spanloop.pipeline.formats.opened import Source, opened

    path = Path(path)
    if path.is_fifo():
        raise ConfigError(
            f"cannot read {path}: it is a pipe, and the format is told by reading twice; save it to a file first"
        )
    with opened(Source(path)) as (stream, _):
        for record in records(stream, path.name):
            yield RawRequest(record.where, record.body, record.json, record.problem)


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
