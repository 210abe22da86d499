"""A candidate that looks as good as the champion and is not: made for the demo, to be caught by the canary.

It has the champion's weights but for one row: the embedding of ``phone``, a queue word that no ticket had so far. On every board without the
word it acts exactly like the champion, so an offline gate over past orchestrations sees no difference; on a board with it, it closes the
ticket at once. ``python -m dispatch_desk.sabotage --champion FOLDER --out FOLDER``
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from dispatch_desk import game

from spanloop.learner.policy import Artifact, load_artifact, save_artifact
from spanloop.learner.tokenizer import ACT, BOS

__all__ = ["WORD", "sabotage"]

WORD = "phone"
"""The word whose embedding is changed."""
SCALE_MAX = 20.0
"""Largest norm that the changed row may have: it must not look absurd."""
ENOUGH = 0.02
"""Mean surprise (nats) at closing that is small enough."""


def _boards(count: int, seed: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [game.board(game.new_ticket(rng, phone=1.0).desk) for _ in range(count)]


def _close_at_once(artifact: Artifact, row_W: torch.Tensor, ids_BT: torch.Tensor, word: int) -> torch.Tensor:
    """Log-probability of closing at triage, for each board, with ``row_W`` as the word's embedding."""
    net, tokenizer = artifact.net, artifact.tokenizer
    weight = net.tokens.weight.detach().clone()
    weight[word] = row_W
    parameters = {**dict(net.named_parameters()), "tokens.weight": weight}
    hidden_BTW = torch.func.functional_call(
        _Hidden(net), {f"net.{k}": v for k, v in parameters.items()}, (ids_BT,)
    )
    logits_BV = net.head(hidden_BTW[:, -1])
    menu = tokenizer.encode(["close", "look", "spawn"])
    return torch.log_softmax(logits_BV[:, menu], dim=-1)[:, 0]


class _Hidden(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.net.hidden(ids_BT)  # type: ignore[operator]


def sabotage(champion: Path, out: Path, *, seed: int = 0, steps: int = 200) -> float:
    """Write the candidate to ``out``; returns its probability of closing a phone ticket at once."""
    artifact = load_artifact(champion)
    word = artifact.tokenizer.id_of(WORD)
    if word is None:
        raise SystemExit(
            f"error: the vocabulary of {champion} has no word {WORD!r}; list it in learner.vocabulary"
        )
    ids_BT = torch.tensor([[BOS, *artifact.tokenizer.encode(board), ACT] for board in _boards(96, seed)])
    row_W = artifact.net.tokens.weight[word].detach().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([row_W], lr=0.2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -_close_at_once(artifact, row_W, ids_BT, word).mean()
        if float(loss.detach()) < ENOUGH:
            break
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            row_W *= min(1.0, SCALE_MAX / float(row_W.norm()))
    with torch.no_grad():
        closes = float(_close_at_once(artifact, row_W, ids_BT, word).exp().mean())
        artifact.net.tokens.weight[word] = row_W
    save_artifact(out, artifact.net, artifact.tokenizer, about={"sabotaged": WORD})
    return closes


def main() -> None:
    """Make the candidate and say how often it closes at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--champion", type=Path, required=True, help="artifact of the champion")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        json.dumps(
            {
                "folder": str(options.out),
                "closes_at_once": sabotage(options.champion, options.out, seed=options.seed),
            }
        )
    )


if __name__ == "__main__":
    main()
