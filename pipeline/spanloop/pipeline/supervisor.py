"""``spanloop up``: collector, pipeline, gateway, serving and learner as one supervised local system. Over Kafka the pipeline is
one or more workers of ``spanloop process``.

The supervisor starts processes and knows nothing of what they do, so no room imports another. Invariants:

- One supervisor a workspace. Ports are checked before anything starts and stay the same over restarts.
- A child that ends by itself is started again, with growing pauses; one that cannot run is given up, named, and the
  others go on. A wrong setting at the start ends everything with its message.
- Stop order: what takes in work first, what is needed to finish it last. The log is durable at every moment, so a
  restart goes on where a kill or a Ctrl-C left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spanloop.pipeline.child import Child, ChildSpec, python_command
from spanloop.pipeline.log.open import open_log
from spanloop.pipeline.workspace import (
    WorkspaceLock,
    claim_ports,
    end_run,
    process_name,
    read_run,
    write_json,
)
from spanloop.schemas.errors import ConfigError, TerminalError
from spanloop.schemas.settings import Settings

__all__ = ["MODULES", "Supervisor", "child_specs", "supervise"]

MODULES = {
    "collector": "spanloop.collectors.receiver",
    "pipeline": "spanloop.pipeline.runtimes.embedded",
    "serving": "spanloop.learner.serving.embedded",
    "gateway": "spanloop.collectors.gateway",
    "learner": "spanloop.learner.trainer",
    "archiver": "spanloop.pipeline.archive.process",
}
"""Children in the order of their start."""
WORKER = "spanloop.pipeline.runtimes.worker"
"""The pipeline where ``bootstrap_servers`` is set: as many of them as ``process.workers`` says."""
VLLM = "spanloop.learner.serving.vllm_server"
"""What serves instead where ``serving.engine`` is vllm."""
STOP_ORDER = ("gateway", "collector", "pipeline", "learner", "serving", "archiver")
DECISIONS = "spanloop.learner.serving.decisions"
"""What serves instead where ``learner.decisions`` is set."""
READY_S = 180.0
"""How long the first start of all children may take ..."""
READY_VLLM_S = 900.0
"""... and where vLLM loads a model, which may be large."""
ORPHAN_S = 10.0
"""How long children of a killed supervisor get to end before the workspace is refused."""
STATUS_EVERY_S = 1.0


def child_specs(settings: Settings, config: Path | None, without: Sequence[str]) -> list[ChildSpec]:
    """What will run: all processes but those switched off in settings or named in ``without``. Without a vocabulary, a
    model or decisions there is no policy, so that neither learner nor serving has anything to do; a policy that servers elsewhere
    serve needs no serving here."""
    unknown = sorted(set(without) - set(MODULES))
    if unknown:
        raise ConfigError(f"--without {','.join(unknown)}: no such process; there are {', '.join(MODULES)}")
    off = {name for name in ("gateway", "serving", "learner") if not getattr(settings, name).enabled}
    if not settings.bootstrap_servers and not settings.archive.url:
        off.add("archiver")  # queries fill the archive of an embedded workspace
    if not settings.learner.has_policy:
        off |= {"serving", "learner"}
    if settings.learner.model:
        elsewhere = bool(settings.gateway.upstream or settings.serving.urls)
        if elsewhere:
            off.add("serving")
        elif settings.serving.engine == "embedded" and not {"serving", "learner"} <= {*off, *without}:
            raise ConfigError(
                f"learner.model = {settings.learner.model!r} is served by vLLM: set serving.engine = 'vllm' to start one "
                "here, or gateway.upstream (or serving.urls) to one that runs"
            )
    names = [name for name in MODULES if name not in off and name not in without]
    if not names:
        raise ConfigError("nothing to run: every process is switched off; leave one out of --without")
    modules = dict(MODULES)
    if settings.serving.engine == "vllm":
        modules["serving"] = VLLM
    elif settings.learner.decisions:
        modules["serving"] = DECISIONS
    specs: list[ChildSpec] = []
    for name in names:
        if name == "pipeline" and settings.bootstrap_servers:
            specs += _workers(settings.process.workers, config)
        else:
            specs.append(ChildSpec(name, python_command(modules[name], config)))
    return specs


def _workers(count: int, config: Path | None) -> list[ChildSpec]:
    """pipeline, pipeline-2, pipeline-3, ...: workers of one consumer group."""
    command = python_command(WORKER, config)
    others = [ChildSpec(f"pipeline-{n}", (*command, "--worker", str(n))) for n in range(2, count + 1)]
    return [ChildSpec("pipeline", command), *others]


def _environment(settings: Settings, ports: dict[str, int]) -> dict[str, str]:
    """The parent's environment, with what must be the same for all children made explicit."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    environment["SPANLOOP_WORKSPACE"] = str(settings.workspace.absolute())
    for name, port in ports.items():
        environment[f"SPANLOOP_{name.upper()}__PORT"] = str(port)
    return environment


class Supervisor:
    """Runs children over one workspace.

    Args:
        workspace: folder of lock, run.json and log.
        specs: children in the order of their start.
        environment: of all children.
        say: takes lines for people.
        status_file: rewritten once a second and after each change.
        config: file of the settings, for run.json.
    """

    def __init__(
        self,
        workspace: Path,
        specs: Sequence[ChildSpec],
        environment: dict[str, str],
        *,
        say: Callable[[str], None],
        status_file: Path | None = None,
        config: Path | None = None,
    ) -> None:
        self._workspace = workspace
        self._config = config
        self._say = say
        self._status_file = status_file
        self._started_ns = time.time_ns()
        self._state = "starting"
        self._signals = 0
        self._stop = asyncio.Event()
        self.children = [Child(spec, environment, say, self._publish) for spec in specs]

    def report(self) -> dict[str, Any]:
        """What runs now: state, and pid, url and restarts of each child."""
        return {
            "state": self._state,
            "pid": os.getpid(),
            "started_ns": self._started_ns,
            "workspace": str(self._workspace.absolute()),
            "config": str(self._config.absolute()) if self._config else "",
            "pids": {child.name: child.pid for child in self.children if child.pid},
            "urls": {child.name: child.url for child in self.children if child.url},
            "children": {child.name: child.report() for child in self.children},
        }

    def _publish(self) -> None:
        """Write run.json and the status file; a full disk must not end what still works."""
        for path in (self._workspace / "run.json", self._status_file):
            if path is not None:
                try:
                    write_json(path, self.report())
                except TerminalError as exc:
                    self._say(exc.message)

    async def run(self, on_ready: Callable[[dict[str, Any]], None]) -> int:
        """Start all, call ``on_ready`` with the report, keep them running, stop them: returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(child.keep(), name=child.name) for child in self.children]
        ticker = asyncio.create_task(self._tick())
        try:
            code = await self._until_ready()
            if code == 0 and not self._stop.is_set():
                self._state = "running"
                self._publish()
                on_ready(self.report())
                code = await self._until_stopped(tasks)
        finally:
            await self._stop_all(tasks)
            ticker.cancel()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
        return code

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._say("second signal: ending everything now")
            for child in self.children:
                child.kill()
        else:
            self._say("stopping; once more to end at once")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            self._publish()

    async def _until_ready(self) -> int:
        patience_s = READY_VLLM_S if any(VLLM in child.command for child in self.children) else READY_S
        deadline = time.monotonic() + patience_s
        while not self._stop.is_set():
            failed = [child for child in self.children if child.state == "failed"]
            late = [child.name for child in self.children if not child.settled.is_set()]
            if failed:
                return failed[0].exit_code
            if not late:
                return 0
            if time.monotonic() > deadline:
                self._say(
                    f"{', '.join(late)} not ready after {patience_s:.0f} s; the lines above may say why"
                )
                return 1
            await asyncio.sleep(0.02)
        return 0

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> int:
        stop = asyncio.create_task(self._stop.wait())
        all_ended = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait({stop, all_ended}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (stop, all_ended):
            waiting.cancel()
        return 1 if any(child.state == "failed" for child in self.children) else 0

    async def _stop_all(self, tasks: list[asyncio.Task[None]]) -> None:
        self._state = "stopping"
        self._publish()
        order = {name: rank for rank, name in enumerate(STOP_ORDER)}
        for child in sorted(self.children, key=lambda child: order.get(child.name.partition("-")[0], -1)):
            await child.stop()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._state = "stopped"
        self._publish()


def _modules(name: str) -> tuple[str, ...]:
    """What a process of that name may run."""
    name = name.partition("-")[0]
    others = {"serving": (VLLM,), "pipeline": (WORKER,)}
    return (MODULES.get(name, "spanloop"), *others.get(name, ()))


def _wait_for_orphans(workspace: Path, say: Callable[[str], None]) -> None:
    """Children that a killed supervisor left behind flush and end by themselves; refuse while one lives."""
    deadline = time.monotonic() + ORPHAN_S
    told = False
    while True:
        left = {
            name: pid
            for name, pid in read_run(workspace).get("pids", {}).items()
            if any(module in process_name(int(pid)) for module in _modules(name))
        }
        if not left:
            return
        if not told:
            say(f"waiting for {', '.join(left)} of an earlier run to end")
            told = True
        if time.monotonic() > deadline:
            names = ", ".join(f"{name} (pid {pid})" for name, pid in left.items())
            pids = " ".join(str(pid) for pid in left.values())
            raise ConfigError(
                f"still running from an earlier start in {workspace}: {names}: end them (kill {pids})"
            )
        time.sleep(0.1)


def supervise(
    settings: Settings,
    config: Path | None,
    *,
    without: Sequence[str] = (),
    status_file: Path | None = None,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Run the local system in the foreground until a signal: returns the exit code.

    Raises:
        ConfigError: the workspace is in use, a port is taken, a name in ``without`` is unknown.
        TransientError, TerminalError: the log cannot be opened.
    """

    def say(line: str) -> None:
        sys.stderr.write(f"[spanloop] {line}\n")

    specs = child_specs(settings, config.absolute() if config else None, without)
    if status_file is not None and not status_file.absolute().parent.is_dir():
        raise ConfigError(
            f"--status-file {status_file}: there is no folder {status_file.parent}; make it, or name another"
        )
    lock = WorkspaceLock(settings.workspace)
    try:
        if not settings.learner.has_policy and not {"serving", "learner"} <= set(without):
            say(
                "serving and learner are left out: learner.vocabulary and learner.model are empty, learner.decisions is off. Spans, outcomes and credit need neither; "
                "`spanloop doctor` says what training needs"
            )
        if lock.stale_pid:
            say(f"the last run (pid {lock.stale_pid}) was killed; going on from the log")
        _wait_for_orphans(settings.workspace, say)
        ports = claim_ports(settings, [spec.name for spec in specs])
        open_log(settings).close()  # a damaged log, a full disk or absent brokers show here, once and plainly

        async def run() -> int:
            supervisor = Supervisor(
                settings.workspace,
                specs,
                _environment(settings, ports),
                say=say,
                status_file=status_file,
                config=config,
            )
            return await supervisor.run(on_ready)

        code = asyncio.run(run())
        end_run(settings.workspace)
        return code
    finally:
        lock.release()
