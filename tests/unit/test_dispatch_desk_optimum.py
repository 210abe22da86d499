"""The dispatch desk is a fair test: all five decisions matter, and no rule that ignores the state gets far."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from dispatch_desk import game, optimum

GAP_MIN = 0.10
"""Least loss of the best state-blind rule at any decision, as a share of both the optimum and the optimum-random range."""
FIXED_MAX = 0.3
"""Greatest f of a policy that prefers the same words everywhere."""
NUM_TICKETS = 5000
NUM_STANDARD_ERRORS = 3.0


@pytest.fixture(scope="module")
def graph() -> optimum.Graph:
    return optimum.Graph()


@pytest.fixture(scope="module")
def best(graph: optimum.Graph) -> optimum.Solution:
    return graph.solve()


@pytest.fixture(scope="module")
def random_value(graph: optimum.Graph) -> float:
    return graph.solve(optimum.uniform).value


def test_constants_are_those_the_documentation_states(best: optimum.Solution, random_value: float) -> None:
    assert best.value == pytest.approx(optimum.OPTIMUM_VALUE, abs=5e-5)
    assert random_value == pytest.approx(optimum.RANDOM_VALUE, abs=5e-5)


@pytest.mark.parametrize("decision", game.DECISIONS)
def test_best_state_blind_rule_loses(
    graph: optimum.Graph, best: optimum.Solution, random_value: float, decision: str
) -> None:
    reoptimised, _ = optimum.best_blind_rule(graph, decision)
    held, _ = optimum.best_blind_rule(graph, decision, best.probabilities)
    assert held <= reoptimised + 1e-12
    loss = best.value - reoptimised
    assert loss >= GAP_MIN * best.value
    assert loss >= GAP_MIN * (best.value - random_value)


def test_fixed_policies_stay_low(graph: optimum.Graph, best: optimum.Solution, random_value: float) -> None:
    values = optimum.fixed_policies(graph)
    assert len(values) == 288
    assert (max(values.values()) - random_value) / (best.value - random_value) <= FIXED_MAX


def test_closing_at_once_is_no_trap(graph: optimum.Graph) -> None:
    by_word = {
        word: graph.solve(
            graph.prescribe(
                {
                    "O1": {
                        words: [float(w == word) for w in words]
                        for words in graph.menus("O1")
                        if word in words
                    }
                },
                optimum.uniform(graph),
            )
        ).value
        for word in ("close", "spawn")
    }
    assert by_word["close"] <= by_word["spawn"]


def test_simulation_agrees_with_the_optimum(graph: optimum.Graph, best: optimum.Solution) -> None:
    nodes = {(query.board[1:], query.prefix): node for node, query in enumerate(graph.queries)}

    def policy(queries: Sequence[game.Query]) -> list[str]:
        words = []
        for query in queries:
            node = nodes[query.board[1:], query.prefix]
            edges = slice(graph.starts[node], graph.starts[node + 1])
            words.append(query.allowed[int(best.probabilities[edges].argmax())])
        return words

    _assert_mean(game.simulate(policy, range(NUM_TICKETS)), best.value)


def test_simulation_agrees_with_random(random_value: float) -> None:
    def policy(queries: Sequence[game.Query]) -> list[str]:
        return [query.allowed[int(query.luck * len(query.allowed))] for query in queries]

    _assert_mean(game.simulate(policy, range(NUM_TICKETS)), random_value)


def _assert_mean(outcomes: list[float], expected: float) -> None:
    standard_error = np.std(outcomes) / len(outcomes) ** 0.5
    assert abs(np.mean(outcomes) - expected) <= NUM_STANDARD_ERRORS * standard_error


def test_policies_meet_the_same_ticket() -> None:
    first, second = (game.new_ticket(random.Random(7), phone=phone) for phone in (0.0, 1.0))
    assert second.desk.queue == "phone"
    assert (first.needs, first.truth, first.specialist_luck) == (
        second.needs,
        second.truth,
        second.specialist_luck,
    )


def test_vocabulary_holds_every_word_once(graph: optimum.Graph) -> None:
    vocabulary = game.vocabulary()
    assert len(set(vocabulary)) == len(vocabulary)
    seen = {word for query in graph.queries for word in (*query.board, *query.prefix, *query.allowed)}
    assert seen <= set(vocabulary)
    assert set(vocabulary) - seen == {"chat", "phone"}
    assert {len(query.board) for query in graph.queries} == {13}


def test_board_and_prefix_determine_the_node(graph: optimum.Graph) -> None:
    bags = {(frozenset(query.board), query.prefix) for query in graph.queries}
    assert len(bags) == len(graph.queries)


@pytest.mark.parametrize(
    "words", [[], ["spawn"], ["spawn", "a"], ["stop"], ["close", "a"], ["spawn", "a", "long"]]
)
def test_responses_off_the_menu_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="response"):
        game.act(game.new_ticket(random.Random(0)), words)
