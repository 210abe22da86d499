"""Attribute values out of whatever a host passes: short, of a type that OTLP can carry, without ever calling the host's code.

A value of an unknown type is left out and marked: its ``str`` or ``repr`` may raise, block or be as large as the heap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spanloop.schemas import sdk_attributes as names

__all__ = ["CONTENT_CHARS", "add", "add_label", "content", "label", "labels", "probabilities"]

LABEL_CHARS = 256
CONTENT_CHARS = 16_384
ATTRIBUTES_MAX = 32
_LIST_MAX = 128
_INT_MAX = 2**63

Attributes = dict[str, Any]


def label(value: Any, attributes: Attributes, most: int = LABEL_CHARS) -> str:
    """A name: a text cut to ``most`` characters, a number as text, anything else empty. What is lost is marked."""
    if isinstance(value, str):
        found = str.__str__(value)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        if value is not None:
            attributes[names.TRUNCATED] = True
        return ""
    else:
        found = int.__repr__(value) if isinstance(value, int) else float.__repr__(value)
    if len(found) > most:
        attributes[names.TRUNCATED] = True
        found = found[:most]
    return found if found.isascii() else found.encode("utf-8", "replace").decode()


def add_label(attributes: Attributes, key: str, value: Any) -> None:
    """A name under ``key`` where there is one."""
    text = label(value, attributes)
    if text:
        attributes[key] = text


def labels(values: Any, attributes: Attributes, most: int, chars: int = LABEL_CHARS) -> list[str]:
    """Several names, ``most`` of them at most."""
    if not isinstance(values, list | tuple):
        if values is not None:
            attributes[names.TRUNCATED] = True
        return []
    if len(values) > most:
        attributes[names.TRUNCATED] = True
    return [label(value, attributes, chars) for value in values[:most]]


def probabilities(values: Any, attributes: Attributes) -> list[float]:
    """Numbers as floats; empty and marked when one is none."""
    if not isinstance(values, list | tuple) or len(values) > names.OPTIONS_MAX:
        attributes[names.TRUNCATED] = True
        return []
    if not all(isinstance(value, int | float) for value in values):
        attributes[names.TRUNCATED] = True
        return []
    return [float(value) for value in values]


def content(value: Any, attributes: Attributes) -> str | None:
    """A text, or plain data as JSON, cut; None and marked for anything else."""
    if isinstance(value, str):
        return label(value, attributes, CONTENT_CHARS)
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        attributes[names.TRUNCATED] = True
        return None
    return label(text, attributes, CONTENT_CHARS)


def add(attributes: Attributes, given: Any) -> None:
    """The host's own attributes; keys of ours and more than ATTRIBUTES_MAX are left out and marked."""
    if not isinstance(given, Mapping):
        attributes[names.TRUNCATED] = True
        return
    for number, (key, value) in enumerate(given.items()):
        if number >= ATTRIBUTES_MAX:
            attributes[names.TRUNCATED] = True
            return
        name = label(key, attributes)
        plain = _plain(value, attributes)
        if name and plain is not None and not name.startswith("spanloop."):
            attributes[name] = plain
        else:
            attributes[names.TRUNCATED] = True


def _plain(value: Any, attributes: Attributes) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if -_INT_MAX <= value < _INT_MAX else None
    if isinstance(value, str):
        return label(value, attributes, CONTENT_CHARS)
    if isinstance(value, list | tuple) and len(value) <= _LIST_MAX:
        items = [_plain(item, attributes) for item in value if not isinstance(item, list | tuple)]
        kinds = {type(item) for item in items}
        return items if len(items) == len(value) and len(kinds) <= 1 and None not in items else None
    return None
