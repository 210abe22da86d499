"""OTLP/JSON ExportTraceServiceRequest -> spans, by an own walk over plain JSON (``json_format`` is 40 times slower
and reads ids as base64). Accepts what real senders send: ids in any case or in base64, int64 as text or number,
enums by name or number, snake_case keys, NaN and Infinity as text, attributes without value, lone surrogates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from spanloop.pipeline.otlp.decoded import (
    MAX_NESTING,
    BadSpanError,
    DecodedBatch,
    Origin,
    Rejected,
    bytes_value,
    check_times,
    float_value,
    from_base64,
    hex_id,
    with_flags,
)
from spanloop.pipeline.otlp.deep_json import TOO_DEEP, shallower
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

__all__ = ["decode_json", "decode_request", "parse_json"]

_LEVELS = 4 * MAX_NESTING + 24
"""Lists and maps in JSON around a value of MAX_NESTING levels."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT = re.compile(r"-?[0-9]{1,40}\Z")
_HEX = re.compile(r"[0-9a-fA-F]*\Z")
_KINDS = {
    name: number
    for number, name in enumerate(("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"))
}
_STATUS: dict[Any, str] = {
    0: "unset", 1: "ok", 2: "error", "0": "unset", "1": "ok", "2": "error", None: "unset",
    "STATUS_CODE_UNSET": "unset", "STATUS_CODE_OK": "ok", "STATUS_CODE_ERROR": "error",
}  # fmt: skip


def decode_json(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans of one OTLP/JSON request. Raises SchemaError when ``body`` is not such a request at all."""
    data, exact = parse_json(body)
    return decode_request(data, max_nesting, exact)


def parse_json(body: bytes) -> tuple[Any, bool]:
    """(value, True) of JSON bytes; (value, False) when it holds lone surrogates, bad UTF-8 or NaN literals that
    the strict parser refuses and the walk must repair. Raises SchemaError when it is no JSON. Where it is nested deeper than can be
    parsed, TOO_DEEP stands for what is below."""
    try:
        return _parse(body)
    except RecursionError:
        try:
            return _parse(shallower(body, _LEVELS))
        except RecursionError as exc:
            raise SchemaError("the JSON body is nested too deep") from exc


def _parse(body: bytes) -> tuple[Any, bool]:
    try:
        return msgspec.json.decode(body), True
    except (msgspec.DecodeError, UnicodeDecodeError) as strict:
        try:
            return json.loads(body.decode("utf-8", "surrogateescape")), False
        except ValueError as exc:
            raise SchemaError(f"the body is not JSON: {strict}") from exc


def decode_request(data: Any, max_nesting: int = MAX_NESTING, exact: bool = True) -> DecodedBatch:
    """Spans of a parsed request; ``exact`` False: repair texts first."""
    batch = DecodedBatch([], [])
    if type(data) is not dict:
        raise SchemaError(f"expected an OTLP request (a JSON object), found {_kind(data)}")
    groups = _either(data, "resourceSpans", "resource_spans")
    if groups is None and data and not {"resourceSpans", "resource_spans"} & data.keys():
        raise SchemaError(f"expected resourceSpans in an OTLP request, found {sorted(map(str, data))[:5]}")
    for group in _list(groups, "resourceSpans"):
        if group is not None:
            _alone(_group, group, batch, max_nesting, exact)
    if not batch.spans and batch.rejected and all(r.kind == "request" for r in batch.rejected):
        raise SchemaError(batch.rejected[0].reason)
    return batch


def _alone(read: Callable[..., None], raw: Any, batch: DecodedBatch, *rest: Any) -> None:
    """Read one group or scope; one that is none is refused as a whole and its neighbours go on."""
    try:
        read(raw, batch, *rest)
    except SchemaError as exc:
        batch.rejected.append(Rejected(exc.message, _raw(raw), "request"))


def _group(raw: Any, batch: DecodedBatch, depth: int, exact: bool) -> None:
    group = _object(raw, "resourceSpans")
    resource = _resource(group.get("resource"), depth, exact)
    scopes = _either(group, "scopeSpans", "scope_spans")
    if scopes is None:  # the name before OTLP 0.19
        scopes = _either(group, "instrumentationLibrarySpans", "instrumentation_library_spans")
    for scope_spans in _list(scopes, "scopeSpans"):
        if scope_spans is not None:
            _alone(_scope, scope_spans, batch, resource, depth, exact)


def _scope(raw: Any, batch: DecodedBatch, resource: dict[str, Any], depth: int, exact: bool) -> None:
    scope_spans = _object(raw, "scopeSpans")
    scope = scope_spans.get("scope")
    scope = scope if type(scope) is dict else {}
    origin = Origin(resource, _label(scope.get("name")), _label(scope.get("version")))
    for raw_span in _list(scope_spans.get("spans"), "spans"):
        try:
            batch.spans.append(_span(raw_span, origin, depth, exact))
        except BadSpanError as exc:
            batch.rejected.append(Rejected(str(exc), _raw(raw_span), exc.kind))


def _span(raw: Any, origin: Origin, depth: int, exact: bool) -> Span:
    if type(raw) is not dict:
        raise BadSpanError(f"a span is {_kind(raw)}, expected an object")
    flags: list[str] = []
    if not exact:
        raw = _repair(raw, flags, "span", depth * 4 + 16)
    get = raw.get
    trace_id = _id(_either(raw, "traceId", "trace_id"), 16, "trace id")
    span_id = _id(_either(raw, "spanId", "span_id"), 8, "span id")
    start = _time(_either(raw, "startTimeUnixNano", "start_time_unix_nano"), "startTimeUnixNano")
    end = _time(_either(raw, "endTimeUnixNano", "end_time_unix_nano"), "endTimeUnixNano")
    check_times(start, end)
    attributes = _attributes(get("attributes"), depth, flags)
    events = get("events")
    links = get("links")
    status = get("status")
    code, message = "unset", ""
    if status is not None:
        if type(status) is not dict:
            raise BadSpanError(f"status is {_kind(status)}, expected an object")
        code = _enum(status.get("code"), _STATUS, "unset")
        message = _text(status.get("message"), "status.message")
    dropped = _either(raw, "droppedAttributesCount", "dropped_attributes_count")
    span_events = _events(events, depth, flags) if events else ()
    span_links = _links(links, depth, flags) if links else ()
    if flags:
        with_flags(attributes, flags)
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        name=_text(get("name"), "name"),
        start_ns=start,
        end_ns=end,
        parent_span_id=_parent(_either(raw, "parentSpanId", "parent_span_id")),
        kind=_span_kind(get("kind")),
        status=code,
        status_message=message,
        attributes=attributes,
        events=span_events,
        links=span_links,
        scope=origin.scope,
        scope_version=origin.version,
        resource=origin.resource,
        dropped_attributes=_int(dropped, "droppedAttributesCount") if dropped else 0,
    )


# ---------------------------------------------------------------- parts of a span


def _events(raw: Any, depth: int, flags: list[str]) -> tuple[SpanEvent, ...]:
    found = []
    for event in _list_of_span(raw, "events"):
        t = _time(_either(event, "timeUnixNano", "time_unix_nano"), "event time")
        check_times(t, 0)
        found.append(
            SpanEvent(
                name=_text(event.get("name"), "event name"),
                t_ns=t,
                attributes=_attributes(event.get("attributes"), depth, flags),
            )
        )
    return tuple(found)


def _links(raw: Any, depth: int, flags: list[str]) -> tuple[SpanLink, ...]:
    found = []
    for link in _list_of_span(raw, "links"):
        attributes = _attributes(link.get("attributes"), depth, flags)
        try:
            trace_id = _id(_either(link, "traceId", "trace_id"), 16, "trace id")
            span_id = _id(_either(link, "spanId", "span_id"), 8, "span id")
        except BadSpanError:
            flags.append("invalid_link:links")
            continue
        found.append(SpanLink(trace_id, span_id, attributes))
    return tuple(found)


def _attributes(raw: Any, depth: int, flags: list[str]) -> dict[str, Any]:
    if not raw:
        return {}
    found: dict[str, Any] = {}
    for pair in _list_of_span(raw, "attributes"):
        key = pair.get("key", "")
        if type(key) is not str:
            raise BadSpanError(f"an attribute key is {_kind(key)}, expected text")
        value = pair.get("value")
        if type(value) is dict and len(value) == 1:  # the usual case, without a call
            text = value.get("stringValue")
            if type(text) is str:
                found[key] = text
                continue
        found[key] = _value(value, depth, flags, key)
    return found


def _value(raw: Any, depth: int, flags: list[str], key: str) -> Any:
    if raw is None:
        return None
    if type(raw) is not dict:
        if raw == TOO_DEEP:
            raise BadSpanError(f"the value of attribute {key[:80]!r} is nested too deep", "nesting")
        raise BadSpanError(
            f"the value of attribute {key[:80]!r} is {_kind(raw)}, expected an object like {{'stringValue': ...}}"
        )
    if depth <= 0:
        raise BadSpanError(f"the value of attribute {key[:80]!r} is nested too deep", "nesting")
    for name, inner in raw.items():
        if inner is None:
            continue
        match name:
            case "stringValue" | "string_value":
                return _text(inner, key)
            case "intValue" | "int_value":
                number = _int(inner, key)
                if -(2**63) <= number < 2**63:
                    return number
                flags.append(f"out_of_range:{key}")
                return str(number)
            case "boolValue" | "bool_value":
                if type(inner) is not bool:
                    raise BadSpanError(f"boolValue of attribute {key[:80]!r} is {_kind(inner)}")
                return inner
            case "doubleValue" | "double_value":
                return _double(inner, flags, key)
            case "arrayValue" | "array_value":
                values = _list_of_span(inner.get("values") if type(inner) is dict else inner, key, any_=True)
                return [_value(v, depth - 1, flags, key) for v in values]
            case "kvlistValue" | "kvlist_value":
                pairs = _list_of_span(inner.get("values") if type(inner) is dict else inner, key)
                return {
                    _text(p.get("key"), "key"): _value(p.get("value"), depth - 1, flags, key) for p in pairs
                }
            case "bytesValue" | "bytes_value":
                return bytes_value(from_base64(_text(inner, key), f"bytesValue of attribute {key[:80]!r}"))
    return None


def _resource(raw: Any, depth: int, exact: bool) -> dict[str, Any]:
    if type(raw) is not dict:
        return {}
    flags: list[str] = []
    try:
        if not exact:
            raw = _repair(raw, flags, "resource", depth * 4 + 16)
        attributes = _attributes(raw.get("attributes"), depth, flags)
    except BadSpanError:
        return with_flags({}, ["invalid_resource:resource"])
    return with_flags(attributes, flags) if flags else attributes


# ---------------------------------------------------------------- scalars


def _id(raw: Any, size: int, what: str) -> str:
    if type(raw) is not str:
        raise BadSpanError(
            f"{what} is {'missing' if raw is None else _kind(raw)}, expected {2 * size} hex digits",
            "id",
        )
    if len(raw) == 2 * size and _HEX.match(raw):
        if raw.strip("0"):
            return raw.lower()
        raise BadSpanError(f"{what} is all zero", "id")
    if len(raw) == (size + 2) // 3 * 4:  # base64 of the bytes: generic protobuf JSON
        return hex_id(from_base64(raw, what), size, what)
    if len(raw) == (2 * size + 2) // 3 * 4:  # base64 of the hex text
        text = from_base64(raw, what)
        if len(text) == 2 * size and text.isascii() and _HEX.match(text.decode("ascii")):
            return hex_id(bytes.fromhex(text.decode("ascii")), size, what)
    if not raw:
        raise BadSpanError(f"{what} is missing, expected {2 * size} hex digits", "id")
    raise BadSpanError(
        f"{what} {raw[:64]!r} has {len(raw)} characters, expected {2 * size} hex digits (or base64 of {size} bytes)",
        "id",
    )


def _parent(raw: Any) -> str | None:
    if not raw or (type(raw) is str and not raw.strip("0")):
        return None
    if type(raw) is str and raw in {"AAAAAAAAAAA=", "MDAwMDAwMDAwMDAwMDAwMA=="}:  # zeros in base64
        return None
    return _id(raw, 8, "parent span id")


def _time(raw: Any, what: str) -> int:
    return 0 if raw is None or raw == "" else _int(raw, what)


def _int(raw: Any, what: str) -> int:
    if type(raw) is int:
        return raw
    if type(raw) is str and _INT.match(raw):
        return int(raw)
    if type(raw) is float and raw.is_integer():
        return int(raw)
    raise BadSpanError(f"{what[:80]} is {str(raw)[:40]!r}, expected a whole number")


def _double(raw: Any, flags: list[str], key: str) -> float | str:
    if type(raw) is float or type(raw) is int or (type(raw) is str and len(raw) < 64):
        try:
            return float_value(float(raw), flags, key)
        except (ValueError, OverflowError):
            pass
    raise BadSpanError(f"doubleValue of attribute {key[:80]!r} is not a number")


def _text(raw: Any, what: str) -> str:
    if raw is None:
        return ""
    if type(raw) is not str:
        raise BadSpanError(f"{what[:80]} is {_kind(raw)}, expected text")
    return raw


def _label(raw: Any) -> str:
    return _SURROGATE.sub("\ufffd", raw) if type(raw) is str else ""


def _enum(raw: Any, table: dict[Any, str], default: str) -> str:
    return table.get(raw, default) if type(raw) in (int, str) or raw is None else default


def _span_kind(raw: Any) -> int:
    if type(raw) is int:
        return raw if 0 <= raw <= 5 else 0
    if type(raw) is str:
        return (
            int(raw)
            if raw in {"0", "1", "2", "3", "4", "5"}
            else _KINDS.get(raw.removeprefix("SPAN_KIND_"), 0)
        )
    return 0


# ---------------------------------------------------------------- JSON plumbing


def _either(data: dict[str, Any], camel: str, snake: str) -> Any:
    value = data.get(camel)
    return data.get(snake) if value is None else value


def _list(raw: Any, what: str) -> list[Any]:
    if raw is None:
        return []
    if type(raw) is not list:
        raise SchemaError(f"{what} is {_kind(raw)}, expected a list")
    return raw


def _object(raw: Any, what: str) -> dict[str, Any]:
    if type(raw) is not dict:
        raise SchemaError(f"an element of {what} is {_kind(raw)}, expected an object")
    return raw


def _list_of_span(raw: Any, what: str, any_: bool = False) -> list[Any]:
    if raw is None:
        return []
    if type(raw) is not list:
        raise BadSpanError(f"{what[:80]} is {_kind(raw)}, expected a list")
    if not any_:
        for item in raw:
            if type(item) is not dict:
                raise BadSpanError(f"an element of {what[:80]} is {_kind(item)}, expected an object")
    return raw


def _repair(value: Any, flags: list[str], where: str, depth: int) -> Any:
    """``value`` with lone surrogates replaced by U+FFFD; the attributes that had them are flagged."""
    if type(value) is str:
        clean = _SURROGATE.sub("\ufffd", value)
        if clean != value:
            flags.append(f"invalid_unicode:{where}")
        return clean
    if depth <= 0:
        raise BadSpanError(f"{where} is nested too deep", "nesting")
    if type(value) is list:
        return [_repair(item, flags, where, depth - 1) for item in value]
    if type(value) is dict:
        key = value.get("key")
        if type(key) is str:
            where = _SURROGATE.sub("\ufffd", key)
        return {
            _repair(name, flags, where, depth - 1): _repair(item, flags, where, depth - 1)
            for name, item in value.items()
        }
    return value


def _raw(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, default=str).encode("ascii")


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
