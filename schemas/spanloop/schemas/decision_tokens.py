"""How a decision is written as token ids, so that one machinery records, credits, trains and replays decisions and text alike.

A decision's prompt is ``MARK``, ids of what was known (state features), then for each open option its id and ids of what is known of
it. The answer is one token: the id of the chosen option; its menu are the ids of the options. Ids are hashes, so nothing has to be
declared and a menu may hold what nobody saw before. Four ranges tell the kinds of id apart, far above any tokenizer's:

    FEATURE..   what was known      DETAIL..   what is known of the option before it
    OPTION..    an option           MARK..     begins a decision; its offset is the version of the hashing

Place: the decision policy writes and reads them (``learner.decision_features``, ``decision_policy``), credit reads them
(``pipeline.credit.states``). Invariants: pure; ids of a part are ascending and distinct, options ascending, so that equal decisions are equal
ids whatever order the caller listed them in.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = [
    "DETAIL",
    "FEATURE",
    "MARK",
    "MENU_MAX",
    "NAME_CHARS",
    "OPTION",
    "SPAN",
    "STATE_MAX",
    "TEMPERATURE_MAX",
    "TEXT_CHARS",
    "VOCABULARY_SIZE",
    "DecisionIds",
    "is_decision",
    "read_decision",
    "written",
]

SPAN = 1 << 28
"""Ids of each range."""
FEATURE = SPAN
DETAIL = 2 * SPAN
OPTION = 3 * SPAN
MARK = 4 * SPAN
_MARKS = 16
VOCABULARY_SIZE = MARK + _MARKS
MENU_MAX = 64
"""Options of one decision."""
STATE_MAX = 64
"""Names of a state."""
NAME_CHARS = 128
"""Characters of an option's name."""
TEXT_CHARS = 16_384
"""Characters of a state's text."""
TEMPERATURE_MAX = 100.0
"""Of a choice."""


class DecisionIds(msgspec.Struct, frozen=True, gc=False):
    """A decision's parts."""

    state: tuple[int, ...]
    options: tuple[int, ...]
    details: tuple[tuple[int, ...], ...]
    """Of each option."""


def is_decision(ids: Sequence[int]) -> bool:
    """Whether a prompt is a decision.

    >>> is_decision((MARK, FEATURE + 1, OPTION + 2)), is_decision((1, 2)), is_decision(())
    (True, False, False)
    """
    return bool(ids) and MARK <= ids[0] < VOCABULARY_SIZE


def written(decision: DecisionIds) -> tuple[int, ...]:
    """The prompt's ids, with the first version's mark.

    >>> read_decision(written(DecisionIds((FEATURE,), (OPTION, OPTION + 3), ((), (DETAIL + 5,))))).options
    (805306368, 805306371)
    """
    pairs = zip(decision.options, decision.details, strict=True)
    return (MARK, *decision.state, *(i for option, details in pairs for i in (option, *details)))


def read_decision(ids: Sequence[int]) -> DecisionIds:
    """The parts of a prompt; ids of other ranges, and details before the first option, are none of them."""
    state: list[int] = []
    options: list[int] = []
    details: list[list[int]] = []
    for i in ids:
        if FEATURE <= i < DETAIL:
            state.append(i)
        elif OPTION <= i < MARK:
            options.append(i)
            details.append([])
        elif DETAIL <= i < OPTION and details:
            details[-1].append(i)
    return DecisionIds(tuple(state), tuple(options), tuple(map(tuple, details)))
