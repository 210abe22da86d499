"""Append files to a log, record by record.

Invariants: event ids are made of the content, so that a run that was cut short, the same file in another encoding, or its lines
in another order change nothing when imported again; what is bad is counted, dead-lettered with file and line and reported, and
costs only itself; memory is bounded by the longest record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from spanloop.collectors.batches import Intake
from spanloop.collectors.feedback import parse_feedback
from spanloop.collectors.importers.checkpoints import (
    HEAD,
    Checkpoint,
    Checkpoints,
    Counts,
    at_checkpoint,
    checkpoint_of,
)
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.formats.detect import format_of
from spanloop.pipeline.formats.framing import Place, Record, records
from spanloop.pipeline.formats.opened import Opener, Source, UnreadableError
from spanloop.pipeline.formats.reading import read_record
from spanloop.pipeline.formats.stream import Stream
from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.otlp.decode_json import parse_json
from spanloop.pipeline.otlp.decoded import DecodedBatch, Rejected
from spanloop.pipeline.ports import Appended, Log, NewRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["SCORER", "Imported", "Importer"]

SCORER = "import"
"""Who gave the scores of a file, as far as the log is concerned: whoever imported it."""
_GROUP_RECORDS = 500
_GROUP_BYTES = 4 * 2**20
_LOOKED_AT = 10
"""Records of a file of unknown name that are looked at to tell its format."""
_REASONS = 10


class Imported(Counts):
    """What became of all files."""

    files: int = 0
    """Read, wholly or in part."""
    passed_over: int = 0
    """Files in folders and archives that are in no format that we know."""
    ignored: int = 0
    """Log records that say nothing of agents, scores that are no numbers."""
    continued: int = 0
    """Files of which a part was in the log already and was not read again."""
    reasons: list[str] = msgspec.field(default_factory=list)
    """The first few reasons, each with file and place."""
    unreadable: list[str] = msgspec.field(default_factory=list)
    """Why named files, and members of archives that cannot be unpacked, could not be read at all."""


class _Reached(msgspec.Struct, frozen=True):
    """Where reading stands behind a record."""

    taken: int
    sha256: str
    place: Place


class _Part(NamedTuple):
    """A record that was read."""

    place: Place
    read: Read
    reached: _Reached


class Importer:
    """Appends files to a log.

    Args:
        log: where to; None: nowhere, only count (a dry run).
        intake: limits and redaction.
        redactor: of the intake, for the comments of scores.
        tenant: of spans and scores.
        now_ns: time of scores that have none.
        max_nesting: levels in one attribute value.
        wanted: the only format to read; empty: told by the content.
        scores: whether scores in the files become feedback.
        checkpoints: None: always from the start.
    """

    def __init__(
        self, log: Log | None, intake: Intake, redactor: Redactor, *, tenant: str, now_ns: int, max_nesting: int,
        wanted: str = "", scores: bool = True, checkpoints: Checkpoints | None = None,
    ) -> None:  # fmt: skip
        self._log = log
        self._intake = intake
        self._redactor = redactor
        self._tenant = tenant
        self._now_ns = now_ns
        self._max_nesting = max_nesting
        self._wanted = wanted
        self._scores = scores
        self._checkpoints = checkpoints
        self._opener = Opener()
        self.total = Imported()

    def run(self, sources: Sequence[Source], tell: Callable[[int, int], None] = lambda *_: None) -> Imported:
        """Import ``sources`` in order; ``tell`` takes the number of the source and how many of its (packed) bytes are read.

        Raises:
            ConfigError: none of the files could be read.
            TransientError: the log refuses; what was appended before stays and is skipped next time.
        """
        with self._opener:
            for number, source in enumerate(sources):
                try:
                    self._source(source, partial(tell, number))
                except ConfigError as exc:
                    if source.named or isinstance(exc, UnreadableError):
                        self.total.unreadable.append(exc.message)
                    else:
                        self.total.passed_over += 1
                else:
                    self.total.files += 1
        if not self.total.files:
            found = "\n".join(self.total.unreadable)
            raise ConfigError(
                found or f"none of the {len(sources)} files there is in a format that can be read"
            )
        return self.total

    def _source(self, source: Source, tell: Callable[[int], None]) -> None:
        with self._opener.opened(source) as (stream, position):
            key, saved = "", None
            if self._checkpoints is not None and source.repeatable:
                key = self._checkpoints.key(stream.head(HEAD))
                saved = self._checkpoints.load(key)
            if saved is None or at_checkpoint(stream, saved):
                self._stream(source, stream, key, saved, lambda: tell(position()))
                return
        with self._opener.opened(source) as (
            stream,
            position,
        ):  # the file is another one than that of the checkpoint
            self._stream(source, stream, key, None, lambda: tell(position()))

    def _stream(
        self, source: Source, stream: Stream, key: str, saved: Checkpoint | None, tell: Callable[[], None]
    ) -> None:
        own = _Own(key, saved)
        if saved is not None:
            self._known_already(saved.counts)
        group: list[_Part] = []
        size = 0
        for record, reached in self._recognised(source, stream, saved):
            read = read_record(record, self._wanted, self._max_nesting)
            unfinished = (
                bool(read.rejected) and reached.place.framing == "lines" and not record.body.endswith(b"\n")
            )
            if unfinished:  # somebody may still be writing it: the next run reads it again
                self._append(source, group, own, tell)
                group, size, own.key = [], 0, ""
            group.append(_Part(record.place, read, reached))
            size += len(record.body)
            if len(group) >= _GROUP_RECORDS or size >= _GROUP_BYTES:
                self._append(source, group, own, tell)
                group, size = [], 0
        self._append(source, group, own, tell)

    def _known_already(self, counts: Counts) -> None:
        """Count the part of a file that an earlier run imported."""
        total = self.total
        total.continued += 1
        total.spans += counts.spans
        total.duplicates += counts.events + counts.duplicates
        total.rejected += counts.rejected

    def _recognised(
        self, source: Source, stream: Stream, saved: Checkpoint | None
    ) -> Iterator[tuple[Record, _Reached]]:
        """Records of a stream, once one of the first is in a format that we know. Raises ConfigError when none is."""
        found = records(stream, source.name, saved.place if saved is not None else None)
        reached = ((r, _Reached(stream.taken, stream.sha256, r.place)) for r in found)
        first: list[tuple[Record, _Reached]] = []
        known = saved is not None or bool(self._wanted)
        while not known and len(first) < _LOOKED_AT and (item := next(reached, None)) is not None:
            first.append(item)
            known = _is_known(item[0])
        if first and not known:
            raise ConfigError(
                f"{source.name} is in no format that can be read: no record at its start is in one"
            )
        yield from chain(first, reached)

    def _records(self, source: Source, group: list[_Part], own: _Own) -> list[NewRecord]:
        """What a group becomes; its keys, where content is sealed, are made together."""
        total, counts = self.total, own.counts
        scores: list[list[NewRecord]] = []
        batches: list[tuple[DecodedBatch, dict[str, object]]] = []
        for place, read, _ in group:
            made, refused = self._feedback(read)
            read.rejected += refused
            scores.append(made)
            batches.append((read, {"file": source.name, place.framing.partition(":")[0]: place.number}))
        found: list[NewRecord] = []
        all_prepared = self._intake.prepare_all(batches, tenant=self._tenant, source="import")
        for (_, read, _), prepared, made in zip(group, all_prepared, scores, strict=True):
            for each in (total, counts):
                each.spans += prepared.num_spans
                each.rejected += len(read.rejected)
            total.ignored += read.ignored
            total.reasons += [item.reason for item in read.rejected[: _REASONS - len(total.reasons)]]
            found += prepared.records
            found += made
        return found

    def _feedback(self, read: Read) -> tuple[list[NewRecord], list[Rejected]]:
        if not read.feedback or not self._scores:
            return [], []
        parsed = parse_feedback(
            read.feedback, tenant=self._tenant, scorer=SCORER, now_ns=self._now_ns, redactor=self._redactor
        )
        refused = [
            Rejected(f"score: {item['reason']}", canonical_json(read.feedback[item["index"]]), "feedback")
            for item in parsed.rejected
        ]
        return [new_record(event) for event in parsed.events], refused

    def _append(self, source: Source, parts: list[_Part], own: _Own, tell: Callable[[], None]) -> None:
        """Append a group, count it and note how far the file is in."""
        group = self._records(source, parts, own)
        if parts:
            own.reached = parts[-1].reached
        appended = self._log.append(group) if self._log is not None and group else []
        for record, result in zip(group, appended, strict=False):
            own.last = (record, result)
        fresh = Counter(r.topic for r, a in zip(group, appended, strict=False) if not a.duplicate)
        if self._log is None:
            fresh = Counter(r.topic for r in group)
        known = sum(a.duplicate for r, a in zip(group, appended, strict=False) if r.topic == topics.SPANS)
        for each in (self.total, own.counts):
            each.events += fresh[topics.SPANS]
            each.scores += fresh[topics.FEEDBACK]
            each.duplicates += known
        if own.key and self._checkpoints is not None and own.reached is not None and own.last is not None:
            reached = own.reached
            saved = checkpoint_of(reached.taken, reached.sha256, reached.place, own.counts, own.last)
            self._checkpoints.save(own.key, saved)
        tell()


class _Own:
    """What is kept of one file while it is imported."""

    def __init__(self, key: str, saved: Checkpoint | None) -> None:
        self.key = key
        self.counts = msgspec.structs.replace(saved.counts) if saved is not None else Counts()
        self.reached: _Reached | None = None
        self.last: tuple[NewRecord, Appended] | None = None


def _is_known(record: Record) -> bool:
    if record.problem:
        return False
    if not record.json:
        return True
    try:
        return bool(format_of(parse_json(record.body)[0]))
    except SchemaError:
        return False
