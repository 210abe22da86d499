"""Canonical JSON and content hashes: equal content is equal bytes, on any machine and in any runtime.

Keys are sorted, no spaces, integers as integers, no NaN or Infinity. Two contents with the same
``content_hash`` are the same for ``spanloop verify``, event ids and the stream == batch law.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeVar

import msgspec

from spanloop.schemas.errors import SchemaError

__all__ = [
    "Framed",
    "bytes_hash",
    "canonical_json",
    "content_hash",
    "decode_json",
    "digest",
    "micro",
    "unmicro",
]

T = TypeVar("T")

MICRO = 1_000_000
"""Micro-units in one unit of reward or credit; the ledger is integer so that sums are exact."""

_encoder = msgspec.json.Encoder(order="sorted")
_LENGTHS = tuple(size.to_bytes(8, "big") for size in range(256))
_MARKS = tuple("\0" * 7 + chr(size) for size in range(128))
"""Lengths as ``_LENGTHS`` has them, as text: of short ASCII parts the whole can be encoded at once."""


def canonical_json(value: Any) -> bytes:
    """Bytes of ``value`` (structs, dicts, lists, str, int, finite float, bool, None) as canonical JSON.

    >>> canonical_json({"b": 1, "a": [1.5, None]})
    b'{"a":[1.5,null],"b":1}'
    """
    return _encoder.encode(_with_defaults(value))


class _Plan(msgspec.Struct, frozen=True):
    """What of a struct class may need its defaults' own objects."""

    defaults: tuple[tuple[str, Any], ...]
    """Fields whose default may be equal without being the same object: texts, floats, large ints."""
    holders: tuple[str, ...]
    """Fields whose type lets them hold structs that have such fields."""


@cache
def _plan(cls: type[msgspec.Struct]) -> _Plan:
    pairs = zip(cls.__struct_fields__[::-1], cls.__struct_defaults__[::-1], strict=False)
    defaults = tuple(
        (name, default)
        for name, default in pairs
        if (isinstance(default, str) and default)
        or isinstance(default, float)
        or (isinstance(default, int) and not isinstance(default, bool) and default not in range(257))
    )
    fields = msgspec.inspect.type_info(cls).fields  # type: ignore[union-attr]
    return _Plan(defaults, tuple(field.name for field in fields if _holds(field.type, frozenset({cls}))))


def _holds(kind: Any, above: frozenset[type]) -> bool:
    """Whether values of a type (as msgspec.inspect tells it) can hold structs with defaults to share."""
    if isinstance(kind, msgspec.inspect.StructType):
        if kind.cls in above:
            return True
        plan = _plan(kind.cls)
        return bool(plan.defaults or plan.holders)
    inner = [getattr(kind, name, None) for name in ("item_type", "types", "item_types")]
    kinds = [k for one in inner if one is not None for k in (one if isinstance(one, tuple) else (one,))]
    return any(_holds(k, above) for k in kinds)


def _with_defaults(value: Any) -> Any:
    """``value`` with the defaults' own objects: msgspec leaves out a default by identity, so that a text read from
    JSON would be written where the same text from a literal is not, and equal structs would have unequal bytes."""
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], msgspec.Struct | tuple | list):
            if _shares_defaults(value):
                return value
            changed = [_with_defaults(item) for item in value]
            if any(new is not old for new, old in zip(changed, value, strict=True)):
                return changed
        return value
    if not isinstance(value, msgspec.Struct):
        return value
    plan = _plan(type(value))
    changes: dict[str, Any] = {}
    for name, default in plan.defaults:
        own = getattr(value, name)
        if own is not default and own == default and type(own) is type(default):
            changes[name] = default
    for name in plan.holders:
        own = getattr(value, name)
        if own:
            new = _with_defaults(own)
            if new is not own:
                changes[name] = new
    return msgspec.structs.replace(value, **changes) if changes else value


def _shares_defaults(items: Sequence[Any]) -> bool:
    """Whether structs of one class without holders have their defaults' own objects already, told without a look at each: as
    many are the default as equal it. False: look."""
    cls = type(items[0])
    if not issubclass(cls, msgspec.Struct):
        return False
    plan = _plan(cls)
    if plan.holders or any(type(item) is not cls for item in items):
        return False
    for name, default in plan.defaults:
        own = list(map(attrgetter(name), items))
        if own.count(default) != sum(map(is_, own, repeat(default))):
            return False
    return True


def decode_json(data: bytes | str, type_: type[T] = Any) -> T:  # type: ignore[assignment]
    """Decode JSON into ``type_``; raises SchemaError that says what is wrong and where."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        name = getattr(type_, "__name__", str(type_))
        raise SchemaError(f"not a valid {name}: {exc}") from exc


def digest(*parts: str | bytes | int) -> str:
    """32 hex digits over the parts, each behind its length, so that ('a', 'bc') != ('ab', 'c').

    >>> digest("a", "bc") == digest("a", b"bc"), digest("a", "bc") == digest("ab", "c")
    (True, False)
    """
    try:
        data = "".join([_MARKS[len(part)] + part for part in parts]).encode("ascii")  # type: ignore[arg-type, operator]
    except (TypeError, IndexError, UnicodeEncodeError):
        data = _framed(parts)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _framed(parts: tuple[str | bytes | int, ...]) -> bytes:
    """Each part in bytes behind its length, also long ones and such as are not ASCII."""
    pieces: list[bytes] = []
    for part in parts:
        if type(part) is str:
            raw = part.encode() if part.isascii() else part.encode("utf-8", "surrogatepass")
        else:
            raw = part if type(part) is bytes else str(part).encode()
        size = len(raw)
        pieces.append(_LENGTHS[size] if size < 256 else size.to_bytes(8, "big"))
        pieces.append(raw)
    return b"".join(pieces)


class Framed(dict[str, bytes]):
    """Texts as ``digest`` frames its parts, each framed once: for ids over the same names again and again.

    >>> framed = Framed()
    >>> bytes_hash(framed["a"] + framed["bc"]) == digest("a", "bc")
    True
    """

    def __missing__(self, part: str) -> bytes:
        raw = part.encode() if part.isascii() else part.encode("utf-8", "surrogatepass")
        size = len(raw)
        found = self[part] = (_LENGTHS[size] if size < 256 else size.to_bytes(8, "big")) + raw
        return found


def content_hash(value: Any) -> str:
    """32 hex digits of the canonical JSON of ``value``."""
    return bytes_hash(canonical_json(value))


def bytes_hash(data: bytes) -> str:
    """32 hex digits of bytes that are canonical JSON already."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def micro(value: float) -> int:
    """A reward in units to integer micro-units, half to even; raises SchemaError when not finite.

    >>> micro(0.530001)
    530001
    """
    if not math.isfinite(value):
        raise SchemaError(f"{value!r} is not a finite number")
    return round(value * MICRO)


def unmicro(value: int) -> float:
    """Micro-units to units, for printing and for tensors."""
    return value / MICRO
