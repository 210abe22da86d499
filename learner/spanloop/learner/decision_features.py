"""From what a caller says of a decision to token ids: names and values are hashed, so nothing has to be declared before.

A number is a feature at three resolutions (tile coding, Sutton and Barto 2018, 9.5.4) of asinh(x): steps near zero, orders of magnitude far
from it. Texts are themselves, lists their items, a longer text its words. What is known of an option is hashed the same way beside the
option's name. Invariants: pure; the order in which features or options are given changes nothing; a value that is not finite, and
a menu beyond a limit, is refused, never cut in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from spanloop.schemas.decision_tokens import (
    DETAIL,
    FEATURE,
    MENU_MAX,
    NAME_CHARS,
    OPTION,
    SPAN,
    STATE_MAX,
    TEXT_CHARS,
    DecisionIds,
)
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.sdk_attributes import kind_of

__all__ = [
    "CONTEXT",
    "KIND_CHARS",
    "MENU_MAX",
    "NAME_CHARS",
    "DecisionRequest",
    "MenuItem",
    "Value",
    "decision_ids",
]

DETAILS_MAX = 32
"""Names in the features of one option."""
LIST_MAX = 64
"""Items of a list."""
STATE_IDS_MAX = 512
"""Features of a state."""
DETAIL_IDS_MAX = 64
"""Features of one option."""
KIND_CHARS = 64
CONTEXT = 2 + STATE_IDS_MAX + MENU_MAX * (1 + DETAIL_IDS_MAX)
"""Longest decision with its answer, in ids."""
WIDTHS = (1.2, 0.35, 0.1)
"""Of the tiles of a number, in units of asinh."""

Value = float | str | bool | list[float | str | bool] | None
_WORD = re.compile(r"\w+")


class MenuItem(msgspec.Struct, frozen=True):
    """An option and what is known of it."""

    name: str
    features: dict[str, Value] = {}


class DecisionRequest(msgspec.Struct, frozen=True):
    """What is asked: ``POST /v1/decide`` of serving."""

    kind: str
    menu: Sequence[MenuItem | str]
    state: dict[str, Value] = {}
    text: str = ""

    def items(self) -> list[MenuItem]:
        """The menu as given."""
        return [MenuItem(item) if isinstance(item, str) else item for item in self.menu]


def decision_ids(request: DecisionRequest) -> tuple[DecisionIds, list[int]]:
    """The decision as ids, and the place of each of its options in the caller's menu.

    Raises:
        SchemaError: a menu that is empty, too long or names an option twice; a state beyond a limit; a number that is not finite.

    >>> one, _ = decision_ids(DecisionRequest("stop", ["stop", "again"], {"margin": 2.0, "seen": ["a", "b"]}))
    >>> two, _ = decision_ids(DecisionRequest("stop", ["again", "stop"], {"seen": ["b", "a"], "margin": 2}))
    >>> one == two
    True
    """
    items = request.items()
    if not 1 <= len(items) <= MENU_MAX:
        raise SchemaError(f"the menu has {len(items)} options, expected 1 to {MENU_MAX}")
    names = [item.name for item in items]
    if len(set(names)) != len(names):
        raise SchemaError("the menu names an option twice")
    if not all(0 < len(name) <= NAME_CHARS for name in names):
        raise SchemaError(f"an option's name has 1 to {NAME_CHARS} characters")
    if not 0 < len(request.kind) <= KIND_CHARS:
        raise SchemaError(f"a decision's kind has 1 to {KIND_CHARS} characters")
    if len(request.state) > STATE_MAX or len(request.text) > TEXT_CHARS:
        raise SchemaError(f"a state has at most {STATE_MAX} names and a text of {TEXT_CHARS} characters")
    kind = kind_of(request.kind)
    said = [f"\0kind={kind}", *_features(request.state, "state"), *_words(request.text)]
    state = _ids(said, FEATURE, STATE_IDS_MAX, "the state")
    taken: dict[int, int] = {}
    for place in sorted(range(len(names)), key=names.__getitem__):
        wanted = _hashed(f"{kind}|{names[place]}", OPTION)
        while wanted in taken:  # two names of one menu under one hash: the later name takes the next id
            wanted = OPTION + (wanted - OPTION + 1) % SPAN
        taken[wanted] = place
    options = sorted(taken)
    details: list[tuple[int, ...]] = []
    for option in options:
        item = items[taken[option]]
        if len(item.features) > DETAILS_MAX:
            raise SchemaError(f"option {item.name!r} has more than {DETAILS_MAX} features")
        found = (f"{kind}|{said}" for said in _features(item.features, item.name))
        details.append(_ids(found, DETAIL, DETAIL_IDS_MAX, f"option {item.name!r}"))
    return DecisionIds(state, tuple(options), tuple(details)), [taken[option] for option in options]


def _ids(said: Iterable[str], base: int, most: int, whose: str) -> tuple[int, ...]:
    found = sorted({_hashed(text, base) for text in said})
    if len(found) > most:
        raise SchemaError(f"{whose} has {len(found)} features, at most {most}: leave some out")
    return tuple(found)


@lru_cache(maxsize=65_536)
def _hashed(text: str, base: int) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return base + int.from_bytes(blake2b(data, digest_size=8).digest(), "big") % SPAN


def _features(values: Mapping[str, Value], whose: str) -> Iterator[str]:
    for name, value in values.items():
        if not 0 < len(name) <= NAME_CHARS:
            raise SchemaError(f"{whose}: a feature's name has 1 to {NAME_CHARS} characters")
        if isinstance(value, list):
            if len(value) > LIST_MAX:
                raise SchemaError(f"{whose}: {name!r} has {len(value)} items, at most {LIST_MAX}")
            yield f"{name}#{len(value)}"
            for item in value:
                yield from _one(f"{name}[]", item, whose)
        else:
            yield from _one(name, value, whose)


def _one(name: str, value: float | str | bool | None, whose: str) -> Iterator[str]:
    if value is None:
        yield f"{name}?"
    elif isinstance(value, bool):
        yield f"{name}={'true' if value else 'false'}"
    elif isinstance(value, str):
        yield f"{name}={value}"
    else:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise SchemaError(f"{whose}: {name!r} is not a finite number")
        place = math.asinh(number)
        yield from (f"{name}~{step}:{math.floor(place / width)}" for step, width in enumerate(WIDTHS))


def _words(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        yield f"text~{word}"
