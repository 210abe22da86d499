"""A deployment over a test broker: workers as processes, records in, and what came out compared with the embedded runtime."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SpansReceived,
    decode,
)
from spanloop.schemas.settings import Kafka, Pipeline, Settings, load_settings
from spanloop.schemas.spans import Span

__all__ = ["Deployment", "contents", "embedded", "sources_of"]

Contents = dict[str, tuple[str, bool, Any, str, str]]


def sources_of(spans: Iterable[Span]) -> list[SpansReceived]:
    """One event for each span, so that halves of a trace are different records."""
    return [SpansReceived(trace_id=span.trace_id, spans=(span,), source="import") for span in spans]


def contents(read: Callable[[str], Iterable[bytes]]) -> Contents:
    """What may not depend on the runtime: of each orchestration's last revision. Of two that share a number the first counts."""

    def last(topic: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for value in read(topic):
            try:
                event: Any = decode(value)
            except SchemaError:
                continue
            if event.key not in found or event.revision > found[event.key].revision:
                found[event.key] = event
        return found

    rewards, credits_ = last(topics.REWARDS), last(topics.CREDITS)
    made: Contents = {}
    for key, event in last(topics.ORCHESTRATIONS).items():
        assert isinstance(event, OrchestrationRevised)
        if event.content is None:
            continue
        reward, credit = rewards.get(key), credits_.get(key)
        assert reward is None or isinstance(reward, RewardsComputed)
        assert credit is None or isinstance(credit, CreditAssigned)
        plain = tuple(msgspec.structs.replace(r, status="") for r in reward.rewards) if reward else ()
        made[key] = (
            content_hash(event.content),
            event.complete,
            reward.team if reward else None,
            content_hash(plain),
            content_hash(credit.nodes) if credit is not None and credit.nodes else "",
        )
    return made


def embedded(pipeline: Pipeline, values: Iterable[bytes | Event]) -> Contents:
    """What the embedded runtime makes of the same records."""
    clock = ManualClock(0)
    log = MemoryLog(clock)
    for n, value in enumerate(values):
        if isinstance(value, bytes):
            log.append([NewRecord(topics.SPANS, "default/x", f"raw-{n}", value)])
        else:
            log.append([new_record(value)])
    state = MemoryState(log)
    run_to_end(build_stages(pipeline), log, state, clock, fire_timers=False)
    clock.set(3600 * 10**9)
    run_to_end(build_stages(pipeline), log, state, clock, fire_timers=False)
    return contents(lambda topic: [record.value for record in log.read([topic], {}, 1_000_000)])


class Deployment:
    """Topics of its own on a broker, a workspace, and workers.

    Args:
        bootstrap: the broker.
        folder: workspace.
        kafka: prefix and partitions.
        more: further settings, dotted by two underscores as in the environment.
    """

    def __init__(self, bootstrap: str, folder: Path, kafka: Kafka, **more: Any) -> None:
        self.folder = folder
        own_broker = "SPANLOOP_TEST_BOOTSTRAP_SERVERS" not in os.environ
        self.session_s = 3 if own_broker else 6  # a real broker refuses less than 6 s
        values = {
            "BOOTSTRAP_SERVERS": bootstrap, "WORKSPACE": str(folder), "KAFKA__PREFIX": kafka.prefix,
            "KAFKA__PARTITIONS": str(kafka.partitions), "PROCESS__SESSION_TIMEOUT_S": str(self.session_s),
            "PROCESS__SNAPSHOT_EVERY_S": "0.5", "PIPELINE__QUIET_S": "0.2", "PIPELINE__TIMEOUT_S": "2",
            "PIPELINE__VALUE_EVERY": "100000", **{name.upper(): str(value) for name, value in more.items()},
        }  # fmt: skip
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", **{f"SPANLOOP_{name}": value for name, value in values.items()}
        }  # fmt: skip
        self.settings = self._settings()
        self.log = KafkaLog(bootstrap, self.settings.kafka)
        self.workers: dict[str, subprocess.Popen[str]] = {}

    def _settings(self) -> Settings:
        saved = dict(os.environ)
        try:
            os.environ.update(self.environment)
            return load_settings()
        finally:
            os.environ.clear()
            os.environ.update(saved)

    # ------------------------------------------------------------ workers

    def start(self, name: str, engine: str = "faust", *options: str) -> subprocess.Popen[str]:
        """Start a worker and do not wait for it."""
        log = (self.folder / f"worker-{name}.log").open("a")
        with log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "spanloop.pipeline.runtimes.worker", "--worker", name, "--engine", engine, *options],
                stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment,
            )  # fmt: skip
        self.workers[name] = worker
        return worker

    def owned(self) -> dict[str, set[str]]:
        """Sources by worker, as their status files say."""
        found: dict[str, set[str]] = {}
        for name in self.workers:
            with contextlib.suppress(OSError, ValueError):
                status = json.loads((self.folder / f"pipeline-{name}.json").read_text())
                if status["pid"] == self.workers[name].pid:
                    found[name] = set(status["stages"])
        return found

    def wait_shared(self, seconds: float = 40.0) -> None:
        """Wait until every source of ``operations`` has one owner, and every worker has something."""
        everything = set(self.log.sources(topics.OPERATIONS))

        def shared() -> bool:
            owned = {
                name: {s for s in sources if s.startswith(topics.OPERATIONS)}
                for name, sources in self.owned().items()
            }
            lists = [owned.get(name, set()) for name in self.workers]
            return (
                set().union(*lists) == everything and sum(map(len, lists)) == len(everything) and all(lists)
            )

        self.wait(shared, seconds, "the workers to share the partitions")

    def kill(self, name: str) -> None:
        """kill -9."""
        worker = self.workers.pop(name)
        worker.kill()
        worker.wait()

    def stop(self, name: str) -> int:
        """SIGTERM; returns the exit code."""
        worker = self.workers.pop(name)
        worker.send_signal(signal.SIGTERM)
        return worker.wait(30)

    def close(self) -> None:
        """Kill what is left."""
        for name in list(self.workers):
            self.kill(name)
        self.log.close()

    def words(self) -> str:
        """What the workers said, for a failure's message."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.folder.glob("worker-*.log"))
        )

    # ------------------------------------------------------------ records

    def put(self, events: Sequence[Event], partition: int | None = None) -> None:
        """Append events; ``partition`` where their key shall not decide."""
        self.log.append([msgspec.structs.replace(new_record(event), partition=partition) for event in events])

    def values(self, topic: str) -> list[bytes]:
        """All values on a topic."""
        return [record.value for record in scan(self.log, [topic])]

    def contents(self) -> Contents:
        """What was made so far."""
        return contents(self.values)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait; returns the seconds it took."""
        begin = time.monotonic()
        while not condition():
            dead = [name for name, worker in self.workers.items() if worker.poll() is not None]
            late = time.monotonic() - begin > seconds
            assert not dead, f"worker {dead} ended\n{self.words()}"
            assert not late, f"waited {seconds} s for {what}\n{self.words()}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_contents(self, wanted: Contents, seconds: float = 40.0) -> float:
        """Wait until exactly these contents were made; returns the seconds."""
        return self.wait(lambda: self.contents() == wanted, seconds, f"contents {sorted(wanted)}")


def feedback_of(case: dict[str, Any]) -> list[FeedbackReceived]:
    """Feedback of a case file on its trace."""
    return [
        FeedbackReceived(
            feedback_id=item["feedbackId"], target_kind="trace", target_id=item["traceId"], name=item["name"],
            value=item["value"],
        )
        for item in case.get("feedback", ())
    ]  # fmt: skip
