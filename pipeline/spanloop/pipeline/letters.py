"""Dead letters as people look at them: which there are, where each came from, and the bytes that were refused.

Place in the flow: the read side of ``dead_letters``, under ``spanloop deadletters``. A letter carries the bytes only where the
deployment keeps content; of a record that was refused behind the log they are still on it, at the place that the letter names.
Invariants: nothing is written; bytes are given out only when they have the digest that the letter names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log, LogRecord, alone, source_of, topic_of
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError, TerminalError
from spanloop.schemas.events import DeadLettered, FeedbackReceived, decode

__all__ = ["Filter", "Letter", "Originals", "find_letters", "read_letters"]

_TOPICS = (*topics.ALL_TOPICS, *topics.INTERNAL)
ID_MIN = 6
"""Characters of an id that are enough to ask for it."""


class Letter(msgspec.Struct, frozen=True):
    """A dead letter as read from the log."""

    letter_id: str
    recorded_ns: int
    """When it was written to the log."""
    event: DeadLettered

    @property
    def origin(self) -> tuple[str, int] | None:
        """Source and offset of the record that was refused; None: it never was a record, or the letter does not say."""
        details = self.event.details
        topic = details.get("topic", self.event.source)
        offset, partition = details.get("offset"), details.get("partition", 0)
        if topic not in _TOPICS or type(offset) is not int or type(partition) is not int or offset < 0:
            return None
        return source_of(topic, partition), offset

    def kept(self) -> bytes | None:
        """The refused bytes where the letter has all of them."""
        try:
            data = base64.b64decode(self.event.data, validate=True)
        except (binascii.Error, ValueError):
            return None
        return data if hashlib.sha256(data).hexdigest() == self.event.sha256 else None

    def row(self) -> dict[str, Any]:
        """For lists and JSON."""
        event = self.event
        place = self.origin
        return {
            "id": self.letter_id,
            "recorded_ns": self.recorded_ns,
            "tenant": event.tenant,
            "source": event.source,
            "reason": event.reason,
            "size": event.size,
            "sha256": event.sha256,
            "bytes_kept": self.kept() is not None,
            "origin": f"{place[0]}@{place[1]}" if place else "",
            "details": event.details,
        }


class Filter(msgspec.Struct, frozen=True):
    """Which letters; an empty field is no condition."""

    reason: str = ""
    """Part of the reason, in any case."""
    source: str = ""
    """The source, or its beginning."""
    tenant: str = ""
    since_ns: int = 0

    def takes(self, letter: Letter) -> bool:
        """Whether a letter is meant."""
        event = letter.event
        return (
            self.reason.lower() in event.reason.lower()
            and event.source.startswith(self.source)
            and self.tenant in ("", event.tenant)
            and letter.recorded_ns >= self.since_ns
        )


def read_letters(log: Log, wanted: Filter | None = None) -> Iterator[Letter]:
    """Letters in the order of the log. The same bytes refused again for the same reason are one letter."""
    seen: set[str] = set()
    for record in scan(log, [topics.DEAD_LETTERS]):
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if not isinstance(event, DeadLettered) or event.event_id in seen:
            continue
        seen.add(event.event_id)
        letter = Letter(event.event_id, record.appended_ns, event)
        if wanted is None or wanted.takes(letter):
            yield letter


def find_letters(log: Log, ids: Iterable[str]) -> list[Letter]:
    """Letters by id, or by the beginning of one.

    Raises:
        ConfigError: an id is too short, unknown, or the beginning of several.
    """
    wanted = list(dict.fromkeys(ids))
    for name in wanted:
        if len(name) < ID_MIN:
            raise ConfigError(f"{name!r} is too short: give at least {ID_MIN} characters of a letter's id")
    found: dict[str, list[Letter]] = {name: [] for name in wanted}
    for letter in read_letters(log):
        for name, letters in found.items():
            if letter.letter_id.startswith(name):
                letters.append(letter)
    for name, letters in found.items():
        if len(letters) != 1:
            what = f"{len(letters)} dead letters begin with" if letters else "there is no dead letter"
            raise ConfigError(f"{what} {name}; `spanloop deadletters list` shows their ids")
    return [letters[0] for letters in found.values()]


class Originals:
    """The records that letters speak of, as far as they are still on the log.

    Args:
        log: where they were refused.
        letters: all that will be asked for, so that those without a place are looked for in one pass.
    """

    def __init__(self, log: Log, letters: Iterable[Letter]) -> None:
        self._log = log
        self._looked_up: dict[str, LogRecord] = {}
        homeless = [letter for letter in letters if letter.origin is None]
        if homeless:
            self._look_up(homeless)

    def _look_up(self, letters: Iterable[Letter]) -> None:
        by_feedback: dict[tuple[str, str], str] = {}
        by_trace: dict[tuple[str, str], list[Letter]] = {}
        by_digest: dict[tuple[int, str], str] = {}
        for letter in letters:
            event = letter.event
            feedback_id, trace_id = event.details.get("feedback_id"), event.details.get("trace_id")
            if event.source == topics.FEEDBACK and feedback_id:
                by_feedback[(event.tenant, str(feedback_id))] = letter.letter_id
            elif event.source == "assembly" and trace_id:
                by_trace.setdefault((event.tenant, str(trace_id)), []).append(letter)
            elif event.source == "assembly" or event.source.startswith("stage:"):
                by_digest[(event.size, event.sha256)] = letter.letter_id
        names = [topics.SPANS] if by_trace or by_digest else []
        names += [topics.FEEDBACK] if by_feedback or by_digest else []
        sizes = {size for size, _ in by_digest}
        for record in scan(self._log, names) if names else ():
            if len(record.value) in sizes:
                digest = (len(record.value), hashlib.sha256(record.value).hexdigest())
                if digest in by_digest:
                    self._looked_up[by_digest[digest]] = record
            if record.topic == topics.FEEDBACK and by_feedback:
                self._match_feedback(record, by_feedback)
            tenant, _, trace_id = record.key.partition("/")
            for letter in by_trace.get((tenant, trace_id), ()) if record.topic == topics.SPANS else ():
                span_id = str(letter.event.details.get("span_id", ""))
                if span_id.encode() in record.value:
                    self._looked_up[letter.letter_id] = record

    def _match_feedback(self, record: LogRecord, wanted: dict[tuple[str, str], str]) -> None:
        try:
            event = decode(record.value)
        except SchemaError:
            return
        if isinstance(event, FeedbackReceived) and (event.tenant, event.feedback_id) in wanted:
            self._looked_up[wanted[(event.tenant, event.feedback_id)]] = record

    def record(self, letter: Letter) -> LogRecord | None:
        """The record that was refused, or that held what was refused; None when it is gone."""
        place = letter.origin
        if place is None:
            return self._looked_up.get(letter.letter_id)
        source, offset = place
        name = alone(source) if len(self._log.sources(topic_of(source)[0])) > 1 else source
        try:
            records = self._log.read([name], {source: offset - 1} if offset else {}, 1)
        except TerminalError:  # deleted by retention
            return None
        if not records or records[0].offset != offset:
            return None
        record = records[0]
        return record if hashlib.sha256(record.value).hexdigest() == letter.event.sha256 else None

    def content(self, letter: Letter) -> bytes | None:
        """The refused bytes: of the letter itself, else of the record; None when they are gone."""
        kept = letter.kept()
        if kept is not None:
            return kept
        record = self.record(letter)
        return record.value if record is not None else None
