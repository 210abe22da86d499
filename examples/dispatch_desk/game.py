"""The dispatch desk: a game whose tickets make five orchestrator decisions matter.

A ticket hides which of three skills it needs. The orchestrator sees a *board* of thirteen words and answers with a short
sequence of *words*: a tool name and its arguments. Every word is one decision:

======== ============================= ==========================================
decision words                         asked
======== ============================= ==========================================
O1       ``close``, ``look``, ``spawn`` triage: what to do with the ticket
O2       ``a``, ``b``, ``c``           which skill the specialist is to have
O3       ``short``, ``full``           how long its brief is
O4       ``specialist``, ``checker``   whom to believe when the two disagree
O5       ``stop``, ``again``           whether to end or to work another skill
======== ============================= ==========================================

Flow of one ticket: ``new_ticket`` -> ``board`` / ``menu`` -> ``act`` -> (when a round is pending) ``specialist_verdict`` and
``checker_verdict``, which an application runs as two separate agents -> ``merge`` -> ``board`` ... until ``Ticket.closed``, then
``outcome``. ``play_round`` joins the middle steps for simulations.

Invariants: the module is pure; all chance is drawn by ``new_ticket`` and indexed by what it is for, so that two policies that meet
the same ticket see the same needs, looks and verdicts (common random numbers). The board is a function of the public ``Desk`` only, and is
a sufficient statistic of it as a bag of words, except for the queue, which has no effect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

__all__ = [
    "DECISIONS",
    "QUEUES",
    "RULES",
    "SKILLS",
    "Desk",
    "Query",
    "Rules",
    "Ticket",
    "Tool",
    "act",
    "allowed",
    "board",
    "checker_verdict",
    "decision_of",
    "menu",
    "merge",
    "new_ticket",
    "outcome",
    "play_round",
    "right_probability",
    "simulate",
    "specialist_verdict",
    "vocabulary",
]

Depth = Literal["shallow", "deep"]
Checker = Literal["junior", "senior"]
Brief = Literal["short", "full"]

SKILLS = ("a", "b", "c")
"""The skills a ticket may need."""
QUEUES = ("mail", "chat", "phone")
"""Neutral words, one on every board; ``phone`` appears only when asked for, to shift the distribution of boards."""
HINTS = ("no", "maybe", "yes")
"""What a ticket says about a skill at first; a look turns ``maybe`` into ``sure`` or ``out``."""
VERDICTS = ("repair", "replace")
"""What a specialist or a checker reports; one of the two is right."""
DECISIONS = ("O1", "O2", "O3", "O4", "O5")
"""The orchestrator's kinds of decision."""
ROUNDS_MAX = 2
"""Rounds of work that a ticket allows."""

_DECISION_OF_WORD = {
    "close": "O1", "look": "O1", "spawn": "O1",
    "a": "O2", "b": "O2", "c": "O2",
    "short": "O3", "full": "O3",
    "specialist": "O4", "checker": "O4",
    "stop": "O5", "again": "O5",
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """The game's constants; probabilities in [0, 1], costs in units of outcome."""

    hint_prior: tuple[float, float, float] = (0.40, 0.29, 0.31)
    """Probability of each hint, in the order of ``HINTS``."""
    need_given_hint: tuple[float, float, float] = (0.01, 0.42, 0.99)
    """Probability that the skill is needed, given its hint."""
    deep: float = 0.59
    """Probability that a ticket is deep."""
    senior: float = 0.55
    """Probability that the checker is senior."""
    specialist_shallow: tuple[float, float] = (0.72, 0.73)
    """Probability that a specialist is right on a shallow ticket, with a short and a full brief."""
    specialist_deep: tuple[float, float] = (0.12, 0.89)
    """The same on a deep ticket."""
    checker_right: tuple[float, float] = (0.56, 0.90)
    """Probability that a junior and a senior checker is right."""
    look_cost: float = 0.05
    """Cost of a look."""
    round_cost: float = 0.108
    """Cost of a round, without its brief."""
    brief_cost: tuple[float, float] = (0.04, 0.105)
    """Cost of a short and of a full brief."""
    share_if_none: float = 0.0
    """Share of needed parts right that a ticket without needs counts as."""


RULES = Rules()
"""The rules of the example; ``optimum`` states what they imply."""


@dataclass(frozen=True)
class Desk:
    """What is public about a ticket: everything that the board shows, and the state of a pending round."""

    queue: str
    depth: Depth
    checker: Checker
    hints: tuple[str, str, str]
    looked: bool = False
    briefs: tuple[Brief | None, Brief | None, Brief | None] = (None, None, None)
    """The brief each skill was worked with; None where it is still open."""
    round_number: int = 0
    skill: str | None = None
    """The skill of the current round."""
    agreed: bool | None = None
    """Whether specialist and checker agreed on it; None before they have reported."""
    adopted: Literal["none", "both", "specialist", "checker"] = "none"
    """Whose verdict the previous round ended with."""

    @property
    def pending(self) -> bool:
        """Whether specialist and checker have yet to report."""
        return self.skill is not None and self.agreed is None


@dataclass(frozen=True)
class Ticket:
    """A ticket: its public desk, and the chance and the results that the orchestrator does not see."""

    desk: Desk
    rules: Rules
    needs: tuple[bool, bool, bool]
    truth: tuple[str, str, str]
    """The right verdict on each skill."""
    specialist_luck: tuple[float, float, float]
    """A uniform number per skill; the specialist is right where it lies below its probability."""
    checker_luck: tuple[float, float, float]
    """The same for the checker."""
    reports: tuple[str, str] | None = None
    """The verdicts of specialist and checker in the current round."""
    results: tuple[tuple[str, str], ...] = ()
    """The adopted verdicts, as pairs of skill and verdict."""
    cost: float = 0.0
    closed: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool the orchestrator may call: its name, and for each argument its name and its choices."""

    name: str
    arguments: tuple[tuple[str, tuple[str, ...]], ...] = ()


def new_ticket(rng: random.Random, *, rules: Rules = RULES, phone: float = 0.0) -> Ticket:
    """Draw a ticket and all of its chance.

    Args:
        rng: Source of randomness; the number of draws does not depend on their values.
        rules: The game's constants.
        phone: Probability in [0, 1] that the ticket's queue is ``phone``.

    Returns:
        A ticket at its triage turn.
    """
    depth: Depth = "deep" if rng.random() < rules.deep else "shallow"
    checker: Checker = "senior" if rng.random() < rules.senior else "junior"
    no, maybe, _ = rules.hint_prior
    hint_luck = [rng.random() for _ in SKILLS]
    hint_index = [0 if luck < no else 1 if luck < no + maybe else 2 for luck in hint_luck]
    needs = [rng.random() < rules.need_given_hint[index] for index in hint_index]
    truth = [VERDICTS[rng.random() < 0.5] for _ in SKILLS]
    specialist_luck = [rng.random() for _ in SKILLS]
    checker_luck = [rng.random() for _ in SKILLS]
    queue = QUEUES[rng.random() < 0.5]
    if rng.random() < phone:
        queue = "phone"
    first, second, third = (HINTS[index] for index in hint_index)
    return Ticket(
        desk=Desk(queue=queue, depth=depth, checker=checker, hints=(first, second, third)),
        rules=rules,
        needs=(needs[0], needs[1], needs[2]),
        truth=(truth[0], truth[1], truth[2]),
        specialist_luck=(specialist_luck[0], specialist_luck[1], specialist_luck[2]),
        checker_luck=(checker_luck[0], checker_luck[1], checker_luck[2]),
    )


def board(desk: Desk) -> list[str]:
    """The thirteen words that the orchestrator sees.

    >>> board(Desk(queue="mail", depth="deep", checker="junior", hints=("no", "maybe", "yes")))[:8]
    ['mail', 'deep', 'junior', 'round0', 'unlooked', 'a-no', 'b-maybe', 'c-yes']
    """
    if desk.skill is None or desk.agreed is None:
        report = "no-report"
    else:
        report = f"{'agree' if desk.agreed else 'disagree'}-{desk.skill}"
    return [
        desk.queue,
        desk.depth,
        desk.checker,
        f"round{desk.round_number}",
        "looked" if desk.looked else "unlooked",
        *(f"{skill}-{hint}" for skill, hint in zip(SKILLS, desk.hints, strict=True)),
        *(f"{skill}-{brief or 'open'}" for skill, brief in zip(SKILLS, desk.briefs, strict=True)),
        report,
        f"adopted-{desk.adopted}",
    ]


def menu(desk: Desk) -> tuple[Tool, ...]:
    """The tools that the desk offers at this turn.

    Args:
        desk: A desk that is not pending.

    Returns:
        The tools, each with the choices of its arguments. Skills that were worked are not offered again.
    """
    if desk.pending:
        raise ValueError("The desk has no menu while a round is pending: merge the two verdicts first.")
    opened = tuple(skill for skill, brief in zip(SKILLS, desk.briefs, strict=True) if brief is None)
    work = (("skill", opened), ("brief", ("short", "full")))
    if desk.skill is None:
        look = () if desk.looked else (Tool("look"),)
        return (Tool("close"), *look, Tool("spawn", work))
    adopt = () if desk.agreed else (("adopt", ("specialist", "checker")),)
    again = (Tool("again", (*adopt, *work)),) if desk.round_number < ROUNDS_MAX else ()
    return (Tool("stop", adopt), *again)


def allowed(tools: Sequence[Tool], prefix: Sequence[str]) -> tuple[str, ...]:
    """The words that may follow a prefix of a response; empty when the response is complete.

    >>> tools = (Tool("close"), Tool("spawn", (("skill", ("a", "c")), ("brief", ("short", "full")))))
    >>> allowed(tools, []), allowed(tools, ["spawn"]), allowed(tools, ["close"])
    (('close', 'spawn'), ('a', 'c'), ())
    """
    if not prefix:
        return tuple(tool.name for tool in tools)
    for tool in tools:
        if tool.name == prefix[0]:
            return tool.arguments[len(prefix) - 1][1] if len(prefix) <= len(tool.arguments) else ()
    raise ValueError(f"The tool {prefix[0]!r} is not on the menu {[tool.name for tool in tools]}.")


def decision_of(words: Sequence[str]) -> str:
    """The kind of decision, of ``DECISIONS``, that a set of allowed words asks for."""
    return _DECISION_OF_WORD[words[0]]


def act(ticket: Ticket, words: Sequence[str]) -> Ticket:
    """Apply a complete response of the orchestrator.

    Args:
        ticket: An open ticket without a pending round.
        words: A complete response, as ``allowed`` defines it.

    Returns:
        The ticket closed, at its next triage turn, or with a pending round.

    Raises:
        ValueError: The response is not on the menu, is incomplete or has words too many.
    """
    desk, rules = ticket.desk, ticket.rules
    if ticket.closed:
        raise ValueError("The ticket is closed.")
    tools = menu(desk)
    for position, word in enumerate(words):
        choices = allowed(tools, words[:position])
        if word not in choices:
            raise ValueError(f"The word {word!r} of the response {list(words)} is none of {choices}.")
    if not words or allowed(tools, words):
        raise ValueError(f"The response {list(words)} is incomplete.")
    tool, arguments = words[0], list(words[1:])
    if tool == "close":
        return replace(ticket, closed=True)
    if tool == "look":
        first, second, third = (
            hint if hint != "maybe" else "sure" if need else "out"
            for hint, need in zip(desk.hints, ticket.needs, strict=True)
        )
        looked = replace(desk, looked=True, hints=(first, second, third))
        return replace(ticket, desk=looked, cost=ticket.cost + rules.look_cost)
    if tool in ("stop", "again"):
        ticket = _adopt(ticket, "both" if desk.agreed else arguments.pop(0))
        if tool == "stop":
            return replace(ticket, closed=True)
    skill, brief = arguments
    briefs = list(desk.briefs)
    briefs[SKILLS.index(skill)] = "short" if brief == "short" else "full"
    pending = replace(
        ticket.desk,
        briefs=(briefs[0], briefs[1], briefs[2]),
        round_number=desk.round_number + 1,
        skill=skill,
        agreed=None,
    )
    cost = rules.round_cost + rules.brief_cost[brief == "full"]
    return replace(ticket, desk=pending, reports=None, cost=ticket.cost + cost)


def _adopt(ticket: Ticket, whose: str) -> Ticket:
    desk = ticket.desk
    if ticket.reports is None or desk.skill is None:
        raise ValueError("There is no report to adopt.")
    adopted: Literal["both", "specialist", "checker"]
    adopted = "both" if whose == "both" else "specialist" if whose == "specialist" else "checker"
    verdict = ticket.reports[adopted == "checker"]
    return replace(
        ticket, desk=replace(desk, adopted=adopted), results=(*ticket.results, (desk.skill, verdict))
    )


def right_probability(desk: Desk, rules: Rules = RULES) -> tuple[float, float]:
    """The probabilities that specialist and checker are right in the current round."""
    if desk.skill is None:
        raise ValueError("No round has begun.")
    by_brief = rules.specialist_deep if desk.depth == "deep" else rules.specialist_shallow
    brief = desk.briefs[SKILLS.index(desk.skill)]
    return by_brief[brief == "full"], rules.checker_right[desk.checker == "senior"]


def specialist_verdict(ticket: Ticket) -> str:
    """What the specialist reports on the pending round."""
    return _verdict(ticket, right_probability(ticket.desk, ticket.rules)[0], ticket.specialist_luck)


def checker_verdict(ticket: Ticket) -> str:
    """What the checker reports on the pending round, independently of the specialist."""
    return _verdict(ticket, right_probability(ticket.desk, ticket.rules)[1], ticket.checker_luck)


def _verdict(ticket: Ticket, probability: float, luck: tuple[float, float, float]) -> str:
    if ticket.desk.skill is None:
        raise ValueError("No round is pending.")
    index = SKILLS.index(ticket.desk.skill)
    is_right = luck[index] < probability
    return ticket.truth[index] if is_right else VERDICTS[1 - VERDICTS.index(ticket.truth[index])]


def merge(ticket: Ticket, specialist: str, checker: str) -> Ticket:
    """Join the two verdicts of the pending round; agreement in the last round ends the ticket.

    Args:
        ticket: A ticket with a pending round.
        specialist: The specialist's verdict, of ``VERDICTS``.
        checker: The checker's verdict.

    Returns:
        The ticket at its report turn, or closed.
    """
    if not ticket.desk.pending:
        raise ValueError("No round is pending.")
    agreed = specialist == checker
    ticket = replace(ticket, desk=replace(ticket.desk, agreed=agreed), reports=(specialist, checker))
    if agreed and ticket.desk.round_number == ROUNDS_MAX:
        return replace(_adopt(ticket, "both"), closed=True)
    return ticket


def play_round(ticket: Ticket, words: Sequence[str]) -> Ticket:
    """Apply a response and, where it starts a round, both reports."""
    ticket = act(ticket, words)
    if ticket.desk.pending and not ticket.closed:
        ticket = merge(ticket, specialist_verdict(ticket), checker_verdict(ticket))
    return ticket


def outcome(ticket: Ticket) -> float:
    """The share of needed parts that are right, minus costs; defined for closed tickets."""
    if not ticket.closed:
        raise ValueError("The ticket is open.")
    num_needed = sum(ticket.needs)
    if num_needed == 0:
        return ticket.rules.share_if_none - ticket.cost
    num_right = sum(
        ticket.needs[SKILLS.index(skill)] and ticket.truth[SKILLS.index(skill)] == verdict
        for skill, verdict in ticket.results
    )
    return num_right / num_needed - ticket.cost


@cache
def vocabulary() -> tuple[str, ...]:
    """All words of boards and responses, in a fixed order."""
    hints = (*HINTS, "sure", "out")
    return (
        *QUEUES,
        *("shallow", "deep", "junior", "senior"),
        *(f"round{number}" for number in range(ROUNDS_MAX + 1)),
        *("unlooked", "looked"),
        *(f"{skill}-{hint}" for skill in SKILLS for hint in hints),
        *(f"{skill}-{brief}" for skill in SKILLS for brief in ("open", "short", "full")),
        "no-report",
        *(f"{report}-{skill}" for report in ("agree", "disagree") for skill in SKILLS),
        *(f"adopted-{whose}" for whose in ("none", "both", "specialist", "checker")),
        *_DECISION_OF_WORD,
    )


@dataclass(frozen=True)
class Query:
    """One question to a policy: the board, the response so far and the words that may follow."""

    board: tuple[str, ...]
    prefix: tuple[str, ...]
    allowed: tuple[str, ...]
    luck: float = field(compare=False, default=0.5)
    """A uniform number that belongs to this ticket and decision; a policy that samples may use it."""


def simulate(
    policy: Callable[[Sequence[Query]], Sequence[str]],
    seeds: Iterable[int],
    *,
    rules: Rules = RULES,
    phone: float = 0.0,
) -> list[float]:
    """Play tickets in lockstep, with common random numbers.

    Args:
        policy: Answers each query of a batch with one of its allowed words. It is not asked where only one word is allowed.
        seeds: One seed per ticket, usually its number; the same seed is the same ticket under every policy.
        rules: The game's constants.
        phone: Probability of the ``phone`` queue.

    Returns:
        The outcome of each ticket, in the order of the seeds.
    """
    seeds = list(seeds)
    tickets = [new_ticket(random.Random(seed), rules=rules, phone=phone) for seed in seeds]
    lucks = [random.Random(f"policy-{seed}") for seed in seeds]
    prefixes: list[tuple[str, ...]] = [()] * len(tickets)
    while opened := [index for index, ticket in enumerate(tickets) if not ticket.closed]:
        asked: list[tuple[int, Query]] = []
        for index in opened:
            ticket = tickets[index]
            words = allowed(menu(ticket.desk), prefixes[index])
            while len(words) == 1:
                prefixes[index] += words
                words = allowed(menu(ticket.desk), prefixes[index])
            if words:
                asked.append(
                    (index, Query(tuple(board(ticket.desk)), prefixes[index], words, lucks[index].random()))
                )
            else:
                tickets[index] = play_round(ticket, prefixes[index])
                prefixes[index] = ()
        for (index, _), word in zip(asked, policy([query for _, query in asked]), strict=True):
            prefixes[index] += (word,)
    return [outcome(ticket) for ticket in tickets]
