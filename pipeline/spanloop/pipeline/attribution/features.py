"""Log-only features of steps: what a reader without the answer could hold against each of them.

Every feature is a number of about 0 to 1 that compares a step with the others of its own log. None of them knows a name: not an
agent's, a tool's, a task's or a framework's. Features that need words are 0 where the deployment keeps none.
Invariants: pure; a renaming of agents changes nothing; the columns are ``FEATURES``, in that order.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

import msgspec

from spanloop.pipeline.attribution.steps import Step

__all__ = ["FEATURES", "STRUCTURE", "Table", "table_of"]

STRUCTURE = (
    "executor", "chat_opening", "chat_second", "chat_early", "chat_late", "chat_last", "hub_plan", "hub_instruct", "hub_work",
    "hub_work_first", "hub_work_second", "hub_work_third", "hub_late", "agent_first", "agent_share", "failed",
)  # fmt: skip
"""Features of who acts when; they need no words."""
WORDS = (
    "code", "result_failed", "result_ok", "supposes", "gives_up", "confirms", "answer", "new_words", "new_numbers", "long",
    "short", "repeats", "doubted",
)  # fmt: skip
"""Features of what was said."""
FEATURES = STRUCTURE + WORDS

_CODE = re.compile(r"```|^\s*(?:def|import|from|class|SELECT|#!)\s", re.MULTILINE)
_RESULT = re.compile(
    r"\A\s*(?:exit ?code\b|exit status\b|stdout\b|stderr\b|traceback\b|there is no code\b)", re.IGNORECASE
)
_ERROR = re.compile(
    r"exit ?code:? *[1-9]|execution failed|traceback \(most recent|\b\w*(?:Error|Exception)\b:|\b(?:404|403|500) (?:not|forbidden|internal)"
    r"|command not found|timed out|permission denied|unknown language"
)
_SUPPOSES = (
    "assum", "suppos", "hypothetic", "simulat", "placeholder", "mock", "manual", "presum", "approximat", "estimat", "likely",
    "probabl", "typical", "dummy", "sample", "pretend", "imagin",
)  # fmt: skip
_GIVES_UP = (
    "unfortunately", "apolog", "sorry", "unable", "cannot", "can't", "couldn't", "failed", "fails", "failure", "unavailable",
    "unsuccessful", "issue", "stuck", "loop", "error",
)  # fmt: skip
_CONFIRMS = (
    "verif", "confirm", "correct", "accura", "validat", "therefore", "thus", "conclu", "final", "summary", "terminate",
)  # fmt: skip
"""Beginnings of words."""
_WORD = re.compile(r"[^\W_]+(?:[.,:'][^\W_]+)*")
_PLACES = ("first", "second", "third")
_SHORT = 80
"""Characters below which a step says next to nothing."""
_REPEAT_WORDS_MAX = 400
_REPEAT_TURNS_MAX = 30
"""An agent's last turns that a new one is compared with."""


class Table(msgspec.Struct, frozen=True):
    """Features of one log."""

    steps: tuple[Step, ...]
    """Those that can be to blame: all but people's."""
    rows: tuple[tuple[float, ...], ...]
    """One row a step, columns FEATURES."""
    has_words: bool
    """At least half of the steps came with their text."""


def table_of(steps: Sequence[Step]) -> Table:
    """The features of ``steps`` (all of one log, in order)."""
    own = [step for step in steps if step.kind != "human"]
    asked = {w for step in steps if step.kind == "human" for w in _words(step.words.text)}
    with_words = sum(bool(step.words.text) for step in own)
    if not own:
        return Table((), (), False)
    said = [_words(step.words.text) for step in own]
    executors = _executors(own)
    columns = {name: [0.0] * len(own) for name in FEATURES}
    _structure(own, executors, columns)
    _content(own, said, executors, columns)
    _novelty(own, said, asked, columns)
    _answer(own, said, asked, executors, columns)
    rows = zip(*(columns[name] for name in FEATURES), strict=True)
    return Table(tuple(own), tuple(rows), 2 * with_words >= len(own))


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _who(step: Step) -> str:
    return step.agent_id or step.agent


def _executors(steps: Sequence[Step]) -> list[bool]:
    """Steps of a machine: a tool's result, or a participant that does nothing but report what ran."""
    reports: dict[str, list[bool]] = defaultdict(list)
    for step in steps:
        if step.words.text:
            reports[_who(step)].append(bool(_RESULT.match(step.words.text)))
    machines = {who for who, seen in reports.items() if 2 * sum(seen) > len(seen)}
    return [step.kind == "result" or _who(step) in machines for step in steps]


def _structure(steps: Sequence[Step], executors: Sequence[bool], columns: dict[str, list[float]]) -> None:
    hub = any(step.kind in ("instruct", "work") for step in steps)
    turns = Counter(_who(step) for step, machine in zip(steps, executors, strict=True) if not machine)
    all_turns = max(1, sum(turns.values()))
    seen: set[str] = set()
    spoken = worked = 0
    for i, (step, machine) in enumerate(zip(steps, executors, strict=True)):
        late = i / max(1, len(steps) - 1)
        found: dict[str, float] = {
            "executor": machine,
            "failed": step.failed,
            "agent_first": _who(step) not in seen,
        }
        found["agent_share"] = 0.0 if machine else turns[_who(step)] / all_turns
        if hub:
            found |= {f"hub_{kind}": step.kind == kind for kind in ("plan", "instruct", "work")}
            found["hub_late"] = late
            if step.kind == "work":
                found |= {f"hub_work_{place}": worked == n for n, place in enumerate(_PLACES)}
                worked += 1
        else:
            found |= {"chat_opening": i == 0, "chat_late": late, "chat_last": i == len(steps) - 1}
            found |= {"chat_second": not machine and spoken == 1, "chat_early": 1 / (1 + i)}
            spoken += not machine
        seen.add(_who(step))
        for name, value in found.items():
            columns[name][i] = float(value)


def _content(
    steps: Sequence[Step],
    said: Sequence[Sequence[str]],
    executors: Sequence[bool],
    columns: dict[str, list[float]],
) -> None:
    lengths = [step.words.length for step in steps]
    usual = max(1.0, float(median(lengths)))
    for i, step in enumerate(steps):
        text = step.words.text
        columns["code"][i] = float(bool(_CODE.search(text)))
        if i + 1 < len(steps) and executors[i + 1] and not executors[i]:
            bad = steps[i + 1].failed or bool(_ERROR.search(steps[i + 1].words.text))
            columns["result_failed" if bad else "result_ok"][i] = float(bool(steps[i + 1].words.text) or bad)
        if step.words.length:
            columns["long"][i] = max(0.0, min(1.0, 0.5 + math.log2(max(1, lengths[i]) / usual) / 6))
            columns["short"][i] = float(lengths[i] < _SHORT)
        if executors[i]:
            continue
        counts = Counter(said[i])
        for name, stems in (("supposes", _SUPPOSES), ("gives_up", _GIVES_UP), ("confirms", _CONFIRMS)):
            hits = sum(count for word, count in counts.items() if word.startswith(stems))
            columns[name][i] = hits / (hits + 2)
    for i in range(len(steps) - 1):
        if not executors[i]:
            after = next((j for j in range(i + 1, len(steps)) if not executors[j]), i)
            if _who(steps[after]) != _who(steps[i]):
                columns["doubted"][i] = columns["gives_up"][after]


def _novelty(
    steps: Sequence[Step], said: Sequence[Sequence[str]], asked: set[str], columns: dict[str, list[float]]
) -> None:
    """Shares of words and numbers that nobody had said before, and likeness to an earlier turn of the same agent."""
    known = set(asked)
    earlier: dict[str, list[frozenset[str]]] = defaultdict(list)
    for i, (step, words) in enumerate(zip(steps, said, strict=True)):
        distinct = set(words)
        numbers = {word for word in distinct if any(c.isdigit() for c in word)}
        if distinct:
            columns["new_words"][i] = len(distinct - known) / len(distinct)
            fresh = len(numbers - known)
            columns["new_numbers"][i] = fresh / (fresh + 3)
            head = frozenset(words[:_REPEAT_WORDS_MAX])
            columns["repeats"][i] = max(
                (len(head & old) / len(head | old) for old in earlier[_who(step)][-_REPEAT_TURNS_MAX:]),
                default=0.0,
            )
            earlier[_who(step)].append(head)
        known |= distinct


def _answer(
    steps: Sequence[Step],
    said: Sequence[Sequence[str]],
    asked: set[str],
    executors: Sequence[bool],
    columns: dict[str, list[float]],
) -> None:
    """Share of the last answer's rare words that this step was the first to say."""
    last = next(
        (
            i
            for i in range(len(steps) - 1, -1, -1)
            if not executors[i] and steps[i].words.length >= _SHORT and said[i]
        ),
        None,
    )
    if last is None:
        return
    spread = Counter(word for words in said for word in set(words))
    opening = set(said[0]) if last > 0 else set()
    weights = {
        word: (2.0 if any(c.isdigit() for c in word) else 1.0) / spread[word]
        for word in set(said[last]) - asked - opening
        if len(word) > 3 or any(c.isdigit() for c in word)
    }
    total = sum(weights.values())
    if not total:
        return
    left = set(weights)
    for i in range(last + 1):
        first = left.intersection(said[i])
        columns["answer"][i] = sum(weights[word] for word in sorted(first)) / total
        left -= first
