"""How good are the versions of a workspace's policy? On fresh tickets, against random and the exact optimum.

``python -m dispatch_desk.evaluate --workspace FOLDER`` prints JSON. A version is evaluated as it is served, with the server's exploration
floor. All policies meet the same tickets with the same luck (common random numbers), and the optimum, whose value is known
exactly, meets them too: a policy's return is the optimum's value plus the mean difference to it on the same tickets.

f = (return - random) / (optimum - random). For each decision O1-O5 the policy is compared with itself where that decision is
replaced by the rule that is best among those that do not see the state. That rule is chosen exactly (dynamic
programming with the policy's own other decisions), then both are played on the same tickets.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dispatch_desk import game
from dispatch_desk.decide import request_of
from dispatch_desk.optimum import BlindRule, Graph, best_blind_rule, uniform
from numpy.typing import NDArray

if TYPE_CHECKING:
    from spanloop.learner.decision_policy import DecisionNet
    from spanloop.schemas.decision_tokens import DecisionIds

__all__ = ["Player", "compare_decisions", "decision_of", "evaluate", "interval", "scores_of"]

FIRST_SEED = 10**9
"""Seeds of evaluation tickets begin here: no client's ticket has one."""
PLACES = 1024
"""Boards in one forward pass."""
QUERIES_MAX = 100_000
"""Decisions that a process keeps: all versions meet the same."""

Floats = NDArray[np.float64]
Word = Mapping[tuple[tuple[str, ...], tuple[str, ...]], Floats]


class Player:
    """A version as served: probabilities of the allowed words of a query, each query computed once."""

    def __init__(self, folder: Path, exploration: float) -> None:
        from spanloop.learner.decision_policy import DecisionNet
        from spanloop.learner.model import load_artifact

        self._artifact: Any = load_artifact(folder)
        self._compute = self._decide if isinstance(self._artifact.net, DecisionNet) else self._read
        self._exploration = exploration
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Floats] = {}

    def __call__(self, queries: Sequence[game.Query]) -> list[str]:
        """A word for each query, drawn with the ticket's own luck."""
        return [
            query.allowed[_draw(probabilities, query.luck)]
            for query, probabilities in zip(queries, self.probabilities(queries), strict=True)
        ]

    def probabilities(self, queries: Sequence[game.Query]) -> list[Floats]:
        """Of each query's allowed words."""
        missing = {(q.board, q.prefix): q for q in queries if (q.board, q.prefix) not in self._known}
        ordered = sorted(missing.values(), key=lambda query: len(query.prefix))
        for start in range(0, len(ordered), PLACES):
            self._compute(ordered[start : start + PLACES])
        return [self._known[q.board, q.prefix] for q in queries]

    def _decide(self, queries: Sequence[game.Query]) -> None:
        """Ask a decision policy, as its server does, many at once."""
        from spanloop.learner.serving.sampling import behaviour

        asked = [decision_of(query) for query in queries]
        for query, (decision, places), scores in zip(
            queries, asked, scores_of(self._artifact.net, [decision for decision, _ in asked]), strict=True
        ):
            found = np.zeros(len(places))
            found[places] = behaviour(scores[: len(decision.options)], exploration=self._exploration)
            self._known[query.board, query.prefix] = found

    def _read(self, queries: Sequence[game.Query]) -> None:
        """Let a policy of text read the boards."""
        import torch

        from spanloop.learner.serving.sampling import behaviour
        from spanloop.learner.tokenizer import ACT, BOS, PAD

        tokenizer = self._artifact.tokenizer
        rows = [[BOS, *tokenizer.encode(q.board), ACT, *tokenizer.encode(q.prefix)] for q in queries]
        lengths = [len(row) for row in rows]
        padded = [row + [PAD] * (max(lengths) - len(row)) for row in rows]
        with torch.no_grad():
            logits = (
                self._artifact.net.last_logits(torch.tensor(padded), torch.tensor(lengths)).double().numpy()
            )
        for query, values in zip(queries, logits, strict=True):
            open_words = values[tokenizer.encode(query.allowed)]
            self._known[query.board, query.prefix] = behaviour(open_words, exploration=self._exploration)


@lru_cache(maxsize=QUERIES_MAX)
def decision_of(query: game.Query) -> tuple[DecisionIds, list[int]]:
    """A query as the decision that the desk asks for, and the place of each of its options among the allowed words."""
    from spanloop.learner.decision_features import DecisionRequest, MenuItem, decision_ids

    asked = request_of(query.board, query.prefix, query.allowed)
    menu = [item if isinstance(item, str) else MenuItem(**item) for item in asked["menu"]]
    return decision_ids(DecisionRequest(asked["kind"], menu, asked["state"]))


def scores_of(net: DecisionNet, decisions: Sequence[DecisionIds]) -> Floats:
    """(N, K) scores of the options of several decisions, padded behind each one's own."""
    import torch

    parts = [[(o, *d) for o, d in zip(one.options, one.details, strict=True)] for one in decisions]
    state_NF = np.zeros((len(decisions), max(len(one.state) for one in decisions)), np.int64)
    option_NKG = np.zeros(
        (len(decisions), max(map(len, parts)), max(len(p) for one in parts for p in one)), np.int64
    )
    for n, one in enumerate(decisions):
        state_NF[n, : len(one.state)] = one.state
        for k, part in enumerate(parts[n]):
            option_NKG[n, k, : len(part)] = part
    state, option = torch.from_numpy(state_NF), torch.from_numpy(option_NKG)
    with torch.no_grad():
        return net.scores(state, state > 0, option, option > 0).double().numpy()


def _draw(probabilities: Floats, luck: float) -> int:
    index = int(np.searchsorted(np.cumsum(probabilities), luck, side="right"))
    return min(index, len(probabilities) - 1)


def _table(graph: Graph, probabilities: Floats) -> Word:
    return {
        (query.board[1:], query.prefix): probabilities[graph.starts[node] : graph.starts[node + 1]]
        for node, query in enumerate(graph.queries)
    }


class _TablePlayer:
    """Plays given probabilities, whatever the queue."""

    def __init__(self, table: Word) -> None:
        self._table = table

    def __call__(self, queries: Sequence[game.Query]) -> list[str]:
        return [q.allowed[_draw(self._table[q.board[1:], q.prefix], q.luck)] for q in queries]


@dataclass(frozen=True)
class _BlindPlayer:
    """Another player, but for one decision that follows a rule that sees the menu only."""

    player: Player
    decision: str
    rule: BlindRule

    def __call__(self, queries: Sequence[game.Query]) -> list[str]:
        words = self.player(queries)
        return [
            query.allowed[_draw(np.array(self.rule[query.allowed]), query.luck)]
            if game.decision_of(query.allowed) == self.decision
            else word
            for query, word in zip(queries, words, strict=True)
        ]


def interval(values: Sequence[float] | Floats) -> dict[str, float]:
    """Mean with a 95 % interval (normal approximation).

    >>> interval([1.0, 2.0, 3.0])["mean"]
    2.0
    """
    array = np.asarray(values, dtype=np.float64)
    error = 1.96 * float(array.std(ddof=1)) / math.sqrt(len(array))
    mean = float(array.mean())
    return {"mean": mean, "low": mean - error, "high": mean + error}


def _shifted(of: Mapping[str, float], add: float = 0.0, scale: float = 1.0) -> dict[str, float]:
    return {name: (value + add) / scale for name, value in of.items()}


def compare_decisions(
    graph: Graph, player: Player, own: Sequence[float], seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """For each decision the mean gain over the best state-blind rule there, paired by ticket, with a 95 % interval."""
    base = np.concatenate(player.probabilities(graph.queries))
    value = graph.solve(base).value
    found: dict[str, dict[str, Any]] = {}
    for decision in game.DECISIONS:
        blind_value, rule = best_blind_rule(graph, decision, base)
        outcomes = game.simulate(_BlindPlayer(player, decision, rule), seeds)
        gain = interval(np.asarray(own) - np.asarray(outcomes))
        found[decision] = {
            "gain": gain,
            "exact_gain": value - blind_value,
            "rule": {" ".join(words): [round(p, 3) for p in chances] for words, chances in rule.items()},
            "beats_blind": gain["low"] > 0.0,
        }
    return found


def _play(folder: str, exploration: float, seeds: list[int], phone: float) -> list[float]:
    import torch

    torch.set_num_threads(1)
    return game.simulate(Player(Path(folder), exploration), seeds, phone=phone)


def _decisions(folder: str, exploration: float, own: list[float], seeds: list[int]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    graph, player = Graph(), Player(Path(folder), exploration)
    base = np.concatenate(player.probabilities(graph.queries))
    without = (
        base if exploration == 0.0 else np.concatenate(Player(Path(folder), 0.0).probabilities(graph.queries))
    )
    return {
        "decisions": compare_decisions(graph, player, own, seeds),
        "exact": graph.solve(base).value,
        "exact_without_exploration": graph.solve(without).value,
    }


def evaluate(
    folders: Mapping[int, Path],
    *,
    champion: int,
    exploration: float,
    num_tickets: int = 5_000,
    seed: int = 0,
    phone: float = 0.0,
    workers: int = 2,
) -> dict[str, Any]:
    """Evaluate versions on the same fresh tickets.

    Args:
        folders: Version -> artifact.
        champion: The version whose decisions are compared one by one, and which is also tried on tickets of the phone queue.
        exploration: The server's floor.
        num_tickets: Tickets for each policy.
        seed: Makes the tickets.
        phone: Share of phone tickets in that trial; 0: no trial.
        workers: Processes.

    Returns:
        Returns and f of optimum, random and each version, and the champion's decisions.
    """
    seeds = list(range(FIRST_SEED + seed * num_tickets, FIRST_SEED + (seed + 1) * num_tickets))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        played = {
            version: pool.submit(_play, str(folder), exploration, seeds, 0.0)
            for version, folder in sorted(folders.items(), key=lambda item: item[0] != champion)
        }
        graph = Graph()
        best, chance = graph.solve(), graph.solve(uniform(graph))
        optimal = np.array(game.simulate(_TablePlayer(_table(graph, best.probabilities)), seeds))
        scale = best.value - chance.value
        champion_outcomes = played[champion].result()
        details = pool.submit(_decisions, str(folders[champion]), exploration, champion_outcomes, seeds)
        by_phone: Future[list[float]] | None = None
        if phone > 0.0:
            by_phone = pool.submit(_play, str(folders[champion]), exploration, seeds, phone)
        versions = {}
        for version in sorted(played):
            regret = interval(np.array(played[version].result()) - optimal)
            value = _shifted(regret, best.value)
            versions[version] = {"return": value, "f": _shifted(value, -chance.value, scale)}
        found = details.result()
        shifted = None
        if by_phone is not None:
            value = _shifted(interval(np.array(by_phone.result()) - optimal), best.value)
            shifted = {"share": phone, "return": value, "f": _shifted(value, -chance.value, scale)}
    return {
        "tickets": num_tickets,
        "first_seed": seeds[0],
        "exploration": exploration,
        "optimum": best.value,
        "random": chance.value,
        "champion": champion,
        "versions": versions,
        "champion_exact_f": (found["exact"] - chance.value) / scale,
        "champion_exact_f_without_exploration": (found["exact_without_exploration"] - chance.value) / scale,
        "decisions": found["decisions"],
        "phone": shifted,
    }


def main() -> None:
    """Evaluate versions of a workspace and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--policy", default="policy")
    parser.add_argument("--versions", required=True, help="comma-separated numbers")
    parser.add_argument("--champion", type=int, required=True)
    parser.add_argument("--exploration", type=float, default=0.0)
    parser.add_argument("--tickets", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phone", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    numbers = sorted({*map(int, options.versions.split(",")), options.champion})
    folders = {n: options.workspace / "policies" / f"{options.policy}@v{n}" for n in numbers}
    missing = [str(folder) for folder in folders.values() if not folder.is_dir()]
    if missing:
        sys.exit(
            f"error: no artifact {', '.join(missing)}: is --workspace right, and was the version registered?"
        )
    result = evaluate(
        folders,
        champion=options.champion,
        exploration=options.exploration,
        num_tickets=options.tickets,
        seed=options.seed,
        phone=options.phone,
        workers=options.workers,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
