"""The two worlds of ``credit_ablation``: the dispatch desk, and a wide desk with five teams of four specialists.

A ``Case`` is one ticket: it shows a *board* of words, says which words may follow a prefix of a response, and plays a complete
response. The generators' constants (``game.RULES``, ``RIGHT``) are read here only: by the generators, and by the yardstick,
which is what a policy is measured with and no estimator sees.

The wide desk has the desk's five kinds of decision with more of each: a round works one or two skills side by side,
each by one of the twenty specialists and a checker of its own, so a ticket has up to eight sub-agents and a response up to
eight words. Its optimum is exact: needs and verdicts are independent given the hints, so what a skill's round is worth is additive, and
dynamic programming needs the hints and the set of worked skills only.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from _harness import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from dispatch_desk import game
from dispatch_desk.optimum import Graph, uniform

__all__ = ["Case", "Desk", "Wide", "World"]


class Case(Protocol):
    """One ticket in work."""

    closed: bool
    expected: float
    """Expected outcome given all that was public so far: what the yardstick uses, so that it needs fewer tickets."""

    def board(self) -> tuple[str, ...]: ...

    def allowed(self, prefix: Sequence[str]) -> tuple[str, ...]: ...

    def play(self, words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Apply a complete response; returns the groups of sub-agents that worked, side by side within a group."""
        ...

    def outcome(self) -> float: ...


class World(Protocol):
    """A kind of ticket and what policies are worth there."""

    name: str
    words: tuple[str, ...]
    units: tuple[str, ...]
    """Words that name interchangeable things (``[pipeline] value_units``)."""
    context: int
    agents: int
    optimum: float
    random: float

    def new(self, seed: str) -> Case: ...

    def root_value(self, case: Case) -> float:
        """Value of a new ticket under the optimal policy."""
        ...


def expected_shares(needs: Sequence[float]) -> tuple[float, ...]:
    """Of each skill the expected share of the outcome: E[need / number of needs], given independent probabilities.

    >>> expected_shares((1.0, 0.5))
    (0.75, 0.25)
    """
    shares = []
    for skill, need in enumerate(needs):
        counts = [1.0]
        for other, p in enumerate(needs):
            if other != skill:
                counts = [
                    (counts[k] if k < len(counts) else 0.0) * (1 - p) + (counts[k - 1] * p if k else 0.0)
                    for k in range(len(counts) + 1)
                ]
        shares.append(need * sum(weight / (k + 1) for k, weight in enumerate(counts)))
    return tuple(shares)


def right_given(specialist: float, checker: float, whose: str) -> float:
    """Probability that what is adopted is right: ``both`` (they agreed), ``specialist`` or ``checker`` (they disagreed)."""
    if whose == "both":
        return specialist * checker / (specialist * checker + (1 - specialist) * (1 - checker))
    mine, other = (specialist, checker) if whose == "specialist" else (checker, specialist)
    return mine * (1 - other) / (specialist * (1 - checker) + (1 - specialist) * checker)


# ---------------------------------------------------------------- the dispatch desk


@cache
def _desk_shares(hints: tuple[str, str, str]) -> tuple[float, ...]:
    no, maybe, yes = game.RULES.need_given_hint
    return expected_shares(
        [{"no": no, "maybe": maybe, "yes": yes, "sure": 1.0, "out": 0.0}[h] for h in hints]
    )


class DeskCase:
    """A ticket of ``examples/dispatch_desk``."""

    def __init__(self, ticket: game.Ticket) -> None:
        self._ticket = ticket
        self.closed = False
        self._earned = 0.0

    @property
    def desk(self) -> game.Desk:
        return self._ticket.desk

    @property
    def expected(self) -> float:
        return self._earned - self._ticket.cost

    def board(self) -> tuple[str, ...]:
        return tuple(game.board(self.desk))

    def allowed(self, prefix: Sequence[str]) -> tuple[str, ...]:
        return game.allowed(game.menu(self.desk), prefix)

    def play(self, words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        if words[0] in ("stop", "again"):
            self._earn("both" if self.desk.agreed else words[1])
        self._ticket = ticket = game.play_round(self._ticket, words)
        self.closed = ticket.closed
        if words[0] not in ("spawn", "again"):
            return ()
        if ticket.closed:
            self._earn("both")
        return (("specialist",), ("checker",))

    def _earn(self, whose: str) -> None:
        skill = self.desk.skill
        if skill is None:
            raise ValueError("nothing to adopt")
        chances = game.right_probability(self.desk, game.RULES)
        self._earned += right_given(*chances, whose) * _desk_shares(self.desk.hints)[game.SKILLS.index(skill)]

    def outcome(self) -> float:
        return game.outcome(self._ticket)


class Desk:
    """The dispatch desk."""

    name = "desk"
    units = game.SKILLS
    context = 32
    agents = 3

    def __init__(self) -> None:
        self.words = game.vocabulary()
        graph = Graph()
        solution = graph.solve()
        self.optimum = solution.value
        self.random = graph.solve(uniform(graph)).value
        self._roots = {
            query.board[1:]: float(value)
            for query, value in zip(graph.queries, solution.node_values, strict=True)
            if query.board[3:5] == ("round0", "unlooked") and not query.prefix
        }

    def new(self, seed: str) -> DeskCase:
        return DeskCase(game.new_ticket(random.Random(seed)))

    def root_value(self, case: Case) -> float:
        return self._roots[case.board()[1:]]


# ---------------------------------------------------------------- the wide desk

TEAMS = ("a", "b", "c", "d", "e")
MEMBERS = ("m1", "m2", "m3", "m4")
ROUNDS_MAX = 2
HINT_PRIOR = (0.50, 0.25, 0.25)
NEED = {"no": 0.02, "maybe": 0.45, "yes": 0.98, "sure": 1.0, "out": 0.0}
DEEP, SENIOR = 0.5, 0.55
CHECKER = (0.55, 0.88)
LOOK_COST, ROUND_COST, SKILL_COST = 0.03, 0.02, 0.04
BRIEF_COST = (0.01, 0.045)
"""Of a short and of a full brief, a skill."""
PROFILES = {
    "steady": ((0.70, 0.74), (0.50, 0.66)),
    "quick": ((0.90, 0.91), (0.15, 0.35)),
    "thorough": ((0.45, 0.48), (0.40, 0.93)),
    "novice": ((0.40, 0.45), (0.20, 0.30)),
}
"""Probability to be right: (shallow (short, full), deep (short, full))."""
KINDS = ("steady", "quick", "thorough", "novice")
"""What each team's m1 to m4 are."""
RIGHT = {
    (team, member): PROFILES[kind] for team in TEAMS for member, kind in zip(MEMBERS, KINDS, strict=True)
}


@cache
def _wide_shares(hints: tuple[str, ...]) -> tuple[float, ...]:
    return expected_shares([NEED[hint] for hint in hints])


class WideCase:
    """A ticket of the wide desk; all of its chance is drawn at the start."""

    def __init__(self, rng: random.Random) -> None:
        self.deep = rng.random() < DEEP
        self.senior = rng.random() < SENIOR
        luck = [rng.random() for _ in TEAMS]
        no, maybe, _ = HINT_PRIOR
        self.hints = tuple("no" if u < no else "maybe" if u < no + maybe else "yes" for u in luck)
        self._needs = [rng.random() < NEED[hint] for hint in self.hints]
        self._specialist_luck = [rng.random() for _ in TEAMS]
        self._checker_luck = [rng.random() for _ in TEAMS]
        self.looked = False
        self.round = 0
        self.brief = ""
        self.worked: dict[str, str] = {}
        self.reports: list[tuple[str, bool, bool]] = []
        """Of this round: (team, specialist is right, checker is right)."""
        self._right: list[str] = []
        self._cost = 0.0
        self._earned = 0.0
        self.closed = False

    @property
    def expected(self) -> float:
        return self._earned - self._cost

    def board(self) -> tuple[str, ...]:
        reports = [f"{'agree' if s == c else 'disagree'}-{team}" for team, s, c in self.reports]
        return (
            "deep" if self.deep else "shallow",
            "senior" if self.senior else "junior",
            f"round{self.round}",
            "looked" if self.looked else "unlooked",
            *(f"{team}-{hint}" for team, hint in zip(TEAMS, self.hints, strict=True)),
            *(f"{team}-{self.worked.get(team, 'open')}" for team in TEAMS),
            f"brief-{self.brief or 'none'}",
            *reports,
            *(["no-report"] * (2 - len(reports))),
        )

    def _disputed(self) -> list[str]:
        return [team for team, s, c in self.reports if s != c]

    def allowed(self, prefix: Sequence[str]) -> tuple[str, ...]:
        if not prefix:
            if self.round == 0:
                return ("close", "spawn") if self.looked else ("close", "look", "spawn")
            return ("stop", "again") if self.round < ROUNDS_MAX else ("stop",)
        if prefix[0] in ("close", "look"):
            return ()
        rest = list(prefix[1:])
        if prefix[0] in ("stop", "again"):
            disputed = self._disputed()
            if len(rest) < len(disputed):
                return ("specialist", "checker")
            if prefix[0] == "stop":
                return ()
            rest = rest[len(disputed) :]
        opened = tuple(team for team in TEAMS if team not in self.worked)
        if not rest:
            return opened
        if len(rest) in (1, 4) and rest[-1] in TEAMS:
            return MEMBERS
        if len(rest) == 2:
            return ("short", "full")
        if len(rest) == 3:
            return (*(team for team in opened if team != rest[0]), "alone")
        return ()

    def play(self, words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        rest = list(words[1:])
        if words[0] == "close":
            self.closed = True
            return ()
        if words[0] == "look":
            self.looked = True
            self._cost += LOOK_COST
            self.hints = tuple(
                hint if hint != "maybe" else "sure" if need else "out"
                for hint, need in zip(self.hints, self._needs, strict=True)
            )
            return ()
        if words[0] in ("stop", "again"):
            self._adopt(rest)
            if words[0] == "stop":
                self.closed = True
                return ()
        self.brief = rest[2]
        chosen = [(rest[0], rest[1]), *([(rest[3], rest[4])] if len(rest) == 5 else [])]
        self.round += 1
        self._cost += ROUND_COST + len(chosen) * (SKILL_COST + BRIEF_COST[self.brief == "full"])
        self.reports = []
        for team, member in chosen:
            at = TEAMS.index(team)
            self.worked[team] = member
            specialist, checker = self._chances(team)
            self.reports.append(
                (team, self._specialist_luck[at] < specialist, self._checker_luck[at] < checker)
            )
        if self.round == ROUNDS_MAX and not self._disputed():
            self._adopt([])
            self.closed = True
        return tuple(f"{team}{member}" for team, member in chosen), ("checker",) * len(chosen)

    def _chances(self, team: str) -> tuple[float, float]:
        return RIGHT[team, self.worked[team]][self.deep][self.brief == "full"], CHECKER[self.senior]

    def _adopt(self, whose: list[str]) -> None:
        """Take over this round's results; ``whose`` is consumed, one word a dispute."""
        for team, specialist, checker in self.reports:
            side = "both" if specialist == checker else whose.pop(0)
            if checker if side == "checker" else specialist:
                self._right.append(team)
            share = _wide_shares(self.hints)[TEAMS.index(team)]
            self._earned += share * right_given(*self._chances(team), side)

    def outcome(self) -> float:
        total = sum(self._needs)
        right = sum(self._needs[TEAMS.index(team)] for team in self._right)
        return (right / total if total else 0.0) - self._cost


class _WidePlan:
    """Exact values of the wide desk for one depth and checker, optimal or uniformly random."""

    def __init__(self, deep: bool, senior: bool, *, best: bool) -> None:
        self._best = best
        c = CHECKER[senior]
        pick = max if best else _mean
        self._right: dict[tuple[str, bool], float] = {}
        """Expected probability to end up right with a team's best (or a random) member, by brief."""
        for team, full in itertools.product(TEAMS, (False, True)):
            found = []
            for member in MEMBERS:
                p = RIGHT[team, member][deep][full]
                found.append(p * c + pick([p * (1 - c), (1 - p) * c]))
            self._right[team, full] = pick(found)
        self._known: dict[tuple[tuple[str, ...], frozenset[str], int], float] = {}

    def round_value(self, hints: tuple[str, ...], worked: frozenset[str], number: int) -> float:
        """Value of starting round ``number`` (1, 2) now."""
        key = (hints, worked, number)
        if key not in self._known:
            pick = max if self._best else _mean
            opened = [team for team in TEAMS if team not in worked]
            firsts = []
            for first in opened:
                briefs = []
                for full in (False, True):
                    seconds = [
                        self._after(hints, worked, number, (first, second), full)
                        for second in opened
                        if second != first
                    ]
                    briefs.append(pick([*seconds, self._after(hints, worked, number, (first,), full)]))
                firsts.append(pick(briefs))
            self._known[key] = pick(firsts)
        return self._known[key]

    def _after(
        self, hints: tuple[str, ...], worked: frozenset[str], number: int, chosen: tuple[str, ...], full: bool
    ) -> float:
        shares = _wide_shares(hints)
        value = -ROUND_COST - len(chosen) * (SKILL_COST + BRIEF_COST[full])
        value += sum(shares[TEAMS.index(team)] * self._right[team, full] for team in chosen)
        if number < ROUNDS_MAX:
            again = self.round_value(hints, worked.union(chosen), number + 1)
            value += max(0.0, again) if self._best else again / 2
        return value

    def start(self, hints: tuple[str, ...], *, looked: bool = False) -> float:
        """Value at triage."""
        options = [0.0, self.round_value(hints, frozenset(), 1)]
        if not looked:
            value = -LOOK_COST
            for seen in itertools.product(*(("sure", "out") if h == "maybe" else (h,) for h in hints)):
                weight = 1.0
                for before, after in zip(hints, seen, strict=True):
                    if before == "maybe":
                        weight *= NEED["maybe"] if after == "sure" else 1 - NEED["maybe"]
                value += weight * self.start(seen, looked=True)
            options.append(value)
        return max(options) if self._best else _mean(options)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Wide:
    """The wide desk: an orchestrator, twenty specialists, checkers."""

    name = "wide"
    units: tuple[str, ...] = TEAMS
    context = 32
    agents = 1 + len(TEAMS) * len(MEMBERS) + 1

    def __init__(self) -> None:
        self.words = (
            "shallow", "deep", "junior", "senior", "round0", "round1", "round2", "unlooked", "looked",
            *(f"{team}-{hint}" for team in TEAMS for hint in NEED),
            *(f"{team}-{state}" for team in TEAMS for state in ("open", *MEMBERS)),
            "brief-none", "brief-short", "brief-full", "no-report",
            *(f"{report}-{team}" for report in ("agree", "disagree") for team in TEAMS),
            "close", "look", "spawn", *TEAMS, *MEMBERS, "short", "full", "alone", "specialist", "checker", "stop", "again",
        )  # fmt: skip
        self._best: dict[tuple[bool, bool, tuple[str, ...]], float] = {}
        self.optimum = self.random = 0.0
        prior = dict(zip(("no", "maybe", "yes"), HINT_PRIOR, strict=True))
        for deep, senior in itertools.product((False, True), repeat=2):
            side = (DEEP if deep else 1 - DEEP) * (SENIOR if senior else 1 - SENIOR)
            best, chance = _WidePlan(deep, senior, best=True), _WidePlan(deep, senior, best=False)
            for hints in itertools.product(prior, repeat=len(TEAMS)):
                weight = side
                for hint in hints:
                    weight *= prior[hint]
                self._best[deep, senior, hints] = value = best.start(hints)
                self.optimum += weight * value
                self.random += weight * chance.start(hints)

    def new(self, seed: str) -> WideCase:
        return WideCase(random.Random(seed))

    def root_value(self, case: Case) -> float:
        if not isinstance(case, WideCase):
            raise TypeError(f"{case!r} is no ticket of the wide desk")
        return self._best[case.deep, case.senior, case.hints]
