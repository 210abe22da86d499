"""The bad candidate of a decision policy: the champion, but for what its table of pairs says of the queue ``phone``, which no ticket had.

Where the queue is ``phone`` it ends the ticket; on every other ticket its answers are the champion's, up to entries of the table that
hashing lets others share, so that an offline gate over past orchestrations sees next to nothing.
``python -m dispatch_desk.sabotage_decisions --champion FOLDER --out FOLDER``
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from dispatch_desk import game
from dispatch_desk.evaluate import decision_of, scores_of

from spanloop.learner.decision_policy import load_artifact, pair_of

__all__ = ["WORD", "sabotage"]

WORD = "phone"
"""The queue that it goes wrong on."""
BAD = ("close", "stop")
"""What it says there, where it may."""
LOUD = 12.0
"""By how much scores are moved: enough to be nearly sure."""


def _first(queue: str) -> list[game.Query]:
    """Triage of every kind of new ticket of a queue."""
    hints = [(a, b, c) for a, b, c in itertools.product(game.HINTS, repeat=3)]
    desks = [
        game.Desk(queue, depth, checker, found)
        for found in hints
        for depth in ("shallow", "deep")
        for checker in ("junior", "senior")
    ]
    return [game.Query(tuple(game.board(d)), (), game.allowed(game.menu(d), ())) for d in desks]


def sabotage(champion: Path, out: Path) -> float:
    """Write the candidate to ``out``; returns its probability of closing a phone ticket at once."""
    net = copy.deepcopy(load_artifact(champion).net)
    phone, mail = _first(WORD), _first("mail")
    (fact,) = set(decision_of(phone[0])[0].state) - set(decision_of(mail[0])[0].state)
    with torch.no_grad():
        for query in (phone[0], game.Query(phone[0].board, (), ("stop", "again"))):
            decision, places = decision_of(query)
            for option, place in zip(decision.options, places, strict=True):
                bad = query.allowed[place] in BAD
                net.pairs.weight[pair_of(fact, option, net.config)] += LOUD if bad else -LOUD
    net.save(out, None, {"sabotaged": WORD})
    asked = [decision_of(query) for query in phone]
    closes = []
    for query, (decision, places), scores in zip(
        phone, asked, scores_of(net, [decision for decision, _ in asked]), strict=True
    ):
        weights = np.exp(scores[: len(decision.options)] - scores[: len(decision.options)].max())
        closes.append(weights[places.index(query.allowed.index("close"))] / weights.sum())
    return float(np.mean(closes))


def main() -> None:
    """Make the candidate and say how often it closes at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--champion", type=Path, required=True, help="artifact of the champion")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    options = parser.parse_args()
    closes = sabotage(options.champion, options.out)
    print(json.dumps({"folder": str(options.out), "closes_at_once": closes}))


if __name__ == "__main__":
    main()
