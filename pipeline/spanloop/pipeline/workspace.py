"""A workspace on disk: who runs on it, what is written beside the log, and which ports it wants.

One supervisor a workspace: an advisory lock on WORKSPACE/supervisor.lock that the kernel frees when its holder dies,
with the holder's pid as text for the error message. run.json is the supervisor's note to other processes;
a clean stop renames it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spanloop.schemas.errors import ConfigError, TerminalError
from spanloop.schemas.settings import Settings

__all__ = [
    "LAST_RUN",
    "SERVERS",
    "WorkspaceLock",
    "check_port",
    "claim_ports",
    "end_run",
    "port_holder",
    "process_name",
    "read_run",
    "running",
    "write_json",
]

LAST_RUN = "last_run.json"
SERVERS = ("collector", "gateway", "serving")
"""Processes that listen; each has a section with host and port."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a small JSON file in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise TerminalError(f"cannot write {path}: {exc.strerror or exc}", path=str(path)) from exc


def end_run(workspace: Path) -> None:
    """Put run.json aside: nothing runs now, but what the last run was started with stays known."""
    with contextlib.suppress(OSError):
        (workspace / "run.json").replace(workspace / LAST_RUN)


def read_run(workspace: Path, name: str = "run.json") -> dict[str, Any]:
    """run.json of a workspace; empty when no supervisor left one. ``name``: LAST_RUN for that of the run which was stopped last."""
    try:
        found = json.loads((workspace / name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def process_name(pid: int) -> str:
    """Command line of a live process; empty when there is none (or the system does not tell)."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
    except (OSError, IndexError):
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def running(run: Mapping[str, Any]) -> dict[str, int]:
    """Live processes of a run.json by name."""
    return {name: int(pid) for name, pid in run.get("pids", {}).items() if process_name(int(pid))}


class WorkspaceLock:
    """The right to supervise a workspace, held until ``release`` or the end of the process.

    Args:
        workspace: folder, made (0700) when missing.
    """

    def __init__(self, workspace: Path) -> None:
        self.path = workspace / "supervisor.lock"
        self.stale_pid = 0
        """Pid of a holder that died without releasing; 0: none."""
        try:
            workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"workspace {workspace} cannot be used: {exc.strerror or exc}; "
                "set `workspace` (SPANLOOP_WORKSPACE) to a folder that this user may write"
            ) from exc
        holder = self._pid_in_file()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(
                f"workspace {workspace} is already run by pid {holder or '?'}: stop that (kill -INT {holder or 'PID'}) "
                "or use another workspace (--workspace, SPANLOOP_WORKSPACE)",
                pid=holder,
            ) from None
        self.stale_pid = holder
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _pid_in_file(self) -> int:
        text = os.pread(self._file, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else 0

    def release(self) -> None:
        """Give the workspace free. The file stays: removing it could remove a successor's lock."""
        os.ftruncate(self._file, 0)
        os.close(self._file)


def port_holder(port: int) -> str:
    """Who listens on a TCP port, as "pid 12 (command)"; empty where that cannot be found out."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):
            if os.readlink(entry) in inodes:
                pid = int(entry.parts[2])
                return f"pid {pid} ({process_name(pid)[:80]})"
    return ""


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def check_port(section: str, host: str, port: int) -> str:
    """Why ``section`` cannot listen there, and which setting changes it; empty when it can."""
    setting = f"{section}.port (SPANLOOP_{section.upper()}__PORT)"
    try:
        _bind(host, port).close()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            holder = port_holder(port) or "another process"
            return (
                f"port {port} on {host} is taken by {holder}: stop it, or set {setting} to a free port or 0"
            )
        if exc.errno == errno.EACCES:
            return f"port {port} needs privileges that this user lacks: set {setting} to one above 1023 or 0"
        host_setting = f"{section}.host (SPANLOOP_{section.upper()}__HOST)"
        return f"cannot listen on {host}:{port}: {exc.strerror or exc}; set {host_setting} or {setting}"
    return ""


def claim_ports(settings: Settings, names: list[str]) -> dict[str, int]:
    """A concrete port for each server that will run: the configured one, checked, or a free one for 0.

    Raises:
        ConfigError: one is taken; the message names the port, its holder and the setting.
    """
    ports: dict[str, int] = {}
    problems, held = [], []
    try:
        for name in (server for server in SERVERS if server in names):
            section = getattr(settings, name)
            if section.port:
                ports[name] = section.port
                same = [other for other, port in ports.items() if port == section.port and other != name]
                problem = (
                    f"{name}.port and {same[0]}.port are both {section.port}: set another one "
                    f"(SPANLOOP_{name.upper()}__PORT)"
                    if same
                    else check_port(name, section.host, section.port)
                )
                if problem:
                    problems.append(problem)
            else:
                held.append(_bind(section.host, 0))  # kept open until all are known, so that they differ
                ports[name] = held[-1].getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    if problems:
        raise ConfigError("\n".join(problems))
    return ports
