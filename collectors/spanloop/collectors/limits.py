"""Bounds on what comes in: bytes before and after decompression, spans and the sizes inside them.

Nothing is cut in silence: a text that was shortened is listed in ``spanloop.truncated``, a refused body is answered
with the limit and its setting.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

__all__ = [
    "EXEMPT",
    "KEY_MAX",
    "MAX_SPAN_BYTES",
    "TRUNCATED",
    "BodyTooLargeError",
    "cut_span",
    "cut_text",
    "expand",
    "fewer_attributes",
    "has_long_keys",
    "longest",
    "rough_size",
]

TRUNCATED = "spanloop.truncated"
"""Attribute that lists the keys whose values were cut."""
EXEMPT = frozenset(
    {
        "spanloop.prompt_token_ids",
        "spanloop.response_token_ids",
        "spanloop.response_logprobs",
        "spanloop.menus",
        "spanloop.sealed",
        "spanloop.sealed.tokens",
    }
)
"""Token arrays of the gateway and sealed content: half of one is worse than none, and who makes them bounds them."""
MAX_SPAN_BYTES = 512 * 1024
"""A span whose cut values still sum to more loses the largest of them, so that a record fits any broker."""
_SMALL = 1024
KEY_MAX = 1024
"""Characters of a key that are kept."""
_CHUNK = 1 << 20
_WBITS = {"gzip": 31, "deflate": 15}


class BodyTooLargeError(SchemaError):
    """The body is over a limit (HTTP 413)."""


def expand(body: bytes, encoding: str, max_expanded: int) -> bytes:
    """``body`` decompressed from ``encoding`` (gzip or deflate), never holding more than ``max_expanded`` bytes.

    Raises:
        BodyTooLargeError: it expands to more.
        SchemaError: it is not in that encoding, or ends too soon.
    """
    parts: list[bytes] = []
    size = 0
    left = body
    wbits = _WBITS[encoding]
    if encoding == "deflate" and body[:1] and body[0] & 0x0F != 8:
        wbits = -15  # raw deflate, as some clients send it
    while left:
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            try:
                part = stream.decompress(left, min(_CHUNK, max_expanded - size + 1))
            except zlib.error as exc:
                raise SchemaError(
                    f"the body is not valid {encoding}, as Content-Encoding says: {exc}"
                ) from exc
            size += len(part)
            if size > max_expanded:
                raise BodyTooLargeError(
                    f"the body expands to more than {max_expanded} bytes (collector.max_expanded_bytes)"
                )
            parts.append(part)
            left = stream.unconsumed_tail
            if not part and not left and not stream.eof:
                raise SchemaError(f"the {encoding} body ends too soon")
        left = stream.unused_data.lstrip(b"\0") if encoding == "gzip" else b""
    return b"".join(parts)


def cut_text(text: str, max_bytes: int) -> str:
    """``text`` cut to at most ``max_bytes`` of UTF-8, at a character boundary.

    >>> cut_text("añb", 2)
    'a'
    """
    if 4 * len(text) <= max_bytes:
        return text
    raw = text.encode()
    return text if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore")


def has_long_keys(span: Span) -> bool:
    """Whether a key of any attribute is longer than is kept."""
    if longest(span.attributes) > KEY_MAX or longest(span.resource) > KEY_MAX:
        return True
    if not span.events and not span.links:
        return False
    return any(longest(part.attributes) > KEY_MAX for part in (*span.events, *span.links))


def longest(attributes: dict[str, Any]) -> int:
    """Characters of the longest key."""
    return max(map(len, attributes)) if attributes else 0


def cut_span(span: Span, max_bytes: int) -> Span:
    """``span`` with each value at most ``max_bytes`` and all of it at most MAX_SPAN_BYTES (token arrays exempt). The same
    object when nothing was cut."""
    cut: set[str] = set()
    attributes = _cut_attributes(span.attributes, max_bytes, cut)
    events = _cut_all(span.events, max_bytes, cut)
    links = _cut_all(span.links, max_bytes, cut)
    resource = _cut_attributes(span.resource, max_bytes, cut)
    name = _cut_label(span.name, "name", max_bytes, cut)
    message = _cut_label(span.status_message, "status_message", max_bytes, cut)
    scope = _cut_label(span.scope, "scope", max_bytes, cut)
    version = _cut_label(span.scope_version, "scope_version", max_bytes, cut)
    if cut:
        span = msgspec.structs.replace(
            span,
            name=name,
            status_message=message,
            scope=scope,
            scope_version=version,
            attributes=attributes,
            events=events,
            links=links,
            resource=resource,
        )
    if rough_size(span) > MAX_SPAN_BYTES:
        span = _shrink(span, cut)
    if not cut:
        return span
    cut.update(span.attributes.get(TRUNCATED, ()))
    return msgspec.structs.replace(span, attributes={**span.attributes, TRUNCATED: sorted(cut)})


def fewer_attributes(span: Span, most: int) -> Span:
    """``span`` with at most ``most`` attributes: token arrays and those of GenAI conventions before others, then by name, so that
    the choice is one of content and not of order. What was left out is counted in ``dropped_attributes``."""
    if len(span.attributes) <= most:
        return span
    ranked = sorted(span.attributes, key=lambda k: (k not in EXEMPT, not k.startswith("gen_ai."), k))
    kept = {key: span.attributes[key] for key in ranked[: most - 1]}
    return msgspec.structs.replace(
        span,
        attributes={**kept, TRUNCATED: ["attributes"]},
        dropped_attributes=span.dropped_attributes + len(span.attributes) - len(kept),
    )


def _shrink(span: Span, cut: set[str]) -> Span:
    """Cut the largest attributes to a small rest, then drop events and links from the end."""
    attributes = dict(span.attributes)
    sizes = {k: len(canonical_json(v)) for k, v in attributes.items() if k not in EXEMPT}
    rest = [len(canonical_json(part)) for part in (*span.events, *span.links)]
    resource = len(canonical_json(span.resource))
    total = sum(sizes.values()) + sum(len(k) for k in sizes) + sum(rest) + resource
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        if total <= MAX_SPAN_BYTES or sizes[key] <= _SMALL:
            break
        attributes[key] = _cut_value(attributes[key], _SMALL)
        total -= sizes[key] - _SMALL
        cut.add(key)
    span = msgspec.structs.replace(span, attributes=attributes)
    if total > MAX_SPAN_BYTES and rest:
        cut.update(("events", "links"))
        span = msgspec.structs.replace(span, events=(), links=())
        total -= sum(rest)
    if total > MAX_SPAN_BYTES and len(attributes) > _SMALL:
        kept = sorted(k for k in attributes if k in EXEMPT or k.startswith("gen_ai."))[:_SMALL]
        span = msgspec.structs.replace(
            span,
            attributes={k: attributes[k] for k in kept},
            dropped_attributes=span.dropped_attributes + len(attributes) - len(kept),
        )
        cut.intersection_update(kept)
        cut.add("attributes")
    if resource > MAX_SPAN_BYTES // 2:
        cut.add("resource")
        span = msgspec.structs.replace(span, resource={})
    return span


def _cut_all(parts: tuple[Any, ...], max_bytes: int, cut: set[str]) -> tuple[Any, ...]:
    return tuple(_cut_part(part, max_bytes, cut) for part in parts) if parts else parts


def _cut_part(part: SpanEvent | SpanLink, max_bytes: int, cut: set[str]) -> SpanEvent | SpanLink:
    attributes = _cut_attributes(part.attributes, max_bytes, cut)
    if isinstance(part, SpanEvent):
        name = _cut_label(part.name, "event name", max_bytes, cut)
        return SpanEvent(name, part.t_ns, attributes)
    return SpanLink(part.trace_id, part.span_id, attributes)


def _cut_label(text: str, what: str, max_bytes: int, cut: set[str]) -> str:
    short = cut_text(text, max_bytes)
    if short is not text and short != text:
        cut.add(what)
    return short


def _cut_attributes(attributes: dict[str, Any], max_bytes: int, cut: set[str]) -> dict[str, Any]:
    """The same dict when nothing is too long."""
    changed: dict[str, Any] = {}
    long_keys = False
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            short = value if 4 * len(value) <= max_bytes or key in EXEMPT else cut_text(value, max_bytes)
        elif (
            (kind is list or kind is dict)
            and key not in EXEMPT
            and 4 * _weigh(value) > max_bytes
            and (len(canonical_json(value)) > max_bytes)
        ):
            short = _cut_value(value, max_bytes)
        else:
            short = value
        if short is not value and short != value:
            changed[key] = short
            cut.add(cut_text(key, 256))
        long_keys = long_keys or len(key) > KEY_MAX
    if long_keys:
        cut.add("keys")
        merged = {**attributes, **changed}
        return {cut_text(key, KEY_MAX): value for key, value in merged.items()}
    return {**attributes, **changed} if changed else attributes


def _cut_value(value: Any, max_bytes: int) -> Any:
    """A text stays a text; a list or map that is too long becomes the beginning of its JSON."""
    if isinstance(value, str):
        return cut_text(value, max_bytes)
    if isinstance(value, dict) and set(value) == {"$bytes"} and isinstance(value["$bytes"], str):
        return {"$bytes": value["$bytes"][: (max_bytes - 16) // 4 * 4]}
    return canonical_json(value)[:max_bytes].decode(errors="ignore")


def rough_size(span: Span) -> int:
    """Size of a span's JSON, roughly and cheaply: texts are counted, not encoded."""
    total = 256 + len(span.name) + len(span.status_message) + len(span.scope)
    total += _sizes(span.attributes.items()) + _sizes(span.resource.items())
    for event in span.events:
        total += 40 + len(event.name) + _sizes(event.attributes.items())
    for link in span.links:
        total += 80 + _sizes(link.attributes.items())
    return total


def _sizes(items: Iterable[tuple[str, Any]]) -> int:
    total = 0
    for key, value in items:
        kind = type(value)
        if kind is str:
            total += len(key) + 6 + (len(value) if len(value) < 4096 else len(value.encode()))
        elif kind is list or kind is dict:
            total += len(key) + (0 if key in EXEMPT else _weigh(value))
        else:
            total += len(key) + 14
    return total


def _weigh(value: Any) -> int:
    """Size of a value's JSON, not less than the characters in it."""
    kind = type(value)
    if kind is str:
        return len(value) + 3
    if kind is list:
        return sum(map(_weigh, value)) + 2
    if kind is dict:
        return sum(len(k) + 4 + _weigh(v) for k, v in value.items()) + 2
    return 24
