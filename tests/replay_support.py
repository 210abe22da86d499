"""What replay tests share: a deployment's log as the embedded runtime leaves it, its archive, and what must come out again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from spanloop.pipeline.archive import ArchiveStore, write_range
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.replay.driver import replay
from spanloop.pipeline.replay.hashes import credit_hash, rewards_hash
from spanloop.pipeline.replay.plan import make_plan
from spanloop.pipeline.replay.results import ResultSet
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    OrchestrationRevised,
    RewardsComputed,
    SpansReceived,
    decode,
)
from spanloop.schemas.settings import Settings, load_settings
from spanloop.schemas.spans import Span

T0 = 1_790_000_000_000_000_000
HASHES = ("content_hash", "rewards_hash", "credit_hash")


def batches(
    spans: Iterable[Span], *, size: int = 4, source: str = "import", tenant: str = "default"
) -> list[Event]:
    """Spans as records of one trace each, so many spans at once."""
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    return [
        SpansReceived(tenant=tenant, trace_id=trace, spans=tuple(own[at : at + size]), source=source)
        for trace, own in by_trace.items()
        for at in range(0, len(own), size)
    ]


def settings_of(workspace: Path, **pipeline: object) -> Settings:
    return load_settings(None, {"workspace": workspace, "pipeline": pipeline})


def published(settings: Settings, *groups: Sequence[Event]) -> MemoryLog:
    """A log with these events, one group after the other, and what the embedded runtime made of each before the next."""
    clock = ManualClock(T0)
    log = MemoryLog(clock)
    runtime = EmbeddedRuntime(build_stages(settings.pipeline), log, MemoryState(log), clock, batch_max=40)
    runtime.restore()
    for events in groups:
        for at in range(0, len(events), 50):
            log.append([new_record(event) for event in events[at : at + 50]])
            clock.advance(seconds=0.01)
        for wait in (0.0, 400.0, 0.0):
            clock.advance(seconds=wait)
            while runtime.step():
                pass
    return log


def archive_of(settings: Settings, log: MemoryLog, *, records: int = 10**6) -> ArchiveStore:
    """The archive of a log, in ranges of so many records."""
    store = ArchiveStore(LocalFiles(settings.workspace / "archive"), ManualClock(T0))
    for topic in topics.ALL_TOPICS:
        found = log.read([topic], {}, 10**6)
        for at in range(0, len(found), records):
            write_range(store, topic, 0, found[at : at + records])
    return store


def expected(log: MemoryLog) -> dict[str, tuple[str, str, str]]:
    """Hashes of content, rewards and credit by orchestration id, as the stream published them last."""
    last: dict[tuple[str, str], Event] = {}
    for record in scan(log, [topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS]):
        event = decode(record.value)
        assert isinstance(event, OrchestrationRevised | RewardsComputed | CreditAssigned)
        key = (event.TOPIC, event.orchestration_id)
        if key not in last or event.revision > last[key].revision:  # type: ignore[attr-defined]
            last[key] = event
    found = {}
    for (topic, name), event in last.items():
        if isinstance(event, OrchestrationRevised) and event.content is not None:
            rewards, credit = last.get((topics.REWARDS, name)), last.get((topics.CREDITS, name))
            found[name] = (content_hash(event.content), rewards_hash(rewards), credit_hash(credit))  # type: ignore[arg-type]
        assert topic
    return found


def run(
    settings: Settings, store: ArchiveStore, name: str = "one", *, workers: int = 1, **options
) -> ResultSet:
    plan = make_plan(settings, store, name=name, **options)
    replay(plan, store, settings.workspace / "replays", workers=workers)
    return ResultSet(settings.workspace / "replays" / name)


def hashes(found: ResultSet) -> dict[str, tuple[str, str, str]]:
    return {
        row["orchestration_id"]: tuple(row[name] for name in HASHES)
        for row in found.rows(["orchestration_id", *HASHES])
    }
