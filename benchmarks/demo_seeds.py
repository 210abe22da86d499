"""The demo on several seeds: f of champion and last candidate, each decision, promotions, the bad candidate, rates, memory.

Each run is `spanloop demo --seed N`, about six minutes. Finished runs in OUT/seed-N are used again with --reuse.
Run: .venv/bin/python benchmarks/demo_seeds.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from _harness import ROOT, percentile, write

from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.events import BatchCommitted, CandidateRegistered, RoutingChanged, decode


def from_log(workspace: Path, seconds: float) -> dict:
    """Decisions a second, and seconds from the outcome that completed a batch to its version being champion for all."""
    with closing(SqliteLog(workspace / "spanloop.db")) as log:
        feedback = {}
        for record in scan(log, [topics.FEEDBACK]):
            feedback[record.key.rpartition("/")[2]] = record.appended_ns
        trace_of = {}
        for record in scan(log, [topics.ORCHESTRATIONS]):
            event = decode(record.value)
            if event.content is not None:
                trace_of[event.orchestration_id] = min(event.content.trace_ids)
        decisions, outcome_at = 0, {}
        for record in scan(log, [topics.SAMPLES]):
            event = decode(record.value)
            decisions += sum(len(menu) > 1 for row in event.rows for menu in row.menu_ids)
            outcome_at[record.offset] = feedback.get(
                trace_of.get(event.orchestration_id, ""), record.appended_ns
            )
        batches, batch_of, served = {}, {}, []
        champion = 0
        for record in scan(log, [topics.POLICIES]):
            event = decode(record.value)
            if isinstance(event, BatchCommitted):
                batches[event.batch] = event.to_offset
            elif isinstance(event, CandidateRegistered) and not event.injected:
                batch_of[event.version] = event.batch
            elif isinstance(event, RoutingChanged) and event.champion != champion:
                champion = event.champion
                if champion in batch_of and batches.get(batch_of[champion]) in outcome_at:
                    served.append((record.appended_ns - outcome_at[batches[batch_of[champion]]]) / 1e9)
    return {
        "decisions_per_s": round(decisions / seconds, 1),
        "feedback_to_champion_s": [round(s, 1) for s in served],
        "feedback_to_champion_median_s": round(percentile(served, 0.5), 1) if served else None,
    }


def figures_of(folder: Path) -> dict:
    """The figures of one finished run."""
    results = json.loads((folder / "results.json").read_text())
    versions = results["evaluation"]["versions"]
    champion, last = str(results["champion"]["version"]), str(results["last_candidate"]["version"])
    return {
        "seed": results["seed"],
        "champion": int(champion),
        "champion_f": versions[champion]["f"],
        "last_candidate": int(last),
        "last_candidate_f": versions[last]["f"],
        "first_policy_f": versions["0"]["f"],
        "decisions": {
            n: {"gain": d["gain"], "beats_blind": d["beats_blind"]}
            for n, d in results["evaluation"]["decisions"].items()
        },
        "fresh_tickets": results["evaluation"]["tickets"],
        "promotions": sum(p["kind"] == "promotion" for p in results["promotions"]) - 1,
        "bad_candidate": results["injection"] and results["injection"]["outcome"],
        "gating_cost": results["gating_cost"],
        "tickets": results["totals"].get("tickets"),
        "tickets_per_s": round(results["totals"]["tickets_per_s"], 1),
        "spans_per_s": round(results["totals"]["spans_per_s"], 1),
        "peak_memory_mib": results["memory_mib"]["sum"],
        "total_s": results["durations"]["total_s"],
        **from_log(folder / "workspace", results["durations"]["live_s"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out" / "seeds")
    parser.add_argument("--reuse", action="store_true")
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        folder = options.out / f"seed-{seed}"
        if not (options.reuse and (folder / "results.json").exists()):
            command = [
                sys.executable,
                "-m",
                "spanloop.schemas.cli",
                "demo",
                "--plain",
                "--seed",
                str(seed),
                "--out",
                str(folder),
            ]
            subprocess.run(command, check=True)
        runs.append(figures_of(folder))
        print(json.dumps({k: v for k, v in runs[-1].items() if k != "decisions"}))
    means = [run["champion_f"]["mean"] for run in runs]
    write(
        "demo_seeds",
        f".venv/bin/python benchmarks/demo_seeds.py --seeds {options.seeds}",
        {
            "champion_f_mean": round(statistics.mean(means), 4),
            "champion_f_min": round(min(means), 4),
            "every_champion_at_least_0.8": min(means) >= 0.8,
            "every_decision_beats_blind": all(
                d["beats_blind"] for run in runs for d in run["decisions"].values()
            ),
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
