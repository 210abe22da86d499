"""Estimators that compare orchestrations with one another, against what the ledger does, on the same logs (METHODS 3.1 b, c, d, j, l).

    python benchmarks/credit_plugins.py [RUNS]

An estimator enters the ledger only with a benchmark that it wins. The world is G2 (``credit_worlds.Relay``): a chain of messages, each
spoilt with some chance, and a side message that changes nothing; 400 orchestrations a log, whose truth is known for every message that
was written. *tokens*: the log has token ids and menus, so that the ledger values each message with its online value model (COMA).
*texts*: it has no token ids, as behind somebody else's server; equal prefixes are still known, by their hash. Scored against the
truth: mean absolute error, Spearman, sign accuracy of the messages that matter. Written to benchmarks/results/credit_plugins.json.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
from _harness import write
from credit import Score
from credit_worlds import Relay

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import lessons
from spanloop.pipeline.credit.estimators.c3 import log_credits
from spanloop.pipeline.credit.estimators.groups import agent_wise, group_stats, rloo
from spanloop.pipeline.credit.estimators.hindsight import anchor_advantages, hindsight_credit
from spanloop.pipeline.credit.repeats import table_of
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.pipeline.signal import derive
from spanloop.schemas.canonical import MICRO, digest
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.orchestration import (
    Agent,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)
from spanloop.schemas.settings import load_settings

COUNT = 400
EVERY = 50
"""Orchestrations between two versions of the value model."""
SETTINGS = load_settings(flags={"pipeline": {"holdout": 0.0}}).pipeline
Rows = list[tuple[str, str, float]]


def prefixed(rows: Rows) -> Rows:
    """With all that was written before as the prefix, of the side message too: what a hash of its prompt tells."""
    said = [message for _, message, _ in rows]
    return [
        ("".join(f"{j}{m}" for j, m in enumerate(said[:k])) + f"|{k}", said[k], rows[k][2])
        for k in range(len(rows))
    ]


def content_of(name: str, rows: Rows, world: Relay, *, tokens: bool) -> OrchestrationContent:
    """One orchestration of a log: an agent that writes its messages one after the other."""
    calls, events = [], []
    said: list[int] = []
    for k, (_, message, _) in enumerate(rows):
        side = k == len(rows) - 1
        chance = 0.5 if side else world.chances[k]
        pair = (100 + 2 * k, 101 + 2 * k)
        second = message in ("bad", "right")
        shares = (1 - chance, chance)
        call = digest("call", name, k)
        fields = {}
        if tokens:
            fields = {
                "prompt_token_ids": (1, 10 + k, *said),
                "response_token_ids": (pair[second],),
                "logprobs": (math.log(shares[second]),),
                "menus": (tuple(MenuOption(t, math.log(p)) for t, p in zip(pair, shares, strict=True)),),
                "policy_version": "policy@v1",
                "harness": "h",
                "task_key": "relay",
            }
        calls.append(
            ModelCall(call, "root", (call[:16],), 2 * k, 2 * k + 1, model="m", response_id=call, **fields)
        )
        events.append(
            OrchestrationEvent(digest("event", name, k), "message", "root", 2 * k, 1.0, "r", (call[:16],), agent_id="root",
                               to="reader", call_id=call)
        )  # fmt: skip
        said.append(pair[second])
    return OrchestrationContent(
        orchestration_id=name, tenant="t", trace_ids=(name,), events=tuple(events), edges=(),
        agents=(Agent("root", "root", "root", ended_ns=2 * len(rows)),), calls=tuple(calls), tokens=TokenUsage(),
        started_ns=0, ended_ns=2 * len(rows),
    )  # fmt: skip


def by_ledger(jobs: list[Rows], world: Relay, *, tokens: bool, table: bool = False) -> list[float]:
    """Credit of each message in the ledger, with the value model that these orchestrations taught."""
    contents = [content_of(digest("job", i), rows, world, tokens=tokens) for i, rows in enumerate(jobs)]
    trainer = ValueTrainer.fresh(2048)
    examples = [
        Example(c.orchestration_id, tuple(lessons(cast_of(c))), round(rows[0][2] * MICRO))
        for c, rows in zip(contents, jobs, strict=True)
    ]
    for end in range(EVERY, len(examples) + 1, EVERY):
        trainer.update(examples[:end])
    model = ValueModel.from_dict(trainer.model.to_dict())
    if table:
        model.table = table_of(([lesson.state for lesson in e.lessons], e.reward) for e in examples)
    found = []
    for content, rows in zip(contents, jobs, strict=True):
        outcome = FeedbackReceived(
            feedback_id="f", target_kind="trace", target_id=content.trace_ids[0], value=rows[0][2], scorer="s"
        )
        signal = derive(
            content,
            [outcome],
            complete=True,
            settings=SETTINGS,
            version="value@v1-00000000",
            model=model,
        )
        assert signal.credit is not None
        unit = "token" if tokens else "message"
        own = {n.subject.partition("/")[0]: n.credit for n in signal.credit.nodes if n.unit in (unit, "turn")}
        found += [own.get(call.id, 0) / MICRO for call in content.calls]
    return found


def by_groups(jobs: list[Rows]) -> dict[str, list[float]]:
    """Credit of each message by what other orchestrations got."""
    flat = [row for rows in jobs for row in rows]
    outcomes = [round(rows[0][2] * MICRO) for rows in jobs]
    group = group_stats(outcomes)
    at_prefix = log_credits(flat)
    anchored = anchor_advantages(
        [
            [(prefix, rows[0][2] if k == len(rows) - 1 else 0.0) for k, (prefix, _, _) in enumerate(rows)]
            for rows in jobs
        ],
        1.0,
    )
    agents = [(k, outcome) for rows, outcome in zip(jobs, outcomes, strict=True) for k in range(len(rows))]
    return {
        "rloo": [
            rloo(outcome, group).value for rows, outcome in zip(jobs, outcomes, strict=True) for _ in rows
        ],
        "dr_mas": [a.value * group.deviation() for a in agent_wise(agents)],
        "gigpo": [a for steps in anchored for a in steps],
        "hindsight": by_hindsight(flat),
        "c3_log": [at_prefix[prefix, message].value for prefix, message, _ in flat],
    }


def by_hindsight(flat: Rows) -> list[float]:
    """HCA with counted propensities and hindsight propensities at each prefix."""
    times: dict[tuple, int] = {}
    for prefix, message, outcome in flat:
        for key in ((prefix,), (prefix, message), (prefix, None, outcome), (prefix, message, outcome)):
            times[key] = times.get(key, 0) + 1
    credit = {}
    for prefix, message in {(p, m) for p, m, _ in flat}:
        share = times[prefix, message] / times[(prefix,)]
        seen = [
            (times[prefix, message, z] / times[prefix, None, z], z)
            for z in (0.0, 1.0)
            for _ in range(times.get((prefix, message, z), 0))
        ]
        credit[prefix, message] = hindsight_credit(share, seen)
    return [credit[prefix, message] for prefix, message, _ in flat]


def truths(jobs: list[Rows], world: Relay) -> list[float]:
    """Advantage of each message against its author's policy; 0 behind a spoilt one and beside the chain."""
    known = world.truth()
    return [
        0.0 if k == len(world.chances) or "bad" in prefix else known[k, message]
        for rows in jobs
        for k, (prefix, message, _) in enumerate(rows)
    ]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    began = time.process_time()
    world = Relay()
    scores: dict[str, Score] = {}
    for run in range(runs):
        log = world.log(np.random.default_rng(run), COUNT)
        size = len(world.chances) + 1
        jobs = [prefixed(log[at : at + size]) for at in range(0, len(log), size)]
        truth = truths(jobs, world)
        found = {
            "ledger_tokens": by_ledger(jobs, world, tokens=True),
            "ledger_tokens_table": by_ledger(jobs, world, tokens=True, table=True),
            "ledger_texts": by_ledger(jobs, world, tokens=False),
            **by_groups(jobs),
        }
        for name, credit in found.items():
            scores.setdefault(name, Score()).add(credit, truth)
    keys = ("mae", "mean_error", "spearman", "sign_accuracy")
    figures: dict = {"runs": runs, "orchestrations": COUNT}
    figures |= {name: {key: score.figures().get(key) for key in keys} for name, score in scores.items()}
    figures["cpu_seconds"] = round(time.process_time() - began, 1)
    write("credit_plugins", f"python benchmarks/credit_plugins.py {runs}", figures)


if __name__ == "__main__":
    main()
