"""The Beam side: rows to results, as one pipeline a bucket (local) or as one pipeline over everything (Flink, Dataflow, ...).

::

    raw spans ─ ReadSpans ─┬─ rows by node ───────────────┐
                           ├─ evidence ─ GroupByKey ─ edges ─ union ─ labels ─┐
                           └─ named targets ─┐                                │
    feedback ─ ReadFeedback ─────────────────┴─ rows by node ─────── Relabel ─┴─ GroupByKey(label) ─ Derive ─ WriteParts
    credits, ... ─ ReadRecorded ─ rows by node ──┘

A bucket's pipeline is the right end, from rows that the driver's passes left on disk. Everything between the shuffles is the pure
functions of ``reading``, ``joining``, ``assembling``.

Invariants: elements are (16 bytes, bytes). A group that cannot be assembled is a bad record, never a failed pipeline. Parts
of a bundle that is tried again are files that no report names.
"""

from __future__ import annotations

import hashlib
import traceback
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from spanloop.pipeline.archive.files import Files, open_files
from spanloop.pipeline.replay import progress
from spanloop.pipeline.replay.assembling import Assembled, Deriver, assemble
from spanloop.pipeline.replay.models import Models
from spanloop.pipeline.replay.passes import load_plan
from spanloop.pipeline.replay.plan import Plan
from spanloop.pipeline.replay.reading import Bad
from spanloop.pipeline.replay.results import Counts, Part, PartWriter, Result, missing
from spanloop.pipeline.replay.spill import Labels, buckets_of, read_spill
from spanloop.pipeline.sealing.opening import vault_at
from spanloop.pipeline.signal import NO_MODEL
from spanloop.schemas import topics

__all__ = ["Report", "Row", "finish", "read_bucket", "run_bucket"]

Row = tuple[bytes, bytes]
"""Node or label, and the row's bytes."""


class Report(msgspec.Struct):
    """What a pipeline made."""

    counts: Counts
    bad: list[Bad] = []
    parts: list[Part] = []

    def add(self, other: Report) -> Report:
        """Sum up."""
        self.counts.add(other.counts)
        self.bad += other.bad
        self.parts += other.parts
        return self


def _at_end(value: Any) -> WindowedValue:
    return WindowedValue(value, 0, (GlobalWindow(),))


class Derive(beam.DoFn):
    """Rows of one label to results, those of one value model together.

    Args:
        plan: What is replayed.
        url, endpoint: Where results and models are.
    """

    REPORT = "report"

    def __init__(self, plan: Plan, url: str, endpoint: str) -> None:
        self._plan, self._url, self._endpoint = plan, url, endpoint

    def setup(self) -> None:
        """Once a worker."""
        self._models = Models(open_files(self._url, self._endpoint), f"{self._plan.name}/models")
        self._vault = vault_at(self._plan.keys)

    def teardown(self) -> None:
        """Close the key store."""
        if self._vault is not None:
            self._vault.keys.close()

    def start_bundle(self) -> None:
        """Nothing waits."""
        self._deriver = Deriver(self._plan.pipeline, self._models.asking, self._version, self._vault)
        self._report = Report(Counts())

    def _version(self, item: Assembled) -> str:
        if self._plan.models == "newest":
            return self._models.newest.get(item.content.tenant, NO_MODEL)
        credit = item.recorded.get(topics.CREDITS)
        return credit.value_model or NO_MODEL if credit is not None else NO_MODEL

    def process(self, element: tuple[bytes, Iterable[bytes]]) -> Iterator[Result]:
        """One group."""
        label, rows = element
        rows = list(rows)
        try:
            yield from self._group(rows)
        except Exception as exc:
            self._report.bad.append(_bad_group(label, rows, exc))
            self._report.counts.problems += 1

    def _group(self, rows: list[bytes]) -> Iterator[Result]:
        counts = self._report.counts
        group = assemble(rows)
        counts.feedback_unmatched += group.unmatched
        yield from (missing(row) for row in group.recorded)
        item = group.orchestration
        if item is None:
            return
        progress.advance(item.spans, item.spans, 1)
        if not self._plan.since_ns <= item.first_ns < self._plan.until_ns:
            counts.outside += 1
            return
        yield from self._counted(self._deriver.add(item))

    def _counted(self, results: list[Result]) -> list[Result]:
        counts = self._report.counts
        for result in results:
            counts.orchestrations += 1
            counts.incomplete += not result.complete
            counts.credited += bool(result.credit_hash)
            counts.samples += bool(result.samples)
            counts.problems += bool(result.problem)
            counts.erased += result.erased
        return results

    def finish_bundle(self) -> Any:
        """What still waits, and the report."""
        for result in self._counted(self._deriver.flush()):
            yield _at_end(result)
        yield TaggedOutput(self.REPORT, _at_end(self._report))


def _bad_group(label: bytes, rows: list[bytes], problem: Exception) -> Bad:
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    joined = b"".join(rows)
    reason = f"an orchestration cannot be made: {type(problem).__name__} at {where}"
    return Bad("", 0, 0, label.hex(), reason, hashlib.sha256(joined).hexdigest(), len(joined))


class WriteParts(beam.DoFn):
    """Results to a Parquet file a bundle; gives its report."""

    def __init__(self, url: str, endpoint: str, folder: str, prefix: str) -> None:
        self._url, self._endpoint, self._folder, self._prefix = url, endpoint, folder, prefix

    def setup(self) -> None:
        """Once a worker."""
        self._files: Files = open_files(self._url, self._endpoint)

    def start_bundle(self) -> None:
        """No file yet."""
        self._writer: PartWriter | None = None

    def process(self, element: Result) -> None:
        """One row."""
        if self._writer is None:
            name = f"{self._prefix}-{uuid.uuid4().hex[:8]}.parquet"
            self._writer = PartWriter(self._files, self._folder, f"parts/{name}")
        self._writer.add(element)

    def finish_bundle(self) -> Any:
        """Make the file."""
        part = self._writer.close() if self._writer is not None else None
        if part is not None:
            yield _at_end(Report(Counts(), parts=[part]))


class SumReports(beam.CombineFn):
    """All reports as one."""

    def create_accumulator(self, *args: Any, **kwargs: Any) -> Report:
        """Nothing yet."""
        return Report(Counts())

    def add_input(self, mutable_accumulator: Report, element: Report, *args: Any, **kwargs: Any) -> Report:
        """One more."""
        return mutable_accumulator.add(element)

    def merge_accumulators(self, accumulators: Iterable[Report], *args: Any, **kwargs: Any) -> Report:
        """Together."""
        total = Report(Counts())
        for report in accumulators:
            total.add(report)
        return total

    def extract_output(self, accumulator: Report, *args: Any, **kwargs: Any) -> Report:
        """As it is."""
        return accumulator


class WriteReport(beam.DoFn):
    """The report as a file: with that the pipeline's parts count."""

    def __init__(self, url: str, endpoint: str, path: str) -> None:
        self._url, self._endpoint, self._path = url, endpoint, path

    def process(self, element: Report) -> None:
        """Written last, in one step."""
        open_files(self._url, self._endpoint).write(self._path, msgspec.json.encode(element))


def finish(
    rows: Any, plan: Plan, url: str, endpoint: str, *, prefix: str, report: str, more: tuple[Any, ...] = ()
) -> None:
    """From rows under their labels to parts and a report.

    Args:
        rows: PCollection of ``Row``.
        plan: What is replayed.
        url, endpoint: Folder of results.
        prefix: Begins the parts' names.
        report: Path of the report, relative to ``url``.
        more: PCollections of further reports.
    """
    results = (
        rows | "by label" >> beam.GroupByKey()
        | "derive" >> beam.ParDo(Derive(plan, url, endpoint)).with_outputs(Derive.REPORT, main="results")
    )  # fmt: skip
    parts = results.results | "write" >> beam.ParDo(WriteParts(url, endpoint, plan.name, prefix))
    _ = (
        (parts, results[Derive.REPORT], *more)
        | "reports" >> beam.Flatten()
        | "sum" >> beam.CombineGlobally(SumReports())
        | "report" >> beam.ParDo(WriteReport(url, endpoint, report))
    )


# ---------------------------------------------------------------- one bucket


def read_bucket(work: str, bucket: int) -> Iterator[Row]:
    """All rows of a bucket under their labels, from what the passes left."""
    folder = Path(work)
    plan, labels = load_plan(folder), Labels.load(folder)
    for number in range(len(plan.chunks[topics.SPANS])):
        nodes, rows = read_spill(folder / f"spans-{number}.arrow", bucket)
        if not len(nodes):
            continue
        own = labels.of(nodes)
        stays = (buckets_of(own, plan.buckets) == bucket).tolist()
        for label, row, here in zip(own.tolist(), rows, stays, strict=True):
            if here:
                yield label.ljust(16, b"\0"), row
    for path in [
        path for kind in ("moved", "recorded", "feedback") for path in sorted(folder.glob(f"{kind}-*.arrow"))
    ]:
        nodes, rows = read_spill(path, bucket)
        for label, row in zip(nodes.tolist(), rows, strict=True):
            yield label.ljust(16, b"\0"), row


def run_bucket(work: Path, bucket: int) -> None:
    """One bucket's pipeline in this process; its report is ``bucket-N.json`` in the work folder."""
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

    plan = load_plan(work)
    url = str(work.parent.parent)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = (
            pipeline | beam.Create([bucket])
            | "rows" >> beam.FlatMap(lambda number, folder: read_bucket(folder, number), str(work)).with_output_types(
                tuple[bytes, bytes]
            )
        )  # fmt: skip
        report = f"{plan.name}/{work.name}/bucket-{bucket}.json"
        finish(rows, plan, url, "", prefix=f"{bucket:05d}", report=report)
