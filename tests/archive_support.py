"""What archive tests share: a log in partitions, media that fail when told to, and what must be true of any archive."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from spanloop.pipeline.archive import Archive, ArchiveStore
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.columns import build
from spanloop.pipeline.ports import Appended, LogRecord, NewRecord, new_record, source_of, topic_of
from spanloop.pipeline.views import TABLES
from spanloop.schemas import topics
from spanloop.schemas.events import Event, OrchestrationRevised, SpansReceived
from spanloop.schemas.orchestration import Agent, OrchestrationContent, OrchestrationEvent, TokenUsage
from spanloop.schemas.spans import Span

T0 = 1_800_000_000_000_000_000
DAY_NS = 86_400_000_000_000


def spans(
    trace: int, numbers: Iterable[int] = (1, 2, 3), tenant: str = "default", name: str = "chat"
) -> SpansReceived:
    return SpansReceived(
        tenant=tenant,
        trace_id=f"{trace:032x}",
        spans=tuple(
            Span(
                trace_id=f"{trace:032x}",
                span_id=f"{trace * 1000 + n:016x}",
                name=name,
                start_ns=T0 + n,
                end_ns=T0 + n + 5,
                attributes={"gen_ai.operation.name": "chat", "text": "x" * 40},
            )
            for n in numbers
        ),
    )


def orchestration(number: int, revision: int = 1, tenant: str = "default") -> OrchestrationRevised:
    name = f"o{number}"
    events = tuple(
        OrchestrationEvent(
            id=f"{name}e{i}",
            type="spawn",
            agent="desk",
            t_ns=T0 + i,
            confidence=0.9,
            rule="r",
            evidence=("s",),
        )
        for i in range(2)
    )
    content = OrchestrationContent(
        orchestration_id=name, tenant=tenant, trace_ids=(f"{number:032x}",), events=events, edges=(),
        agents=(Agent("a1", "desk"),), calls=(), tokens=TokenUsage(input=1, output=1, calls=1), started_ns=T0,
        ended_ns=T0 + 1, flags=(),
    )  # fmt: skip
    return OrchestrationRevised(
        tenant=tenant,
        orchestration_id=name,
        revision=revision,
        complete=True,
        content_hash="h",
        content=content,
    )


class PartitionedLog:
    """A log in memory with partitions and retention; offsets count by source, as Kafka's do."""

    def __init__(self, clock: ManualClock, partitions: int = 1) -> None:
        self.clock = clock
        self.partitions = partitions
        self.records: dict[str, list[LogRecord]] = {}
        self.next: dict[str, int] = {}
        self._known: set[tuple[str, str]] = set()

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        done = []
        for record in records:
            partition = 0 if record.topic in topics.SINGLE else sum(record.key.encode()) % self.partitions
            if record.partition is not None:
                partition = record.partition
            source = source_of(record.topic, partition)
            if (record.topic, record.event_id) not in self._known:
                self._known.add((record.topic, record.event_id))
                offset = self.next.get(source, 0)
                self.next[source] = offset + 1
                self.records.setdefault(source, []).append(
                    LogRecord(record.topic, offset, record.key, record.event_id, record.value, self.clock.now_ns(), partition)
                )  # fmt: skip
            done.append(Appended(self.next[source] - 1, False, partition))
        return done

    def add(self, *events: Event) -> None:
        self.append([new_record(event) for event in events])

    def trim(self, source: str, before: int) -> None:
        """Forget what lies before an offset."""
        self.records[source] = [record for record in self.records[source] if record.offset >= before]

    def read(self, topic_names: Sequence[str], after: dict[str, int], limit: int) -> list[LogRecord]:
        found: list[LogRecord] = []
        for name in topic_names:
            for source in (source_of(*topic_of(name)),) if "/" in name else self.sources(name):
                found += [r for r in self.records.get(source, []) if r.offset > after.get(source, -1)][:limit]
        return found[:limit]

    def end(self, source: str) -> int:
        return self.next.get(source, 0) - 1

    def sources(self, topic: str) -> tuple[str, ...]:
        return tuple(source_of(topic, p) for p in range(1 if topic in topics.SINGLE else self.partitions))

    def commit(self, group: str, offsets: dict[str, int]) -> None: ...

    def committed(self, group: str) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class Killed(BaseException):
    """Stands for kill -9: nothing runs after it, so every later call on the medium fails with it too."""


class FailingFiles(LocalFiles):
    """A folder whose ``at``-th change is a kill, before, in or after it; or which refuses all changes while ``no_space``."""

    def __init__(self, root: Path, *, at: int | None = None, how: str = "before") -> None:
        super().__init__(root)
        self.calls = 0
        self.at = at
        self.how = how
        self.dead = False
        self.no_space = False
        self.written: list[str] = []

    def _step(self, effect, torn=None) -> None:
        if self.dead:
            raise Killed
        if self.no_space:
            raise OSError(errno.ENOSPC, "No space left on device")
        hit = self.calls == self.at
        self.calls += 1
        if hit:
            self.dead = True
            if self.how == "after":
                effect()
            elif self.how == "torn" and torn:
                torn()
            raise Killed
        effect()

    def write(self, path: str, data: bytes | pa.Buffer) -> None:
        self._step(lambda: LocalFiles.write(self, path, data), lambda: self._half(path, data))
        self.written.append(path)

    def _half(self, path: str, data: bytes | pa.Buffer) -> None:
        target = Path(self.root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name(f".{target.name}.1.tmp").write_bytes(bytes(memoryview(data))[: len(data) // 2])

    def delete(self, path: str) -> None:
        self._step(lambda: LocalFiles.delete(self, path))

    def move(self, source: str, target: str) -> None:
        self._step(lambda: LocalFiles.move(self, source, target))


def rows_of(log: PartitionedLog, name: str) -> Counter:
    """(partition, offset, an id of the row) of a table, straight from the log."""
    topic = TABLES[name].topic
    found: Counter = Counter()
    for source in log.sources(topic):
        built, _ = build(topic, log.records.get(source, []))
        found += _identities(built[name])
    return found


def _identities(table: pa.Table) -> Counter:
    column = (
        "span_id"
        if "span_id" in table.column_names and "trace_id" in table.column_names
        else "orchestration_id"
    )
    return Counter(
        zip(
            table["partition"].to_pylist(),
            table["offset"].to_pylist(),
            table[column].to_pylist(),
            strict=True,
        )
    )


def read_files(store: ArchiveStore, files: Sequence[str], name: str) -> pa.Table:
    return (
        ds.dataset(
            list(files), schema=TABLES[name].schema, format="parquet", filesystem=store.filesystem
        ).to_table(use_threads=False)
        if files
        else TABLES[name].schema.empty_table()
    )


def loaded_table(log: PartitionedLog, store: ArchiveStore, name: str) -> pa.Table:
    loaded = Archive(log, store, fill=False).load([name])[name]
    return pa.concat_tables([read_files(store, loaded.files, name), loaded.tail])


def check_loaded(log: PartitionedLog, store: ArchiveStore) -> None:
    """What a query gets is the log: each row once, each span once as no repeat."""
    for name in ("events", "spans"):
        table = loaded_table(log, store, name)
        assert _identities(table) == rows_of(log, name), name
    keys = list(zip(*(table[c].to_pylist() for c in ("tenant", "trace_id", "span_id")), strict=True))
    firsts = Counter(k for k, repeat in zip(keys, table["repeat"].to_pylist(), strict=True) if not repeat)
    assert firsts == Counter(set(keys))


def archived(store: ArchiveStore) -> dict[str, list[LogRecord]]:
    """Records of all raw files by source, in offset order."""
    found: dict[str, list[LogRecord]] = {}
    for topic in topics.ALL_TOPICS:
        for file in store.raw_files(topic):
            for batch in store.records(file.path):
                found.setdefault(source_of(file.topic, file.partition), []).extend(batch)
    return {source: sorted(records, key=lambda r: r.offset) for source, records in found.items()}


def traffic(log: PartitionedLog, rng: random.Random, count: int) -> None:
    """Some appends: several tenants, spans sent again, orchestrations revised, now and then a new day."""
    for _ in range(count):
        log.clock.advance(ns=rng.choice([1, 1, 1, DAY_NS // 2]))
        tenant = rng.choice(["default", "a/b"[:1], "ä"])
        if rng.random() < 0.7:
            event: Event = spans(rng.randrange(6), rng.sample(range(5), rng.randrange(1, 4)), tenant)
        else:
            event = orchestration(rng.randrange(5), rng.randrange(9), tenant)
        record = new_record(event)
        log.append([NewRecord(record.topic, record.key, f"{record.event_id}-{rng.random()}", record.value)])


def check_archived(log: PartitionedLog, store: ArchiveStore) -> None:
    """The raw files hold exactly the log's records."""
    found = archived(store)
    for source, records in log.records.items():
        if topic_of(source)[0] in topics.ALL_TOPICS:
            assert found.get(source, []) == records, source
