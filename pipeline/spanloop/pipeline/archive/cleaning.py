"""What is taken out of the archive: bad files into ``_quarantine``, and what no live manifest names, after a grace period.

Place in the flow: ``repair`` sets aside, ``archiver`` sweeps when it starts and after compaction.

Invariants: a file that a live manifest names is never touched. Files of a covered manifest (merged, or of a second writer that
came late) and files that a repair took out stay for ``GRACE_S``, for queries that began before. Nothing inside an unresolved
gap is swept: it may be all that is left of it.
"""

from __future__ import annotations

import json
import re

from spanloop.pipeline.archive.files import Entry
from spanloop.pipeline.archive.manifest import RAW, Range, gaps
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.archive.repeats import INDEX

__all__ = ["GRACE_S", "QUARANTINE", "orphans", "quarantine", "quarantined", "sweep"]

GRACE_S = 600.0
"""How long files that were replaced stay for readers."""
QUARANTINE = "_quarantine"
_REASON = ".reason.json"
_DATA = re.compile(r"/(\d+)-(\d+)-(\d+)-[0-9a-f]{8}\.(?:parquet|u64)$")


def quarantine(store: ArchiveStore, path: str, reason: str) -> None:
    """Move a file aside, with a note of where it was and what is wrong; a missing file leaves only the note."""
    name = f"{QUARANTINE}/{path.replace('/', '~')}"
    note = {"path": path, "reason": reason, "found_ns": store.clock.now_ns()}
    store.files.write(name + _REASON, json.dumps(note, indent=1).encode())
    if store.files.sizes([path])[0] is not None:
        store.files.move(path, name)


def quarantined(store: ArchiveStore) -> list[dict[str, str]]:
    """The notes: path and reason of everything set aside."""
    return [
        json.loads(store.files.read(entry.path))
        for entry in store.files.list(QUARANTINE)
        if entry.path.endswith(_REASON)
    ]


def orphans(store: ArchiveStore, *, grace_s: float = GRACE_S) -> list[Entry]:
    """Data files that no manifest names, live or covered, and no repair took out within the grace period."""
    listing = store.listing()
    now_ns = store.clock.now_ns()
    named = set()
    for ranges in (*listing.live.values(), *listing.covered.values()):
        for item in ranges:
            named |= {info.path for info in item.files}
            if now_ns - item.written_ns <= grace_s * 1e9:
                named |= set(item.retired)
    return [
        entry
        for folder in (RAW, "tables", INDEX)
        for entry in store.files.list(folder)
        if entry.path not in named
    ]


def sweep(store: ArchiveStore, *, grace_s: float = GRACE_S) -> int:
    """Remove what nobody needs any more: how many files and manifests.

    Args:
        store: To be held for writing by the caller.
        grace_s: Seconds for which replaced files stay.

    Raises:
        OSError: the medium refused; calling it again goes on.
    """
    swept = store.files.sweep()
    now_ns = store.clock.now_ns()
    listing = store.listing()
    for source, covered in listing.covered.items():
        for item in covered:
            cover = _cover(item, listing.live[source])
            if now_ns - cover.written_ns > grace_s * 1e9:
                store.files.delete(item.path)
                swept += 1
    open_gaps = [(source, gap) for source, live in listing.live.items() for gap in gaps(live)]
    for entry in orphans(store, grace_s=grace_s):
        if not store.files.local and now_ns - entry.mtime_ns <= grace_s * 1e9:
            continue  # another writer may be about to name it: there is no lock
        if any(_inside(entry.path, source, gap) for source, gap in open_gaps):
            continue
        store.files.delete(entry.path)
        swept += 1
    return swept


def _cover(item: Range, live: list[Range]) -> Range:
    return next(other for other in live if other.first <= item.first <= other.last)


def _inside(path: str, source: str, gap: tuple[int, int]) -> bool:
    """Whether a file may belong to the missing range; by its offsets and partition, whatever its table."""
    match = _DATA.search(path)
    partition = source.partition("/")[2] or "0"
    return match is not None and match[1] == partition and int(match[2]) <= gap[1] and int(match[3]) >= gap[0]
