"""OTLP's trace messages as far as their first level: what lies inside an attribute, an event, a link, a scope or a
resource stays bytes.

Place in the flow: ``decode_protobuf`` reads these instead of the generated classes. One parse of the request then
neither fails on what one value holds (a text that is not UTF-8, a hundred levels) nor builds an object for each
attribute, and equal attributes are equal bytes, which can be remembered.

Invariants: field numbers and types are OTLP's, so that what is written back is what came.
Source: opentelemetry-proto, trace.proto and common.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

__all__ = ["SHALLOW_DEPTH", "Event", "Group", "Link", "Request", "Scopes", "Span"]

SHALLOW_DEPTH = 4
"""Levels of messages from a request to its spans' status: malformed bytes are the only way to fail."""

_KINDS = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "fixed64": FieldDescriptorProto.TYPE_FIXED64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "int32": FieldDescriptorProto.TYPE_INT32,
}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Status": {"message": (2, "bytes"), "code": (3, "int32")},
    "Event": {"time_unix_nano": (1, "fixed64"), "name": (2, "bytes"), "attributes": (3, "bytes*")},
    "Link": {"trace_id": (1, "bytes"), "span_id": (2, "bytes"), "attributes": (4, "bytes*")},
    "Span": {
        "trace_id": (1, "bytes"),
        "span_id": (2, "bytes"),
        "parent_span_id": (4, "bytes"),
        "name": (5, "bytes"),
        "kind": (6, "int32"),
        "start_time_unix_nano": (7, "fixed64"),
        "end_time_unix_nano": (8, "fixed64"),
        "attributes": (9, "bytes*"),
        "dropped_attributes_count": (10, "uint32"),
        "events": (11, "bytes*"),
        "links": (13, "bytes*"),
        "status": (15, "Status"),
    },
    "Scopes": {"scope": (1, "bytes*"), "spans": (2, "Span*")},
    "Group": {"resource": (1, "bytes*"), "scope_spans": (2, "Scopes*")},
    "Request": {"resource_spans": (1, "Group*")},
}


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(
        name="spanloop/otlp_shallow.proto", package="spanloop.otlp_shallow", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind.rstrip("*")
            added = message.field.add(
                name=field,
                number=number,
                label=FieldDescriptorProto.LABEL_REPEATED
                if one != kind
                else FieldDescriptorProto.LABEL_OPTIONAL,
                type=_KINDS.get(one, FieldDescriptorProto.TYPE_MESSAGE),
            )
            if one in _MESSAGES:
                added.type_name = f".spanloop.otlp_shallow.{one}"
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in _MESSAGES}


_MADE = _classes()
Event: Any = _MADE["Event"]
Link: Any = _MADE["Link"]
Span: Any = _MADE["Span"]
Scopes: Any = _MADE["Scopes"]
Group: Any = _MADE["Group"]
Request: Any = _MADE["Request"]
