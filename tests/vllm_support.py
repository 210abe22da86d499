"""A real vLLM for tests, started once a run, and LoRA versions of a tiny model, scored by transformers and peft.

``vllm_server()`` skips the test where there is no vLLM (neither SPANLOOP_VLLM_PYTHON nor .venv-vllm).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spanloop.learner.tiny_model import build_tiny_model
from spanloop.pipeline.child import die_with_parent
from spanloop.schemas.settings import Settings, load_settings

ROOT = Path(__file__).parents[1]
WORDS = (
    "red", "green", "blue", "north", "south", "east", "west", "look", "stop", "take", "drop", "open", "close", "up", "down",
    "left", "right", "yes", "never", "maybe", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
)  # fmt: skip
"""None is the beginning of another: a grammar that asks for "north" also lets "no" through."""
FIRST = 5
"""Token id of the first word."""
START_S = 330.0


def ids(*words: str) -> list[int]:
    """Token ids of words."""
    return [FIRST + WORDS.index(word) for word in words]


@functools.cache
def vllm_interpreter() -> str:
    """The python that has vLLM; empty when there is none."""
    given = os.environ.get("SPANLOOP_VLLM_PYTHON", "")
    local = ROOT / ".venv-vllm" / "bin" / "python"
    return given or (str(local) if local.exists() else "")


def need_vllm() -> None:
    """Skip the test where there is no vLLM."""
    if not vllm_interpreter():
        pytest.skip("needs a real vLLM: `make vllm-env`, or set SPANLOOP_VLLM_PYTHON")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write_lora(folder: Path, base: Path, seed: int, *, rank: int = 4, scale: float = 0.15) -> Path:
    """A LoRA adapter of a tiny model with random matrices."""
    config = json.loads((base / "config.json").read_text())
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    outs = {
        "self_attn.q_proj": (width, head * config["num_attention_heads"]),
        "self_attn.v_proj": (width, head * config["num_key_value_heads"]),
        "self_attn.o_proj": (head * config["num_attention_heads"], width),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (wide, out) in outs.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, wide, generator=generator) * wide**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * scale
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
        "lora_alpha": 2 * rank, "target_modules": sorted(m.rpartition(".")[2] for m in outs), "lora_dropout": 0.0,
        "bias": "none", "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def peft_scores(base: Path, folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of the prompts' tokens after the first, by transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()
    found = []
    with torch.no_grad():
        for prompt in prompts:
            row = torch.tensor([list(prompt)])
            logp = model(row).logits[0, :-1].log_softmax(-1)
            found.append(logp.gather(1, row[0, 1:, None])[:, 0].tolist())
    return found


@dataclass
class VllmServer:
    """A running ``spanloop.learner.serving.vllm_server``."""

    url: str
    workspace: Path
    base: Path
    settings: Settings
    ready_s: float
    process: subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)

    def version(self, folder: Path, seed: int) -> Path:
        """A new LoRA version of its base model."""
        return write_lora(folder, self.base, seed)


def start_server(
    workspace: Path,
    base: Path,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    **serving: Any,
) -> VllmServer:
    """Start one; raises AssertionError with its last lines when it does not come up."""
    port = port or free_port()
    section = {"engine": "vllm", "port": port, **serving}
    settings = load_settings(
        flags={"workspace": str(workspace), "serving": section, "learner": {"model": str(base)}}
    )
    environment = {
        **os.environ,
        **(environment or {}),
        "SPANLOOP_WORKSPACE": str(workspace),
        "SPANLOOP_SERVING": json.dumps(section),
        "SPANLOOP_LEARNER__MODEL": str(base),
        "SPANLOOP_VLLM_PYTHON": vllm_interpreter(),
    }
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "spanloop.learner.serving.vllm_server"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )  # fmt: skip
    server = VllmServer("", workspace, base, settings, 0.0, process)

    def drain() -> None:
        for raw in process.stderr or ():
            server.lines.append(raw.decode("utf-8", "replace").rstrip())
            del server.lines[:-400]

    threading.Thread(target=drain, daemon=True).start()
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    line = process.stdout.readline() if process.stdout else b""
    timer.cancel()
    if not line:
        process.wait(30)
        time.sleep(0.2)
        raise AssertionError("vLLM did not come up:\n" + "\n".join(server.lines[-60:]))
    server.url = json.loads(line)["url"]
    server.ready_s = time.monotonic() - started
    return server


def stop_server(server: VllmServer) -> int:
    """SIGTERM and wait; returns the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    return server.process.wait(40)


@functools.cache
def vllm_server() -> VllmServer:
    """The run's server, over a tiny model; stopped at exit."""
    folder = Path(tempfile.mkdtemp(prefix="spanloop-vllm-"))
    base = build_tiny_model(folder / "base", WORDS, hidden=64, heads=2, context=256)
    server = start_server(folder / "workspace", base)

    def stop() -> None:
        stop_server(server)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return server
