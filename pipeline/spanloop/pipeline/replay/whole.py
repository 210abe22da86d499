"""Replay as one Beam pipeline, for runners that shuffle on many machines: Flink, Dataflow, or any other class of runner.

Place in the flow: ``cli`` calls ``replay_whole`` where ``--runner`` is not ``direct``. The transforms call the same functions as the
local passes; what those keep on disk between passes is shuffled by the runner here. The set of edges between traces is
combined into one table that every worker gets; spans are never collected.

Invariants: the result set is the same as the local run's, up to the names of its parts. Archive and results must be where all
workers reach them (s3://, or a folder on all hosts).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions
from apache_beam.pvalue import AsSingleton, TaggedOutput

from spanloop.pipeline.archive.files import Files, open_files
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.replay import passes
from spanloop.pipeline.replay.driver import manifest_of
from spanloop.pipeline.replay.joining import Union, edges_of
from spanloop.pipeline.replay.models import copy_models
from spanloop.pipeline.replay.plan import Plan
from spanloop.pipeline.replay.reading import (
    Bad,
    FeedbackRow,
    Piece,
    encode_row,
    feedback_target,
    read_feedback,
    read_spans,
)
from spanloop.pipeline.replay.recorded import expired_feedback, read_recorded
from spanloop.pipeline.replay.results import Counts, Manifest
from spanloop.pipeline.replay.source import Chunk
from spanloop.pipeline.replay.transforms import Report, Row, finish
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError

__all__ = ["RUNNERS", "build", "replay_whole"]

RUNNERS = {"flink": "FlinkRunner", "dataflow": "DataflowRunner"}
_piece = msgspec.msgpack.Decoder(tuple[tuple[int, int, int, int], bytes, int, str, int, int])
_pack = msgspec.msgpack.encode


class _Reading(beam.DoFn):
    """Base of what reads chunks of the archive."""

    def __init__(self, plan: Plan) -> None:
        self._url, self._endpoint, self._compare = plan.archive, plan.endpoint, plan.compare

    def setup(self) -> None:
        """Once a worker."""
        self._store = ArchiveStore(open_files(self._url, self._endpoint))


class ReadSpans(_Reading):
    """Chunks of ``spans`` to rows; beside them pieces of evidence, edges by links, names that feedback wants, reports."""

    OUTPUTS = ("pieces", "edges", "named", "report")

    def process(self, element: Chunk, wanted: frozenset[bytes]) -> Iterator[Any]:
        """One chunk."""
        counts, bad = Counts(), []
        for number, (at, value) in enumerate(passes.read_chunk(self._store, element)):
            read = read_spans(value, at, wanted)
            counts.span_records += 1
            counts.spans += read.spans
            bad += read.bad
            if read.row is None:
                continue
            yield read.node, encode_row(read.row)
            order = (at.appended_ns, at.partition, at.offset, number)
            for piece in read.pieces:
                yield TaggedOutput("pieces", (piece.key, _pack((order, *piece[1:]))))
            for other in read.linked:
                yield TaggedOutput("edges", (read.node, other))
            for key in read.named:
                yield TaggedOutput("named", (key, b"n" + _pack((order, read.node))))
        counts.bad = len(bad)
        yield TaggedOutput("report", Report(counts, bad))


class ReadFeedback(_Reading):
    """Chunks of ``feedback`` to rows by node, or by target where only the spans know the node."""

    OUTPUTS = ("targeted", "report")

    def process(self, element: Chunk, expired: frozenset[tuple[str, str]]) -> Iterator[Any]:
        """One chunk."""
        counts, bad = Counts(), []
        for at, value in passes.read_chunk(self._store, element):
            counts.feedback += 1
            event = read_feedback(value, at)
            if isinstance(event, Bad):
                bad.append(event)
                continue
            if (event.tenant, event.feedback_id) in expired:
                counts.feedback_expired += 1
                continue
            node, key = feedback_target(event)
            row = encode_row(FeedbackRow(at.partition, at.offset, at.appended_ns, value))
            if node is not None:
                yield node, row
            else:
                yield TaggedOutput("targeted", (key, b"f" + row))
        counts.bad = len(bad)
        yield TaggedOutput("report", Report(counts, bad))


class ReadTargets(_Reading):
    """Chunks of ``feedback`` to the keys of targets that spans must be looked through for."""

    def process(self, element: Chunk) -> Iterator[bytes]:
        """One chunk."""
        for at, value in passes.read_chunk(self._store, element):
            event = read_feedback(value, at)
            key = None if isinstance(event, Bad) else feedback_target(event)[1]
            if key is not None:
                yield key


class ReadExpired(_Reading):
    """Chunks of ``dead_letters`` to feedback that the stream gave up."""

    def process(self, element: Chunk) -> Iterator[tuple[str, str]]:
        """One chunk."""
        yield from expired_feedback(value for _, value in passes.read_chunk(self._store, element))


class ReadRecorded(_Reading):
    """Chunks of derived topics to rows by node."""

    OUTPUTS = ("report",)

    def process(self, element: Chunk) -> Iterator[Any]:
        """One chunk."""
        found = iter(passes.read_chunk(self._store, element))
        rows, bad = read_recorded(element.topic, found, compare=self._compare)
        yield from rows
        if bad:
            yield TaggedOutput("report", Report(Counts(bad=len(bad)), bad))


def match_group(element: tuple[bytes, Iterable[bytes]]) -> list[Row]:
    """Edges that the pieces of one key give, in log order."""
    key, packed = element
    found = sorted(_piece.decode(item) for item in packed)
    return edges_of(Piece(key, node, side, span, start, end) for _, node, side, span, start, end in found)


def place_feedback(element: tuple[bytes, Iterable[bytes]]) -> Iterator[Row]:
    """Feedback on a span or response under the node that has it, the last where several have; where none has: nowhere."""
    _, values = element
    rows, nodes = [], []
    for value in values:
        if value[:1] == b"f":
            rows.append(value[1:])
        else:
            nodes.append(msgspec.msgpack.decode(value[1:], type=tuple[tuple[int, int, int, int], bytes]))
    if not rows:
        return
    if not nodes:
        yield TaggedOutput("report", Report(Counts(feedback_unmatched=len(rows))))  # type: ignore[misc]
        return
    node = max((order[:3], node) for order, node in nodes)[1]
    for row in rows:
        yield node, row


class Unite(beam.CombineFn):
    """Edges to the table node -> label."""

    def create_accumulator(self, *args: Any, **kwargs: Any) -> Union:
        """No edges."""
        return Union()

    def add_input(self, mutable_accumulator: Union, element: Row, *args: Any, **kwargs: Any) -> Union:
        """One edge."""
        mutable_accumulator.add(*element)
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[Union], *args: Any, **kwargs: Any) -> Union:
        """Together."""
        total = Union()
        for one in accumulators:
            total.merge(one)
        return total

    def extract_output(self, accumulator: Union, *args: Any, **kwargs: Any) -> dict[bytes, bytes]:
        """Only nodes that have another's label."""
        return accumulator.labels()


def _relabel(row: Row, labels: Mapping[bytes, bytes]) -> Row:
    return labels.get(row[0], row[0]), row[1]


def _as_set(values: Any, name: str) -> Any:
    return AsSingleton(values | f"{name} set" >> beam.CombineGlobally(_Collect()))


class _Collect(beam.CombineFn):
    """All values as a frozen set."""

    def create_accumulator(self, *args: Any, **kwargs: Any) -> set[Any]:
        """Nothing yet."""
        return set()

    def add_input(self, mutable_accumulator: set[Any], element: Any, *args: Any, **kwargs: Any) -> set[Any]:
        """One more."""
        mutable_accumulator.add(element)
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[set[Any]], *args: Any, **kwargs: Any) -> set[Any]:
        """Together."""
        return set().union(*accumulators)

    def extract_output(self, accumulator: set[Any], *args: Any, **kwargs: Any) -> frozenset[Any]:
        """Frozen."""
        return frozenset(accumulator)


def build(pipeline: Any, plan: Plan, url: str, endpoint: str, report: str) -> None:
    """The whole replay on a pipeline.

    Args:
        pipeline: Where to.
        plan: What is replayed.
        url, endpoint: Folder of results.
        report: Path of the report that is written last, relative to ``url``.
    """

    def chunks(name: str, *names: str) -> Any:
        found = [chunk for topic in names for chunk in plan.chunks.get(topic, [])]
        return pipeline | f"{name} chunks" >> beam.Create(found) | f"{name} spread" >> beam.Reshuffle()

    rows_type = tuple[bytes, bytes]
    wanted = _as_set(
        chunks("targets", topics.FEEDBACK) | "targets" >> beam.ParDo(ReadTargets(plan)), "targets"
    )
    expired = _as_set(
        chunks("expired", topics.DEAD_LETTERS) | "expired" >> beam.ParDo(ReadExpired(plan)), "expired"
    )
    spans = chunks("spans", topics.SPANS) | "read spans" >> beam.ParDo(ReadSpans(plan), wanted).with_outputs(
        *ReadSpans.OUTPUTS, main="rows"
    )
    feedback = chunks("feedback", topics.FEEDBACK) | "read feedback" >> beam.ParDo(
        ReadFeedback(plan), expired
    ).with_outputs(*ReadFeedback.OUTPUTS, main="rows")
    recorded = chunks(
        "recorded", topics.CREDITS, topics.ORCHESTRATIONS, topics.REWARDS, topics.DEAD_LETTERS
    ) | "read recorded" >> beam.ParDo(ReadRecorded(plan)).with_outputs("report", main="rows")
    matched = (
        spans.pieces
        | "evidence" >> beam.Map(lambda kv: kv).with_output_types(rows_type)
        | "by evidence" >> beam.GroupByKey()
        | "match" >> beam.FlatMap(match_group)
    )
    labels = (matched, spans.edges) | "edges" >> beam.Flatten() | "unite" >> beam.CombineGlobally(Unite())
    placed = (
        (spans.named, feedback.targeted)
        | "targets and names" >> beam.Flatten()
        | "typed targets" >> beam.Map(lambda kv: kv).with_output_types(rows_type)
        | "by target" >> beam.GroupByKey()
        | "place" >> beam.FlatMap(place_feedback).with_outputs("report", main="rows")
    )
    rows = (
        (spans.rows, feedback.rows, recorded.rows, placed.rows)
        | "rows" >> beam.Flatten()
        | "relabel" >> beam.Map(_relabel, AsSingleton(labels)).with_output_types(rows_type)
    )
    reports = (spans.report, feedback.report, recorded.report, placed.report)
    finish(rows, plan, url, endpoint, prefix="part", report=report, more=reports)


def replay_whole(
    plan: Plan, store: ArchiveStore, url: str, endpoint: str, *, runner: str, options: Sequence[str] = ()
) -> Manifest:
    """Run a plan as one pipeline and wait for it.

    Args:
        plan: What to do.
        store: The archive, as this process sees it.
        url, endpoint: Folder of results, as all workers see it.
        runner: flink, dataflow, or a runner's class name.
        options: Further options of Beam, key=value each.

    Raises:
        ConfigError: the runner does not exist or an option is malformed.
        TerminalError: the pipeline failed.
    """
    began_ns = SystemClock().now_ns()
    files: Files = open_files(url, endpoint)
    values = (value for chunk in plan.chunks[topics.MODELS] for _, value in passes.read_chunk(store, chunk))
    copy_models(values, files, f"{plan.name}/models")
    report = f"{plan.name}/report-{began_ns}.json"
    pipeline = beam.Pipeline(options=_options(runner, options))
    build(pipeline, plan, url, endpoint, report)
    try:
        pipeline.run().wait_until_finish()
        found = msgspec.json.decode(files.read(report), type=Report)
    except SpanloopError:
        raise
    except Exception as exc:
        raise TerminalError(
            f"the pipeline on {runner} failed: {type(exc).__name__}: {str(exc)[-500:]}"
        ) from exc
    seconds = (SystemClock().now_ns() - began_ns) / 1e9
    if found.bad:
        files.write(
            f"{plan.name}/bad.jsonl", b"".join(msgspec.json.encode(item) + b"\n" for item in found.bad)
        )
    manifest = manifest_of(plan, runner, found.counts, sorted(found.parts, key=lambda p: p.path), seconds)
    files.write(f"{plan.name}/manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    files.delete(report)
    return manifest


def _options(runner: str, options: Sequence[str]) -> PipelineOptions:
    flags = [f"--runner={RUNNERS.get(runner, runner)}"]
    for option in options:
        key, separator, value = option.partition("=")
        if not key:
            raise ConfigError(f"--runner-option {option!r}: expected key=value, as Beam's own --key=value")
        flags.append(f"--{key}={value}" if separator else f"--{key}")
    found = PipelineOptions(flags)
    found.view_as(SetupOptions).save_main_session = False
    return found
