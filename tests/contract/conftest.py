"""Each adapter of the Log and StateStore ports, behind one small interface: open, crash, open again."""

from __future__ import annotations

import itertools

import pytest

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord
from spanloop.pipeline.state.memory import MemoryState
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas import topics


class MemoryAdapter:
    """Memory keeps its objects over a 'reopen': what survives is what a stage had committed."""

    durable = False
    one_order = True

    def __init__(self, tmp_path):
        self.clock = ManualClock(1_000)
        self.log = MemoryLog(self.clock)
        self.state = MemoryState(self.log)

    def reopen(self):
        return self.log, self.state

    def close(self):
        pass


class SqliteAdapter:
    durable = True
    one_order = True

    def __init__(self, tmp_path):
        self.clock = ManualClock(1_000)
        self.path = tmp_path / "workspace" / "spanloop.db"
        self._opened = []
        self.reopen()

    def reopen(self):
        self.log = SqliteLog(self.path, self.clock)
        self.state = SqliteState(self.path, self.clock)
        self._opened += [self.log, self.state]
        return self.log, self.state

    def close(self):
        for item in self._opened:
            item.close()


class KafkaAdapter:
    """One partition a topic and every topic exact: then Kafka keeps all of the port's promises but one order over topics."""

    durable = True
    one_order = False

    def __init__(self, bootstrap_servers, settings):
        self.clock = ManualClock(1_000)
        self._make = lambda: KafkaLog(
            bootstrap_servers,
            settings.model_copy(update={"partitions": 1}),
            self.clock,
            exact=(*topics.ALL_TOPICS, *topics.INTERNAL),
        )
        self._opened = []
        self.reopen()

    def reopen(self):
        self.log = self._make()
        self._opened.append(self.log)
        return self.log, None

    def close(self):
        for item in self._opened:
            item.close()


ADAPTERS = {"memory": MemoryAdapter, "sqlite": SqliteAdapter}
"""Adapters that have both ports."""


@pytest.fixture(params=sorted(ADAPTERS))
def adapter(request, tmp_path):
    adapter = ADAPTERS[request.param](tmp_path)
    yield adapter
    adapter.close()


@pytest.fixture(params=[*sorted(ADAPTERS), "kafka"])
def log_adapter(request, tmp_path):
    if request.param == "kafka":
        adapter = KafkaAdapter(
            request.getfixturevalue("bootstrap_servers"), request.getfixturevalue("kafka_settings")
        )
    else:
        adapter = ADAPTERS[request.param](tmp_path)
    yield adapter
    adapter.close()


_numbers = itertools.count()


def record(event_id=None, *, topic="spans", key="k", value=b"{}"):
    return NewRecord(topic, key, event_id or f"event-{next(_numbers)}", value)


@pytest.fixture
def make():
    return record
