"""Exact dynamic programming for the dispatch desk.

``Graph`` unrolls every public desk of the game into *nodes* (a board and a prefix of a response at which more than one word is allowed) and
*edges* (one allowed word of a node). Its topology does not depend on the constants. ``Graph.solve`` walks it backwards once for
a policy that may be optimal at some decisions and prescribed at others, so optimum, uniform random, fixed words,
state-blind rules and a learned policy are all one call.

Invariants: needs and verdicts are independent given the hints, so the expected outcome is additive over adopted verdicts;
nodes are numbered so that successors come after predecessors. The queue is left out (it has no effect): boards
carry one given queue word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from dispatch_desk.game import (
    DECISIONS,
    HINTS,
    ROUNDS_MAX,
    RULES,
    SKILLS,
    Desk,
    Query,
    Rules,
    allowed,
    board,
    decision_of,
    menu,
    right_probability,
)
from numpy.typing import NDArray

__all__ = [
    "OPTIMUM_VALUE",
    "RANDOM_VALUE",
    "BlindRule",
    "Graph",
    "Solution",
    "best_blind_rule",
    "fixed_policies",
    "uniform",
]

OPTIMUM_VALUE = 0.4479
"""Expected outcome of the optimal policy under ``RULES``."""
RANDOM_VALUE = -0.0149
"""Expected outcome of the uniform random policy under ``RULES``."""

Floats = NDArray[np.float64]
BlindRule = Mapping[tuple[str, ...], Sequence[float]]
"""For each menu of a decision, the probability of each allowed word: a rule that sees the menu, but not the state."""


@dataclass(frozen=True)
class Solution:
    """What a policy is worth, and the action values behind it."""

    value: float
    """Expected outcome of a ticket."""
    node_values: Floats
    """Value of each node, shape (nodes,)."""
    edge_values: Floats
    """Value of each edge, shape (edges,)."""
    probabilities: Floats
    """Probability of each edge at its node, shape (edges,)."""


class Graph:
    """All decisions of the game under one set of rules.

    Attributes:
        queries: One query per node.
        decisions: Index into ``DECISIONS`` of each node, shape (nodes,).
        starts: First edge of each node, shape (nodes + 1,); a node's edges are in the order of its allowed words.
    """

    def __init__(self, rules: Rules = RULES, *, queue: str = "mail") -> None:
        self.rules = rules
        self._queue = queue
        self._shares = {hints: _expected_shares(hints, rules) for hints in _all_hints()}
        self.queries: list[Query] = []
        self._desks: dict[tuple[Desk, tuple[str, ...]], int] = {}
        self._edge_rewards: list[float] = []
        self._edge_successors: list[list[tuple[float, int]]] = []
        starts = [0]
        roots = self._roots()
        for desk, _ in roots:
            self._node(desk, ())
        layer = 0
        self._layers: list[tuple[int, int]] = []
        while layer < len(self.queries):  # Breadth first: a layer's successors are all in later layers.
            end = len(self.queries)
            for desk, prefix in list(self._desks)[layer:end]:
                for word in self.queries[self._desks[desk, prefix]].allowed:
                    reward, successors = self._follow(desk, (*prefix, word))
                    self._edge_rewards.append(reward)
                    self._edge_successors.append(successors)
                starts.append(len(self._edge_rewards))
            self._layers.append((layer, end))
            layer = end
        self.starts = np.array(starts)
        self.decisions = np.array([DECISIONS.index(decision_of(query.allowed)) for query in self.queries])
        self.root_weights = np.array([weight for _, weight in roots])
        self.rewards = np.array(self._edge_rewards)
        sizes = [len(successors) for successors in self._edge_successors]
        self._link_edge = np.repeat(np.arange(len(sizes)), sizes)
        links = [link for successors in self._edge_successors for link in successors]
        self._link_weight = np.array([weight for weight, _ in links])
        self._link_node = np.array([node for _, node in links])
        self._link_starts = np.concatenate([[0], np.cumsum(sizes)])
        later = self._link_node > np.repeat(
            [last - 1 for first, last in self._layers for _ in range(first, last)],
            np.diff(self._link_starts[self.starts]),
        )
        if not later.all():
            raise AssertionError("A node must be in an earlier layer than its successors.")
        self.edge_node = np.repeat(np.arange(len(self.queries)), np.diff(self.starts))

    def _roots(self) -> list[tuple[Desk, float]]:
        rules = self.rules
        roots = []
        for depth, checker in itertools.product(("shallow", "deep"), ("junior", "senior")):
            weight = rules.deep if depth == "deep" else 1 - rules.deep
            weight *= rules.senior if checker == "senior" else 1 - rules.senior
            for hints in itertools.product(HINTS, repeat=3):
                probability = float(np.prod([rules.hint_prior[HINTS.index(hint)] for hint in hints]))
                roots.append((Desk(self._queue, depth, checker, hints), weight * probability))  # type: ignore[arg-type]
        return roots

    def _node(self, desk: Desk, prefix: tuple[str, ...]) -> int:
        words = allowed(menu(desk), prefix)
        while len(words) == 1:
            prefix += words
            words = allowed(menu(desk), prefix)
        index = self._desks.setdefault((desk, prefix), len(self.queries))
        if index == len(self.queries):
            self.queries.append(Query(tuple(board(desk)), prefix, words))
        return index

    def _follow(self, desk: Desk, words: tuple[str, ...]) -> tuple[float, list[tuple[float, int]]]:
        """The expected reward of completing ``words``, and the nodes that may come next."""
        if allowed(menu(desk), words):
            return 0.0, [(1.0, self._node(desk, words))]
        rules, arguments = self.rules, list(words[1:])
        shares, share_if_none = self._shares[desk.hints]
        if words[0] == "close":
            return share_if_none, []
        if words[0] == "look":
            return -rules.look_cost, [
                (weight, self._node(replace(desk, looked=True, hints=hints), ()))
                for hints, weight in _looks(desk.hints, rules)
            ]
        reward = 0.0
        if words[0] in ("stop", "again"):
            whose = "both" if desk.agreed else arguments.pop(0)
            reward += _right_given(desk, whose, rules) * shares[SKILLS.index(desk.skill or "a")]
            if words[0] == "stop":
                return reward + share_if_none, []
            desk = replace(desk, adopted=whose)
        skill, brief = arguments
        reward -= rules.round_cost + rules.brief_cost[brief == "full"]
        briefs = tuple(brief if name == skill else old for name, old in zip(SKILLS, desk.briefs, strict=True))
        desk = replace(desk, briefs=briefs, round_number=desk.round_number + 1, skill=skill, agreed=None)
        specialist, checker = right_probability(desk, rules)
        agree = specialist * checker + (1 - specialist) * (1 - checker)
        successors = [(1 - agree, self._node(replace(desk, agreed=False), ()))]
        if desk.round_number == ROUNDS_MAX:
            reward += specialist * checker * shares[SKILLS.index(skill)] + agree * share_if_none
        else:
            successors.append((agree, self._node(replace(desk, agreed=True), ())))
        return reward, successors

    def solve(self, prescribed: Callable[[Graph], Floats] | Floats | None = None) -> Solution:
        """Evaluate a policy exactly.

        Args:
            prescribed: Probability of each edge, shape (edges,), NaN where the policy is to be optimal; or a function of the graph
                that returns it. None is optimal everywhere.

        Returns:
            The policy's value, with ties of optimal choices broken by the first word.
        """
        fixed = prescribed(self) if callable(prescribed) else prescribed
        if fixed is None:
            fixed = np.full(len(self.rewards), np.nan)
        node_values = np.zeros(len(self.queries))
        edge_values = np.zeros(len(self.rewards))
        probabilities = np.array(fixed, dtype=np.float64)
        for first, last in reversed(self._layers):
            low, high = self.starts[first], self.starts[last]
            links = slice(self._link_starts[low], self._link_starts[high])
            weighted = self._link_weight[links] * node_values[self._link_node[links]]
            following = np.bincount(self._link_edge[links] - low, weights=weighted, minlength=high - low)
            values = self.rewards[low:high] + following
            edge_values[low:high] = values
            offsets = self.starts[first:last] - low
            greatest = np.maximum.reduceat(values, offsets)
            mean = np.add.reduceat(values * np.nan_to_num(probabilities[low:high]), offsets)
            node_values[first:last] = np.where(
                np.isnan(probabilities[self.starts[first:last]]), greatest, mean
            )
        undecided = np.isnan(probabilities)
        is_best = undecided & (edge_values >= node_values[self.edge_node] - 1e-12)
        order = np.cumsum(is_best) - (np.cumsum(is_best) - is_best)[self.starts[:-1]][self.edge_node]
        probabilities[undecided] = (is_best & (order == 1))[undecided]
        value = float(self.root_weights @ node_values[: len(self.root_weights)])
        return Solution(value, node_values, edge_values, probabilities)

    def prescribe(self, rules_by_decision: Mapping[str, BlindRule], base: Floats | None = None) -> Floats:
        """Edge probabilities that follow blind rules at some decisions and ``base`` (default: optimal) at the others."""
        result = np.full(len(self.rewards), np.nan) if base is None else base.copy()
        for decision, rule in rules_by_decision.items():
            for words, probabilities in rule.items():
                for node in self._nodes_by_menu()[decision][words]:
                    result[self.starts[node] : self.starts[node + 1]] = probabilities
        return result

    def menus(self, decision: str) -> tuple[tuple[str, ...], ...]:
        """The menus at which a decision is asked."""
        return tuple(self._nodes_by_menu()[decision])

    def _nodes_by_menu(self) -> dict[str, dict[tuple[str, ...], list[int]]]:
        if not hasattr(self, "_by_menu"):
            self._by_menu: dict[str, dict[tuple[str, ...], list[int]]] = {
                decision: {} for decision in DECISIONS
            }
            for node, query in enumerate(self.queries):
                by_words = self._by_menu[decision_of(query.allowed)]
                by_words.setdefault(query.allowed, []).append(node)
        return self._by_menu


def uniform(graph: Graph) -> Floats:
    """The policy that picks every allowed word with equal probability."""
    return 1.0 / np.diff(graph.starts)[graph.edge_node]


def best_blind_rule(
    graph: Graph, decision: str, base: Floats | None = None
) -> tuple[float, dict[tuple[str, ...], tuple[float, ...]]]:
    """The best rule for one decision that ignores the state, and its value.

    The rule may tell menus apart. A menu that a ticket meets at most once makes the value convex in the mixture, so a pure rule is
    best there; menus of two words, which may be met twice, are also searched over mixtures in steps of an eighth.

    Args:
        graph: The game.
        decision: Of ``DECISIONS``.
        base: The policy at the other decisions, shape (edges,); None re-optimises them for every rule.

    Returns:
        The value, and for each menu the probabilities of its words.
    """
    menus = graph.menus(decision)
    candidates: list[list[tuple[float, ...]]] = []
    for words in menus:
        pure = [tuple(float(i == j) for j in range(len(words))) for i in range(len(words))]
        if decision in ("O3", "O4"):
            pure = [(step / 8, 1 - step / 8) for step in range(9)]
        candidates.append(pure)
    best: tuple[float, dict[tuple[str, ...], tuple[float, ...]]] = (-np.inf, {})
    for choice in itertools.product(*candidates):
        rule = dict(zip(menus, choice, strict=True))
        value = graph.solve(graph.prescribe({decision: rule}, base)).value
        if value > best[0]:
            best = (value, rule)
    return best


def fixed_policies(graph: Graph) -> dict[tuple[str, ...], float]:
    """The value of every policy that prefers the same words everywhere: one order of preference per decision."""
    words_by_decision = {
        "O1": ("close", "look", "spawn"),
        "O2": SKILLS,
        "O3": ("short", "full"),
        "O4": ("specialist", "checker"),
        "O5": ("stop", "again"),
    }
    orders = [list(itertools.permutations(words_by_decision[decision])) for decision in DECISIONS]
    edge_words = [word for query in graph.queries for word in query.allowed]
    result = {}
    for combination in itertools.product(*orders):
        rank = {word: position for order in combination for position, word in enumerate(order)}
        ranks = np.array([rank[word] for word in edge_words])
        best = np.minimum.reduceat(ranks, graph.starts[:-1])
        chosen = (ranks == best[graph.edge_node]).astype(np.float64)
        result[tuple(">".join(order) for order in combination)] = graph.solve(chosen).value
    return result


def _all_hints() -> list[tuple[str, str, str]]:
    return list(itertools.product((*HINTS, "sure", "out"), repeat=3))  # type: ignore[arg-type]


def _need(hint: str, rules: Rules) -> float:
    return (
        {"sure": 1.0, "out": 0.0}[hint]
        if hint in ("sure", "out")
        else rules.need_given_hint[HINTS.index(hint)]
    )


def _expected_shares(hints: tuple[str, str, str], rules: Rules) -> tuple[tuple[float, ...], float]:
    """E[needed_i / number needed] for each skill, and the expected share of a ticket without needs."""
    shares, none = [0.0, 0.0, 0.0], 0.0
    for needs in itertools.product((False, True), repeat=3):
        weight = 1.0
        for need, hint in zip(needs, hints, strict=True):
            weight *= _need(hint, rules) if need else 1 - _need(hint, rules)
        if not any(needs):
            none += weight * rules.share_if_none
        for index, need in enumerate(needs):
            shares[index] += weight * need / max(sum(needs), 1)
    return tuple(shares), none


def _looks(hints: tuple[str, str, str], rules: Rules) -> list[tuple[tuple[str, str, str], float]]:
    """What a look may turn the hints into, with probabilities."""
    maybe = rules.need_given_hint[1]
    choices = [
        ((("sure", maybe), ("out", 1 - maybe)) if hint == "maybe" else ((hint, 1.0),)) for hint in hints
    ]
    return [
        ((parts[0][0], parts[1][0], parts[2][0]), float(np.prod([weight for _, weight in parts])))
        for parts in itertools.product(*choices)
    ]


def _right_given(desk: Desk, whose: str, rules: Rules) -> float:
    """Probability that the adopted verdict is right, given that the two agreed or disagreed."""
    specialist, checker = right_probability(desk, rules)
    if whose == "both":
        return specialist * checker / (specialist * checker + (1 - specialist) * (1 - checker))
    only_specialist, only_checker = specialist * (1 - checker), (1 - specialist) * checker
    return (only_specialist if whose == "specialist" else only_checker) / (only_specialist + only_checker)
