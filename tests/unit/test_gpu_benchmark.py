"""The GPU script runs, on the CPU; where there is no GPU it says so. On a machine with one it is run there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=480, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_dry_run_gives_the_same_numbers_both_ways() -> None:
    done = run("--device", "cpu", "--size", "tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    figures = ast.literal_eval(done.stdout.strip())
    assert figures["float32"]["gradient_from_cpu_float32"] < 1e-6
    assert figures["float32"]["gradient_packed_from_padded"] < 1e-4
    for dtype in ("float32", "bfloat16"):
        assert figures[dtype]["steps_kept"] == 1
        assert figures[dtype]["push"]["probe_difference"] == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("torch sees no CUDA device here: nothing was measured")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(500)
def test_on_the_gpu() -> None:
    done = run("--device", "cuda", "--size", "tiny")
    assert done.returncode == 0, done.stderr[-2000:]
