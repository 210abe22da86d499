"""Files of any known format, as spans and scores: what ``spanloop assemble`` and ``spanloop import`` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from spanloop.pipeline.formats.detect import read_json
from spanloop.pipeline.formats.framing import Record, records
from spanloop.pipeline.formats.opened import Opener, sources
from spanloop.pipeline.formats.otlp import as_read
from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.otlp.decoded import MAX_NESTING, Rejected
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["Part", "read_files", "read_record"]


class Part(msgspec.Struct):
    """One record of a file and what it held."""

    record: Record
    read: Read


def read_files(path: Path, wanted: str = "", max_nesting: int = MAX_NESTING) -> Iterator[Part]:
    """Records of a file, or of the members of an archive, in order.

    Raises:
        ConfigError: it cannot be read, or is in no format that we know.
    """
    known = False
    with Opener() as opener:
        for source in sources(path):
            try:
                with opener.opened(source) as (stream, _):
                    for record in records(stream, source.name):
                        yield Part(record, read_record(record, wanted, max_nesting))
                known = True
            except ConfigError:
                if source.named:
                    raise
    if not known:
        raise ConfigError(f"{path} holds no file in a format that can be read")


def read_record(record: Record, wanted: str = "", max_nesting: int = MAX_NESTING) -> Read:
    """What a record holds; never raises for its content. Reasons name the file and the place in it."""
    if record.problem:
        read = Read([], [Rejected(record.problem, record.body, "request")])
    elif record.json:
        read = read_json(record.body, wanted, max_nesting)
    else:
        read = _protobuf(record.body, max_nesting)
    if read.rejected:
        read.rejected = [
            msgspec.structs.replace(item, reason=f"{record.where}: {item.reason}") for item in read.rejected
        ]
    return read


def _protobuf(body: bytes, max_nesting: int) -> Read:
    from spanloop.pipeline.otlp.decode_any import decode_any_protobuf

    try:
        return as_read(decode_any_protobuf(body, max_nesting))
    except SchemaError as exc:
        return Read([], [Rejected(exc.message, body, "request")])
