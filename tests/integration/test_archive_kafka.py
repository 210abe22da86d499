"""The archive over Kafka: all partitions, the live tail behind it, a restart, a broker that hangs, one that comes back empty."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from archive_support import orchestration, read_files, spans
from kafka_broker import Broker

from spanloop.pipeline.archive import Archive, ArchiveStore
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TerminalError, TransientError
from spanloop.schemas.settings import Kafka, Settings, load_settings


def settings(folder: Path) -> Settings:
    return load_settings(None, {"workspace": folder, "archive": {"records": 30, "every_s": 0.1}})


def rows(log: KafkaLog, store: ArchiveStore) -> Counter:
    loaded = Archive(log, store).load(["spans"])["spans"]
    found: Counter = Counter()
    for table in (read_files(store, loaded.files, "spans"), loaded.tail):
        pairs = zip(table["span_id"].to_pylist(), table["repeat"].to_pylist(), strict=True)
        found.update(span for span, repeat in pairs if not repeat)
    return found


def expected(numbers: range) -> Counter:
    return Counter(f"{n * 1000 + i:016x}" for n in numbers for i in (1, 2, 3))


def fill(log: KafkaLog, numbers: range) -> None:
    log.append([new_record(event) for n in numbers for event in (spans(n), orchestration(n))])


def test_archive_and_tail_are_the_log(tmp_path: Path, bootstrap_servers: str, kafka_settings: Kafka) -> None:
    store = ArchiveStore.open(settings(tmp_path))
    with closing(KafkaLog(bootstrap_servers, kafka_settings)) as log:
        fill(log, range(200))
        worker = Archiver(log, store, settings(tmp_path))
        worker.start()
        assert worker.drain() == 400
        assert len([s for s in store.contained() if s.startswith("spans")]) == 4
        fill(log, range(200, 230))
        assert rows(log, store) == expected(range(230))
    with closing(KafkaLog(bootstrap_servers, kafka_settings)) as log:  # another process goes on
        worker = Archiver(log, store, settings(tmp_path))
        assert worker.start().lost == []
        assert worker.drain() == 60
        again = [new_record(spans(n)) for n in range(5)]  # a copy on the log: no new row for a query
        log.append(again)
        worker.drain()
        assert rows(log, store) == expected(range(230))
        victim = next((tmp_path / "archive").glob("raw/topic=spans/**/*.parquet"))
        victim.write_bytes(b"")
        report = worker.start()
        assert (len(report.quarantined), report.lost) == (1, [])
        assert rows(log, store) == expected(range(230))


def test_a_broker_that_hangs_and_one_that_comes_back_empty(tmp_path: Path, kafka_settings: Kafka) -> None:
    broker = Broker()
    broker.start()
    store = ArchiveStore.open(settings(tmp_path))
    try:
        with closing(KafkaLog(broker.bootstrap, kafka_settings)) as log:
            fill(log, range(20))
            worker = Archiver(log, store, settings(tmp_path))
            stop = threading.Event()
            thread = threading.Thread(target=worker.follow, args=(stop.wait,))
            thread.start()
            try:
                _wait(lambda: worker.status.records == 40)
                broker.pause()
                time.sleep(0.5)
                broker.resume()
                fill(log, range(20, 40))
                _wait(lambda: worker.status.records == 80)
            finally:
                stop.set()
                thread.join(30)
            assert rows(log, store) == expected(range(40))
        broker.stop()
        broker.start()
        with closing(KafkaLog(broker.bootstrap, kafka_settings)) as log:
            worker = Archiver(log, store, settings(tmp_path))
            worker.start()
            with pytest.raises(TransientError, match="was the log emptied"):
                worker.drain()
            fill(log, range(100, 300))
            with pytest.raises(TerminalError, match="made from another log"):
                worker.drain()
    finally:
        broker.stop()


def _wait(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
