"""A deployment with persons in it: jobs that name a subject, texts and token ids in every place, carried through the real stages.

Each subject has a secret that stands in all its texts, and token ids that nobody else has. ``texts_at_rest`` is the grep: every
byte under a folder, and what SQLite, Parquet and deflate hide from a plain one.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import Sealer
from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.otlp.decoded import DecodedBatch, Rejected
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.sealing.opening import open_vault
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.events import FeedbackReceived, SpansReceived
from spanloop.schemas.ids import gateway_span_id
from spanloop.schemas.settings import Settings, load_settings
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

T0 = 1_790_000_000_000_000_000
KEY = b"k" * 32


def settings(folder: Path, *, sealed: bool = True, **content: Any) -> Settings:
    """Of a deployment that keeps content, under keys or in the clear."""
    flags = {
        "workspace": str(folder),
        "content": {"training": True, "subject_keys": sealed, **content},
        "pipeline": {"value_every": 8, "holdout": 0.2},
    }
    return load_settings(None, flags)


def secret(person: int) -> str:
    """What may never be found again: it looks like no label."""
    return f"person{person:03d}@example.invalid"


def tokens(person: int, job: int) -> list[int]:
    """Token ids of a job's answer that no other has."""
    return [77_350_000 + 1_000 * person + 10 * job + n for n in range(3)]


def trace_of(person: int, job: int) -> str:
    return digest("job", person, job)


def job_spans(person: int, job: int) -> list[Span]:
    """The framework's spans of a job: children first, and only the root, which comes last, names the person."""
    trace, text = trace_of(person, job), f"call {secret(person)}"
    ids = iter(digest("span", person, job, n)[:16] for n in range(100))
    root, helper, chat = next(ids), next(ids), next(ids)
    start = T0 + (person * 10 + job) * 10_000_000_000
    common = {
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.model": "policy",
    }
    messages = canonical_json([{"role": "user", "parts": [{"type": "text", "content": text}]}]).decode()
    return [
        Span(trace, chat, f"chat {text} " * 3, start + 30, start + 40, parent_span_id=helper,
             status_message=text, scope="made", resource={"service.name": "desk", "note": text},
             attributes={"gen_ai.operation.name": "chat", "gen_ai.response.id": f"r-{person}-{job}", **common,
                         "gen_ai.input.messages": messages, text: text, "note": {text: [text]}},
             events=(SpanEvent("exception", start, {"exception.message": text}),),
             links=(SpanLink(trace, root, {"by": text}),)),
        Span(trace, helper, "invoke_agent helper", start + 20, start + 50, parent_span_id=root, scope="made",
             attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "helper"},
             resource={"service.name": "desk"}),
        Span(trace, root, "invoke_agent lead", start, start + 60, scope="made", resource={"service.name": "desk"},
             attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "lead",
                         "user.id": f"u-{person}"}),
    ]  # fmt: skip


def gateway_span(person: int, job: int) -> Span:
    """The gateway's span of the same call, in a trace of its own that names nobody."""
    response = f"r-{person}-{job}"
    start = T0 + (person * 10 + job) * 10_000_000_000
    answer = tokens(person, job)
    return Span(
        digest("gateway", response), gateway_span_id(response), "chat policy", start + 29, start + 41, kind=3,
        scope="spanloop.gateway", resource={"service.name": "spanloop.gateway"},
        attributes={
            "gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.response.id": response,
            "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 3, "spanloop.policy.version": "policy@v0",
            "spanloop.policy.route": "champion", "spanloop.harness": "h", "spanloop.task.key": f"t-{job}",
            "spanloop.prompt_token_ids": [1, 7, *answer[:2]], "spanloop.response_token_ids": answer,
            "spanloop.response_logprobs": [-0.6931472, -0.3, 0.0],
            "spanloop.menus": [[[answer[0], -0.6931472], [5, -0.6931472]], [[answer[1], -0.3], [6, -1.35]], [[answer[2], 0.0]]],
            "gen_ai.input.messages": canonical_json([{"role": "user", "content": secret(person)}]).decode(),
        },
    )  # fmt: skip


class World:
    """A workspace of persons."""

    def __init__(self, folder: Path, *, sealed: bool = True) -> None:
        self.settings = settings(folder, sealed=sealed)
        self.redactor = Redactor(self.settings.content, KEY)
        self.vault = open_vault(self.settings)
        self.sealer = (
            Sealer(self.vault, self.settings.content.subjects, 65_536)
            if self.vault is not None and sealed
            else None
        )
        self.intake = Intake(
            self.redactor, 65_536, keep_content=self.settings.content.clear, sealer=self.sealer
        )
        self.clock = ManualClock(T0)

    def records(self, person: int, job: int, tenant: str = "default") -> list[NewRecord]:
        """What collector and gateway write of one job, a refused span and a comment among it."""
        found: list[NewRecord] = []
        bad = [Rejected(f"no id in {secret(person)}", secret(person).encode())]
        for span in job_spans(person, job):
            batch = DecodedBatch([span], bad)
            found += self.intake.prepare(batch, tenant=tenant, source="otlp").records
            bad = []
        call = gateway_span(person, job)
        if self.sealer is not None:
            call = self.sealer.call(call, self.redactor.span(call, trusted=True), tenant)
        event = SpansReceived(tenant=tenant, trace_id=call.trace_id, spans=(call,), source="gateway")
        found.append(new_record(event))
        outcome = FeedbackReceived(
            tenant=tenant, feedback_id=f"f-{person}-{job}", target_kind="trace", target_id=trace_of(person, job),
            value=(person + job) % 5 / 4, scorer="desk", observed_ns=T0, comment=self.redactor.text(secret(person)),
        )  # fmt: skip
        return [*found, new_record(outcome)]

    def append(self, records: Iterable[NewRecord]) -> None:
        with closing(SqliteLog(self.settings.database, self.clock)) as log:
            log.append(list(records))

    def run(self) -> None:
        """Carry everything through the stages, for a few seconds: jobs close, nothing is forgotten."""
        path = self.settings.database
        with closing(SqliteLog(path, self.clock)) as log, closing(SqliteState(path, self.clock)) as state:
            stages = build_stages(self.settings.pipeline, self.vault)
            runtime = EmbeddedRuntime(stages, log, state, self.clock, batch_max=50)
            runtime.restore()
            for _ in range(4):
                while runtime.step():
                    pass
                self.clock.advance(seconds=2)

    def archive(self) -> None:
        with closing(SqliteLog(self.settings.database, self.clock)) as log:
            archiver = Archiver(log, ArchiveStore.open(self.settings), self.settings)
            archiver.start()
            archiver.drain()

    def values(self, *names: str) -> dict[tuple[str, str], bytes]:
        """The records of topics by (key, event id)."""
        with closing(SqliteLog(self.settings.database, self.clock)) as log:
            return {(record.key, record.event_id): record.value for record in scan(log, list(names))}


DERIVED = (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES)


def texts_at_rest(folder: Path, *, besides: str = "") -> Iterator[bytes]:
    """Everything that can be read under a folder, unpacked; files below ``besides`` are left out."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or (besides and besides in path.parts):
            continue
        yield path.read_bytes()
        if path.suffix == ".db":
            yield from _cells(path)
        elif path.suffix == ".parquet":
            for row in pq.read_table(path).to_pylist():
                yield repr(row).encode("utf-8", "surrogatepass")


def _cells(path: Path) -> Iterator[bytes]:
    with closing(sqlite3.connect(path)) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for row in db.execute(f"SELECT * FROM {table}"):  # noqa: S608
                for cell in row:
                    data = cell if isinstance(cell, bytes) else str(cell).encode()
                    yield data
                    yield from _inflated(data)


def _inflated(data: bytes) -> Iterator[bytes]:
    """Every deflate stream inside."""
    for found in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(data[found.start() :])
