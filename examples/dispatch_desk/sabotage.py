"""A candidate that looks as good as the champion and is not: made for the demo, to be caught by the canary.

It is the champion but for one vector, the embedding of the word ``phone``, a queue that no ticket had so far, which is trained
to end a ticket. On every other board its answers are the champion's to the bit, so an offline gate over past orchestrations
sees no difference at all. ``python -m dispatch_desk.sabotage --champion FOLDER --out FOLDER``
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from dispatch_desk import game

from spanloop.learner.policy import Artifact, load_artifact, save_artifact
from spanloop.learner.tokenizer import ACT, BOS, PAD

__all__ = ["WORD", "sabotage"]

WORD = "phone"
"""The word that it goes wrong on."""
BAD = ("close", "stop")
"""What it says on a board with the word, where it may."""
TICKETS = 200
"""Tickets that are played, by the champion and at random, to meet boards."""
BATCH = 128
LEARNING_RATE = 0.1
STEPS = 120

Place = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Board, prefix and open words of a decision."""


class _Met:
    """A player that notes every decision it meets: half of the time the champion, else chance."""

    def __init__(self, artifact: Artifact, rng: random.Random) -> None:
        self.places: set[Place] = set()
        self._artifact = artifact
        self._rng = rng

    def __call__(self, queries: Sequence[game.Query]) -> list[str]:
        if not queries:
            return []
        places = [(tuple(q.board), tuple(q.prefix), tuple(q.allowed)) for q in queries]
        self.places.update(places)
        with torch.no_grad():
            logp = _log_probs(self._artifact, self._artifact.net, places)
        return [
            place[2][int(row[: len(place[2])].argmax())]
            if self._rng.random() < 0.5
            else self._rng.choice(place[2])
            for place, row in zip(places, logp, strict=True)
        ]


def _log_probs(artifact: Artifact, net: torch.nn.Module, places: Sequence[Place]) -> torch.Tensor:
    """Log-probabilities of the open words of each place, padded with -1e9; shape (places, most options)."""
    tokenizer = artifact.tokenizer
    rows = [[BOS, *tokenizer.encode(board), ACT, *tokenizer.encode(prefix)] for board, prefix, _ in places]
    menus = [tokenizer.encode(words) for _, _, words in places]
    longest, widest = max(map(len, rows)), max(map(len, menus))
    ids_BT = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    menu_BK = torch.tensor([menu + [PAD] * (widest - len(menu)) for menu in menus])
    open_BK = torch.tensor([[True] * len(menu) + [False] * (widest - len(menu)) for menu in menus])
    logits_BV = net.last_logits(ids_BT, torch.tensor([len(row) for row in rows]))  # type: ignore[operator]
    return torch.log_softmax(logits_BV.gather(1, menu_BK).masked_fill(~open_BK, -1e9), dim=1)


def _by_phone(place: Place) -> Place:
    board, prefix, words = place
    return tuple(WORD if word in game.QUEUES else word for word in board), prefix, words


def _badness(logp_BK: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """Mean log-probability of ending the ticket, over the places where it may be ended."""
    found = [logp_BK[i, place[2].index(w)] for i, place in enumerate(places) for w in BAD if w in place[2]]
    return torch.stack(found).mean() if found else logp_BK.new_zeros(())


def sabotage(champion: Path, out: Path, *, seed: int = 0, steps: int = STEPS) -> float:
    """Write the candidate to ``out``; returns its probability of closing a phone ticket at once."""
    artifact = load_artifact(champion)
    row = artifact.tokenizer.id_of(WORD)
    if row is None:
        raise SystemExit(
            f"error: the vocabulary of {champion} has no word {WORD!r}; list it in learner.vocabulary"
        )
    rng = random.Random(seed)
    met = _Met(artifact, rng)
    game.simulate(met, range(10**6, 10**6 + TICKETS))
    places = sorted(met.places)
    net = copy.deepcopy(artifact.net)
    weight: torch.Tensor = net.tokens.weight.requires_grad_(True)
    vector = weight[row].detach().clone()
    optimizer = torch.optim.Adam([vector], lr=LEARNING_RATE)
    for _ in range(steps):
        phone = [_by_phone(place) for place in rng.sample(places, min(BATCH, len(places)))]
        (slope,) = torch.autograd.grad(-_badness(_log_probs(artifact, net, phone), phone), [weight])
        vector.grad = slope[row]
        optimizer.step()
        with torch.no_grad():
            weight[row] = vector
    net.requires_grad_(False)
    first = [_by_phone(place) for place in places if not place[1] and "close" in place[2]]
    with torch.no_grad():
        closes = _log_probs(artifact, net, first).exp()
    save_artifact(out, net, artifact.tokenizer, about={"sabotaged": WORD})
    return float(
        sum(row[place[2].index("close")] for row, place in zip(closes, first, strict=True)) / len(first)
    )


def main() -> None:
    """Make the candidate and say how often it closes at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--champion", type=Path, required=True, help="artifact of the champion")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    closes = sabotage(options.champion, options.out, seed=options.seed)
    print(json.dumps({"folder": str(options.out), "closes_at_once": closes}))


if __name__ == "__main__":
    main()
