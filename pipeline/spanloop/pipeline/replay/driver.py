"""The local run: passes over the archive, then a Beam pipeline a bucket, in worker processes; resumable at every step.

Place in the flow: ``cli`` makes a plan and calls ``replay``. The local Beam runner holds a grouping in memory, so the driver first
spreads rows over buckets on disk, whole components each (``passes``), and runs each bucket on its own.

Invariants: a step that left its ``.json`` is not done again, so a kill loses what was in hand, a chunk or a bucket a worker. The
plan of the first try is kept: what is archived meanwhile changes nothing. Workers end when their driver does.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.archive.files import LocalFiles, open_files
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.replay import passes, progress
from spanloop.pipeline.replay.models import copy_models
from spanloop.pipeline.replay.plan import Plan
from spanloop.pipeline.replay.reading import Bad
from spanloop.pipeline.replay.results import Counts, Manifest, Part, write_bad
from spanloop.pipeline.replay.spill import Labels, write_atomically
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, TransientError

__all__ = ["WORK", "Progress", "replay"]

WORK = "work"
"""Folder of an unfinished result set for what its passes leave."""
_TELL_S = 0.5
Tell = Callable[["Progress"], None]


class Progress(msgspec.Struct, frozen=True):
    """How far a replay is."""

    phase: str
    done: int
    total: int
    """Steps of the phase: records of spans while reading, spans while replaying."""
    spans: int
    orchestrations: int
    seconds: float
    """Of this phase, in this try."""


class _Workers:
    """Runs steps in processes, or here where one is enough."""

    def __init__(self, work: Path, workers: int, tell: Tell | None) -> None:
        self._work, self._tell = work, tell
        self._counts = work / "progress"
        shutil.rmtree(self._counts, ignore_errors=True)
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(
                workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker,
                initargs=(self._counts, os.getpid()),
            )  # fmt: skip
        else:
            progress.attach(self._counts)

    def run(self, phase: str, steps: Sequence[tuple[str, tuple[Any, ...]]], total: int = 0) -> None:
        """Run steps, (kind, arguments) each, that are not done; in any order."""
        began = time.monotonic()
        before = progress.total(self._counts)

        def told() -> None:
            if self._tell is not None:
                now = progress.total(self._counts)
                steps_done, spans, orchestrations = (b - a for a, b in zip(before, now, strict=True))
                self._tell(
                    Progress(phase, steps_done, total, spans, orchestrations, time.monotonic() - began)
                )

        if self._pool is None:
            stop = threading.Event()
            teller = threading.Thread(target=lambda: [told() for _ in iter(lambda: stop.wait(_TELL_S), True)])
            teller.start()
            try:
                for kind, arguments in steps:
                    run_step(self._work, kind, *arguments)
            finally:
                stop.set()
                teller.join()
        else:
            self._spread(steps, told)
        told()

    def _spread(self, steps: Sequence[tuple[str, tuple[Any, ...]]], told: Callable[[], None]) -> None:
        assert self._pool is not None  # noqa: S101
        pending: set[Future[None]] = set()
        try:
            pending = {self._pool.submit(run_step, self._work, kind, *arguments) for kind, arguments in steps}
            while pending:
                finished, pending = wait(pending, timeout=_TELL_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                told()
        except BrokenProcessPool as exc:
            raise TransientError(
                "a worker of the replay was killed, maybe for its memory: nothing that was finished is lost, the same command "
                "goes on (fewer --workers need less memory)"
            ) from exc
        except BaseException:
            for future in pending:
                future.cancel()
            raise

    def close(self, *, at_once: bool) -> None:
        """End the processes; ``at_once``: in the middle of what they do."""
        progress.attach(None)
        if self._pool is None:
            return
        if at_once:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(counts: Path, parent: int) -> None:
    """First thing in a worker: Ctrl-C is the driver's, and without driver there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress.attach(counts)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_step(work: Path, kind: str, *arguments: Any) -> None:
    """One step of a replay, in whatever process."""
    if kind == "bucket":
        from spanloop.pipeline.runtimes.collecting import collect_rarely

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        progress.quiet_beam()
        from spanloop.pipeline.replay.transforms import run_bucket

        collect_rarely()
        run_bucket(work, *arguments)
        return
    getattr(passes, kind)(work, *arguments)


def replay(
    plan: Plan,
    store: ArchiveStore,
    root: Path,
    *,
    workers: int = 1,
    tell: Tell | None = None,
    restart: bool = False,
) -> Manifest:
    """Run a plan to its end, or go on where an earlier try stopped.

    Args:
        plan: What to do.
        store: The archive.
        root: Folder of result sets.
        workers: Processes; 1: this one.
        tell: Called about twice a second, from any thread.
        restart: Throw away what is there under the name.

    Raises:
        ConfigError: the name belongs to another replay.
        TransientError: a worker died, or another process replays under the name; run it again.
        TerminalError: a file of the archive cannot be read.
    """
    folder = root / plan.name
    work = folder / WORK
    with alone(root, plan.name):
        if restart:
            shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        plan, spent = _resumed(plan, folder, work)
        passes.load_plan.cache_clear()
        crew = _Workers(work, min(workers, max(plan.buckets, len(plan.chunks[topics.SPANS]))), tell)
        whole = False
        try:
            _prepare(plan, store, folder, work, crew)
            buckets = [("bucket", (n,)) for n in range(plan.buckets) if not _is_done(work, f"bucket-{n}")]
            spans = sum(_steps(work, f"spans-{i}").spans for i in range(len(plan.chunks[topics.SPANS])))
            crew.run("replaying", buckets, spans)
            whole = True
        finally:
            crew.close(at_once=not whole)
            write_atomically(work / "seconds", str(spent + time.monotonic() - began).encode())
        return _finish(plan, folder, work, spent + time.monotonic() - began)


@contextlib.contextmanager
def alone(root: Path, name: str) -> Iterator[None]:
    """One driver a name; the kernel frees the lock of a killed one."""
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError(
                f"another process is replaying {name!r}: wait for it, or give another --name"
            ) from None
        yield
    finally:
        os.close(handle)


def _resumed(plan: Plan, folder: Path, work: Path) -> tuple[Plan, float]:
    """The plan to go on with, and the seconds that went into it before."""
    if (folder / "manifest.json").exists():
        raise ConfigError(
            f"replay {plan.name!r} is there already, in {folder}: give another --name, or --restart"
        )
    try:
        old = msgspec.json.decode((work / "plan.json").read_bytes(), type=Plan)
    except (FileNotFoundError, msgspec.MsgspecError):
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(work / "plan.json", msgspec.json.encode(plan))
        return plan, 0.0
    if not old.same_job(plan):
        changed = [n for n in ("settings", "models", "since", "until", "archive", "code_version")
                   if getattr(old, n) != getattr(plan, n)]  # fmt: skip
        raise ConfigError(
            f"an unfinished replay {plan.name!r} was begun with other {', '.join(changed) or 'options'}: give the same ones to go "
            "on, another --name, or --restart"
        )
    with contextlib.suppress(OSError, ValueError):
        return old, float((work / "seconds").read_text())
    return old, 0.0


def _is_done(work: Path, name: str) -> bool:
    return (work / f"{name}.json").exists()


def _steps(work: Path, name: str) -> Counts:
    step = passes.done(work, name)
    return step.counts if step is not None else Counts()


def _prepare(plan: Plan, store: ArchiveStore, folder: Path, work: Path, crew: _Workers) -> None:
    """Everything up to rows in their buckets."""
    chunks = range(len(plan.chunks[topics.SPANS]))
    if not _is_done(work, "models"):
        values = (
            value for chunk in plan.chunks[topics.MODELS] for _, value in passes.read_chunk(store, chunk)
        )
        copy_models(values, LocalFiles(folder), "models")
        write_atomically(work / "models.json", b"{}")
    if not _is_done(work, "targets"):
        crew.run("feedback", [("feedback_targets", ())])
    todo = [("spans", (n,)) for n in chunks if not _is_done(work, f"spans-{n}")]
    crew.run("reading", todo, sum(plan.chunks[topics.SPANS][n].rows for _, (n,) in todo))
    if not _is_done(work, "join"):
        crew.run("joining", [("join", ())])
    if Labels.load(work).moved(plan.buckets):
        crew.run("moving", [("move", (n,)) for n in chunks if not _is_done(work, f"move-{n}")])
    rest: list[tuple[str, tuple[Any, ...]]] = [
        ("recorded", (topic, n))
        for topic in (topics.CREDITS, topics.ORCHESTRATIONS, topics.REWARDS, topics.DEAD_LETTERS)
        for n in range(len(plan.chunks.get(topic, [])))
        if not _is_done(work, f"recorded-{topic}-{n}")
    ]
    if not _is_done(work, "feedback"):
        rest.append(("feedback", ()))
    crew.run("feedback", rest)


def _finish(plan: Plan, folder: Path, work: Path, seconds: float) -> Manifest:
    """Sum up, remove what no report names, write the manifest; then the work folder is not needed any more."""
    from spanloop.pipeline.replay.transforms import Report

    counts = Counts()
    bad: list[Bad] = []
    parts: list[Part] = []
    for path in sorted(work.glob("*.json")):
        if path.name.startswith("bucket-"):
            report = msgspec.json.decode(path.read_bytes(), type=Report)
            counts.add(report.counts)
            bad += report.bad
            parts += report.parts
        elif path.name not in ("plan.json", "models.json"):
            step = msgspec.json.decode(path.read_bytes(), type=passes.Step)
            counts.add(step.counts)
            bad += step.bad
    named = {part.path for part in parts}
    for path in (folder / "parts").glob("*"):
        if f"parts/{path.name}" not in named:
            path.unlink()
    if bad:
        write_bad(folder / "bad.jsonl", (msgspec.json.encode(item) for item in bad))
    manifest = manifest_of(plan, "direct", counts, sorted(parts, key=lambda part: part.path), seconds)
    LocalFiles(folder).write("manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def manifest_of(plan: Plan, runner: str, counts: Counts, parts: list[Part], seconds: float) -> Manifest:
    """The manifest of a finished replay."""
    return Manifest(
        name=plan.name, code_version=plan.code_version, settings=plan.settings, rewards_file=plan.rewards_file,
        models=plan.models, since=plan.since, until=plan.until, archive=plan.archive, contained=plan.contained, runner=runner,
        buckets=plan.buckets, counts=counts, parts=parts, seconds=round(seconds, 3), finished_ns=SystemClock().now_ns(),
    )  # fmt: skip


def open_store(plan: Plan) -> ArchiveStore:
    """The archive that a plan names."""
    return ArchiveStore(open_files(plan.archive, plan.endpoint))
