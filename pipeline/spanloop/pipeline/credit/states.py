"""States of an orchestration as bags of features: what a value model is asked about.

Two kinds. A *token state* is what the policy saw and said so far: the prompt and the response up to a token. A *structural
state* is a set of finished steps (turns, tool results, returns) of an orchestration without token ids.

An ``Encoder`` turns token states into features. By default these are the ids themselves. Of a decision asked outright
(``schemas.decision_tokens``) they are what was known, the chosen option with what is known of it, and how many others there were of each
description. A deployment that declares *units*
(words that name interchangeable things, such as skills) gets features that are the same under a renaming of units: facts
about the unit that the response names, about the one that a report is on, and about the others. The encoder is part of a
value model, so that a recorded version says how states were read.
Invariants: pure; a state is a sorted tuple of distinct ints, so that equal states are equal keys on any machine.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from spanloop.schemas.decision_tokens import is_decision, read_decision
from spanloop.schemas.orchestration import ModelCall

__all__ = [
    "COUNT_MAX",
    "RAW",
    "Encoder",
    "State",
    "by_token",
    "has_menus",
    "has_tokens",
    "is_asked",
    "is_forced",
    "step_feature",
    "step_state",
]

State = tuple[int, ...]
"""Feature ids of a state."""

PROMPT_IDS_MAX = 512
"""Distinct prompt ids that count, the last ones; a longer prompt is known by its end."""
TOKENS_MAX = 64
"""Tokens of a response that is valued token by token."""
SURE = -1e-3
"""A lone option of less log-probability than this was not the only one."""
COUNT_MAX = 4
"""Features of one kind are counted up to this many."""
PROMPTS_MAX = 50_000
_NAMED = 1 << 40


def has_tokens(call: ModelCall) -> bool:
    """Whether a call has what a token state needs."""
    return bool(call.prompt_token_ids) and bool(call.response_token_ids)


def by_token(call: ModelCall) -> bool:
    """Whether a response is valued token by token; a longer one is valued as a whole."""
    return len(call.response_token_ids) <= TOKENS_MAX


def has_menus(call: ModelCall) -> bool:
    """Whether the options of every response token are known. Where a server does not list them all (a large model over its
    whole vocabulary), the gateway records the sampled token alone, with a probability below 1."""
    return (
        by_token(call)
        and len(call.menus) == len(call.response_token_ids)
        and all(len(menu) > 1 or (menu and menu[0].logprob >= SURE) for menu in call.menus)
    )


def is_asked(call: ModelCall) -> bool:
    """Whether a call is a decision asked of the policy outright, not a text of it."""
    return is_decision(call.prompt_token_ids)


def is_forced(call: ModelCall, index: int) -> bool:
    """Whether the response token at ``index`` was the only open option: then it decided nothing."""
    return has_menus(call) and len(call.menus[index]) == 1


@lru_cache(maxsize=65_536)
def step_feature(kind: str, count: int) -> int:
    """Feature of the ``count``-th finished step of a kind."""
    return _NAMED | zlib.crc32(f"{kind}#{count}".encode("utf-8", "surrogatepass"))


def step_state(kinds: Iterable[str]) -> State:
    """The state in which steps of these kinds are finished, in any order."""
    return _step_state(tuple(sorted(kinds)))


@lru_cache(maxsize=65_536)
def _step_state(kinds: tuple[str, ...]) -> State:
    """Of sorted kinds: orchestrations of a deployment pass through the same states again and again."""
    counts = Counter(kinds)
    return tuple(
        sorted(
            {
                step_feature(kind, n)
                for kind, count in counts.items()
                for n in range(1, min(count, COUNT_MAX) + 1)
            }
        )
    )


class Encoder:
    """From token ids to a state.

    Args:
        units: Words that name interchangeable things. A prompt word ``unit-fact`` is a fact about a unit, ``fact-unit`` makes
            the unit the subject of a fact.
        words: Word of each token id; needed with units.
    """

    def __init__(self, units: Sequence[str] = (), words: Sequence[str] = ()) -> None:
        self.units = tuple(units)
        self.words = tuple(words)
        self._units = frozenset(units)
        self._prompts: dict[tuple[int, ...], State] = {}

    def __call__(self, prompt: tuple[int, ...], response: Sequence[int]) -> State:
        """The state after ``response`` (a prefix of one) was said to ``prompt``.

        >>> Encoder()((7, 3, 7), ())
        (6, 14)
        >>> Encoder()((7, 3, 7), (3,))
        (6, 7, 14)
        """
        if is_decision(prompt):
            return _decided(prompt, response[-1] if response else -1)
        if self._units:
            return self._relational(prompt, response)
        base = self._prompts.get(prompt)
        if base is None:
            if len(self._prompts) >= PROMPTS_MAX:
                self._prompts.clear()
            base = self._prompts[prompt] = _bag(prompt)
        return tuple(sorted({*base, *(2 * token + 1 for token in response)})) if response else base

    def _relational(self, prompt: Sequence[int], response: Sequence[int]) -> State:
        named = [self._word(token) for token in response]
        chosen = self._units.intersection(named)
        counts: Counter[str] = Counter("+*" if word in self._units else f"+{word}" for word in named)
        facts: dict[str, list[str]] = {}
        subjects: set[str] = set()
        for word in map(self._word, prompt):
            head, _, tail = word.partition("-")
            if head in self._units:
                facts.setdefault(head, []).append(tail)
            elif tail in self._units:
                subjects.add(tail)
                counts[f"{head}-*"] = 1
            else:
                counts[word] = 1
        for unit, told in facts.items():
            for part, members in (("chosen", chosen), ("subject", subjects)):
                if unit in members:
                    counts.update(f"{part}:{fact}" for fact in told)
            if unit not in chosen and unit not in subjects:
                counts["other:" + "&".join(told)] += 1
        return step_state(counts.elements())

    def _word(self, token: int) -> str:
        return self.words[token] if 0 <= token < len(self.words) else f"#{token}"


@lru_cache(maxsize=PROMPTS_MAX)
def _decided(prompt: tuple[int, ...], chosen: int) -> State:
    """The state of a decision after an option was chosen; -1: before."""
    decision = read_decision(prompt)
    state = {2 * feature for feature in decision.state}
    others: Counter[str] = Counter()
    for option, details in zip(decision.options, decision.details, strict=True):
        if option == chosen:
            state |= {2 * part + 1 for part in (option, *details)}
        else:
            others["other:" + "&".join(map(str, details or (option,)))] += 1
    return tuple(sorted(state | set(step_state(others.elements()))))


def _bag(prompt: Sequence[int]) -> State:
    kept: dict[int, None] = {}
    for token in reversed(prompt):
        kept[2 * token] = None
        if len(kept) == PROMPT_IDS_MAX:
            break
    return tuple(sorted(kept))


RAW = Encoder()
"""Features are the token ids."""
