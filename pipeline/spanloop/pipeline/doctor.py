"""``spanloop doctor``: what can be learned here, what is missing, and whether this machine is fit to run it.

Works on an empty workspace and while everything runs; changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.credit.residuals import alarm, levels_of
from spanloop.pipeline.learnable import Deployment, examine
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord
from spanloop.pipeline.workspace import SERVERS, check_port, read_run, running
from spanloop.schemas import topics
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.events import CreditAssigned, decode
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings

__all__ = ["EXAMINED", "RECORDS_MAX", "Check", "Diagnosis", "dead_letter_checks", "diagnose", "lines"]

DISK_LOW = 2**30
DISK_NONE = 100 * 2**20
LEDGERS_MAX = 2_000
"""Newest ledgers whose residuals are looked at."""
RECORDS_MAX = 50_000
"""Newest records of a topic that are looked at."""
EXAMINED = (topics.SPANS, topics.ORCHESTRATIONS, topics.FEEDBACK)
PACKAGES = {
    "collect": ("aiohttp", "protobuf", "opentelemetry-proto"),
    "pipeline": ("numpy", "duckdb", "pyarrow", "rich"),
    "learn": ("torch", "mlflow", "safetensors"),
}
"""Packages by extra."""


class Check(msgspec.Struct, frozen=True):
    """One look at the machine. ``status``: ok, warn or fail."""

    name: str
    status: str
    message: str


class Diagnosis(msgspec.Struct):
    """All that ``doctor`` says."""

    deployments: list[Deployment]
    checks: list[Check]
    collector: str
    """Where agents send spans."""
    records: dict[str, int] = {}
    """Records on the log by topic."""
    cut: bool = False
    """Only the newest RECORDS_MAX records of a topic were looked at."""

    @property
    def healthy(self) -> bool:
        """No check failed; a deployment that lacks something is no failure."""
        return all(check.status != "fail" for check in self.checks)


def diagnose(settings: Settings) -> Diagnosis:
    """Look at the log, the workspace, the ports, the disk and the installed packages."""
    url = read_run(settings.workspace).get("urls", {}).get("collector", "")
    found = Diagnosis([], [], url or f"http://{settings.collector.host}:{settings.collector.port or 4318}")
    log_checks = list(_log_checks(settings, found))
    found.checks = [
        *_workspace_checks(settings),
        *log_checks,
        *_port_checks(settings),
        *_package_checks(settings),
        *_served_checks(settings),
    ]
    return found


def _log_checks(settings: Settings, found: Diagnosis) -> Iterator[Check]:
    if settings.bootstrap_servers:
        from spanloop.pipeline.doctor_kafka import kafka_checks

        yield from kafka_checks(settings, found)
        return
    if not settings.database.exists():
        yield Check(
            "log", "ok", f"none yet at {settings.database}; it is made by `spanloop up` or `spanloop import`"
        )
        return
    try:
        log = SqliteLog(settings.database, create=False)
    except SpanloopError as exc:
        yield Check("log", "fail", exc.message)
        return
    try:
        found.records = log.counts()
        after = {topic: log.nth_last(topic, RECORDS_MAX) for topic in EXAMINED}
        found.cut = any(offset > -1 for offset in after.values())
        found.deployments = examine(scan(log, EXAMINED, after=after), settings)
        size = settings.database.stat().st_size / 2**20
        yield Check(
            "log", "ok", f"{settings.database}: {sum(found.records.values())} records, {size:.1f} MiB"
        )
        yield from dead_letter_checks(found)
        credits_after = {topics.CREDITS: log.nth_last(topics.CREDITS, LEDGERS_MAX)}
        yield from credit_checks(scan(log, (topics.CREDITS,), after=credits_after))
    except SpanloopError as exc:
        yield Check("log", "fail", exc.message)
    finally:
        log.close()


def credit_checks(records: Iterable[LogRecord]) -> Iterator[Check]:
    """Whether what the ledger's estimates leave over looks like noise."""
    last: dict[str, CreditAssigned] = {}
    for record in records:
        event = decode(record.value)
        if isinstance(event, CreditAssigned):
            last[event.key] = event
    levels = levels_of(last.values())
    if not levels:
        return
    alarms = [text for text in map(alarm, levels) if text]
    for text in alarms:
        yield Check("credit", "warn", text)
    if not alarms:
        told = ", ".join(f"{level.name} {level.mean:+.3f}" for level in levels)
        yield Check(
            "credit", "ok", f"mean residuals of {len(last)} ledgers: {told} (z; environment: units of reward)"
        )


def dead_letter_checks(found: Diagnosis) -> Iterator[Check]:
    """Whether anything was refused."""
    dead = found.records.get(topics.DEAD_LETTERS, 0)
    if dead:
        yield Check(
            "dead letters",
            "warn",
            f"{dead} records or spans were refused; `spanloop deadletters list` says why",
        )


def _workspace_checks(settings: Settings) -> Iterator[Check]:
    workspace = settings.workspace
    existing = workspace if workspace.exists() else _parent(workspace)
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Check(
            "workspace",
            "fail",
            f"{existing} is not writable by this user: set workspace (SPANLOOP_WORKSPACE)",
        )
    elif workspace.exists() and stat.S_IMODE(workspace.stat().st_mode) & 0o077:
        yield Check("workspace", "warn", f"others may read {workspace}: chmod 700 {workspace}")
    else:
        yield Check(
            "workspace", "ok", str(workspace) if workspace.exists() else f"{workspace} (will be made)"
        )
    free = shutil.disk_usage(existing).free
    status = "fail" if free < DISK_NONE else "warn" if free < DISK_LOW else "ok"
    hint = "" if status == "ok" else ": free some space; nothing is acknowledged that cannot be written"
    yield Check("disk", status, f"{free / 2**30:.1f} GiB free{hint}")


def _parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _given_up(run: Mapping[str, Any]) -> Iterator[Check]:
    """Processes that the running supervisor no longer starts."""
    for name, child in run.get("children", {}).items():
        if child.get("state") == "failed":
            why = child.get("last_exit") or "no reason known"
            yield Check(
                f"process {name}",
                "fail",
                f"given up after {child.get('restarts', 0)} restarts ({why}): the log of `spanloop up` says why; "
                "what was acknowledged is kept, stop `spanloop up` and start it again after the repair",
            )


def _port_checks(settings: Settings) -> Iterator[Check]:
    run = read_run(settings.workspace)
    pids = running(run)
    if pids:
        told = ", ".join(f"{name} (pid {pid})" for name, pid in pids.items())
        yield Check("processes", "ok", f"running: {told}")
    else:
        yield Check("processes", "ok", "none running; start them with `spanloop up`")
    if pids:
        yield from _given_up(run)
    for name in SERVERS:
        section = getattr(settings, name)
        if name in pids:
            yield Check(
                f"port {name}",
                "ok",
                f"{run.get('urls', {}).get(name, section.port)} served by pid {pids[name]}",
            )
        elif not getattr(section, "enabled", True):
            yield Check(f"port {name}", "ok", f"not used ({name}.enabled = false)")
        elif problem := (check_port(name, section.host, section.port) if section.port else ""):
            yield Check(f"port {name}", "fail", problem)
        else:
            yield Check(f"port {name}", "ok", f"{section.host}:{section.port or 'any'} is free")


class _Audited(msgspec.Struct):
    version: int
    fits: bool


def _served_checks(settings: Settings) -> Iterator[Check]:
    """What the learner's last audit of the served versions found."""
    try:
        audited = msgspec.json.decode((settings.workspace / "audit.json").read_bytes(), type=list[_Audited])
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError) as exc:
        yield Check("served version", "warn", f"audit.json cannot be read: {exc}")
        return
    names = [policy_name(settings.gateway.policy, one.version) for one in audited]
    wrong = [policy_name(settings.gateway.policy, one.version) for one in audited if not one.fits]
    if wrong:
        yield Check(
            "served version",
            "fail",
            f"what serves as {', '.join(wrong)} does not answer as its weights do (`spanloop policies show N`): restart that "
            "server, then `spanloop policies unfreeze`",
        )
    elif names:
        yield Check("served version", "ok", f"{', '.join(names)}: log-probabilities are those of the weights")


def _package_checks(settings: Settings) -> Iterator[Check]:
    own = _version("spanloop") or "not installed"
    yield Check(
        "spanloop", "ok", f"{own} on Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    )
    packages = PACKAGES | ({"kafka": ("confluent-kafka",)} if settings.bootstrap_servers else {})
    for extra, names in packages.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            needed = extra != "learn" or settings.learner.enabled or settings.serving.enabled
            text = f"{', '.join(missing)} not installed: pip install 'spanloop[{extra}]'"
            yield Check(f"packages {extra}", "warn" if needed else "ok", text)
        else:
            yield Check(f"packages {extra}", "ok", ", ".join(f"{n} {v}" for n, v in versions.items()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lines(found: Diagnosis) -> Iterator[str]:
    """The diagnosis for people."""
    for deployment in found.deployments:
        yield from _deployment_lines(deployment)
        yield ""
    if not found.deployments:
        yield "No spans yet. Point an agent at the collector:"
        yield f"  OTEL_EXPORTER_OTLP_ENDPOINT={found.collector} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf python agent.py"
        yield ""
    if found.cut:
        yield f"(counted over the newest {RECORDS_MAX} records of each topic)"
    for check in found.checks:
        yield f"{check.status:4}  {check.name}: {check.message}"


def _deployment_lines(found: Deployment) -> Iterator[str]:
    def mark(there: Any) -> str:
        return "yes" if there else "no "

    learns = found.learns
    tenant = "" if found.tenant == "default" else f" (tenant {found.tenant})"
    yield f"{found.service}{tenant}: {found.traces} traces, {found.spans} spans"
    yield (
        f"  {mark(learns['traces'])}  traces: {found.agent_runs} agent runs, {found.model_calls} model calls, "
        f"{found.tool_calls} tool calls"
    )
    yield f"  {mark(learns['team_reward'])}  team reward: {found.traces_with_outcome} of {found.traces} traces have an outcome"
    yield f"  {mark(learns['credit'])}  credit: {', '.join(learns['credit']) or 'needs traces and an outcome'}"
    yield (
        f"  {mark(learns['token_training'])}  token training: {found.with_token_ids} calls with token ids, "
        f"{found.with_propensities} with propensities, {found.with_version} by a policy version"
    )
    for need in found.needs:
        setting = f" [{need.setting}]" if need.setting else ""
        yield f"  for {need.for_}: {need.missing}; {need.do}{setting}"
