"""Append files of OTLP requests to a log. Event ids are made of the content, so that a run that was cut short, or the
same file in another encoding, changes nothing when it is imported again. Bad records are counted, dead-lettered and
reported with file and line; the rest of the file is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from spanloop.collectors.batches import Intake, Prepared
from spanloop.pipeline.otlp.decoded import MAX_NESTING
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import Log, NewRecord
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError

__all__ = ["SUFFIXES", "Imported", "import_files", "span_files"]

SUFFIXES = frozenset({".jsonl", ".ndjson", ".pb", ".len", ".bin", ".otlp", ".gz"})
"""Files that are taken out of a folder, where .json may be anything; a file that is named is always read."""
_GROUP_RECORDS = 500
_GROUP_BYTES = 4 * 2**20


class Imported(msgspec.Struct):
    """What became of the files."""

    files: int = 0
    spans: int = 0
    """Spans read and not refused."""
    events: int = 0
    """Events new to the log."""
    duplicates: int = 0
    """Events that the log had already."""
    rejected: int = 0
    reasons: list[str] = []
    """The first few reasons, each with file and record."""


def span_files(paths: list[Path]) -> list[Path]:
    """Files of ``paths`` in order; folders are searched. Raises ConfigError for what does not exist."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise ConfigError(f"no file in {path} ends in one of {' '.join(sorted(SUFFIXES))}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(f"there is no {path}")
    return found


def import_files(
    paths: list[Path],
    log: Log,
    intake: Intake,
    *,
    tenant: str,
    max_nesting: int = MAX_NESTING,
    progress: Callable[[Path, Imported], None] | None = None,
) -> Imported:
    """Append all files to ``log``. Raises ConfigError for a file in no known format, TransientError when the log
    refuses; what was appended before stays and is skipped next time."""
    total = Imported()
    for path in paths:
        for group in _groups(path, intake, tenant, max_nesting, total):
            for record, appended in zip(group, log.append(group), strict=True):
                if record.topic == topics.SPANS:
                    total.duplicates += appended.duplicate
                    total.events += not appended.duplicate
            if progress is not None:
                progress(path, total)
        total.files += 1
    return total


def _groups(
    path: Path, intake: Intake, tenant: str, max_nesting: int, total: Imported
) -> Iterator[list[NewRecord]]:
    group: list[NewRecord] = []
    size = 0
    for number, batch in enumerate(read_spans(path, max_nesting), 1):
        prepared: Prepared = intake.prepare(batch, tenant=tenant, source="import")
        total.spans += prepared.num_spans
        total.rejected += len(batch.rejected)
        for rejected in batch.rejected:
            if len(total.reasons) < 10:
                known = rejected.reason.startswith(path.name)
                total.reasons.append(
                    rejected.reason if known else f"{path.name} record {number}: {rejected.reason}"
                )
        group += prepared.records
        size += sum(len(r.value) for r in prepared.records)
        if len(group) >= _GROUP_RECORDS or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
