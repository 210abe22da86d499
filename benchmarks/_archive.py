"""An archive of any size, quickly: recorded orchestrations copied with fresh ids, in the files that the archiver writes.

A template is the dispatch desk's recording (tests/golden/assembly/desk.otlp.jsonl) with the gateway's spans beside the
policy's calls, run through the real stages once for each variant. A copy differs in every id and time. Raw values and tables
are copied as bytes, so ten million spans take minutes; ``tests/unit/test_query_archive.py`` holds a small archive of it
against what the real writer makes of the same records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
from _harness import ROOT

from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive.encoding import sort
from spanloop.pipeline.archive.manifest import Range, date_of
from spanloop.pipeline.archive.raw import RAW_SCHEMA
from spanloop.pipeline.archive.repeats import index_of
from spanloop.pipeline.archive.writer import TABLES_VERSION, Attempt, save, schemas_of
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.columns import build
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.pipeline.views import TABLES_OF_TOPIC
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import DeadLettered, Event, FeedbackReceived, SpansReceived
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span

__all__ = [
    "COPIED",
    "Copier",
    "Template",
    "number_of",
    "plan",
    "recorded",
    "run",
    "templates",
    "write_copies",
    "write_topic",
]

pc: Any = pyarrow.compute
COPIED = (topics.SPANS, topics.FEEDBACK, topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES,
          topics.DEAD_LETTERS)  # fmt: skip
_TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{16,64}(?![0-9a-f])")
_TIME = re.compile(rb"\d{19}")
_FRESH = 12
"""Hex digits of an id that a copy replaces."""
SPACING_NS = 2_000_000_000
"""Between copies: 400,000 orchestrations fill nine days."""
DAY_NS = 86_400 * 10**9
RANGE_BYTES = 256 * 2**20
"""Values of one range, as compaction leaves them (``compaction.VALUE_BYTES``)."""


class Template(NamedTuple):
    """One orchestration's records and tables."""

    records: dict[str, list[LogRecord]]
    tables: dict[str, pa.Table]
    num_spans: int
    kept: frozenset[bytes]
    """Hex texts that all copies share."""


def recorded() -> list[Span]:
    """The recording with 128-bit response ids, and the gateway's view of each policy call."""
    spans: list[Span] = []
    for batch in read_spans(ROOT / "tests/golden/assembly/desk.otlp.jsonl"):
        for span in batch.spans:
            attributes = dict(span.attributes)
            response = attributes.get("gen_ai.response.id")
            if response is not None:
                attributes["gen_ai.response.id"] = f"chatcmpl-{digest('response', response)}"
            for key in ("gen_ai.conversation.id", "gen_ai.agent.call.id"):
                if key in attributes:
                    attributes[key] = digest(key, attributes[key])
            spans.append(msgspec.structs.replace(span, attributes=attributes))
    return spans


def _gateway(span: Span, version: str) -> Span:
    facts = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.response.model": "policy",
        "gen_ai.response.id": span.attributes["gen_ai.response.id"], "gen_ai.usage.input_tokens": 54,
        "gen_ai.usage.output_tokens": 4, "spanloop.policy.version": version, "spanloop.policy.route": "champion",
        "spanloop.harness": "desk-harness", "spanloop.task.key": "desk",
        "spanloop.prompt_token_ids": list(range(40, 94)), "spanloop.response_token_ids": [7, 12, 9, 2],
        "spanloop.response_logprobs": [-0.25, -0.5, -0.125, -1.0],
        "spanloop.menus": [[[7, -0.25], [8, -1.5]], [[12, -0.5]], [[9, -0.125]], [[2, -1.0]]],
    }  # fmt: skip
    return Span(
        trace_id=span.trace_id, span_id=digest("gateway", span.span_id)[:16], name="chat policy", start_ns=span.start_ns + 1000,
        end_ns=span.end_ns - 1000, parent_span_id=span.span_id, kind=3, status="ok", attributes=facts, scope="spanloop.gateway",
        resource={"service.name": "spanloop-gateway"},
    )  # fmt: skip


def run(spans: Sequence[Span], value: float | None, tenant: str, *, batch: int = 5) -> Template:
    """The stages over some spans and, later, their outcome (None: it never comes)."""
    clock = ManualClock(spans[0].start_ns)
    log, settings = MemoryLog(clock), load_settings()
    runtime = EmbeddedRuntime(build_stages(settings.pipeline), log, MemoryState(log), clock, batch_max=1000)
    runtime.restore()
    trace = spans[0].trace_id
    events: list[Event] = []
    for source in ("gateway", "otlp"):
        own = [span for span in spans if (span.scope == "spanloop.gateway") == (source == "gateway")]
        events += [
            SpansReceived(tenant=tenant, trace_id=trace, spans=tuple(own[at : at + batch]), source=source)
            for at in range(0, len(own), batch)
        ]
    events.append(
        DeadLettered(
            tenant=tenant, source="otlp", reason="zero trace id", sha256=digest("dead", trace), size=412
        )
    )
    for _ in range(2):
        log.append([new_record(event) for event in events])
        for wait in (0.0, 60.0, 3600.0):
            clock.advance(seconds=wait)
            while runtime.step():
                pass
        events = []
        if value is not None:
            events.append(
                FeedbackReceived(
                    tenant=tenant, feedback_id=digest("feedback", trace), target_kind="trace", target_id=trace, value=value,
                    scorer="checkout", observed_ns=clock.now_ns(),
                )
            )  # fmt: skip
    records = {name: log.read([name], {}, 10**6) for name in COPIED}
    tables = {table: built for name in COPIED for table, built in build(name, records[name])[0].items()}
    groups = {text.encode() for text in tables["samples"]["group_id"].to_pylist()} - {trace.encode()}
    return Template(records, tables, len(spans), frozenset(groups))


def templates(tenant: str = "default") -> list[Template]:
    """Four policy versions, two outcomes each; one run in eight has no outcome and one a failed tool."""
    base, found = recorded(), []
    for number in range(8):
        spans = []
        for span in base:
            if number == 5 and span.name == "execute_tool look":
                spans.append(msgspec.structs.replace(span, status="error", status_message="no such ticket"))
            else:
                spans.append(span)
            if span.name == "chat policy":
                spans.append(_gateway(span, f"policy@v{1 + number % 4}"))
        value = None if number == 7 else (0.25, 0.5, 0.75, 1.0)[number % 4]
        made = run(spans, value, tenant)
        if number != 6:  # refused bodies are rare
            made.records[topics.DEAD_LETTERS].clear()
            made.tables["dead_letters"] = made.tables["dead_letters"].slice(0, 0)
        found.append(made)
    return found


# ---------------------------------------------------------------- copying bytes


def _fresh(prefixes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """48 bits for each (copy, id prefix) by splitmix64, as ASCII hex [copies, ids, 12]."""
    with np.errstate(over="ignore"):
        x = prefixes[None, :] ^ (numbers[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    shifts = np.arange(4 * (_FRESH - 1), -1, -4, dtype=np.uint64)
    nibbles = ((x[:, :, None] >> shifts) & np.uint64(15)).astype(np.uint8)
    return nibbles + np.where(nibbles < 10, 48, 87).astype(np.uint8)


def _decimal(values: np.ndarray) -> np.ndarray:
    """19-digit integers as ASCII [..., 19]."""
    powers = 10 ** np.arange(18, -1, -1, dtype=np.int64)
    return ((values[..., None] // powers) % 10 + 48).astype(np.uint8)


class Copier:
    """Copies of columns and values.

    Args:
        numbers: int64, one a copy.
        kept: Hex texts that are the same in every copy (a harness, a group).
    """

    def __init__(self, numbers: np.ndarray, kept: frozenset[bytes]) -> None:
        self.numbers = numbers
        self._kept = kept
        self._shift = numbers * SPACING_NS

    def bytes(self, text: bytes) -> np.ndarray:
        """Copies of one text with fresh ids and shifted times: uint8 [copies, len(text)]."""
        out = np.tile(np.frombuffer(text, np.uint8), (len(self.numbers), 1))
        ids, times = [], []
        for match in _TOKEN.finditer(text):
            if match.group() not in self._kept:
                (times if _TIME.fullmatch(match.group()) else ids).append(match)
        if ids:
            prefixes = np.array([int(m.group()[:_FRESH], 16) for m in ids], np.uint64)
            columns = np.array([m.start() for m in ids])[:, None] + np.arange(_FRESH)
            out[:, columns.ravel()] = _fresh(prefixes, self.numbers).reshape(len(self.numbers), -1)
        if times:
            values = np.array([int(m.group()) for m in times], np.int64)[None, :] + self._shift[:, None]
            columns = np.array([m.start() for m in times])[:, None] + np.arange(19)
            out[:, columns.ravel()] = _decimal(values).reshape(len(self.numbers), -1)
        return out

    def texts(self, array: pa.Array) -> pa.Array:
        """Copies of a string or binary column, copy after copy."""
        values = [v.encode() if isinstance(v, str) else (v or b"") for v in array.to_pylist()]
        blocks = [self.bytes(value) for value in values] or [np.empty((len(self.numbers), 0), np.uint8)]
        data = np.concatenate(blocks, axis=1)
        lengths = np.tile(np.array([len(v) for v in values], np.int64), len(self.numbers))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        buffers = [self._validity(array), pa.py_buffer(offsets), pa.py_buffer(data.ravel())]
        large = pa.large_binary() if pa.types.is_binary(array.type) else pa.large_string()
        return pa.Array.from_buffers(large, len(lengths), buffers).cast(array.type)

    def _validity(self, array: pa.Array) -> pa.Buffer | None:
        if not array.null_count:
            return None
        valid = np.array([v is not None for v in array.to_pylist()])
        return pa.py_buffer(np.packbits(np.tile(valid, len(self.numbers)), bitorder="little"))

    def column(self, array: pa.Array, name: str) -> pa.Array:
        """A column's copies; texts may hold ids, times are shifted."""
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            return self.texts(array)
        if pa.types.is_list(array.type) and not array.null_count:
            inner = self.column(array.flatten(), name)
            lengths = np.tile([len(v) for v in array.to_pylist()], len(self.numbers))
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            return pa.ListArray.from_arrays(offsets, inner, type=array.type)
        tiled = array.take(pa.array(np.tile(np.arange(len(array)), len(self.numbers))))
        shift = np.repeat(self._shift, len(array))
        if pa.types.is_timestamp(array.type):
            return pc.add(tiled, pa.array(shift // 1000).cast(pa.duration("us")))
        if pa.types.is_int64(array.type) and name.endswith("_ns"):
            return pc.add(tiled, pa.array(shift))
        return tiled

    def table(self, table: pa.Table) -> pa.Table:
        """Copies of a table, copy after copy."""
        columns = [self.column(table[f.name].combine_chunks(), f.name) for f in table.schema]
        return pa.Table.from_arrays(columns, schema=table.schema)


# ---------------------------------------------------------------- ranges


def _offsets(table: pa.Table, template: Sequence[LogRecord], first: int, copies: int) -> np.ndarray:
    """Rows of copy c of the template's record i lie at offset first + c * len(template) + i."""
    own = {record.offset: i for i, record in enumerate(template)}
    rows = np.array([own[o] for o in table["offset"].to_pylist()], np.int64)
    return (first + np.arange(copies)[:, None] * len(template) + rows[None, :]).ravel()


def _raw(topic: str, template: Sequence[LogRecord], copier: Copier, first: int) -> pa.Table:
    copies = len(copier.numbers)
    total = len(template) * copies
    appended = np.array([r.appended_ns for r in template])[None, :] + (copier.numbers * SPACING_NS)[:, None]
    return pa.Table.from_pydict(
        {
            "topic": pa.array([topic]).take(pa.array(np.zeros(total, np.int64))),
            "partition": np.zeros(total, np.int32),
            "offset": first + np.arange(total),
            "key": copier.texts(pa.array([r.key for r in template])),
            "event_id": copier.texts(pa.array([r.event_id for r in template])),
            "value": copier.texts(pa.array([r.value for r in template], pa.binary())),
            "appended_ns": appended.ravel(),
        },
        schema=RAW_SCHEMA,
    )


def write_copies(
    store: ArchiveStore, topic: str, made: Sequence[Template], numbers: np.ndarray, first: int
) -> int:
    """One range of ``topic`` with copies ``numbers`` (each of template number mod len(made)). Returns the offset after it."""
    at, raw, parts, tenant = first, [], {name: [] for name in TABLES_OF_TOPIC[topic]}, ""
    for index, template in enumerate(made):
        records, own = template.records[topic], numbers[numbers % len(made) == index]
        if not records or not len(own):
            continue
        tenant = records[0].key.partition("/")[0]
        copier = Copier(own, template.kept)
        raw.append(_raw(topic, records, copier, at))
        for name, some in parts.items():
            table = template.tables[name]
            if table.num_rows:
                column = table.schema.get_field_index("offset")
                offsets = pa.array(_offsets(table, records, at, len(own)))
                some.append(copier.table(table).set_column(column, table.schema.field(column), offsets))
        at += len(records) * len(own)
    if not raw:
        return first
    table = pa.concat_tables(raw)
    days = table["appended_ns"].to_numpy() // DAY_NS
    attempt = Attempt(store.files, topic, 0, first, at - 1)
    for day in np.unique(days):
        attempt.add_raw(
            (tenant, date_of(int(day) * DAY_NS)), table.filter(pa.array(days == day)), table.num_rows
        )
    for name, some in parts.items():
        rows = pa.concat_tables(some) if some else None
        for day in np.unique(days) if rows is not None else ():
            own_rows = rows.filter(pa.array(days[rows["offset"].to_numpy() - first] == day))
            if own_rows.num_rows:
                attempt.add(name, (tenant, date_of(int(day) * DAY_NS)), sort(own_rows))
    if topic == topics.SPANS:
        attempt.add_index(index_of([part["trace_id"] for part in parts[topics.SPANS]]))
    save(
        store.files,
        Range(
            topic, 0, first, at - 1, table.num_rows, store.clock.now_ns(), first_offset=first, last_offset=at - 1,
            first_event_id=table["event_id"][0].as_py(), last_event_id=table["event_id"][-1].as_py(),
            value_bytes=int(pc.sum(pc.binary_length(table["value"])).as_py()), version=TABLES_VERSION,
            schemas=schemas_of(topic), files=tuple(attempt.written),
        ),
    )  # fmt: skip
    return at


def plan(topic: str, made: Sequence[Template], orchestrations: int) -> list[np.ndarray]:
    """Copies of each range."""
    size = sum(len(r.value) for t in made for r in t.records[topic]) / len(made)
    chunk = max(len(made), min(orchestrations, int(RANGE_BYTES / max(1.0, size))))
    return [
        np.arange(first, min(first + chunk, orchestrations), dtype=np.int64)
        for first in range(0, orchestrations, chunk)
    ]


def number_of(made: Sequence[Template], spans: int) -> int:
    """Orchestrations that have about so many spans."""
    return max(len(made), round(spans / (sum(t.num_spans for t in made) / len(made))))


def write_topic(store: ArchiveStore, topic: str, made: Sequence[Template], orchestrations: int) -> int:
    """All ranges of one topic. Returns the number of records."""
    at = 0
    for numbers in plan(topic, made, orchestrations):
        at = write_copies(store, topic, made, numbers, at)
    return at
