"""vLLM as the process ``serving`` of ``spanloop up``: the real server with the flags that learning needs.

Place: started by the supervisor where ``serving.engine`` is ``vllm`` and ``serving.urls`` is empty; gateway and learner then
find the same routes as at the embedded server. vLLM lives in an environment of its own (``make vllm-env``), this module only
starts it, waits until it answers, says ready in one JSON line, passes SIGTERM on and ends with it.

Invariants: it listens on a loopback address only, since loading adapters needs no key; nothing is downloaded; a version that is
not loaded is loaded on first use from ``WORKSPACE/policies/NAME``, so that a restart goes on serving what is routed; nothing
of vLLM outlives this process (its engine survives a killed API server and would keep its memory).
Run: ``python -m spanloop.learner.serving.vllm_server [--config TOML] [--model DIR]``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from spanloop.learner.serving.calls import ServerCalls
from spanloop.learner.serving.vllm_replica import PROBE
from spanloop.pipeline.child import describe_exit, die_with_parent
from spanloop.pipeline.workspace import check_port, process_name
from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["end_leftovers", "main", "vllm_command", "vllm_environment", "vllm_python", "write_plugins"]

STARTUP_S = 600.0
"""A large model takes its time to load; a tiny one on a CPU is up in half a minute."""
STOP_S = 15.0
"""How long vLLM may take to end before it is killed."""
LEFTOVERS_S = 2.0
"""How long what a killed run left may take to end by itself."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that vLLM takes."""
LINEAR = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "c_attn", "c_proj", "c_fc", "fc1", "fc2", "experts",
)  # fmt: skip
"""Layers that may get an adapter where learner.lora_targets does not say: all linear ones that models commonly have. Not the
output head: vLLM's LoRA over it mixes up rows when prompts are scored in a batch, which on a CPU ends the engine."""
PLUGINS = Path(__file__).parent / "vllm_plugins"
_GROUP = "vllm.group"


def vllm_python(environment: Mapping[str, str]) -> str:
    """The interpreter that has vLLM: SPANLOOP_VLLM_PYTHON, else .venv-vllm, else our own. Raises ConfigError."""
    given = environment.get("SPANLOOP_VLLM_PYTHON", "")
    if given:
        if not os.access(given, os.X_OK):
            raise ConfigError(f"SPANLOOP_VLLM_PYTHON = {given!r} is not an executable file")
        return given
    local = Path(".venv-vllm/bin/python").absolute()
    if local.exists():
        return str(local)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise ConfigError(
        "serving.engine is vllm, but there is no vLLM: `make vllm-env` makes .venv-vllm, or set SPANLOOP_VLLM_PYTHON to the "
        "python of an environment that has it"
    )


def on_cpu() -> bool:
    """Whether this machine has no accelerator that vLLM could use."""
    return not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def check_model(model: str, *, cpu: bool) -> None:
    """Raise ConfigError when the base model cannot be served; vLLM itself would fail at the first request."""
    try:
        config = msgspec.json.decode((Path(model) / "config.json").read_bytes())
    except OSError as exc:
        raise ConfigError(
            f"{model} is not a Hugging Face model folder: config.json: {exc.strerror or exc}"
        ) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{model}/config.json is not JSON: {exc}") from exc
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    if cpu and 0 < width < 32:
        raise ConfigError(
            f"{model} has attention heads of {width}; vLLM on a CPU needs 32 or more: fewer heads or a wider model"
        )


def vllm_command(settings: Settings, *, python: str, model: str, port: int, cpu: bool) -> list[str]:
    """The command line; ``serving.vllm_args`` come last and win."""
    serving = settings.serving
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", f"{settings.gateway.policy}-base",
        "--host", serving.host, "--port", str(port), "--seed", str(settings.learner.seed),
        "--enable-lora", "--max-loras", "4", "--max-cpu-loras", str(max(4, serving.max_adapters)),
        "--max-lora-rank", str(next(r for r in RANKS if r >= settings.learner.lora_rank)),
        "--lora-target-modules", *(settings.learner.lora_targets or LINEAR),
        "--max-num-seqs", str(serving.max_batch), "--enable-prefix-caching",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--logits-processors", "spanloop_exploration:ExplorationFloor",
    ]  # fmt: skip
    if cpu:
        command += ["--dtype", "float32", "--enforce-eager"]
    return [*command, *serving.vllm_args]


def vllm_environment(
    settings: Settings, environment: Mapping[str, str], *, policies: Path, cpu: bool
) -> dict[str, str]:
    """The environment: nothing leaves this machine, adapters may be loaded at run time, and are found by their name."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(policies.resolve()),
        "PYTHONPATH": str(PLUGINS),
    }
    if settings.serving.adapters == "mlflow":
        uri = settings.learner.tracking_uri or environment.get("MLFLOW_TRACKING_URI", "")
        if not uri.startswith(("http://", "https://")):
            raise ConfigError(
                f"serving.adapters is mlflow, but learner.tracking_uri is {uri or 'empty'}: name the http(s) URL of an MLflow server"
            )
        plugins = policies.resolve().parent / "vllm"
        write_plugins(plugins)
        ours |= {
            "VLLM_PLUGINS": "spanloop_mlflow",
            "SPANLOOP_MLFLOW_URI": uri,
            "SPANLOOP_MLFLOW_CACHE": str(plugins / "versions"),
            "PYTHONPATH": str(plugins),
        }
    if cpu:
        ours["OMP_NUM_THREADS"] = str(settings.serving.threads)
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        ours.setdefault("VLLM_CPU_KVCACHE_SPACE", environment.get("VLLM_CPU_KVCACHE_SPACE", "1"))
    kept = {k: v for k, v in environment.items() if not k.startswith("SPANLOOP_")}
    return {**kept, **ours}


def write_plugins(folder: Path) -> None:
    """What a vLLM environment without spanloop needs on its PYTHONPATH: the plugins, and the entry point by which vLLM finds the
    resolver. For a server on another machine, copy the folder there."""
    about = folder / "spanloop_plugins-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    for source in PLUGINS.glob("*.py"):
        (folder / source.name).write_bytes(source.read_bytes())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: spanloop-plugins\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nspanloop_mlflow = spanloop_mlflow:register\n"
    )


class VllmProcess:
    """The running server. ``stop`` may be called from a signal handler's flag; use it as a context."""

    def __init__(self, command: list[str], environment: dict[str, str], *, workspace: Path, url: str) -> None:
        self._note = workspace / _GROUP
        self._url = url
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=sys.stderr,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        except OSError as exc:
            raise ConfigError(f"cannot start {command[0]}: {exc.strerror or exc}") from exc
        self._note.write_text(str(self._process.pid))

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_healthy(self, stopping: list[int]) -> bool:
        """Wait until it answers and has answered once (the first request compiles); False when told to stop.

        Raises TerminalError when it ends, TransientError when it is not up in time."""
        calls = ServerCalls(self._url, timeout_s=120.0)
        deadline = time.monotonic() + STARTUP_S
        while not stopping:
            if self.exit_code is not None:
                raise TerminalError(
                    f"vLLM ended at its start ({describe_exit(self.exit_code)}); its lines above say why"
                )
            if time.monotonic() > deadline:
                raise TransientError(f"vLLM does not answer on {self._url} after {STARTUP_S:.0f} s")
            with contextlib.suppress(TransientError):
                if calls.ask("GET", "/health").status == 200:
                    self._warm(calls)
                    return True
            time.sleep(0.1)
        return False

    def _warm(self, calls: ServerCalls) -> None:
        base = next(card["id"] for card in calls.cards() if not card["parent"])
        calls.scores(base, PROBE)
        body = {
            "model": base,
            "prompt": [[1, 2]],
            "max_tokens": 1,
            "allowed_token_ids": [1, 2],
            "logprobs": 2,
        }
        calls.call("POST", "/v1/completions", body)

    def end(self) -> None:
        """Ask it to end, then kill whatever of it is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            self._note.unlink()


def _leftovers(group: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and "vllm" in process_name(pid).lower():
                found.append(pid)
    return found


def end_leftovers(note: Path, *, patience_s: float = LEFTOVERS_S) -> None:
    """End what a killed run of this module left behind: members of its process group that are vLLM's. The kernel has told
    its API server to end; after ``patience_s`` we kill."""
    try:
        group = int(note.read_text())
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + patience_s
    while left := _leftovers(group):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _run(settings: Settings, model: str) -> int:
    if not model:
        raise ConfigError("learner.model is empty: name the folder of the base model that vLLM serves")
    workspace, host, port = settings.workspace, settings.serving.host, settings.serving.port
    cpu = on_cpu()
    python = vllm_python(os.environ)
    check_model(model, cpu=cpu)
    policies = workspace / "policies"
    policies.mkdir(parents=True, exist_ok=True)
    end_leftovers(workspace / _GROUP)
    problem = check_port("serving", host, port)
    if problem or not port:
        raise ConfigError(problem or "serving.port = 0: vLLM needs a concrete port (`spanloop up` picks one)")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    command = vllm_command(settings, python=python, model=model, port=port, cpu=cpu)
    environment = vllm_environment(settings, os.environ, policies=policies, cpu=cpu)
    with VllmProcess(command, environment, workspace=workspace, url=url) as server:
        if server.wait_healthy(stopping):
            sys.stdout.write(json.dumps({"ready": "serving", "url": url}) + "\n")
            sys.stdout.flush()
        while not stopping and server.exit_code is None:
            time.sleep(0.1)
        if not stopping:
            raise TransientError(
                f"vLLM ended by itself ({describe_exit(server.exit_code or 0)}); its lines above say why"
            )
    return 0


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Settings (TOML).")
@click.option("--model", default="", help="Base model folder; default: learner.model.")
@click.option(
    "--write-plugins",
    "plugins",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Only write the plugins for a vLLM server on another machine to this folder.",
)
def main(config: Path | None, model: str, plugins: Path | None) -> None:
    """Serve the base model and the versions of this workspace with vLLM until SIGTERM.

    \b
    Examples:
      python -m spanloop.learner.serving.vllm_server --config spanloop.toml
      python -m spanloop.learner.serving.vllm_server --write-plugins ./vllm-plugins
    """
    if plugins is not None:
        write_plugins(plugins)
        click.echo(f"written; start vLLM with PYTHONPATH={plugins.resolve()} (docs/serving.md has the rest)")
        return
    try:
        settings = load_settings(config)
        sys.exit(_run(settings, model or settings.learner.model))
    except SpanloopError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
