"""Tokens a second through the learner: the batches of a finished demo are trained again from its log, on one thread.

Tokens are prompt and response tokens of the rows, counted once an epoch. Needs a workspace of `make demo`.
Run: .venv/bin/python benchmarks/learner.py --workspace demo-out/workspace
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

from _harness import ROOT, peak_rss_mib, write

from spanloop.learner.history import read_policies
from spanloop.learner.policy import load_artifact
from spanloop.learner.promotion import fold
from spanloop.learner.provenance import lessons_of, policy_config
from spanloop.learner.training import Training, exact_numerics, hyper_of_batch
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.events import BatchCommitted

BATCHES = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, default=ROOT / "demo-out" / "workspace")
    options = parser.parse_args()
    if not (options.workspace / "spanloop.db").exists():
        sys.exit(f"no workspace {options.workspace}: run `make demo` first, or name one with --workspace")
    with closing(SqliteLog(options.workspace / "spanloop.db")) as log:
        events = read_policies(log, "default", "policy")
        state = fold(events)
        config = policy_config(options.workspace, state)
        batches = [e for e, _ in events if isinstance(e, BatchCommitted)][:BATCHES]
        tokens, orchestrations = 0, 0
        for committed, rollouts, _ in lessons_of(log, config, tenant="default", policy="policy"):
            if committed.batch > len(batches):
                break
            orchestrations += len(rollouts)
            tokens += (
                sum(len(call.ids) for rollout in rollouts for call in rollout.calls)
                * hyper_of_batch(committed).epochs
            )
        training = Training(config, load_artifact(options.workspace / "policies" / "policy@v0").net, None)
        with exact_numerics():
            begun, cpu = time.perf_counter(), time.process_time()
            training.resume(log, state, batches, "default")
            elapsed, used = time.perf_counter() - begun, time.process_time() - cpu
    write(
        "learner",
        ".venv/bin/python benchmarks/learner.py --workspace demo-out/workspace",
        {
            "updates": len(batches),
            "orchestrations": orchestrations,
            "tokens": tokens,
            "tokens_per_s": round(tokens / elapsed),
            "cpu_s_per_update": round(used / len(batches), 3),
            "peak_rss_mib": peak_rss_mib(),
        },
    )


if __name__ == "__main__":
    main()
