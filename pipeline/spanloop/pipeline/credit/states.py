"""States of an orchestration as bags of features: what a value model is asked about.

Two kinds. A *token state* is what the policy saw and said so far: the ids of the prompt and of the response up to a token.
A *structural state* is a set of finished steps (turns, tool results, returns) of an orchestration without token ids.
Invariants: pure; a state is a sorted tuple of distinct ints, so that equal states are equal keys on any machine.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from spanloop.schemas.orchestration import ModelCall

__all__ = ["State", "extended", "has_tokens", "is_forced", "prompt_state", "step_state"]

State = tuple[int, ...]
"""Feature ids of a state."""

PROMPT_IDS_MAX = 512
"""Distinct prompt ids that count, the last ones; a longer prompt is known by its end."""
COUNT_MAX = 4
"""Steps of one kind are told apart up to this many."""
_STRUCTURE = 1 << 40


def has_tokens(call: ModelCall) -> bool:
    """Whether a call has what a token state needs."""
    return bool(call.prompt_token_ids) and bool(call.response_token_ids)


def is_forced(call: ModelCall, index: int) -> bool:
    """Whether the response token at ``index`` was the only open option: then it decided nothing."""
    return len(call.menus) == len(call.response_token_ids) and len(call.menus[index]) == 1


@lru_cache(maxsize=65_536)
def prompt_state(prompt: tuple[int, ...]) -> State:
    """The state in which nothing is said yet.

    >>> prompt_state((7, 3, 7))
    (6, 14)
    """
    kept: dict[int, None] = {}
    for token in reversed(prompt):
        kept[2 * token] = None
        if len(kept) == PROMPT_IDS_MAX:
            break
    return tuple(sorted(kept))


def extended(prompt: State, response: Sequence[int]) -> State:
    """The state after ``response`` (a prefix) was said.

    >>> extended((6, 14), (3,))
    (6, 7, 14)
    """
    return tuple(sorted({*prompt, *(2 * token + 1 for token in response)})) if response else prompt


@lru_cache(maxsize=65_536)
def _feature(kind: str, count: int) -> int:
    return _STRUCTURE | zlib.crc32(f"{kind}#{count}".encode("utf-8", "surrogatepass"))


def step_state(kinds: Iterable[str]) -> State:
    """The state in which steps of these kinds are finished, in any order."""
    counts = Counter(kinds)
    return tuple(
        sorted({_feature(kind, n) for kind, count in counts.items() for n in range(1, min(count, COUNT_MAX) + 1)})
    )
