"""The learner's step and the push on a CUDA device: speed, memory, and the same numbers as on the CPU. Needs no network.

The model is a Llama of random weights, made on the spot, with LoRA. Measured: a step of eight-turn orchestrations from padded rows
and from prefix trees (``packing``), in float32 and bfloat16; the largest difference of log-probabilities and gradients
between CUDA and CPU; one ``Updater`` batch; and a push as far as it is the learner's: the version is written, read, verified
and probed. vLLM's own loading is in ``benchmarks/pushes.py``. On an H200-class device it takes about two minutes.
Run: .venv/bin/python benchmarks/gpu.py [--size small|tiny] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import write
from packing import VOCABULARY, batch_of, conversations, stepper

from spanloop.learner import hf_base
from spanloop.learner.batches import Call, Decision, Rollout
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.model import load_artifact, save_artifact
from spanloop.learner.update import Updater, hyper_of
from spanloop.schemas.settings import Settings, load_settings

SIZES = {"tiny": (64, 2, 2), "small": (1024, 16, 16)}
"""Width, layers, heads."""
REPEATS = {"tiny": 1, "small": 5}
ROWS = {"tiny": 4, "small": 32}


def model_in(folder: Path, size: str) -> Path:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def settings_of(model: Path, device: str, dtype: str) -> Settings:
    section = {
        "model": str(model), "max_length": 1024, "device": device, "dtype": dtype, "epochs": 1, "learning_rate": 1e-4,
        "microbatch_tokens": 16_384, "minibatch_orchestrations": 4,
    }  # fmt: skip
    return load_settings(flags={"learner": section})


def policy_on(model: Path, device: str, dtype: str) -> HfPolicy:
    """A version on a device. The process keeps one base for a shape: a former device's is forgotten first."""
    hf_base._BASES.clear()
    gc.collect()
    base = hf_base.base_of_settings(settings_of(model, device, dtype).learner)
    generator = torch.Generator().manual_seed(1)
    tensors = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in base.initial(0).items()}
    return HfPolicy(base, tensors, trainable=True)


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    def once() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        begun = time.monotonic()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.monotonic() - begun

    once()
    return statistics.median(once() for _ in range(repeats))


def outcome(
    net: HfPolicy, rows: list[list[int]], starts: list[int], *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, gradients), on the CPU."""
    batch = batch_of(rows, starts, packed=packed)
    with torch.no_grad():
        logp_NK, _ = net.decide(batch)
    stepper(net, batch, 16_384)()
    gradients = [p.grad.flatten().cpu() for p in net.trainable().values() if p.grad is not None]
    return logp_NK[:, 0], torch.cat(gradients)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(f"{float((one - other).norm() / other.norm()):.2e}")


def rollouts_of(rows: list[list[int]], starts: list[int]) -> list[Rollout]:
    """One a row, its answer's tokens as decisions over the whole vocabulary."""
    rng = np.random.default_rng(0)
    found = []
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        decisions = tuple(
            Decision(t - 1, (), 0, -9.0, float(advantage))
            for t, advantage in zip(range(start, len(row)), rng.normal(size=len(row) - start), strict=True)
        )
        found.append(Rollout(f"o{number}", 1, f"g{number}", 1.0, 0.0, (0,), (Call(tuple(row), decisions),)))
    return found


def push(net: HfPolicy, folder: Path) -> dict[str, float]:
    """Write a version, read it back as the promoter does, and compare what both say of a probe."""
    prompts = [list(range(1, 65)), list(range(200, 264))]
    begun = time.monotonic()
    sha256 = save_artifact(folder, net, None, about={"version": 1})
    saved = time.monotonic()
    found = load_artifact(folder, sha256=sha256).net
    probes = zip(net.probe(prompts), found.probe(prompts), strict=True)
    difference = max(abs(a - b) for mine, theirs in probes for a, b in zip(mine, theirs, strict=True))
    return {"save_s": round(saved - begun, 3), "load_and_probe_s": round(time.monotonic() - saved, 3), "probe_difference": difference}  # fmt: skip


def measure(model: Path, device: str, folder: Path, size: str) -> dict[str, Any]:
    rows, starts = (part[: ROWS[size]] for part in conversations(np.random.default_rng(0)))
    tokens = sum(map(len, rows))
    figures: dict[str, Any] = {"tokens_of_rows": tokens}
    few, few_starts = rows[:8], starts[:8]
    cpu = outcome(policy_on(model, "cpu", "float32"), few, few_starts, packed=True)
    for dtype in ("float32", "bfloat16"):
        net = policy_on(model, device, dtype)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        speed = {}
        for way, packed in (("padded", False), ("packed", True)):
            step = stepper(net, batch_of(rows, starts, packed=packed), 16_384)
            speed[way] = round(tokens / seconds(step, device, REPEATS[size]))
        mine = outcome(net, few, few_starts, packed=True)
        padded = outcome(net, few, few_starts, packed=False)
        updater = Updater(net)
        hyper = hyper_of(settings_of(model, device, dtype))
        begun = time.monotonic()
        metrics = updater.train(rollouts_of(few, few_starts), hyper, 1)
        figures[dtype] = {
            "tokens_per_s": speed, "packed_over_padded": round(speed["packed"] / speed["padded"], 2),
            "log_probs_from_cpu_float32": far(mine[0], cpu[0]), "gradient_from_cpu_float32": far(mine[1], cpu[1]),
            "gradient_packed_from_padded": far(mine[1], padded[1]), "update_s": round(time.monotonic() - begun, 3),
            "steps_kept": updater.steps, "gradient_norm": round(metrics["gradient_norm"], 4),
            "push": push(updater.net, folder / dtype),
            "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20) if device != "cpu" else None,
        }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cpu: a dry run, which writes no result")
    parser.add_argument("--size", choices=SIZES, default="small")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(
            "torch sees no CUDA device here: nothing was measured (--device cpu --size tiny is a dry run)"
        )
    with tempfile.TemporaryDirectory() as name:
        model = model_in(Path(name) / "model", options.size)
        figures: dict[str, Any] = {
            "model": dict(zip(("width", "layers", "heads"), SIZES[options.size], strict=True))
        }
        figures |= measure(model, options.device, Path(name), options.size)
    if options.device == "cpu":
        print(figures)
        return
    figures["gpu"] = torch.cuda.get_device_name()
    write("gpu", f".venv/bin/python {' '.join(['benchmarks/gpu.py', *sys.argv[1:]])}", figures)


if __name__ == "__main__":
    main()
