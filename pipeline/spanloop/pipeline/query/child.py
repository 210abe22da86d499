"""The sandbox as its parent sees it: start it, hand it a plan, take its bytes, stop it.

Invariants: the child gets no environment, no open file but its three pipes, and is killed when the time is over, when the
caller stops reading, or when this process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spanloop.schemas.errors import TransientError

__all__ = ["Answer", "Child", "start_early", "started"]

_BLOCK = 1 << 18
START_S = 60.0
"""For the process to start, take its plan and shut itself in."""
_CODE = (
    "import gc, sys, json\n"
    "gc.set_threshold(200_000)\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from spanloop.pipeline.query.sandbox import main\n"
    "main(int(sys.argv[2]))\n"
)
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8", "TZ": "UTC", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}  # fmt: skip


class Answer:
    """How a statement ended: filled when the last byte was read."""

    def __init__(self) -> None:
        self.error = ""
        """Kind of the failure; empty: none."""
        self.message = ""
        self.ready = False
        """Whether the statement began; its time counts from then."""
        self.guards: list[str] = []
        """What confined the process."""
        self.seconds = 0.0
        """From plan to last row, in the child."""


class Child:
    """One sandbox process, started at once so that it is ready when the plan is."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, json.dumps(_import_path()), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENVIRONMENT, cwd="/", close_fds=True,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def run(
        self,
        plan: dict[str, Any],
        answer: Answer,
        *,
        timeout_s: float,
        progress: Callable[[float], None] = lambda _percent: None,
    ) -> Iterator[bytes]:
        """Hand over the plan; yields what the child writes until it is done, then fills ``answer``.

        Raises:
            TransientError: it took longer than ``timeout_s``; the child is gone.
        """
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: S101, PT018
        body = json.dumps(plan).encode()
        with contextlib.suppress(BrokenPipeError):  # it says why on its way out
            stdin.write(len(body).to_bytes(4, "little") + body)
        end = time.monotonic() + START_S
        notes = bytearray()
        open_pipes = [stdout.fileno(), stderr.fileno()]
        while open_pipes:
            ready, _, _ = select.select(open_pipes, [], [], max(0.0, end - time.monotonic()))
            if not ready or time.monotonic() > end:
                self.close()
                raise TransientError(
                    f"the query ran longer than {timeout_s:g} s and was stopped: narrow it or raise --timeout"
                    if answer.ready
                    else f"the query's process was not ready after {START_S:g} s: is this machine overloaded?",
                    late_s=time.monotonic() - end,
                )
            for pipe in ready:
                data = os.read(pipe, _BLOCK)
                if not data:
                    open_pipes.remove(pipe)
                elif pipe == stdout.fileno():
                    yield data
                else:
                    notes += data
                    *lines, rest = notes.split(b"\n")
                    notes = bytearray(rest)
                    for line in lines:
                        waiting = not answer.ready
                        self._noted(bytes(line), answer, progress)
                        if waiting and answer.ready:
                            end = time.monotonic() + timeout_s
        code = self._process.wait()
        if code and not answer.error:
            said = f" ({answer.message})" if answer.message else ""
            answer.error, answer.message = "Crashed", _cause(code) + said

    @staticmethod
    def _noted(line: bytes, answer: Answer, progress: Callable[[float], None]) -> None:
        try:
            note = json.loads(line)
        except ValueError:  # not ours: a library's warning, or a traceback
            text = line.decode("utf-8", "replace").strip()
            if text and not answer.error:
                answer.message = text[:200]
            return
        if "progress" in note:
            progress(note["progress"])
        elif "ready" in note:
            answer.ready = True
        else:
            answer.error, answer.message = note.get("error", ""), note.get("message", "")
            answer.guards, answer.seconds = note.get("guards", []), note.get("seconds", 0.0)


_waiting: list[Child] = []


def start_early() -> None:
    """Start the sandbox of this process's first statement."""
    _waiting.append(Child())
    atexit.register(_end_waiting)


def started() -> Child:
    """The sandbox that was started early, or a new one."""
    return _waiting.pop() if _waiting else Child()


def _end_waiting() -> None:
    while _waiting:
        _waiting.pop().close()


def _cause(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "the query used up its processor time"
    if code < 0:
        return f"the query's process was ended by {signal.Signals(-code).name}; it may have needed more memory (--memory)"
    return f"the query's process ended with code {code}"


_LIBRARY = os.path.dirname(os.__file__)


def _import_path() -> list[str]:
    """Where this process finds modules, with the folder of this package in it (editable installs use finders)."""
    here = str(Path(__file__).resolve().parents[3])
    rooms = {str(Path(folder).parent) for folder in sys.modules["spanloop"].__path__}
    ours = [here, *sorted(rooms - {here})]
    # Python's own library first: most of what is imported is there, and each folder before it is asked each time
    library = [
        folder for folder in sys.path if folder.startswith(_LIBRARY) and not folder.endswith("-packages")
    ]
    return [*library, *ours, *(f for f in sys.path if f and f not in library and f not in ours)]
