"""Dead letters sent again on the path that refused them, after a fix.

A record that a stage refused goes to its topic again under a new event id made of the letter's, so that replaying twice is one
record on the embedded log and without effect on Kafka (reducers are idempotent). A span that a collector refused is decoded,
limited and redacted as any other. What today's code would refuse as well is counted and left where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from spanloop.collectors.batches import Intake
from spanloop.pipeline.formats.detect import read_json
from spanloop.pipeline.letters import Letter, Originals
from spanloop.pipeline.otlp.decode_any import decode_any_json
from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.ports import Log, LogRecord, NewRecord
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import decode

__all__ = ["OUTCOMES", "Replayed", "counted", "replay"]

OUTCOMES = {
    "sent": "on the log again",
    "there": "was sent again before",
    "refused": "would be refused again",
    "gone": "bytes are neither in the letter nor on the log any more",
}
"""What becomes of a letter."""
_BATCH = 200


class Replayed(msgspec.Struct, frozen=True):
    """What became of one letter."""

    letter: Letter
    outcome: str
    why: str = ""


def replay(
    log: Log,
    letters: Sequence[Letter],
    intake: Intake,
    *,
    attempt: int = 1,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Replayed]:
    """Send what letters speak of again.

    Args:
        log: of the deployment.
        letters: which.
        intake: the collector's rules, for spans that it refused.
        attempt: makes new event ids, for letters that were sent again once already.
        dry_run: say what would become of each and append nothing.
        progress: takes how many are done.
    """
    originals = Originals(log, letters)
    done: list[Replayed] = []
    for first in range(0, len(letters), _BATCH):
        part = letters[first : first + _BATCH]
        prepared = [_prepare(letter, originals, intake, attempt) for letter in part]
        records = [record for item in prepared if not isinstance(item, Replayed) for record in item]
        appended = iter([] if dry_run else log.append(records))
        for letter, item in zip(part, prepared, strict=True):
            if isinstance(item, Replayed):
                done.append(item)
            elif dry_run:
                done.append(Replayed(letter, "sent"))
            else:
                duplicates = [next(appended).duplicate for _ in item]
                done.append(Replayed(letter, "there" if all(duplicates) else "sent"))
        progress(len(done))
    return done


def counted(done: Iterable[Replayed]) -> dict[str, int]:
    """How many letters had which outcome."""
    found = Counter(item.outcome for item in done)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def _prepare(
    letter: Letter, originals: Originals, intake: Intake, attempt: int
) -> list[NewRecord] | Replayed:
    """Records to append, or why there are none."""
    if letter.event.reason.startswith("bad span:"):
        return _spans(letter, intake)
    record = originals.record(letter)
    if record is not None:
        return _again(letter, record, attempt)
    content = letter.kept()
    topic = str(letter.event.details.get("topic", letter.event.source))
    if content is None or topic not in (*topics.ALL_TOPICS, *topics.INTERNAL):
        return Replayed(letter, "gone", OUTCOMES["gone"])
    partition = letter.event.details.get("partition", 0)
    return _again(letter, LogRecord(topic, -1, "", "", content, 0, int(partition)), attempt)


def _again(letter: Letter, record: LogRecord, attempt: int) -> list[NewRecord] | Replayed:
    try:
        event = decode(record.value)
    except SchemaError as exc:
        return Replayed(letter, "refused", exc.message)
    owned = record.partition if record.topic not in topics.SINGLE else None
    name = digest("replayed", letter.letter_id, record.event_id, attempt)
    return [NewRecord(record.topic, record.key or event.key, name, record.value, owned)]


def _spans(letter: Letter, intake: Intake) -> list[NewRecord] | Replayed:
    """A span in its wire form, or a group of them, or a whole request; what was around it is lost."""
    data = letter.kept()
    if data is None:
        return Replayed(letter, "gone", "a collector keeps refused bytes only with content.training = true")
    why = ""
    for batch in _readings(data):
        if batch.spans and not batch.rejected:
            source = letter.event.source
            return intake.prepare(batch, tenant=letter.event.tenant, source=source).records
        why = why or next((item.reason for item in batch.rejected), "")
    return Replayed(letter, "refused", why or letter.event.reason)


def _readings(data: bytes) -> Iterable[DecodedBatch]:
    """What the bytes may be: a record of a file, JSON or protobuf, from a whole request down to one span or log record."""
    yield read_json(data)
    for before, after in (
        (b"", b""),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[', b"]}]}]}"),
        (b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[', b"]}]}]}"),
    ):
        try:
            yield decode_any_json(before + data + after)
        except SchemaError:
            continue
    for depth in range(4):
        wrapped = data
        for number in range(depth):
            wrapped = _field(1 if number == depth - 1 else 2, wrapped)
        for read in (decode_protobuf, decode_logs_protobuf):
            try:
                yield read(wrapped)
            except SchemaError:
                continue


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, varint = len(payload), bytearray()
    while size > 0x7F:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    varint.append(size)
    return bytes((number << 3 | 2,)) + bytes(varint) + payload
