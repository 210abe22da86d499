"""What a replay leaves behind: one row an orchestration in Parquet parts, and a manifest that says how it was made.

Layout below the folder of results (WORKSPACE/replays)::

    NAME/parts/BUCKET-HEX.parquet     rows, see ``SCHEMA``
    NAME/bad.jsonl                    records and spans that could not be read
    NAME/manifest.json                written last: settings, range, code version, counts, parts

Invariants: without manifest there is no result; only parts that it names belong to it. Hashes are those of ``spanloop verify``:
revision numbers, provisional or final, and times of processing are no content.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

import spanloop.schemas
from spanloop.pipeline.archive.files import Files, LocalFiles
from spanloop.pipeline.replay.hashes import plain_credit, plain_samples, rewards_hash
from spanloop.schemas.canonical import bytes_hash, canonical_json
from spanloop.schemas.errors import ConfigError, TerminalError

if TYPE_CHECKING:
    from spanloop.pipeline.replay.assembling import Assembled
    from spanloop.pipeline.replay.reading import VersionRow
    from spanloop.pipeline.signal import Signal

__all__ = [
    "RECORDED", "SCHEMA", "Counts", "Manifest", "Part", "PartWriter", "Result", "ResultSet", "check_name", "code_version",
    "missing", "result_of",
]  # fmt: skip

SCHEMA = pa.schema(
    [
        ("tenant", pa.string()),
        ("orchestration_id", pa.string()),
        ("complete", pa.bool_()),
        ("spans", pa.int32()),
        ("first_ns", pa.int64()),
        ("touched_ns", pa.int64()),
        ("late", pa.bool_()),
        ("erased", pa.bool_()),
        ("feedback", pa.int32()),
        ("version", pa.string()),
        ("status", pa.string()),
        ("team", pa.int64()),
        ("problem", pa.string()),
        ("content_hash", pa.string()),
        ("rewards_hash", pa.string()),
        ("credit_hash", pa.string()),
        ("samples_hash", pa.string()),
        ("recorded", pa.binary()),
        ("content", pa.binary()),
        ("rewards", pa.binary()),
        ("credit", pa.binary()),
        ("samples", pa.binary()),
    ]
)
RECORDED = "recorded"
"""Name that stands for what the stream published."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROW_GROUP_BYTES = 16 * 2**20
_DECIDES = ("assembly", "credit", "dialects", "replay", "rewards", "held.py", "samples.py", "signal.py")


class Result(msgspec.Struct, frozen=True):
    """One orchestration of a result set; columns of ``SCHEMA``."""

    tenant: str
    orchestration_id: str
    complete: bool
    spans: int
    first_ns: int
    """When its first spans were appended."""
    touched_ns: int
    late: bool
    """Has spans that the stream refused as later than the retention: the log is right to differ."""
    erased: bool
    """Its token ids cannot be read any more: credit and samples are without them, the stream's need not be."""
    feedback: int
    version: str
    """Value model."""
    status: str
    """Of the team's reward."""
    team: int | None
    problem: str
    content_hash: str
    rewards_hash: str
    credit_hash: str
    """Empty: no credit."""
    samples_hash: str
    recorded: bytes
    """What the stream published, as JSON (topic -> VersionRow); empty unless asked for."""
    content: bytes
    rewards: bytes
    credit: bytes
    samples: bytes


def result_of(item: Assembled, signal: Signal, version: str, problem: str) -> Result:
    """The row of one orchestration."""
    content = canonical_json(item.content)
    credit = samples = b""
    if not problem:
        if signal.credit is not None and signal.credit.nodes:
            credit = canonical_json(plain_credit(signal.credit))
        if signal.samples is not None and (signal.samples.rows or signal.samples.excluded):
            samples = canonical_json(plain_samples(signal.samples))
    recorded = {topic: row for topic, row in item.recorded.items() if row.told or row.hash}
    return Result(
        tenant=item.content.tenant,
        orchestration_id=item.content.orchestration_id,
        complete=item.complete,
        spans=item.spans,
        first_ns=item.first_ns,
        touched_ns=item.touched_ns,
        late=item.late,
        erased=item.erased,
        feedback=len(item.feedback),
        version=version,
        status=signal.rewards.status,
        team=signal.rewards.team,
        problem=problem,
        content_hash=bytes_hash(content),
        rewards_hash=rewards_hash(signal.rewards),
        credit_hash=bytes_hash(credit) if credit else "",
        samples_hash=bytes_hash(samples) if samples else "",
        recorded=msgspec.json.encode(recorded) if recorded else b"",
        content=content,
        rewards=canonical_json(signal.rewards),
        credit=credit,
        samples=samples,
    )


def missing(row: VersionRow) -> Result:
    """The row of an orchestration that only the log has."""
    recorded = msgspec.json.encode({row.topic: row})
    return Result(
        row.tenant, row.orchestration_id, row.complete, 0, row.appended_ns, row.appended_ns, False, False, 0, "", "", None, "",
        "", "", "", "", recorded, b"", b"", b"", b"",
    )  # fmt: skip


# ---------------------------------------------------------------- parts and manifest


class Part(msgspec.Struct, frozen=True):
    """One Parquet file of results."""

    path: str
    """Relative to the result set."""
    rows: int
    bytes: int


class Counts(msgspec.Struct):
    """What went through a replay; sums over its pieces."""

    span_records: int = 0
    spans: int = 0
    """As received, repeats included."""
    feedback: int = 0
    feedback_expired: int = 0
    """Dead-lettered by the stream, so left out."""
    feedback_unmatched: int = 0
    """On nothing that the range has."""
    bad: int = 0
    """Records and spans that could not be read: see bad.jsonl."""
    orchestrations: int = 0
    incomplete: int = 0
    credited: int = 0
    samples: int = 0
    outside: int = 0
    """Orchestrations that began before or after the range, left out."""
    problems: int = 0
    """Without credit because their value model is missing, or that could not be assembled."""
    erased: int = 0
    """Orchestrations whose token ids cannot be read: their key was destroyed, or is not in this deployment's key store."""

    def add(self, other: Counts) -> None:
        """Sum up."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Manifest(msgspec.Struct):
    """How a result set was made."""

    name: str
    code_version: str
    settings: dict[str, Any]
    """Section [pipeline] as used, rewards file included."""
    rewards_file: str
    """Its text; empty: the deployment's own definition."""
    models: str
    """recorded or newest."""
    since: str
    until: str
    archive: str
    contained: dict[str, int]
    """Offsets that the archive had, by source."""
    runner: str
    buckets: int
    counts: Counts
    parts: list[Part]
    seconds: float = 0.0
    """Of all tries together."""
    finished_ns: int = 0


class PartWriter:
    """Results to one Parquet file, in memory until ``close``.

    Args:
        files: Where the result sets are.
        name: Of the result set.
        path: Of the file, relative to that.
    """

    def __init__(self, files: Files, name: str, path: str) -> None:
        self._files, self._name, self._path = files, name, path
        self._sink = pa.BufferOutputStream()
        dictionary: Any = ["tenant", "version", "status", "problem"]
        self._writer = pq.ParquetWriter(
            self._sink, SCHEMA, compression="zstd", use_dictionary=dictionary,
            write_page_checksum=True,
        )  # fmt: skip
        self._rows: list[Result] = []
        self._size = 0
        self._total = 0

    def add(self, result: Result) -> None:
        """Take a row."""
        self._rows.append(result)
        self._size += len(result.content) + len(result.rewards) + len(result.credit) + len(result.samples)
        if self._size >= _ROW_GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        columns = [[getattr(row, name) for row in self._rows] for name in SCHEMA.names]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._total += len(self._rows)
        self._rows, self._size = [], 0

    def close(self) -> Part | None:
        """Make the file; None where there were no rows."""
        if self._rows:
            self._write()
        self._writer.close()
        if not self._total:
            return None
        data = self._sink.getvalue()
        self._files.write(f"{self._name}/{self._path}", data)
        return Part(self._path, self._total, len(data))


def check_name(name: str) -> str:
    """A name that can be a folder. Raises ConfigError."""
    if not _NAME.fullmatch(name) or name == RECORDED:
        raise ConfigError(
            f"{name!r} cannot name a replay: letters, digits, . _ - and at most 100 of them; `recorded` stands for what the "
            "stream published"
        )
    return name


def code_version() -> str:
    """Version of the package and a hash of the sources that results depend on, so that two results say whether the same code
    made them."""
    here = Path(__file__).resolve().parents[1]
    roots = [Path(spanloop.schemas.__file__).parent, *(here / name for name in _DECIDES)]
    files = sorted(path for root in roots for path in (root.rglob("*.py") if root.is_dir() else [root]))
    text = b"".join(path.name.encode() + path.read_bytes() for path in files)
    return f"{importlib.metadata.version('spanloop')}+{bytes_hash(text)[:12]}"


class ResultSet:
    """A finished replay, for readers.

    Args:
        folder: NAME's.

    Raises:
        ConfigError: there is none, or it is not finished.
        TerminalError: its manifest cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "manifest.json"
        try:
            self.manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            known = sorted(p.parent.name for p in folder.parent.glob("*/manifest.json"))
            state = (
                "is not finished: run the same `spanloop replay` again" if folder.is_dir() else "is not there"
            )
            raise ConfigError(
                f"replay {folder.name!r} {state}; finished ones in {folder.parent}: {', '.join(known) or 'none'}"
            ) from None
        except msgspec.MsgspecError as exc:
            raise TerminalError(f"{path} is no manifest: {exc}; remove the folder and replay again") from exc

    @property
    def paths(self) -> list[Path]:
        """Its parts."""
        return [self.folder / part.path for part in self.manifest.parts]

    def batches(self, columns: Sequence[str], rows: int = 1_000) -> Iterator[pa.RecordBatch]:
        """All rows, some columns."""
        for path in self.paths:
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(rows, columns=list(columns))

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """All rows as dictionaries."""
        for batch in self.batches(columns):
            yield from batch.to_pylist()


def write_bad(path: Path, lines: Iterable[bytes]) -> None:
    """Keep the notes of what could not be read."""
    LocalFiles(path.parent).write(path.name, b"".join(line + b"\n" for line in lines))
