"""The processes of the demo: ``spanloop up`` on free ports, two clients of the dispatch desk, and short helpers.

Place: ``demo`` starts, watches and stops them. Invariants: whatever happens in the demo, ``close`` leaves no process behind;
outputs of all of them are in files below ``OUT/logs``; a stage that died is a TerminalError with its last lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanloop.pipeline.child import die_with_parent
from spanloop.pipeline.workspace import read_run
from spanloop.schemas.errors import ConfigError, TerminalError

__all__ = ["CLIENTS", "Helper", "System", "find_examples"]

CLIENTS = 2
FIRST_TICKET_STEP = 10_000_000
READY_S = 120.0
CLIENT_STOP_S = 40.0
UP_STOP_S = 60.0


def find_examples() -> Path:
    """The folder ``examples`` of a source checkout.

    Raises:
        ConfigError: this is an installed package without it.
    """
    here = Path(__file__).resolve()
    for root in (Path.cwd(), *here.parents):
        if (root / "examples" / "dispatch_desk" / "spanloop.toml").is_file():
            return root / "examples"
    raise ConfigError(
        "the demo's agents (examples/dispatch_desk) are not here: run it from a checkout of the source (make demo)"
    )


class Helper:
    """A short process whose end the demo awaits while it goes on."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.name = name
        self.process = process
        self._out = out
        self._err = err

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def output(self) -> str:
        """What it printed. Raises TerminalError when it failed."""
        if self.process.returncode != 0:
            raise TerminalError(
                f"{self.name} failed (exit code {self.process.returncode}): {_tail(self._err) or _tail(self._out)}"
            )
        return self._out.read_text()

    def wait(self, timeout_s: float) -> str:
        """Wait for its end: what it printed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise TerminalError(f"{self.name} took longer than {timeout_s:.0f} s") from None
        return self.output()


def _tail(path: Path, lines: int = 6) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    return ""


class System:
    """All processes of one demo.

    Args:
        out: Folder of the demo; logs go to ``out/logs``.
        workspace: Folder of the workspace.
        seed: Of tickets and policy.
        decisions: The team's LLM is closed: a decision policy is asked and trained.
    """

    def __init__(self, out: Path, workspace: Path, seed: int, *, decisions: bool = False) -> None:
        self.workspace = workspace
        self.examples = find_examples()
        self.config = self.examples / "dispatch_desk" / ("decisions.toml" if decisions else "spanloop.toml")
        self.saboteur = "dispatch_desk.sabotage_decisions" if decisions else "dispatch_desk.sabotage"
        self._client_flags = ["--decisions"] if decisions else []
        self.peak_rss_mib: dict[str, float] = {}
        self._seed = seed
        self._logs = out / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._up: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[bytes]] = []
        self._helpers: list[Helper] = []
        self._urls: dict[str, str] = {}
        self._clients_stopping = False

    def environment(self) -> dict[str, str]:
        """Of every process: free ports, this workspace, the examples importable."""
        paths = [str(self.examples), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "SPANLOOP_WORKSPACE": str(self.workspace.absolute()),
            "SPANLOOP_BOOTSTRAP_SERVERS": "",
            "SPANLOOP_COLLECTOR__PORT": "0",
            "SPANLOOP_GATEWAY__PORT": "0",
            "SPANLOOP_SERVING__PORT": "0",
            "SPANLOOP_LEARNER__SEED": str(self._seed),
        }

    def _start(
        self, name: str, command: Sequence[str], environment: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        out, err = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=out_file, stderr=err_file,
                stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )  # fmt: skip
        return process, out, err

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start ``spanloop up`` and wait until everything is ready. Raises TerminalError."""
        command = ["-m", "spanloop.schemas.cli", "up", "--config", str(self.config)]
        self._up, _, _ = self._start("up", command, self.environment())
        deadline = time.monotonic() + READY_S
        while True:
            run = read_run(self.workspace)
            if run.get("state") == "running":
                self._urls = run["urls"]
                return
            if self._up.poll() is not None:
                raise TerminalError(f"spanloop up did not start: {_tail(self._logs / 'up.log')}")
            if time.monotonic() > deadline:
                raise TerminalError(
                    f"spanloop up was not ready after {READY_S:.0f} s: see {self._logs / 'up.log'}"
                )
            time.sleep(0.1)

    def start_clients(self, concurrency: int) -> None:
        """Start the desk's two client processes; they know three addresses."""
        environment = {
            **self.environment(),
            "OPENAI_BASE_URL": f"{self._urls['gateway']}/v1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self._urls["collector"],
            "FEEDBACK_URL": f"{self._urls['collector']}/v1/feedback",
        }
        for name in [name for name in environment if name.startswith("SPANLOOP_")]:
            del environment[name]
        for number in range(CLIENTS):
            command = [
                "-m", "dispatch_desk.main", "--seconds", "1e9", "--concurrency", str(concurrency),
                "--seed", str(self._seed), "--first-ticket", str(number * FIRST_TICKET_STEP),
                *self._client_flags,
            ]  # fmt: skip
            self._clients.append(self._start(f"client-{number + 1}", command, environment)[0])

    def helper(self, name: str, command: Sequence[str]) -> Helper:
        """Start a short process (``python ...``)."""
        helper = Helper(name, *self._start(name, command, self.environment()))
        self._helpers.append(helper)
        return helper

    def open_phone(self) -> None:
        """From now on a share of the tickets comes by phone."""
        for client in self._clients:
            client.send_signal(signal.SIGUSR1)

    def check(self) -> None:
        """Raise TerminalError when a process died or a stage had to be started again."""
        if self._up is not None and self._up.poll() is not None:
            raise TerminalError(
                f"spanloop up ended (exit code {self._up.returncode}): {_tail(self._logs / 'up.log')}"
            )
        for name, child in read_run(self.workspace).get("children", {}).items():
            if child.get("restarts") or child.get("state") == "failed":
                reason = child.get("last_exit") or "it could not go on"
                raise TerminalError(f"the stage {name} died ({reason}): see {self._logs / 'up.log'}")
        for number, client in enumerate(self._clients, 1):
            if not self._clients_stopping and client.poll() is not None:
                raise TerminalError(
                    f"client {number} ended (exit code {client.returncode}): {_tail(self._logs / f'client-{number}.log')}"
                )

    def stop_clients(self) -> list[dict[str, Any]]:
        """Let the clients finish their tickets and send what is left: their reports."""
        self._clients_stopping = True
        for client in self._clients:
            _signal(client, signal.SIGTERM)
        reports = []
        for number, client in enumerate(self._clients, 1):
            _wait(client, CLIENT_STOP_S)
            lines = (self._logs / f"client-{number}.out").read_text().strip().splitlines()
            with contextlib.suppress(IndexError, ValueError):
                reports.append(json.loads(lines[-1]))
        self._clients = []
        return reports

    def stop(self) -> int:
        """Stop ``spanloop up`` in order: its exit code."""
        if self._up is None:
            return 0
        _signal(self._up, signal.SIGINT)
        _wait(self._up, UP_STOP_S)
        code, self._up = self._up.returncode, None
        return code

    def close(self) -> None:
        """Stop everything that still runs."""
        self._clients_stopping = True
        for process in (*self._clients, *(helper.process for helper in self._helpers)):
            _signal(process, signal.SIGTERM)
        for process in (*self._clients, *(helper.process for helper in self._helpers)):
            _wait(process, 10.0)
        self.stop()

    def measure_memory(self) -> None:
        """Note each process's peak resident memory (Linux only)."""
        pids = dict(read_run(self.workspace).get("pids", {}))
        if self._up is not None:
            pids["supervisor"] = self._up.pid
        pids |= {f"client-{number}": client.pid for number, client in enumerate(self._clients, 1)}
        pids["demo"] = os.getpid()
        for name, pid in pids.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/status").read_text()
                peak = next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]
                self.peak_rss_mib[name] = max(self.peak_rss_mib.get(name, 0.0), round(int(peak) / 1024, 1))


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
