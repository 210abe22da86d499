"""The archive in an S3-compatible store (moto on loopback): write, query, damage, repair, merge, and the verb."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_support import DAY_NS, T0, PartitionedLog, check_archived, check_loaded, orchestration, spans
from click.testing import CliRunner

from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.archive.cleaning import orphans, sweep
from spanloop.pipeline.archive.cli import archive as command
from spanloop.pipeline.archive.compaction import compact
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings, load_settings

moto = pytest.importorskip("moto.server")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/archive", method="PUT"), timeout=5).close()
        yield url
    finally:
        server.stop()


def settings(folder: Path, endpoint: str) -> Settings:
    return load_settings(
        None,
        {
            "workspace": folder,
            "archive": {"url": "s3://archive/deep/prefix", "endpoint": endpoint, "records": 5},
        },
    )


def test_an_archive_in_s3(tmp_path: Path, endpoint: str) -> None:
    options = settings(tmp_path, endpoint)
    log = PartitionedLog(ManualClock(T0), partitions=2)
    store = ArchiveStore(ArchiveStore.open(options).files, log.clock)
    worker = Archiver(log, store, options)
    assert worker.start().files == 0
    for number in range(2):
        log.add(
            *(spans(number * 10 + i) for i in range(4)), orchestration(number), spans(1, [number, number + 1])
        )
        worker.drain()
    log.add(spans(77))
    check_archived(PartitionedLog(log.clock), store)
    check_loaded(log, store)
    assert store.files.uri("").startswith("s3://archive/deep/prefix")

    victim = store.ranges("spans")[0].files
    for info in victim:
        if info.kind == "spans":
            store.files.write(info.path, b"PAR1 nonsense")
    assert len(worker.start().quarantined) == 1
    check_loaded(log, store)

    log.clock.advance(ns=DAY_NS)
    assert compact(store, below_bytes=2**30) > 0
    log.clock.advance(ns=DAY_NS)
    sweep(store)
    log.clock.advance(ns=10 * 365 * DAY_NS)  # objects carry the machine's time, not the test's
    sweep(store)
    assert orphans(store) == []
    check_loaded(log, store)
    worker.drain()
    check_archived(log, store)


def test_the_verb_and_a_store_that_is_away(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(spans(1))])
    log.close()
    monkeypatch.setenv("SPANLOOP_ARCHIVE__URL", "s3://archive/x")
    monkeypatch.setenv("SPANLOOP_ARCHIVE__ENDPOINT", endpoint)
    result = CliRunner().invoke(command, ["once", "--workspace", str(tmp_path)], catch_exceptions=False)
    assert "1 records archived" in result.output
    monkeypatch.setenv("SPANLOOP_ARCHIVE__URL", "s3://no-such-bucket/x")
    with pytest.raises(TransientError, match="nothing is lost, the log keeps it"):
        CliRunner().invoke(command, ["once", "--workspace", str(tmp_path)], catch_exceptions=False)
