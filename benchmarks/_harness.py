"""What every benchmark shares: where results go and what they say about the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict:
    """Cores, memory, CPU and Python of this machine."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    memory = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "cpu": cpu,
        "python": platform.python_version(),
    }


def write(name: str, command: str, figures: dict) -> None:
    """Print ``figures`` and write benchmarks/results/NAME.json with commit, date and machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    result = {
        "name": name,
        "command": command,
        "figures": figures,
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
    }
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    print(f"written to {path.relative_to(ROOT)}")


def peak_rss_mib() -> float:
    """Peak resident memory of this process so far, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
