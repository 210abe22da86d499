"""What ``spanloop archive status`` shows: per source what is archived and what waits, and how the archiver is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from spanloop.pipeline.archive.archiver import STATUS_FILE, Status
from spanloop.pipeline.archive.cleaning import quarantined
from spanloop.pipeline.archive.manifest import gaps
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics

__all__ = ["Overview", "Source", "overview"]

_STALE_S = 30.0


class Source(msgspec.Struct):
    """One partition of a topic."""

    source: str
    ranges: int
    records: int
    files: int
    bytes: int
    contained: int
    """Last archived offset."""
    behind: int | None
    """Offsets in the log after it (an upper bound where offsets are shared between topics); None: the log does not answer."""


class Overview(msgspec.Struct):
    """The archive as a whole."""

    root: str
    archiver: str
    """ok, red, starting, stopped, silent (no sign of life for half a minute) or none (never ran here)."""
    reason: str
    sources: list[Source]
    quarantined: list[str]
    lost: list[str]
    gaps: list[str]

    @property
    def healthy(self) -> bool:
        """Nothing lost or open, and no archiver in trouble."""
        return not self.lost and not self.gaps and self.archiver not in ("red", "silent")


def overview(store: ArchiveStore, log: Log | None, workspace: Path) -> Overview:
    """Look at manifests, log and status file; only reads.

    Raises:
        OSError: the store does not answer. TransientError: the log does not.
    """
    listing = store.listing()
    sources = []
    names = dict.fromkeys(listing.live)
    for source in (s for topic in topics.ALL_TOPICS if log is not None for s in log.sources(topic)):
        names.setdefault(source)
    for source in names:
        live = listing.live.get(source, [])
        contained = live[-1].last if live else -1
        behind = None if log is None else max(0, log.end(source) - contained)
        sources.append(
            Source(
                source, len(live), sum(item.records for item in live), sum(len(item.files) for item in live),
                sum(item.bytes for item in live), contained, behind,
            )
        )  # fmt: skip
    state, reason = _archiver(workspace, store.clock.now_ns())
    return Overview(
        store.files.uri(""),
        state,
        reason,
        sources,
        [f"{note['path']}: {note['reason']}" for note in quarantined(store)],
        [
            f"{item.source} {item.name}: {loss.kind}: {loss.reason}"
            for live in listing.live.values()
            for item in live
            for loss in item.lost
        ],
        [f"{source} {a}-{b}" for source, live in listing.live.items() for a, b in gaps(live)],
    )


def _archiver(workspace: Path, now_ns: int) -> tuple[str, str]:
    try:
        status = msgspec.json.decode((workspace / STATUS_FILE).read_bytes(), type=Status)
    except (OSError, msgspec.MsgspecError):
        return "none", ""
    if status.state != "stopped" and now_ns - status.updated_ns > _STALE_S * 1e9:
        return (
            "silent",
            f"last sign of life {(now_ns - status.updated_ns) / 1e9:.0f} s ago; then: {status.state}",
        )
    return status.state, status.reason
