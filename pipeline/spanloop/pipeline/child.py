"""One process under the supervisor: start it, wait for its ready line, hear it end, restart it with backoff.

A child prints one JSON line ``{"ready": NAME, "url": URL}`` on stdout when it serves, logs to stderr, and flushes and
exits 0 on SIGTERM. It runs in its own session, so that Ctrl-C reaches the supervisor alone, which stops the children
in order; on Linux the kernel sends it SIGTERM should the supervisor be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Backoff", "Child", "ChildSpec", "describe_exit", "die_with_parent"]

RESTART_FIRST_S = 0.25
RESTART_MAX_S = 15.0
RESTARTS_MAX = 8
"""Failures in a row, each before HEALTHY_S, after which a child is given up."""
STARTS_MAX = 3
"""The same for a child that was never ready: a start that cannot work should say so soon."""
HEALTHY_S = 20.0
"""A child that ran this long starts again with the first pause."""
STOP_S = 20.0
"""How long a child may flush before it is killed."""
_LINE_MAX = 2**20
_CONFIG_ERROR = 2


class ChildSpec(msgspec.Struct, frozen=True):
    """Name and command of a child."""

    name: str
    command: tuple[str, ...]


class Backoff:
    """When to start a child again.

    >>> backoff = Backoff(); [backoff.after(0.0) for _ in range(3)], backoff.after(60.0)
    ([0.25, 0.5, 1.0], 0.25)
    """

    def __init__(self) -> None:
        self.failures = 0

    def after(self, ran_s: float, *, was_ready: bool = True) -> float | None:
        """Pause in seconds after a child ended that had run ``ran_s``; None: give it up."""
        if ran_s >= HEALTHY_S:
            self.failures = 0
        self.failures += 1
        if self.failures > (RESTARTS_MAX if was_ready else STARTS_MAX):
            return None
        return min(RESTART_FIRST_S * 2 ** (self.failures - 1), RESTART_MAX_S)


def describe_exit(code: int) -> str:
    """What an exit status means, in words.

    >>> describe_exit(-9), describe_exit(4)
    ('killed by SIGKILL', 'exit code 4')
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def die_with_parent() -> None:  # runs between fork and exec
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


async def _exit_of(process: asyncio.subprocess.Process) -> int:
    """Exit status. ``process.wait`` would also wait for whoever inherited its pipes."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return process.returncode


class Child:
    """A process that is kept running until it is told to stop.

    Args:
        spec: what to run.
        environment: its whole environment.
        say: takes one line about it, for people.
        changed: called after each change of state.
    """

    def __init__(
        self,
        spec: ChildSpec,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._environment = dict(environment)
        self._say = say
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=20)
        self.state = "new"
        """new, starting, ready, waiting (for its restart), stopped or failed (given up)."""
        self.url = ""
        self.restarts = 0
        self.last_exit = ""
        self.exit_code = 0
        self.settled = asyncio.Event()
        """Set when it is ready for the first time, or given up."""

    @property
    def command(self) -> tuple[str, ...]:
        """What it runs."""
        return self._spec.command

    @property
    def pid(self) -> int:
        """Process id while it runs, else 0."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def report(self) -> dict[str, Any]:
        """State for run.json and the status file."""
        return {
            "state": self.state,
            "pid": self.pid,
            "url": self.url,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
        }

    def last_words(self) -> str:
        """The end of what it logged: the line that says error, else the last one."""
        errors = [line for line in self._tail if line.startswith("error:") or "Error" in line]
        lines = errors or list(self._tail)
        return lines[-1][:500] if lines else ""

    async def keep(self) -> None:
        """Run until ``stop`` or until it is given up."""
        backoff = Backoff()
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            ran_s = time.monotonic() - started
            was_ready = self.settled.is_set()
            pause = None if code == _CONFIG_ERROR else backoff.after(ran_s, was_ready=was_ready)
            self.exit_code = code or 1
            self.last_exit = describe_exit(code)
            if pause is None:
                self._give_up(code)
                return
            self.restarts += 1
            self._set("waiting")
            words = self.last_words()
            self._say(
                f"{self.name} ended ({self.last_exit}) after {ran_s:.1f} s"
                f"{': ' + words if words else ''}; restart {self.restarts} in {pause:.2g} s"
            )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        self._set("stopped")
        self.settled.set()

    def _give_up(self, code: int) -> None:
        why = "its settings are wrong" if code == _CONFIG_ERROR else f"{self.restarts} restarts did not help"
        self._say(
            f"{self.name} is given up, {why} ({self.last_exit}): {self.last_words() or 'it said nothing'}"
        )
        self._set("failed")
        self.settled.set()

    async def _run_once(self) -> int:
        self._tail.clear()
        self._set("starting")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                limit=_LINE_MAX,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as exc:
            self._tail.append(f"error: cannot start {self._spec.command[0]}: {exc}")
            return 1
        process = self._process
        self._changed()
        if self._stopping.is_set():  # stop came while it was being started
            process.terminate()
        pumps = [
            asyncio.create_task(self._pump(stream, ready=stream is process.stdout))
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        code = await _exit_of(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started itself must not outlive it
        _, open_pumps = await asyncio.wait(pumps, timeout=2.0)
        for pump in open_pumps:
            pump.cancel()
        return code

    async def _pump(self, stream: asyncio.StreamReader, *, ready: bool) -> None:
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line over the limit: asyncio has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if ready and self.state == "starting" and self._is_ready(line):
                continue
            self._tail.append(line)
            sys.stderr.write(f"[{self.name}] {line}\n")

    def _is_ready(self, line: str) -> bool:
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if not isinstance(message, dict) or "ready" not in message:
            return False
        self.url = str(message.get("url", ""))
        self._set("ready")
        self.settled.set()
        return True

    def _set(self, state: str) -> None:
        self.state = state
        self._changed()

    def kill(self) -> None:
        """End it now; what it acknowledged is durable, what it was doing is done again after a restart."""
        self._stopping.set()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to flush and end; kill it when it takes longer than STOP_S."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(_exit_of(process), STOP_S)
        except TimeoutError:
            self._say(
                f"{self.name} did not end within {STOP_S:.0f} s and is killed; nothing acknowledged is lost"
            )
            self.kill()
            await _exit_of(process)


def python_command(module: str, config: Path | None) -> tuple[str, ...]:
    """Command of a spanloop process in this interpreter."""
    return (sys.executable, "-m", module, *(("--config", str(config)) if config else ()))
