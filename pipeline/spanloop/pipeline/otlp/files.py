"""Files of OTLP trace requests: find out the format, stream requests, go on after a bad record.

Formats: OTLP/JSON, one request a line (collector's file exporter) or one document; protobuf requests, each behind a
4-byte big-endian length or behind a varint length. Gzip of any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch, Rejected
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["read_spans"]


def read_spans(path: Path, max_nesting: int = MAX_NESTING) -> Iterator[DecodedBatch]:
    """Decoded requests of ``path`` in file order. A record that is no request becomes one Rejected.

    Raises ConfigError when the file cannot be read.
    """
    path = Path(path)
    try:
        handle: BinaryIO = path.open("rb")
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    with handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                yield decode_json(line, max_nesting)
            except SchemaError as exc:
                yield DecodedBatch([], [Rejected(f"{path.name} line {number}: {exc.message}", line)])
