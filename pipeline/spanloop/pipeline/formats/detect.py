"""The registry of file formats: the first that recognises a record reads it. A record is a JSON object; lists of records and
objects that only wrap a list are taken apart first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from spanloop.pipeline.formats import langfuse, openai_agents, otlp, phoenix, survey, tau_bench, who_and_when
from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.otlp.decode_json import parse_json
from spanloop.pipeline.otlp.decoded import MAX_NESTING, BadSpanError, Rejected
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError

__all__ = ["FORMATS", "NAMES", "Format", "format_of", "read_json"]


class Format(Protocol):
    """A module of this folder."""

    @property
    def NAME(self) -> str: ...

    def matches(self, value: dict[str, Any]) -> bool:
        """Whether the object is a record of this format; by its keys, never raises."""
        ...

    def read(self, value: dict[str, Any]) -> Read:
        """Its spans and scores. Raises SchemaError or BadSpanError when it is none after all."""
        ...


FORMATS: tuple[Format, ...] = (openai_agents, phoenix, langfuse, tau_bench, who_and_when, survey)
"""All but OTLP, in order."""
NAMES = ("otlp", *(f.NAME for f in FORMATS))
_WRAPPERS = ("data", "spans", "traces")
_MAX_WRAPS = 4


def format_of(value: Any) -> str:
    """Name of the format of a parsed record; empty: none that we know."""
    item = next(_records(value, _MAX_WRAPS), None)
    if not isinstance(item, dict):
        return ""
    if otlp.matches(item):
        return otlp.NAME
    return next((f.NAME for f in FORMATS if f.matches(item)), "")


def read_json(body: bytes, wanted: str = "", max_nesting: int = MAX_NESTING) -> Read:
    """What a record in JSON holds. ``wanted``: the only format to read it in. What cannot be read is in ``rejected``, with a
    reason that does not say where. Never raises for the content."""
    try:
        value, exact = parse_json(body)
    except SchemaError as exc:
        return Read([], [Rejected(exc.message, body, "request")])
    found = Read([], [])
    for item in _records(value, _MAX_WRAPS):
        try:
            one = _read(item, exact, wanted, max_nesting)
        except SchemaError as exc:
            one = Read([], [Rejected(exc.message, _bytes(item, value, body), "request")])
        except BadSpanError as exc:
            one = Read([], [Rejected(str(exc), _bytes(item, value, body), exc.kind)])
        except RecursionError:
            one = Read([], [Rejected("nested too deep", _bytes(item, value, body), "nesting")])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            reason = f"its values are not of the kinds that its format has ({type(exc).__name__}: {exc})"
            one = Read([], [Rejected(reason[:500], _bytes(item, value, body), "type")])
        found.spans += one.spans
        found.rejected += one.rejected
        found.feedback = [*found.feedback, *one.feedback]
        found.ignored += one.ignored
    return found


def _read(item: Any, exact: bool, wanted: str, max_nesting: int) -> Read:
    if not isinstance(item, dict):
        raise SchemaError(f"expected a JSON object, found {type(item).__name__}")
    if otlp.matches(item) and wanted in ("", otlp.NAME):
        return otlp.read(item, max_nesting, exact)
    for known in FORMATS:
        if wanted in ("", known.NAME) and known.matches(item):
            return known.read(item)
    keys = ", ".join(sorted(map(str, item))[:5])
    raise SchemaError(
        f"expected {wanted or 'a record of a known format'}, found an object with the keys {keys}"
    )


def _records(value: Any, wraps: int) -> Iterator[Any]:
    """The records in a value: elements of lists, and of objects that only wrap a list."""
    if isinstance(value, list) and wraps:
        for item in value:
            yield from _records(item, wraps - 1)
        return
    if isinstance(value, dict) and wraps and not _known(value):
        inner = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), list)), None)
        if inner is not None:
            yield from _records(inner, wraps - 1)
            return
    yield value


def _known(value: dict[str, Any]) -> bool:
    return otlp.matches(value) or any(f.matches(value) for f in FORMATS)


def _bytes(item: Any, value: Any, body: bytes) -> bytes:
    """Bytes of a refused record: as they stood where it is alone."""
    if item is value:
        return body
    try:
        return canonical_json(item)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return body
