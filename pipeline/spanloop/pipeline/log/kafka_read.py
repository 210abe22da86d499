"""Reading side of the Kafka log: consumers that keep their place between reads, and the index of exact topics.

Place in the flow: inside ``kafka.KafkaLog``, which calls it under its reading lock. Invariants: a source is read in offset order
and never jumps by itself: where the records that come next are gone, the reader raises, or, told so, skips loudly.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from spanloop.pipeline.ports import LogRecord
from spanloop.schemas.errors import SpanloopError, TerminalError, TransientError

if TYPE_CHECKING:
    from spanloop.pipeline.log.kafka import KafkaLog

__all__ = ["SEEN_MAX", "Index", "Reader", "fetched_end"]

SEEN_MAX = 20_000
"""Event ids that a reader remembers: a copy within so many records is not given again."""
AHEAD_MAX = 10_000
"""Records that a reader holds beyond what was asked for, while it waits for a slower partition."""
IDLE_WAIT_S = 0.012
"""How long a read at the end waits for news: a little longer than a fetch ..."""
POLLING_WAIT_S = 0.002
"""... unless the last read was less than POLLING_S ago: who polls will see it at the next one."""
POLLING_S = 0.5
STUCK_S = 15.0
"""How long a read waits for records that are known to be there."""

_log = logging.getLogger("spanloop.kafka")


class _Place:
    """Where a reader is in one source."""

    __slots__ = ("at_end", "buffer", "fetched", "known", "next", "partition", "since", "source")

    def __init__(self, source: str, partition: int) -> None:
        self.source = source
        self.partition = partition
        self.known = False
        """Whether ``next`` means something."""
        self.next: int | None = None
        """Offset that is given next; None: the earliest there is."""
        self.since: int | None = None
        """All from here to ``next`` was skipped: whoever asks for it is here."""
        self.buffer: deque[LogRecord] = deque()
        self.at_end = False
        self.fetched = 0
        """Offset behind the last that arrived, kept or skipped."""

    def holds(self, wanted: int | None) -> bool:
        """Whether reading may go on here for someone who wants ``wanted``."""
        if not self.known:
            return False
        if wanted is None or self.next is None or self.since is None:
            return wanted == self.next == self.since
        return self.since <= wanted <= self.next


class Reader:
    """A consumer of some sources that keeps its place between reads.

    Args:
        log: of which it is a part.
        names: topics or sources.
        skip: go on from what is left where records are gone, with a warning; else raise.
    """

    def __init__(self, log: KafkaLog, names: tuple[str, ...], *, skip: bool) -> None:
        self.names = names
        self._log = log
        self._skip = skip
        sources = dict.fromkeys(source for name in names for source in log.sources(name))
        at = {source: log.cluster.at(source, 0) for source in sources}
        self._places = {source: _Place(source, at[source].partition) for source in sources}
        self._on_wire = {(p.topic, p.partition): self._places[source] for source, p in at.items()}
        more: dict[str, Any] = {"enable.partition.eof": True, "error_cb": self._hear}
        self._consumer = log.cluster.consumer("spanloop-reader", **more)
        self._down: KafkaError | None = None
        self._suspect = False
        """Brokers were away: they may have come back with less, and some do not say so."""
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        self._read_at = 0.0

    def holds(self, after: Mapping[str, int]) -> bool:
        """Whether this reader is where ``after`` ends."""
        return all(place.holds(_wanted(after, place.source)) for place in self._places.values())

    def read(self, after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Up to ``limit`` records behind ``after``; raises where they are gone."""
        self._seek(after)
        self._fill(limit)
        return self._merged(limit)

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _hear(self, error: KafkaError) -> None:
        """Called by the client while it consumes."""
        if error.code() in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
            self._suspect = True
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._down = error

    # ------------------------------------------------------------ giving

    def _merged(self, limit: int) -> list[LogRecord]:
        """The next records of all buffers, roughly by time of append, each source in its order."""
        waiting = [place for place in self._places.values() if place.buffer]
        if len(waiting) == 1:
            place = waiting[0]
            buffer = place.buffer
            taken = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
            place.next = place.since = taken[-1].offset + 1
            return taken
        taken = []
        heap = [(place.buffer[0].appended_ns, n) for n, place in enumerate(waiting)]
        heapq.heapify(heap)
        last = [-1] * len(waiting)
        while heap and len(taken) < limit:
            time_ns, n = heap[0]
            buffer = waiting[n].buffer
            record = buffer.popleft()
            taken.append(record)
            last[n] = record.offset
            if buffer:
                heapq.heapreplace(heap, (max(time_ns, buffer[0].appended_ns), n))
            else:
                heapq.heappop(heap)
        for place, offset in zip(waiting, last, strict=True):
            if offset >= 0:
                place.next = place.since = offset + 1
        return taken

    # ------------------------------------------------------------ moving

    def _seek(self, after: Mapping[str, int]) -> None:
        moved = False
        for place in self._places.values():
            wanted = _wanted(after, place.source)
            if place.holds(wanted):
                continue
            buffer = place.buffer
            while buffer and wanted is not None and buffer[0].offset < wanted:
                buffer.popleft()
            if not (place.known and buffer and buffer[0].offset == wanted):
                moved = True
                buffer.clear()
            place.next = place.since = wanted
            place.known = True
        if moved or self._suspect:
            self._assign()
            self._suspect = False

    def _assign(self) -> None:
        starts = []
        for place in self._places.values():
            place.at_end = False
            if place.buffer:
                start = place.buffer[-1].offset + 1
            elif place.next is None:
                start = self._log.watermarks(self._consumer, place.source)[0]
            else:
                start = self._start(place, place.next)
            starts.append(self._log.cluster.at(place.source, start))
        self._consumer.assign(starts)

    def _start(self, place: _Place, wanted: int) -> int:
        """``wanted``, or what is left behind it; raises where records are gone."""
        low, high = self._log.watermarks(self._consumer, place.source)
        if wanted > high and wanted > self._log.fetched_last(place.source) + 1:
            place.known = False
            raise _ends_before(place.source, wanted)
        if wanted >= low:
            return wanted
        if not self._skip:
            place.known = False
            raise TerminalError(
                f"{place.source}: records {wanted} to {low - 1} are no longer on Kafka (retention), and they were not read "
                "yet: rebuild from the archive (docs/kafka.md, 'Records that are gone'), then start behind them",
                source=place.source, wanted=wanted, first=low,
            )  # fmt: skip
        self._log.lost += low - wanted
        _log.warning(
            "%s: records %d to %d are no longer on Kafka and are skipped", place.source, wanted, low - 1
        )
        return low

    # ------------------------------------------------------------ fetching

    def _fill(self, limit: int) -> None:
        """Fetch until there is enough, or every source is read to its end."""
        began = time.monotonic()
        idle = began + (POLLING_WAIT_S if began - self._read_at < POLLING_S else IDLE_WAIT_S)
        places = self._places.values()
        try:
            while True:
                have = sum(len(place.buffer) for place in places)
                if have >= limit and (
                    have > limit + AHEAD_MAX or all(place.buffer or place.at_end for place in places)
                ):
                    return
                ended = all(p.at_end and p.fetched > self._log.written(p.source) for p in places)
                if have and (ended or have >= limit):
                    if not self._take(limit, 0.0):
                        return
                    continue
                got = self._take(limit, 0.002 if ended else 0.01)
                if not got and ended and time.monotonic() >= idle:
                    return
                if time.monotonic() > began + STUCK_S:
                    if have:
                        return
                    lacking = [place.source for place in places if not place.at_end]
                    raise TransientError(f"Kafka gives no records of {', '.join(lacking)}; is it running?")
        finally:
            self._read_at = time.monotonic()

    def _take(self, limit: int, wait_s: float) -> bool:
        """Take in what has arrived; everything of it, before an error among it is raised."""
        messages = self._consumer.consume(min(max(limit, 500), 10_000), wait_s) or []
        record = self._log.cluster.record
        problem: SpanloopError | None = None
        for message in messages:
            error = message.error()
            place = self._on_wire.get((message.topic() or "", message.partition() or 0))
            if error is None:
                if place is not None:
                    self._keep(place, record(message))
                continue
            code = error.code()
            if code == KafkaError._PARTITION_EOF and place is not None:
                place.at_end = True
                place.fetched = message.offset() or 0
            elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE) and place:
                problem = self._out_of_range(place) or problem
            elif code in _GONE or error.fatal():
                problem = self._log.cluster.translated(KafkaException(error))
        if self._down is not None:
            problem, self._down = problem or self._log.cluster.translated(KafkaException(self._down)), None
        if problem is not None:
            raise problem
        return bool(messages)

    def _out_of_range(self, place: _Place) -> SpanloopError | None:
        wanted = place.buffer[-1].offset + 1 if place.buffer else place.next or 0
        try:
            start = self._start(place, wanted)
        except SpanloopError as exc:
            return exc
        if start == wanted:  # neither: a broker that is behind
            return TransientError(f"{place.source}: Kafka has no record {wanted} at the moment")
        self._consumer.seek(self._log.cluster.at(place.source, start))
        return None

    def _keep(self, place: _Place, record: LogRecord) -> None:
        offset = record.offset
        place.fetched = offset + 1
        place.at_end = False
        buffer = place.buffer
        if (place.next is not None and offset < place.next) or (buffer and offset <= buffer[-1].offset):
            return
        here = (record.partition, offset)
        seen = self._seen
        first = seen.setdefault((record.topic, record.event_id), here)
        if len(seen) > SEEN_MAX:
            seen.popitem(last=False)
        repeated = first is not here and first[0] == here[0] and first[1] < offset
        if repeated or self._log.is_copy(record):
            if not buffer:
                place.next = offset + 1
            return
        buffer.append(record)


class Index:
    """Where each event id of an exact topic stands first."""

    def __init__(self, log: KafkaLog, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._consumer = log.cluster.consumer("spanloop-index", **{"enable.partition.eof": True})
        sources = log.sources(topic)
        low = {source: log.watermarks(self._consumer, source)[0] for source in sources}
        self._consumer.assign([log.cluster.at(source, offset) for source, offset in low.items()])
        self._first: dict[str, tuple[int, int]] = {}
        self._next = dict.fromkeys(sources, 0)
        self._end = dict.fromkeys(sources, -1)

    def first(self, event_id: str) -> tuple[int, int] | None:
        """Partition and offset of the first record with an event id."""
        return self._first.get(event_id)

    def end(self, source: str) -> int:
        """Offset of the last record that counts, after ``catch_up``."""
        return self._end.get(source, -1)

    def upto(self, source: str, offset: int) -> None:
        """Read on until ``offset`` of a source is in the index."""
        self._read(lambda: self._next[source] > offset)

    def drain(self) -> None:
        """Take in what has arrived."""
        while self._consume(0.0):
            pass

    def catch_up(self) -> None:
        """Read on to the end as of now."""
        ends = {source: self._log.last(source) for source in self._next}
        self._read(lambda: all(self._next[source] > end for source, end in ends.items()))

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _read(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_S
        while not done():
            self._consume(0.005)
            if time.monotonic() > deadline:
                raise TransientError(f"Kafka gives no records of {self._topic}; is it running?")

    def _consume(self, wait_s: float) -> bool:
        messages = self._consumer.consume(500, wait_s) or []
        for message in messages:
            error = message.error()
            if error is not None:
                code = error.code()
                if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    source = self._log.cluster.source(message)
                    raise _ends_before(source, self._next[source])
                if code in _GONE or error.fatal():
                    raise KafkaException(error)
                continue
            record = self._log.cluster.record(message)
            source = record.source
            self._next[source] = record.offset + 1
            here = (record.partition, record.offset)
            if self._first.setdefault(record.event_id, here) == here:
                self._end[source] = record.offset
        return bool(messages)


def _wanted(after: Mapping[str, int], source: str) -> int | None:
    offset = after.get(source, -1)
    return offset + 1 if offset >= 0 else None


def _ends_before(source: str, wanted: int) -> TerminalError:
    return TerminalError(
        f"{source}: the log ends before offset {wanted - 1}, which was read already: did Kafka lose its data? Nothing is read "
        "from the start again by itself; see docs/kafka.md, 'A broker that came back empty'",
        source=source, wanted=wanted,
    )  # fmt: skip


def fetched_end(consumer: Consumer, place: TopicPartition) -> int:
    """Last offset by fetching: some brokers list an end that lags behind what can be read."""
    low, high = consumer.get_watermark_offsets(place, timeout=10)
    start = max(low, high - 1)
    consumer.assign([TopicPartition(place.topic, place.partition, start)])
    last = start - 1
    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        for message in consumer.consume(1_000, 0.002) or ():
            if message.topic() != place.topic or message.partition() != place.partition:
                continue  # left over from the place before
            error = message.error()
            if error is None:
                last = message.offset() or 0
            elif error.code() == KafkaError._PARTITION_EOF:
                return max(last, (message.offset() or 0) - 1)
            elif error.code() in _GONE or error.fatal():
                raise KafkaException(error)
    raise TransientError(f"Kafka does not say where {place.topic} ends; is it running?")


_GONE = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
