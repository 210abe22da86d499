"""Prefix-tree packing against padded rows and TRL's packing: tokens a second of a training step on eight-turn orchestrations.

Each orchestration has eight turns; a turn's prompt is the whole conversation so far. Tokens are prompt and response tokens of the
rows, counted once each, so all ways count the same. The model is a Llama of random weights with LoRA; one thread. TRL runs in
an environment of its own (--peer PYTHON, with trl, peft and datasets installed) on the same weights and rows: rows packed by its
`pack_dataset` (bfd) with restarting positions, from which transformers makes the block mask.
Run: .venv/bin/python benchmarks/packing.py [--peer ENV/bin/python]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import peak_rss_mib, write

from spanloop.learner.hf_base import base_of_settings
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.model import TensorBatch
from spanloop.learner.packing import pack
from spanloop.learner.update import exact_numerics
from spanloop.schemas.settings import load_settings

VOCABULARY, WIDTH, LAYERS, HEADS = 8192, 256, 6, 4
ORCHESTRATIONS, TURNS, SYSTEM, TURN, ANSWER = 4, 8, 128, 64, 32
REPEATS = 5
PEER = """
import json, sys, time, torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.data_utils import pack_dataset
job = json.load(open(sys.argv[1]))
torch.set_num_threads(1); torch.set_flush_denormal(True)
model = AutoModelForCausalLM.from_pretrained(job["model"], local_files_only=True, attn_implementation="sdpa")
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=job["targets"], task_type="CAUSAL_LM")).eval()
data = Dataset.from_dict({"input_ids": job["rows"], "completion_mask": job["masks"]})
longest = max(map(len, job["rows"]))
packed = pack_dataset(data, seq_length=longest, strategy="bfd").with_format(None)
def step():
    model.zero_grad(); total = 0.0
    for row in packed:
        ids = torch.tensor(row["input_ids"])[None]
        lengths = row["seq_lengths"]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        mask = torch.tensor(row["completion_mask"], dtype=torch.bool)
        hidden = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        at = mask.nonzero()[:, 0]
        logits = model.get_output_embeddings()(hidden[at - 1]).float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, at], reduction="sum")
        loss.backward(); total += loss.item()
    return total
step(); times = []
for _ in range(job["repeats"]):
    begun = time.process_time(); total = step(); times.append(time.process_time() - begun)
print(json.dumps({"seconds": times, "rows": len(packed), "loss": total}))
"""


def conversations(rng: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    """Rows of all turns, and where each row's answer begins."""
    rows: list[list[int]] = []
    starts: list[int] = []
    for _ in range(ORCHESTRATIONS):
        said = rng.integers(1, VOCABULARY, SYSTEM).tolist()
        for _ in range(TURNS):
            said += rng.integers(1, VOCABULARY, TURN - ANSWER).tolist()
            starts.append(len(said))
            said += rng.integers(1, VOCABULARY, ANSWER).tolist()
            rows.append(list(said))
    return rows, starts


def batch_of(rows: list[list[int]], starts: list[int], *, packed: bool) -> TensorBatch:
    """All answers as decisions over the whole vocabulary."""
    longest = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids_BT[b, : len(row)] = torch.tensor(row)
    places = [
        (b, t)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True))
        for t in range(start, len(row))
    ]
    count = len(places)
    return TensorBatch(
        ids_BT=ids_BT,
        lengths_B=torch.tensor(list(map(len, rows))),
        row_N=torch.tensor([b for b, _ in places]),
        position_N=torch.tensor([t - 1 for _, t in places]),
        menu_NK=torch.tensor([[rows[b][t]] for b, t in places]),
        open_NK=torch.ones(count, 1, dtype=torch.bool),
        chosen_N=torch.zeros(count, dtype=torch.int64),
        behaviour_N=torch.zeros(count),
        advantage_N=torch.ones(count),
        values_NK=torch.zeros(count, 1),
        valued_N=torch.zeros(count, dtype=torch.bool),
        weight_N=torch.ones(count),
        full_N=torch.ones(count, dtype=torch.bool),
        packed=packed,
    )


def stepper(net: HfPolicy, batch: TensorBatch, tokens: int) -> Callable[[], float]:
    """Loss and gradients of the whole batch, in parts of ``tokens``."""

    def step() -> float:
        for parameter in net.trainable().values():
            parameter.grad = None
        total = 0.0
        for part, _ in batch.parts(tokens):
            logp_NK, _ = net.decide(part)
            loss = -logp_NK[:, 0].sum()
            loss.backward()
            total += loss.item()
        return total

    return step


def timed(step: Callable[[], float]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


def peer(
    python: Path, folder: Path, rows: list[list[int]], starts: list[int], targets: list[str]
) -> dict[str, Any]:
    masks = [[int(t >= start) for t in range(len(row))] for row, start in zip(rows, starts, strict=True)]
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "model": str(folder / "model"),
                "rows": rows,
                "masks": masks,
                "targets": targets,
                "repeats": REPEATS,
            }
        )
    )
    done = subprocess.run(
        [str(python), "-c", PEER, str(job)], capture_output=True, text=True, check=False,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(folder), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="python of an environment with trl, peft and datasets")
    options = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name, exact_numerics():
        folder = Path(name)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1024, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        learner = {"model": str(folder / "model"), "max_length": 1024}
        base = base_of_settings(load_settings(flags={"learner": learner}).learner)
        rows, starts = conversations(np.random.default_rng(0))
        tokens = sum(map(len, rows))
        net = HfPolicy(base, base.initial(0), trainable=True)
        ways = {
            "padded": stepper(net, batch_of(rows, starts, packed=False), 8192),
            "packed": stepper(net, batch_of(rows, starts, packed=True), 8192),
        }
        gradients: dict[str, torch.Tensor] = {}
        losses: dict[str, float] = {}
        for way, step in ways.items():
            losses[way] = step()
            gradients[way] = torch.cat(
                [p.grad.flatten() for p in net.trainable().values() if p.grad is not None]
            )
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(REPEATS):
            for way, step in ways.items():
                seconds[way].append(timed(step))
        error = (gradients["padded"] - gradients["packed"]).norm() / gradients["padded"].norm()
        trees = pack([np.array(row) for row in rows])
        figures: dict[str, Any] = {
            "orchestrations": ORCHESTRATIONS, "turns": TURNS, "tokens_of_rows": tokens, "tokens_packed": trees.size,
            "loss": {way: round(value, 3) for way, value in losses.items()},
            "gradient_relative_difference": float(f"{error:.2e}"),
        }  # fmt: skip
        if options.peer:
            found = peer(options.peer, folder, rows, starts, list(base.config.targets))
            seconds["trl"] = found["seconds"]
            figures["loss"]["trl"] = round(found["loss"], 3)
            figures["trl_rows"] = found["rows"]
    speed = {way: tokens / statistics.median(times) for way, times in seconds.items()}
    figures["tokens_per_cpu_s"] = {way: round(value) for way, value in speed.items()}
    figures["packed_over_padded"] = round(speed["packed"] / speed["padded"], 2)
    if "trl" in speed:
        figures["packed_over_trl"] = round(speed["packed"] / speed["trl"], 2)
    figures["peak_rss_mib"] = peak_rss_mib()
    command = ".venv/bin/python benchmarks/packing.py" + (" --peer PYTHON" if options.peer else "")
    write("packing", command, figures)


if __name__ == "__main__":
    main()
