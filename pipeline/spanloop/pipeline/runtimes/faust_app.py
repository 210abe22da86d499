"""The Faust engine: a consumer group of workers over the delivered topics.

Faust decides which process has which partition and delivers records; stages, state, outputs and recovery are ``Partition``'s, on
confluent-kafka. Of topics with many small records Faust only says whose they are; they are paused in it and read in
batches. No Faust Tables: at-least-once delivery counted a quarter of the records twice in them (ADR 8). Records are taken
as bytes, a batch at a time, and folded in one thread beside the event loop, so that a long fold never misses a heartbeat. Faust's
own acknowledgements are off: the group's offsets are committed up to what snapshots contain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faust
from faust.types import TP

from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.ports import LogRecord, source_of, topic_of
from spanloop.pipeline.runtimes.workers import DELIVERED, POLLED, Workers
from spanloop.schemas.canonical import bytes_hash
from spanloop.schemas.errors import TerminalError
from spanloop.schemas.settings import Settings

__all__ = ["run_faust"]

TICK_S = 0.05
COMMIT_EVERY = 10
"""Ticks between two looks at what may be committed, and at where the sources end."""
WITHIN_S = 0.005
"""How long a batch waits to be filled."""
FETCH_WAIT_MS = 50
"""How long a broker may hold a fetch open. Faust says 1,500 and offers no setting; a broker that answers late by that much (the test
broker does) would delay everything."""
POLL_S = 0.02
"""Pause after a batch read that reached the end: larger batches cost less a record."""

_log = logging.getLogger("spanloop.process")


class _Engine:
    """Carries Faust's events to ``Workers`` in one thread."""

    def __init__(self, settings: Settings, workers: Workers, prefix: str) -> None:
        self._workers = workers
        self._prefix = prefix
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spanloop-fold")
        self._committed: dict[str, int] = {}
        self.failure: BaseException | None = None

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run in the folding thread, one call after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def sources(self, partitions: Iterable[TP]) -> list[str]:
        """Our sources among Faust's partitions."""
        return [
            source_of(p.topic.removeprefix(self._prefix), p.partition)
            for p in partitions
            if p.topic.removeprefix(self._prefix) in DELIVERED
        ]

    async def offer(self, events: Iterable[Any]) -> None:
        """Fold a batch of Faust's events."""
        by_source: dict[str, list[LogRecord]] = {}
        for event in events:
            record = _record(event.message, self._prefix)
            by_source.setdefault(record.source, []).append(record)
        await self.call(self._offer_all, by_source)

    def _offer_all(self, by_source: dict[str, list[LogRecord]]) -> None:
        for source, records in by_source.items():
            records.sort(key=lambda record: record.offset)
            self._workers.offer(source, records)

    def ends(self, consumer: Any) -> dict[str, int]:
        """Last offsets as the consumer knows them from what it fetched."""
        found: dict[str, int] = {}
        for place in consumer.assignment():
            (source,) = self.sources([place]) or ("",)
            end = consumer.highwater(place) if source else None
            if end is not None:
                found[source] = end - 1
        return found

    @staticmethod
    def shorten_fetches(consumer: Any) -> None:
        """Set ``FETCH_WAIT_MS`` in the client below Faust, where that is as we know it."""
        fetcher = getattr(getattr(getattr(consumer, "_thread", None), "_consumer", None), "_fetcher", None)
        if getattr(fetcher, "_fetch_max_wait_ms", FETCH_WAIT_MS) > FETCH_WAIT_MS:
            fetcher._fetch_max_wait_ms = FETCH_WAIT_MS  # type: ignore[union-attr]

    def pause_polled(self, consumer: Any) -> None:
        """Keep Faust from handing over the records of polled topics; a rebalance makes it forget that."""
        polled = {p for p in consumer.assignment() if p.topic.removeprefix(self._prefix) in POLLED}
        if polled & consumer._get_active_partitions():
            consumer.pause_partitions(polled)

    async def commit(self, consumer: Any) -> None:
        """Commit offsets that snapshots contain; a worker that has lost its partitions commits nothing."""
        places = {}
        for source, offset in self._workers.committable().items():
            if self._committed.get(source) != offset:
                topic, partition = topic_of(source)
                places[TP(self._prefix + topic, partition)] = offset + 1
                self._committed[source] = offset
        if places and not await consumer._commit(places):
            self._committed.clear()


def _record(message: Any, prefix: str) -> LogRecord:
    """A record from Faust's message; event id and time of append stand in its headers, where spanloop wrote it."""
    headers = message.headers or ()
    found = dict(headers.items() if isinstance(headers, dict) else headers)
    key, value = message.key or b"", message.value or b""
    event_id, stamp = found.get("event_id"), found.get("appended_ns")
    return LogRecord(
        topic=message.topic.removeprefix(prefix),
        offset=message.offset,
        key=key.decode("utf-8", "replace"),
        event_id=event_id.decode("utf-8", "replace") if isinstance(event_id, bytes) else bytes_hash(value),
        value=value,
        appended_ns=int(stamp)
        if isinstance(stamp, bytes) and stamp.isdigit()
        else int((message.timestamp or 0) * 1e9),
        partition=message.partition,
    )


def _application(settings: Settings) -> faust.App:
    process, kafka = settings.process, settings.kafka
    broker = ";".join(f"kafka://{address}" for address in settings.bootstrap_servers.split(","))
    return faust.App(
        kafka.prefix + process.group,
        broker=broker,
        store="memory://",
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        topic_replication_factor=kafka.replication,
        processing_guarantee="at_least_once",
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=process.session_timeout_s,
        broker_heartbeat_interval=process.session_timeout_s / 3,
        broker_request_timeout=max(90.0, 3 * process.session_timeout_s),
        broker_commit_interval=1.0,
        broker_max_poll_records=process.batch_max * 4,
        broker_max_poll_interval=3600.0,
        consumer_max_fetch_size=32 * 2**20,
        stream_wait_empty=False,
        key_serializer="raw",
        value_serializer="raw",
        logging_config=None,
        loghandlers=[],
        **_credentials(kafka.client),
    )


def _credentials(client: dict[str, str]) -> dict[str, Any]:
    """SASL with a password, from the librdkafka properties; other log-ins need ``--engine loop``."""
    mechanism = client.get("sasl.mechanism") or client.get("sasl.mechanisms")
    if not mechanism:
        return {}
    import ssl

    secured = "SSL" in client.get("security.protocol", "")
    context = ssl.create_default_context(cafile=client.get("ssl.ca.location")) if secured else None
    return {
        "broker_credentials": faust.SASLCredentials(
            username=client.get("sasl.username", ""), password=client.get("sasl.password", ""),
            mechanism=mechanism, ssl_context=context,
        )
    }  # fmt: skip


def build(settings: Settings, workers: Workers) -> tuple[faust.App, _Engine]:
    """The Faust application over these workers."""
    app = _application(settings)
    engine = _Engine(settings, workers, settings.kafka.prefix)
    batch = settings.process.batch_max

    def agent_for(topic: str) -> None:
        channel = app.topic(settings.kafka.prefix + topic, key_type=bytes, value_type=bytes, key_serializer="raw",
                            value_serializer="raw", acks=False, allow_empty=True)  # fmt: skip

        async def handle(stream: Any) -> None:
            async for events in stream.take_events(batch, within=WITHIN_S):
                try:
                    await engine.offer(events)
                except Exception as exc:
                    engine.failure = exc
                    await app.crash(exc)
                    raise

        handle.__name__ = handle.__qualname__ = f"spanloop_{topic}"
        app.agent(channel, name=f"spanloop.{topic}")(handle)

    for name in DELIVERED:
        agent_for(name)

    @app.on_partitions_revoked.connect  # type: ignore[arg-type]
    async def revoked(_: Any, partitions: Iterable[TP], **__: Any) -> None:
        leaving = engine.sources(partitions)
        workers.leave(leaving)
        await engine.call(workers.give_up, leaving)

    @app.on_partitions_assigned.connect  # type: ignore[arg-type]
    async def assigned(_: Any, partitions: Iterable[TP], **__: Any) -> None:
        workers.expect(
            engine.sources(partitions)
        )  # taken over in the next tick: no heartbeat goes out in here

    @app.task
    async def ticking() -> None:
        rounds = 0
        while not app.should_stop:
            try:
                if not app.rebalancing:
                    engine.shorten_fetches(app.consumer)
                    engine.pause_polled(app.consumer)
                await engine.call(workers.tick)
                rounds += 1
                if rounds % COMMIT_EVERY == 0 and not app.rebalancing:
                    workers.ends(engine.ends(app.consumer))
                    await engine.commit(app.consumer)
            except Exception as exc:
                engine.failure = exc
                await app.crash(exc)
                raise
            await asyncio.sleep(TICK_S)

    @app.task
    async def polling() -> None:
        while not app.should_stop:
            try:
                more = await engine.call(workers.poll)
            except Exception as exc:
                engine.failure = exc
                await app.crash(exc)
                raise
            await asyncio.sleep(0 if more else POLL_S)

    return app, engine


async def _serve(
    settings: Settings, workers: Workers, stop: asyncio.Event, ready: Callable[[], None]
) -> None:
    app, engine = build(settings, workers)
    app.finalize()
    await app.start()
    ready()
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not stopping.done() and engine.failure is None and not app.crashed:
            await asyncio.wait([stopping], timeout=0.5)
    finally:
        stopping.cancel()
        workers.stop()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(app.stop(), timeout=20)
        await engine.call(workers.close)
    if engine.failure is not None:
        raise engine.failure
    if app.crashed:
        raise TerminalError(
            f"Faust gave up: {app.crash_reason!r}; the lines above say where. Start the worker again"
        )


def run_faust(
    settings: Settings, log: KafkaLog, workers: Workers, *, stop: Any, ready: Callable[[], None]
) -> None:
    """Run until ``stop`` (a threading.Event) is set."""

    async def main() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        watching = loop.run_in_executor(None, stop.wait)
        watching.add_done_callback(lambda _: done.set())
        try:
            await _serve(settings, workers, done, ready)
        finally:
            stop.set()

    asyncio.run(main())
