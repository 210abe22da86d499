"""SQL over a deployment: files and live tail for one statement, run in a sandbox of its own.

Place in the flow: the read side's engine, behind ``spanloop query`` and whatever else reads a deployment. It only reads: one
statement that returns rows, no files or network from SQL, bounded memory and time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanloop.pipeline.ports import Log
from spanloop.pipeline.query.child import Answer, Child
from spanloop.pipeline.query.plan import (
    Names,
    Part,
    as_json,
    functions_of,
    lists_names,
    names_in,
    setup_of,
)
from spanloop.pipeline.query.sources import Sources
from spanloop.pipeline.tables import TABLES
from spanloop.pipeline.views import VIEWS
from spanloop.schemas.errors import ConfigError, SchemaError, TransientError

if TYPE_CHECKING:
    import pyarrow as pa

    from spanloop.pipeline.archive import ArchiveStore

__all__ = ["Query", "QueryError", "open_query"]

HINT = "Views: " + ", ".join(name for name in VIEWS if not name.endswith("_all"))
_READ_BYTES = 2**20
_SLACK_MB = 1024
"""Address space beyond DuckDB's own memory limit: code, stacks, results on their way out."""
_HARMLESS = {"Refused", "InvalidInputException", "ParserException", "BinderException", "CatalogException", "PermissionException", "OutOfMemoryException",
             "ConversionException", "NotImplementedException", "SyntaxException", "UnicodeEncodeError", "TypeMismatchException"}  # fmt: skip
"""Failures that say nothing about the archive's files."""


class QueryError(SchemaError):
    """The SQL was refused or failed; one line."""

    exit_code = 1


class Query:
    """Statements over one deployment.

    Args:
        log: Of the deployment; None: only what is archived.
        archive: Its archive; a path stands for a folder.
        memory_mb: DuckDB's memory limit in MiB.
        timeout_s: A query that runs longer is stopped.
        threads: Of DuckDB.
        tenant: Only this one's rows; None: all.
        segment_records: Records of a topic that a query leaves undecoded before it writes them to an embedded archive.
        cache: Where files of a remote archive are kept for the next query.
        child: A sandbox that was started already.
    """

    def __init__(
        self,
        log: Log | None,
        archive: Path | ArchiveStore,
        *,
        memory_mb: int = 1024,
        timeout_s: float = 60.0,
        threads: int = 2,
        tenant: str | None = None,
        segment_records: int | None = None,
        cache: Path | None = None,
        child: Child | None = None,
    ) -> None:
        self._sources = Sources(log, archive, tenant=tenant, segment_records=segment_records, cache=cache)
        self._memory_mb = memory_mb
        self._timeout_s = timeout_s
        self._threads = threads
        self._tenant = tenant
        self._child = child
        self._running: Child | None = None
        self.guards: list[str] = []
        """What confined the last query's process."""
        self.seconds = 0.0
        """From plan to last row of the last query."""

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *error: object) -> None:
        for child in (self._child, self._running):
            if child is not None:
                child.close()
        self._sources.close()

    @property
    def unreadable(self) -> int:
        """Records that the last query could not decode."""
        return self._sources.unreadable

    @property
    def lost(self) -> tuple[str, ...]:
        """What the last query's tables lack because it cannot be read any more."""
        return self._sources.lost

    def run(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Column names and rows (streamed) of one SELECT, as Python values.

        Raises:
            QueryError: not one SELECT, a name that does not exist, an error while it ran; the message is one line.
            TransientError: it took longer than the limit.
        """
        reader = self.arrow(sql)
        return list(reader.schema.names), _python_rows(reader)

    def arrow(
        self, sql: str, progress: Callable[[float], None] = lambda _percent: None
    ) -> pa.RecordBatchReader:
        """The result as a stream of record batches. Raises as ``run`` does, also while it is read."""
        import pyarrow as pa

        source = io.BufferedReader(_Reader(self.chunks(sql, "arrow", progress)), _READ_BYTES)
        reader = pa.ipc.open_stream(source)

        def batches() -> Iterator[pa.RecordBatch]:
            yield from reader
            source.read()  # to the end, where it is said how it ended

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def chunks(
        self, sql: str, form: str, progress: Callable[[float], None] = lambda _percent: None
    ) -> Iterator[bytes]:
        """The result as bytes of ``form``: table, json, ndjson, csv or arrow (an IPC stream).

        Nothing is yielded before the first rows are there, so what raises before that has written nothing.
        """
        try:
            sql.encode()
        except UnicodeEncodeError as exc:
            raise QueryError(f"the SQL is not valid UTF-8 (character {exc.start + 1}). {HINT}") from exc
        names = names_in(sql)
        parts = self._sources.parts(names.tables)
        answer = Answer()
        stream = self._start(sql, form, parts=parts, answer=answer, progress=progress)
        first = next(stream, None)
        if answer.error and answer.error not in _HARMLESS and first is None:
            repaired = self._sources.repaired(names.tables, parts)
            if repaired is not None:
                answer = Answer()
                stream = self._start(sql, form, parts=repaired, answer=answer, progress=progress)
                first = next(stream, None)
        return self._rest(first, stream, answer, names, parts)

    def _rest(
        self,
        first: bytes | None,
        stream: Iterator[bytes],
        answer: Answer,
        names: Names,
        parts: dict[str, list[Part]],
    ) -> Iterator[bytes]:
        self.guards = answer.guards
        if first is None and answer.error:
            raise _failed(answer)

        def rest() -> Iterator[bytes]:
            if first is not None:
                yield first
            yield from stream
            self.guards, self.seconds = answer.guards, answer.seconds
            if answer.error:
                if answer.error not in _HARMLESS and self._sources.repaired(names.tables, parts) is not None:
                    raise TransientError(
                        "a file of the archive was damaged: what was shown is incomplete, run it again"
                    )
                raise _failed(answer)

        return rest()

    # ------------------------------------------------------------ the plan

    def _start(
        self,
        sql: str,
        form: str,
        *,
        parts: dict[str, list[Part]],
        answer: Answer,
        progress: Callable[[float], None],
    ) -> Iterator[bytes]:
        names = names_in(sql)
        files = [file for own in parts.values() for part in own for file in part.files]
        listing = lists_names(sql)
        known = {name: parts.get(name, []) for name in (TABLES if listing else names.tables)}
        plan = {
            "sql": sql, "form": form, "memory_mb": self._memory_mb, "slack_mb": _SLACK_MB, "threads": self._threads,
            "cpu_s": int(self._timeout_s * self._threads) + 10, "open_files": 128 + 2 * len(files), "tenant": self._tenant,
            "tables": as_json(known),
            "folders": sorted({os.path.dirname(file) for file in files}),
            "setup": setup_of(names, everything=listing), "functions": functions_of(names, everything=listing),
        }  # fmt: skip
        child, self._child = self._child or Child(), None
        self._running = child
        return self._stream(child, plan, answer, progress)

    def _stream(
        self, child: Child, plan: dict[str, Any], answer: Answer, progress: Callable[[float], None]
    ) -> Iterator[bytes]:
        try:
            yield from child.run(plan, answer, timeout_s=self._timeout_s, progress=progress)
        finally:
            child.close()


class _Reader(io.RawIOBase):
    """Chunks as a file for Arrow."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._buffer:
            data = next(self._chunks, None)
            if data is None:
                return 0
            self._buffer = memoryview(data)
        size = min(len(target), len(self._buffer))
        target[:size] = self._buffer[:size]
        self._buffer = self._buffer[size:]
        return size


def _python_rows(reader: pa.RecordBatchReader) -> Iterator[tuple[Any, ...]]:
    for batch in reader:
        columns = [column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
        yield from zip(*columns, strict=True)


def _failed(answer: Answer) -> QueryError | TransientError:
    if answer.error == "Refused":
        return QueryError(f"{answer.message} {HINT}")
    lines = [line.strip() for line in answer.message.splitlines() if line.strip()]
    message = " ".join(line for line in lines if not line.startswith(("LINE ", "^"))) or answer.error
    at = next((line for line in lines if line.startswith("LINE ")), "")
    place = f" (at {at})" if at else ""
    if answer.error in {"OutOfMemoryException", "MemoryError"}:
        return QueryError(f"{message}{place}: narrow the query or raise --memory")
    return QueryError(f"{message}{place}. {HINT}")


@contextmanager
def open_query(workspace: Path, *, archive_only: bool = False, **limits: Any) -> Iterator[Query]:
    """A ``Query`` over a workspace folder with an embedded log; ``limits`` as for ``Query``.

    Raises:
        ConfigError: there is no workspace.
    """
    database = workspace / "spanloop.db"
    if archive_only:
        with Query(None, workspace / "archive", **limits) as query:
            yield query
        return
    if not database.exists():
        raise ConfigError(
            f"no workspace in {workspace} ({database.name} is missing): give one with --workspace, or make one with "
            "`spanloop up`, `spanloop demo` or `spanloop import`"
        )
    from spanloop.pipeline.log.sqlite import SqliteLog

    log = SqliteLog(database, create=False)
    try:
        with Query(log, workspace / "archive", **limits) as query:
            yield query
    finally:
        log.close()
