"""Accuracy of ``spanloop explain failure`` on failed multi-agent logs with labelled culprits (Who&When).

    python benchmarks/attribution.py FOLDER [--repeats N] [--weights FILE]

FOLDER holds ``Algorithm-Generated/*.json`` and ``Hand-Crafted/*.json``. The logs go through the product's own importer, assembly
and features; only this script reads the labels. Nested cross-validation by question: the outer folds are never seen while
features and penalties are chosen and weights fitted; the choice is made by inner folds of the training part alone. Baselines
are computed in the same run. Repeats shuffle the folds; mean and range over them are given, with Wilson's interval (95 %) of
the mean.

--weights fits on all logs, with what the outer folds chose most often, and writes them with their provenance. No text of a log is
printed or written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from _harness import write

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.attribution.features import FEATURES, STRUCTURE, Table, table_of
from spanloop.pipeline.attribution.model import Model, by_agent, probabilities
from spanloop.pipeline.attribution.steps import Step, steps_of
from spanloop.pipeline.attribution.texts import words_of
from spanloop.pipeline.attribution.training import Labelled, fit
from spanloop.pipeline.formats.reading import read_files

OUTER, INNER = 10, 5
PENALTIES = (0.003, 0.01, 0.03, 0.1)
AGENT_SHARES = (0.0, 0.5)
COLUMNS = {"structure": STRUCTURE, "all": FEATURES}
NEAR = (0, 1, 3)
Choice = tuple[str, float, float]
"""Columns, penalty, agent share."""


class Log(msgspec.Struct, frozen=True):
    """One labelled log as the product sees it."""

    kind: str
    question: str
    steps: tuple[Step, ...]
    table: Table
    step: int
    agent: str

    def labelled(self) -> Labelled:
        return Labelled(self.table, self.step, self.agent)


def load(folder: Path) -> list[Log]:
    """All logs of the folder, through importer and assembly."""
    found: list[Log] = []
    for kind in ("Algorithm-Generated", "Hand-Crafted"):
        for path in sorted((folder / kind).glob("*.json"), key=lambda p: (len(p.stem), p.stem)):
            label = json.loads(path.read_text(encoding="utf-8"))
            spans = [span for part in read_files(path) for span in part.read.spans]
            (content,) = assemble_spans(spans, "benchmark")
            steps = steps_of(content, {span.span_id: words_of(span) for span in spans})
            if len(steps) != len(label["history"]):
                raise SystemExit(f"{path}: {len(steps)} steps of {len(label['history'])} turns")
            found.append(
                Log(kind, label["question_ID"], steps, table_of(steps), int(label["mistake_step"]), label["mistake_agent"])
            )  # fmt: skip
    return found


def folds(logs: Sequence[Log], parts: int, seed: int) -> list[list[int]]:
    """Indices in ``parts`` folds; one question is in one fold, both kinds are spread evenly."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, log in enumerate(logs):
        groups.setdefault((log.kind, log.question), []).append(i)
    rng = random.Random(seed)
    order = sorted(groups)
    rng.shuffle(order)
    order.sort(key=lambda key: key[0])
    made: list[list[int]] = [[] for _ in range(parts)]
    place = {}
    for key in order:
        part = place.setdefault(key[1], len(place) % parts)
        made[part] += groups[key]
    return made


def weights_of(logs: Sequence[Log], choice: Choice) -> dict[str, float]:
    """Weights fitted on ``logs``."""
    columns = COLUMNS[choice[0]]
    fitted = fit([log.labelled() for log in logs], columns, penalty=choice[1], agent_share=choice[2])
    return dict(zip(columns, map(float, fitted), strict=True))


def choose(logs: Sequence[Log], seed: int, columns: Sequence[str] = tuple(COLUMNS)) -> Choice:
    """The choice with the best log-likelihood of step and agent labels on inner folds."""
    inner = folds(logs, INNER, seed)
    best: tuple[float, Choice] | None = None
    for choice in [(c, p, a) for c in columns for p in PENALTIES for a in AGENT_SHARES]:
        score = 0.0
        for part in inner:
            held = set(part)
            weights = weights_of([log for i, log in enumerate(logs) if i not in held], choice)
            score += sum(likelihood(logs[i], weights) for i in part)
        if best is None or score > best[0]:
            best = (score, choice)
    assert best is not None
    return best[1]


def likelihood(log: Log, weights: dict[str, float]) -> float:
    chances = probabilities(log.table, weights)
    step = sum(p for s, p in zip(log.table.steps, chances, strict=True) if s.index == log.step)
    agent = sum(p for s, p in zip(log.table.steps, chances, strict=True) if s.agent == log.agent)
    return math.log(max(step, 1e-6)) + math.log(max(agent, 1e-6))


def answer(log: Log, weights: dict[str, float]) -> tuple[str, int]:
    """(agent, step) that the weights blame."""
    chances = probabilities(log.table, weights)
    agents = by_agent([step.agent for step in log.table.steps], chances)
    place = max(range(len(chances)), key=lambda i: (chances[i], -i))
    return next(iter(agents)), log.table.steps[place].index


def nested(
    logs: Sequence[Log], seed: int, columns: Sequence[str] = tuple(COLUMNS)
) -> tuple[list[tuple[str, int]], Counter[Choice]]:
    """Answer for each log by weights that have not seen it, and what was chosen how often."""
    answers: dict[int, tuple[str, int]] = {}
    chosen: Counter[Choice] = Counter()
    for part in folds(logs, OUTER, seed):
        held = set(part)
        rest = [log for i, log in enumerate(logs) if i not in held]
        choice = choose(rest, seed + 1, columns)
        chosen[choice] += 1
        weights = weights_of(rest, choice)
        answers |= {i: answer(logs[i], weights) for i in part}
    return [answers[i] for i in range(len(logs))], chosen


def position_prior(logs: Sequence[Log], seed: int) -> list[tuple[str, int]]:
    """Cross-validated: the commonest labelled position of the training logs of the same kind."""
    answers: dict[int, tuple[str, int]] = {}
    for part in folds(logs, OUTER, seed):
        held = set(part)
        for i in part:
            seen = Counter(
                log.step for j, log in enumerate(logs) if j not in held and log.kind == logs[i].kind
            )
            step = min(seen, key=lambda s: (-seen[s], s))
            step = min(step, len(logs[i].steps) - 1)
            answers[i] = (logs[i].steps[step].agent, step)
    return [answers[i] for i in range(len(logs))]


def last_speaker(log: Log) -> tuple[str, int]:
    return log.table.steps[-1].agent, log.table.steps[-1].index


def most_active(log: Log) -> tuple[str, int]:
    turns = Counter(step.agent for step in log.table.steps)
    agent = max(turns, key=lambda name: turns[name])
    return agent, next(step.index for step in log.table.steps if step.agent == agent)


def random_step(log: Log) -> tuple[float, list[float]]:
    """Expected agent and step accuracy of a step drawn evenly."""
    steps = log.table.steps
    return (
        sum(step.agent == log.agent for step in steps) / len(steps),
        [sum(abs(step.index - log.step) <= k for step in steps) / len(steps) for k in NEAR],
    )


def over(runs: Sequence[dict]) -> dict:
    """Mean and range of one accuracy over shuffles of the folds, and the interval of the mean."""
    found = [run["hits"] / run["of"] for run in runs]
    mean, count = statistics.mean(found), runs[0]["of"]
    return {
        "mean": round(mean, 3),
        "range": [round(min(found), 3), round(max(found), 3)],
        "wilson95": wilson(mean * count, count),
    }


def wilson(hits: float, count: int) -> list[float]:
    """95 % interval of a proportion."""
    z, p = 1.96, hits / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return [round(max(0.0, middle - half), 3), round(min(1.0, middle + half), 3)]


def scored(logs: Sequence[Log], answers: Sequence[tuple[str, int]], kind: str) -> dict:
    """Accuracies of ``answers`` on the logs of ``kind``."""
    own = [(log, told) for log, told in zip(logs, answers, strict=True) if log.kind == kind]
    counts = {"agent": sum(told[0] == log.agent for log, told in own)}
    counts |= {f"step_{k}": sum(abs(told[1] - log.step) <= k for log, told in own) for k in NEAR}
    return {
        name: {"hits": hits, "of": len(own), "accuracy": round(hits / len(own), 3), "wilson95": wilson(hits, len(own))}
        for name, hits in counts.items()
    }  # fmt: skip


def report(logs: Sequence[Log], repeats: int) -> tuple[dict, Choice]:
    """All figures, and what the folds chose most often."""
    runs = [nested(logs, 100 * seed) for seed in range(repeats)]
    blind, _ = nested(logs, 0, ("structure",))
    simple: dict[str, Callable[[Log], tuple[str, int]]] = {
        "last_speaker": last_speaker,
        "most_active": most_active,
    }
    figures: dict = {}
    for kind in dict.fromkeys(log.kind for log in logs):
        own = [log for log in logs if log.kind == kind]
        drawn = [random_step(log) for log in own]
        ours = [scored(logs, answers, kind) for answers, _ in runs]
        figures[kind] = {
            "logs": len(own),
            "label_names_no_speaker_of_that_step": sum(
                not any(s.index == log.step and s.agent == log.agent for s in log.table.steps) for log in own
            ),
            "nested_cv": ours[0],
            "over_repeats": {name: over([run[name] for run in ours]) for name in ours[0]},
            "nested_cv_without_words": scored(logs, blind, kind),
            "baselines": {
                **{name: scored(logs, [how(log) for log in logs], kind) for name, how in simple.items()},
                "position_prior_cv": scored(logs, position_prior(logs, 0), kind),
                "random_step_expected": {
                    "agent": round(statistics.mean(agent for agent, _ in drawn), 3),
                    **{f"step_{k}": round(statistics.mean(near[n] for _, near in drawn), 3) for n, k in enumerate(NEAR)},
                },
            },
        }  # fmt: skip
    total = Counter[Choice]()
    for _, chosen in runs:
        total.update(chosen)
    figures["chosen"] = {f"{c} penalty={p} agent_share={a}": n for (c, p, a), n in total.most_common()}
    figures["protocol"] = (
        f"nested cross-validation by question, {OUTER} outer and {INNER} inner folds, {repeats} repeats"
    )
    return figures, total.most_common(1)[0][0]


def final_model(logs: Sequence[Log], figures: dict, usual: Choice) -> Model:
    """Weights of all logs: with ``usual``, and with the inner choice among those that need no words."""
    chosen = {"words": usual, "structure": choose(logs, 1, ("structure",))}
    fitted = {
        name: {feature: round(weight, 4) for feature, weight in weights_of(logs, choice).items()}
        for name, choice in chosen.items()
    }
    labels = sorted((log.kind, log.question, log.step, log.agent) for log in logs)
    kinds = [kind for kind in figures if "nested_cv" in figures[kind]]
    return Model(
        version="attribution@1",
        words=fitted["words"],
        structure=fitted["structure"],
        provenance={
            "data": "Who&When, ag2ai/Agents_Failure_Attribution at f4d2b6da (MIT): the odd-numbered half",
            "logs": Counter(log.kind for log in logs),
            "labels_sha256": hashlib.sha256(json.dumps(labels).encode()).hexdigest(),
            "choice": {name: {"penalty": c[1], "agent_share": c[2]} for name, c in chosen.items()},
            "protocol": figures["protocol"],
            "accuracy_without_words": {kind: {name: {"mean": own[name]["accuracy"], "wilson95": own[name]["wilson95"]}
                                              for name in ("agent", "step_0", "step_3")}
                                       for kind in kinds for own in [figures[kind]["nested_cv_without_words"]]},
            "accuracy": {kind: {name: {"mean": figures[kind]["over_repeats"][name]["mean"],
                                       "wilson95": figures[kind]["over_repeats"][name]["wilson95"]}
                                for name in ("agent", "step_0", "step_3")} for kind in kinds},
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--weights", type=Path, help="Fit on all logs and write the weights here.")
    given = parser.parse_args()
    logs = load(given.folder)
    figures, usual = report(logs, given.repeats)
    if given.weights:
        model = msgspec.json.encode(final_model(logs, figures, usual))
        given.weights.write_bytes(msgspec.json.format(model, indent=1) + b"\n")
    write("attribution", f"python benchmarks/attribution.py FOLDER --repeats {given.repeats}", figures)


if __name__ == "__main__":
    main()
