"""A million corrupted OTLP requests through decoder, redaction and intake: no crash, no hang, no valid neighbour lost.

The mutations and what must survive each are in tests/otlp_fuzz.py; request n is made from seed n alone. With no failure
in N requests the 95 % upper bound on the failure rate is 3/N.
Run: make fuzz, or .venv/bin/python benchmarks/fuzz.py --requests 1000000 --first 0
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from _harness import peak_rss_mib, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from otlp_fuzz import HANG_S, attempt, intakes, outcome

FAILURES_MAX = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    both = intakes()
    seen: Counter[str] = Counter()
    failures: list[str] = []
    slowest = 0.0
    began = time.perf_counter()
    for seed in range(options.first, options.first + options.requests):
        tried = attempt(seed)
        at = time.thread_time()
        try:
            result = outcome(tried, both[seed % 2])
        except BaseException as exc:  # RecursionError and MemoryError too are failures
            if isinstance(exc, KeyboardInterrupt):
                raise
            result = "failed"
            failures.append(f"seed {seed} ({tried.kind}, json={tried.json}): {exc!r}"[:400])
            print(failures[-1], file=sys.stderr)
        slowest = max(slowest, time.thread_time() - at)
        seen[f"{'json' if tried.json else 'protobuf'} {tried.kind} {result}"] += 1
        if len(failures) >= FAILURES_MAX:
            break
        if seed % 50_000 == 49_999:
            print(f"{seed + 1 - options.first} requests, {len(failures)} failures", file=sys.stderr)
    total = seen.total()
    write(
        "fuzz",
        f".venv/bin/python benchmarks/fuzz.py --requests {options.requests} --first {options.first}",
        {
            "requests": total,
            "seeds": [options.first, options.first + total - 1],
            "failures": failures,
            "failure_rate_upper_95": round(3 / total, 8) if not failures else None,
            "slowest_cpu_s": round(slowest, 3),
            "hang_limit_cpu_s": HANG_S,
            "outcomes": dict(sorted(seen.items())),
            "seconds": round(time.perf_counter() - began, 1),
            "peak_rss_mib": peak_rss_mib(),
        },
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
