"""The archiver: follows every topic of the log and writes ranges, one process for an archive.

Place in the flow: ``spanloop archive follow`` and the process ``archiver`` of ``spanloop up`` run ``Archiver.follow``;
``spanloop archive once`` runs ``drain``. What is contained is read from the manifests alone, so there is nothing else to
keep in step with them.

Invariants: a range is written only when the one before it is there. Whatever the store or the log refuse (disk full, not
reachable), nothing is dropped: the archiver says so, pauses and goes on by itself; the log keeps the records. Before the first
write everything that is there is verified.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.archive.cleaning import GRACE_S, sweep
from spanloop.pipeline.archive.compaction import compact
from spanloop.pipeline.archive.manifest import RAW, Lost, Range
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.archive.repair import Report, verify
from spanloop.pipeline.archive.source import chunk, contradicts, first_offset
from spanloop.pipeline.archive.writer import write_range
from spanloop.pipeline.ports import Log, topic_of
from spanloop.pipeline.workspace import write_json
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.settings import Settings

__all__ = ["STATUS_FILE", "Archiver", "Status"]

STATUS_FILE = "archiver.json"
"""In the workspace: the archiver's ``Status``, rewritten when it changes and once in ``STATUS_EVERY_S``."""
STATUS_EVERY_S = 5.0
POLL_S = 0.5
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 15.0
COMPACT_EVERY_S = 60.0
LIST_EVERY_S = 30.0
"""How often a remote archive is looked at again: this process alone should write there."""
LOCK_WAIT_S = 5.0
"""A query that fills an embedded workspace's archive holds it for so long at most, as a rule."""

logger = logging.getLogger(__name__)


class Status(msgspec.Struct):
    """How the archiver is. ``state``: starting, ok, or red with the reason why nothing is written."""

    state: str = "starting"
    reason: str = ""
    since_ns: int = 0
    ranges: int = 0
    """Written since the start."""
    records: int = 0
    merged: int = 0
    quarantined: list[str] = []
    lost: list[str] = []
    updated_ns: int = 0


class Archiver:
    """Writes what the log has and the archive has not.

    Args:
        log: Any Log.
        store: Of this deployment.
        settings: ``archive.records``, ``archive.every_s``, ``archive.compact_below_mb``; the workspace takes the status file.
        say: Takes lines for people.
    """

    def __init__(
        self,
        log: Log,
        store: ArchiveStore,
        settings: Settings,
        *,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._log = log
        self._store = store
        self._settings = settings.archive
        self._status_file: Path | None = settings.workspace / STATUS_FILE
        self._say = say
        self._pending: dict[str, float] = {}
        self._tried: dict[str, int] = {}
        self._shrunk: set[str] = set()
        self._contained: dict[str, int] = {}
        self._listed_s = -LIST_EVERY_S
        self._swept_s = time.monotonic()
        self._written_s = 0.0
        self.status = Status()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the archive for writing.

        Raises:
            ConfigError: another process does.
        """
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            with self._store.files.writer() as mine:
                if mine:
                    yield
                    return
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process writes to the archive {self._store.files.uri('')}: `spanloop archive status` shows how it "
                    "is; stop it first, or let it do the work"
                )
            time.sleep(0.05)

    def start(self, progress: Callable[[int, int], None] = lambda _done, _all: None) -> Report:
        """Check that the archive is of this log, repair it, sweep what a killed archiver left.

        Raises:
            TerminalError: it was made from another log.
            OSError, TransientError: store or log do not answer.
        """
        self._store.files.sweep()
        for source, live in self._store.listing().live.items():
            if contradicts(self._log, source, live):
                raise self._other_log(source)
        report = verify(self._store, self._log, progress=progress)
        self.status.quarantined = report.quarantined
        self.status.lost = report.lost
        for line in (*report.quarantined, *report.lost):
            self._say(line)
        sweep(self._store)
        return report

    def drain(self, on_range: Callable[[Range], None] = lambda _range: None) -> int:
        """Write everything up to the log's end as it is now: how many records.

        Raises:
            OSError, TransientError: store or log refused; what was written stays, calling it again goes on.
        """
        contained = self._store.contained()
        written = 0
        for topic in topics.ALL_TOPICS:
            ends = {source: self._log.end(source) for source in self._log.sources(topic)}
            for source, end in ends.items():
                if end < contained.get(source, -1) or source in self._shrunk:
                    self._same_log(source, contained[source], end)
            behind = {source: end for source, end in ends.items() if end > contained.get(source, -1)}
            written += self._write(topic, behind, on_range)
        return written

    def step(self, on_range: Callable[[Range], None] = lambda _range: None) -> int:
        """Write the ranges that are due by number of records or age: how many records.

        Raises:
            OSError, TransientError: as ``drain``.
        """
        now = time.monotonic()
        if self._store.files.local or now - self._listed_s >= LIST_EVERY_S:
            self._contained, self._listed_s = self._store.contained(), now
        contained = self._contained
        written = 0
        trouble: TransientError | None = None
        for topic in topics.ALL_TOPICS:
            ends: dict[str, int] = {}
            due = shrunk = False
            for source in self._log.sources(topic):
                after, end = contained.get(source, -1), self._log.end(source)
                if end < after or source in self._shrunk:
                    try:
                        self._same_log(source, after, end)
                    except TransientError as exc:
                        trouble, shrunk = exc, True
                elif end == after:
                    self._pending.pop(source, None)
                else:
                    ends[source] = end
                    aged = now - self._pending.setdefault(source, now) >= self._settings.every_s
                    due = (
                        due or aged or end - max(after, self._tried.get(source, -1)) >= self._settings.records
                    )
            if due and not shrunk:
                written += self._write(topic, ends, on_range)
                self._tried |= ends
                for source in ends:
                    self._pending.pop(source, None)
        if trouble is not None:
            raise trouble
        return written

    def _same_log(self, source: str, after: int, end: int) -> None:
        """The log ended before the archive does. Raises TransientError until that is over, TerminalError when it turns out
        that offsets were given again: what they stand for now is in the log only."""
        self._shrunk.add(source)
        if contradicts(self._log, source, self._store.listing([topic_of(source)[0]]).live.get(source, [])):
            raise self._other_log(source)
        if end < after:
            raise TransientError(
                f"{source} ends at offset {end} in the log, but the archive has it up to {after}: was the log emptied or put back "
                "to an older copy? The archive is kept as it is"
            )
        self._shrunk.discard(source)

    def _other_log(self, source: str) -> TerminalError:
        return TerminalError(
            f"the archive {self._store.files.uri('')} was made from another log: what it has of {source} is not what this log "
            "has at the same offsets. Move it away, or set archive.url (SPANLOOP_ARCHIVE__URL) to an empty place; `spanloop "
            "replay` reads the old one"
        )

    def _write(self, topic: str, ends: dict[str, int], on_range: Callable[[Range], None]) -> int:
        """Write the sources of a topic up to ``ends``."""
        if not ends:
            return 0
        live = self._store.listing([topic]).live
        after = {source: ranges[-1].last for source, ranges in live.items()}
        gone: dict[str, Lost] = {}
        written = 0

        def on_gone(source: str, first: int, last: int) -> None:
            gone[source] = Lost(RAW, f"offsets {first}-{last} left the log before they were archived")

        while found := chunk(self._log, topic, after, ends, self._settings.records, on_gone=on_gone):
            for source, records in found.items():
                before = after.get(source, -1)
                lost = gone.pop(source, None) or self._forgotten(source, before, records[0].offset)
                item = write_range(
                    self._store,
                    topic,
                    records[0].partition,
                    records,
                    first=before + 1,
                    lost=[lost] if lost else [],
                )
                assert item is not None  # noqa: S101 - there are records
                if lost:
                    self._tell_lost(source, lost)
                self.status.ranges += 1
                self.status.records += len(records)
                written += len(records)
                after[source] = self._contained[source] = item.last
                on_range(item)
        return written

    def _forgotten(self, source: str, after: int, next_offset: int) -> Lost | None:
        """Whether the log's retention took records before they were archived."""
        if after < 0 or next_offset == after + 1:
            return None
        start = first_offset(self._log, source)
        if start is None or start <= after + 1:
            return None
        return Lost(RAW, f"offsets {after + 1}-{start - 1} left the log before they were archived")

    def _tell_lost(self, source: str, lost: Lost) -> None:
        self.status.lost.append(f"{source}: {lost.reason}")
        logger.error(
            "archive_lost: %s: %s; raise kafka.retention_hours or look why the archiver stood",
            source,
            lost.reason,
        )

    def follow(
        self,
        stop: Callable[[float], bool],
        on_range: Callable[[Range], None] = lambda _range: None,
        on_ready: Callable[[Report], None] = lambda _report: None,
    ) -> None:
        """Archive until ``stop``, then write what is left.

        Args:
            stop: Waits so many seconds at most and says whether to stop, like ``threading.Event.wait``.
            on_range: Called after each range.
            on_ready: Called once, when the archive was verified.

        Raises:
            TerminalError: the archive was made from another log.
        """
        pause, compact_s, ready = PAUSE_FIRST_S, time.monotonic(), False
        wait = 0.0
        while not stop(wait):
            try:
                if not ready:
                    report = self.start()
                    ready = True
                    on_ready(report)
                self.step(on_range)
                if time.monotonic() - compact_s >= COMPACT_EVERY_S:
                    self._tidy(stop)
                    compact_s = time.monotonic()
                self._set("ok", "")
                pause, wait = PAUSE_FIRST_S, POLL_S
            except (OSError, TransientError) as exc:
                reason = exc.message if isinstance(exc, SpanloopError) else str(exc)
                self._set("red", f"nothing is lost, the log keeps it; goes on by itself: {reason}")
                wait, pause = pause, min(2 * pause, PAUSE_MAX_S)
        if ready:
            try:
                self.drain(on_range)
            except (OSError, TransientError) as exc:
                self._say(f"the rest stays in the log for the next start: {exc}")
        self._set("stopped", "")

    def _tidy(self, stop: Callable[[float], bool]) -> None:
        """Merge and sweep; a damaged file found on the way is repaired, and keeps nothing from being archived."""
        try:
            below = self._settings.compact_below_mb * 2**20
            self.status.merged += compact(self._store, below_bytes=below, stop=lambda: stop(0.0))
            if time.monotonic() - self._swept_s >= GRACE_S:
                sweep(self._store)
                self._swept_s = time.monotonic()
        except OSError as exc:
            self._say(f"not merged: {exc}")
            report = verify(self._store, self._log)
            self.status.quarantined += report.quarantined
            self.status.lost = report.lost

    def _set(self, state: str, reason: str) -> None:
        """Tell people about a change, and the status file now and then."""
        now_ns = time.time_ns()
        changed = (state, reason) != (self.status.state, self.status.reason)
        if changed:
            self.status.since_ns = now_ns
            if state == "red" or self.status.state == "red":
                self._say(f"{state}: {reason}" if reason else state)
        self.status.state, self.status.reason, self.status.updated_ns = state, reason, now_ns
        if self._status_file is not None and (
            changed or time.monotonic() - self._written_s >= STATUS_EVERY_S
        ):
            with contextlib.suppress(TerminalError):  # a full disk must not end what still works
                write_json(self._status_file, _plain(self.status))
            self._written_s = time.monotonic()


def _plain(status: Status) -> dict[str, Any]:
    return msgspec.to_builtins(status)
