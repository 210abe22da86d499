"""The demo: the whole loop on this machine, about six minutes, and a report of what it did.

Place: behind ``spanloop demo``. It starts the local system and two client processes, watches the log, injects one bad candidate, stops
everything, evaluates every champion on fresh tickets and writes ``results.json`` and ``report.html``. It learns nothing itself and
the client knows nothing of it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.demo_injection import Injection
from spanloop.pipeline.demo_results import (
    chosen_versions,
    gating_cost,
    own_candidates,
    promotions,
    returns_by_version,
)
from spanloop.pipeline.demo_screen import Point, Screen, event_line, point_of
from spanloop.pipeline.demo_system import System
from spanloop.pipeline.demo_watch import Watch
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import PolicyPromoted, PolicyRolledBack
from spanloop.schemas.settings import load_settings

__all__ = ["Options", "run_demo"]

RESERVE_S = 65.0
"""Kept of the given minutes for stopping, evaluation and report."""
LIVE_MIN_S = 20.0
INJECT_AT = 0.45
"""Share of the live time after which the bad candidate is made: late enough for a champion worth defending, early enough
that the learner's own versions have the end to themselves."""
INJECT_LATEST = 0.7
"""The same where the first policy still is the champion: a copy of it is hardly worse than it is."""
EXTRA_S = 30.0
"""A canary of the bad candidate that is still undecided at the end gets so much longer."""
DRAIN_S = 15.0
EVALUATE_S = 300.0
TICKETS = 5_000
PHONE_SHARE = 0.5


class Options(msgspec.Struct, frozen=True):
    """What ``spanloop demo`` was asked for."""

    minutes: float
    seed: int
    out: Path
    inject: bool
    plain: bool
    concurrency: int
    decisions: bool = False
    """The team's LLM is closed: what is trained is a decision policy that the team asks."""
    tickets: int = TICKETS
    """Fresh tickets on which each version is evaluated."""


def _fresh_workspace(out: Path) -> Path:
    """``out/workspace``, empty. One of an earlier demo is removed; anything else is left alone."""
    workspace = out / "workspace"
    if workspace.exists():
        if any(workspace.iterdir()) and not (workspace / "spanloop.db").exists():
            raise ConfigError(f"{workspace} is not a demo's workspace: give another folder with --out")
        try:
            shutil.rmtree(workspace)
        except OSError as exc:
            raise ConfigError(
                f"cannot remove the last demo's {workspace}: {exc}; is it still running? Or give another --out"
            ) from exc
    workspace.mkdir(parents=True)
    return workspace


class _Demo:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.begun = time.monotonic()
        self.workspace = _fresh_workspace(options.out)
        self.system = System(options.out, self.workspace, options.seed, decisions=options.decisions)
        self.points: list[Point] = []
        self.durations: dict[str, float] = {}
        self.start_ns = 0
        self.injection: Injection | None = None
        self.clients: list[dict[str, Any]] = []

    # ------------------------------------------------------------ live

    def run(self) -> dict[str, Any]:
        options, say = self.options, _say
        say(f"starting spanloop up in {self.workspace}")
        self.system.start()
        self.durations["start_s"] = time.monotonic() - self.begun
        log, state = SqliteLog(self.workspace / "spanloop.db"), SqliteState(self.workspace / "spanloop.db")
        try:
            watch = Watch(log, state)
            live_s = max(LIVE_MIN_S, options.minutes * 60 - RESERVE_S - self.durations["start_s"])
            say(f"ready; two clients now work tickets for {live_s:.0f} s")
            self._live(watch, live_s)
            self._stop(watch)
        finally:
            state.close()
            log.close()
        say("evaluating champions and candidates on fresh tickets")
        started = time.monotonic()
        results = self._results(watch, self._evaluate(watch))
        self.durations["evaluate_s"] = time.monotonic() - started
        return results

    def _live(self, watch: Watch, live_s: float) -> None:
        screen = Screen(plain=self.options.plain, end_s=live_s)
        started = time.monotonic()
        self.start_ns = time.time_ns()
        inject_at, latest = INJECT_AT * live_s, INJECT_LATEST * live_s
        self.system.start_clients(self.options.concurrency)
        told, ticks = 0, 0
        try:
            while True:
                time.sleep(0.5)
                now_s = time.monotonic() - started
                watch.poll()
                for event, _ in watch.policy_events[told:]:
                    if line := event_line(event):
                        screen.say(line)
                told = len(watch.policy_events)
                ticks += 1
                if ticks % 2 == 0:
                    self._tick(watch, screen, now_s)
                due = latest if self.injection is None and watch.champion <= 0 else inject_at
                if self.options.inject and now_s >= due:
                    self._inject(watch, screen.say, now_s)
                undecided = self.injection is not None and not self.injection.over
                if now_s >= live_s + (EXTRA_S if undecided else 0.0):
                    break
        finally:
            screen.close()
        self.durations["live_s"] = time.monotonic() - started

    def _tick(self, watch: Watch, screen: Screen, now_s: float) -> None:
        recent = [point for point in self.points if point.t_s >= now_s - 10.0]
        point = point_of(watch, now_s, time.time_ns(), recent[0] if recent else None)
        self.points.append(point)
        screen.show(point)
        self.system.check()
        if len(self.points) % 5 == 0:
            self.system.measure_memory()

    def _inject(self, watch: Watch, say: Callable[[str], None], now_s: float) -> None:
        if self.injection is None:
            self.injection = Injection(self.system, watch, self.options.out / "injected", say)
        self.injection.step(now_s)

    def _stop(self, watch: Watch) -> None:
        started = time.monotonic()
        _say("stopping: clients finish their tickets, the pipeline what is on the log")
        self.system.measure_memory()
        self.clients = self.system.stop_clients()
        deadline = time.monotonic() + DRAIN_S
        while watch.lag_s(time.time_ns()) > 0.0 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.0)
        code = self.system.stop()
        watch.poll()
        if code != 0:
            _say(f"note: spanloop up ended with exit code {code}; see {self.options.out / 'logs' / 'up.log'}")
        self.durations["stop_s"] = time.monotonic() - started

    # ------------------------------------------------------------ afterwards

    def _evaluate(self, watch: Watch) -> dict[str, Any]:
        settings = load_settings(self.system.config)
        own = [version for _, version in own_candidates(watch.policy_events)]
        champions = [e.version for e, _ in watch.policy_events if isinstance(e, PolicyPromoted)]
        champions += [e.to for e, _ in watch.policy_events if isinstance(e, PolicyRolledBack)]
        versions = chosen_versions(champions, own)
        phone = PHONE_SHARE if self.injection is not None else 0.0
        command = [
            "-m", "dispatch_desk.evaluate", "--workspace", str(self.workspace), "--policy", settings.gateway.policy,
            "--versions", ",".join(map(str, versions)), "--champion", str(watch.champion),
            "--exploration", str(settings.serving.exploration), "--tickets", str(self.options.tickets),
            "--seed", str(self.options.seed), "--phone", str(phone),
        ]  # fmt: skip
        return json.loads(self.system.helper("evaluate", command).wait(EVALUATE_S))

    def _results(self, watch: Watch, evaluation: dict[str, Any]) -> dict[str, Any]:
        registered = own_candidates(watch.policy_events)
        own = [version for _, version in registered]
        means = {int(v): e["return"]["mean"] for v, e in evaluation["versions"].items()}
        by_version = returns_by_version(means, own)
        served = sorted(watch.served.values(), key=lambda ticket: ticket.known_ns)
        champion = evaluation["versions"][str(watch.champion)]
        last = evaluation["versions"][str(own[-1])] if own else champion
        times = {version: round((at - self.start_ns) / 1e9, 1) for at, version in registered}
        reports = self.clients
        return {
            "seed": self.options.seed,
            "policy": "decisions" if self.options.decisions else "text",
            "machine": {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
            },
            "champion": {"version": watch.champion, "epoch": watch.epoch, **champion},
            "last_candidate": {"version": own[-1] if own else watch.champion, **last},
            "champion_f_exact": evaluation["champion_exact_f"],
            "champion_f_exact_without_exploration": evaluation["champion_exact_f_without_exploration"],
            "decisions": evaluation["decisions"],
            "reached_0.8": champion["f"]["low"] >= 0.8 or champion["f"]["mean"] >= 0.8,
            "every_decision_beats_blind": all(d["beats_blind"] for d in evaluation["decisions"].values()),
            "evaluation": evaluation,
            "registered_s": times,
            "promotions": promotions(watch.policy_events, self.start_ns),
            "injection": self.injection.report() if self.injection is not None else None,
            "gating_cost": gating_cost(served, registered, by_version),
            "totals": {
                "tickets": len(served),
                "spans": watch.num_spans,
                "updates": watch.batches,
                "candidates": len(own),
                "tickets_per_s": len(served) / self.durations["live_s"],
                "spans_per_s": watch.num_spans / self.durations["live_s"],
                "client_cpu_ms_per_ticket": [report["cpu_ms_per_ticket"] for report in reports],
                "failed_tickets": sum(report["failed"] for report in reports),
                "mean_outcome": sum(t.value for t in served) / max(1, len(served)),
            },
            "memory_mib": {
                **self.system.peak_rss_mib,
                "sum": round(sum(self.system.peak_rss_mib.values()), 1),
            },
            "timeline": [msgspec.to_builtins(point) for point in self.points[::5]],
            "example": _example(watch),
        }


def _example(watch: Watch) -> str:
    """An orchestration worth explaining: a late one of the champion, better than most."""
    mine = [t for t in watch.served.values() if t.version == watch.champion] or list(watch.served.values())
    late = mine[-200:]
    return max(late, key=lambda t: t.value).orchestration_id if late else ""


def _say(line: str) -> None:
    sys.stdout.write(f"==> {line}\n")
    sys.stdout.flush()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind: stopping them takes seconds and is bounded."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_demo(options: Options) -> dict[str, Any]:
    """Run the demo and write its report: the results.

    Raises:
        ConfigError: no checkout, or ``out`` cannot be used.
        TerminalError: a process died; everything else was stopped.
    """
    from spanloop.pipeline.demo_report import write_report

    options.out.mkdir(parents=True, exist_ok=True)
    demo = _Demo(options)
    try:
        results = demo.run()
    finally:
        with _uninterrupted():
            demo.system.close()
    demo.durations["total_s"] = time.monotonic() - demo.begun
    results["durations"] = {name: round(value, 1) for name, value in demo.durations.items()}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, options.out / "report.html")
    return results
