"""One OTLP request of traces or of logs, told apart by its bytes: for files and for topics that carry both."""

from __future__ import annotations

from spanloop.pipeline.otlp.decode_json import decode_request, parse_json
from spanloop.pipeline.otlp.decode_logs_json import decode_log_request, is_log_request
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch
from spanloop.pipeline.otlp.wire import WireError, fields

__all__ = ["decode_any_json", "decode_any_protobuf", "holds_logs"]

_SPAN_STARTS = (0x0A, 0x12)
"""First bytes of a span: its trace id, or its span id where a bad one lacks that. In a log record field 1 is a time and field 2
a number."""


def decode_any_json(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans or log records of one OTLP/JSON request. Raises SchemaError when ``body`` is neither."""
    data, exact = parse_json(body)
    if is_log_request(data):
        return decode_log_request(data, max_nesting, exact)
    return decode_request(data, max_nesting, exact)


def decode_any_protobuf(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans or log records of one OTLP protobuf request. Raises SchemaError when ``body`` is neither."""
    if holds_logs(body):
        from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf

        return decode_logs_protobuf(body, max_nesting)
    from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf

    return decode_protobuf(body, max_nesting)


def holds_logs(body: bytes) -> bool:
    """Whether a protobuf request is one of logs, by its first record; the two differ in nothing above that. What is
    damaged or holds no record is none."""
    try:
        for _, group in _named(memoryview(body), 1):
            for _, scope in _named(group, 2):
                for _, record in _named(scope, 2):
                    if len(record):
                        return record[0] not in _SPAN_STARTS
    except WireError:
        pass
    return False


def _named(data: memoryview, number: int) -> list[tuple[int, memoryview]]:
    return [field for field in fields(data) if field[0] == number]
