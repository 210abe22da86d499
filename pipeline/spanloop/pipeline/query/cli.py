"""``spanloop query``: SQL over a deployment, or the list of views. A thin layer over ``session``.

Nothing heavy is imported before it is needed: most statements over archived data end before pyarrow would have been loaded.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spanloop.schemas.errors import ConfigError

if TYPE_CHECKING:
    from spanloop.pipeline.query.child import Child
    from spanloop.pipeline.query.session import Query

__all__ = ["query"]

_FORMS = ("table", "json", "ndjson", "csv", "arrow", "parquet")
_SUFFIXES = {".json": "json", ".ndjson": "ndjson", ".jsonl": "ndjson", ".csv": "csv", ".arrow": "arrow", ".feather": "arrow",
             ".parquet": "parquet", ".txt": "table"}  # fmt: skip
_QUIET_S = 1.0


def _no_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", context, option)
    return value


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="Folder of the workspace. Default: the settings' one.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings file (TOML): Kafka and an archive in S3 are set there.",
)
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice([*_FORMS, "jsonl"]),
    help="Default: by OUTPUT's ending, else table.",
)
@click.option("--table", "form", flag_value="table", help="Aligned columns, first 1000 rows.")
@click.option("--json", "form", flag_value="json", help="One JSON array of objects.")
@click.option("--ndjson", "form", flag_value="ndjson", help="One JSON object a line, streamed.")
@click.option(
    "--csv",
    "form",
    flag_value="csv",
    help="CSV with a header, streamed; cells that look like formulas are quoted.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, whole or not at all.",
)
@click.option("--tenant", help="Only this tenant's rows; other tenants' files are not opened.")
@click.option("--archive-only", is_flag=True, help="Only what is archived: the log is not opened.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001, max=1e6),
    callback=_no_nan,
    default=60.0,
    show_default=True,
    help="Seconds before the query is stopped.",
)
@click.option(
    "--memory", type=click.IntRange(min=64), default=1024, show_default=True, help="Memory limit in MiB."
)
@click.option(
    "--threads", type=click.IntRange(min=1, max=64), default=2, show_default=True, help="Of DuckDB."
)
@click.option("--stats", is_flag=True, help="Say on stderr how long it took and what confined it.")
def query(sql: str | None, *, workspace: Path | None, config: Path | None, form: str | None, output: Path | None, tenant: str | None,
          archive_only: bool, timeout: float, memory: int, threads: int, stats: bool) -> None:  # fmt: skip
    """Run one SELECT (DuckDB's dialect) over a workspace. It only reads; without SQL it lists views and macros.

    \b
    spanloop query
    spanloop query "SELECT type, count(*) FROM events GROUP BY 1"
    spanloop query "FROM critical_path('3fa9')"
    spanloop query --ndjson "FROM orchestrations WHERE num_calls > 3 LIMIT 10"
    spanloop query -o calls.parquet "FROM calls"

    Views show the last revision of each orchestration; NAME_all shows every revision. Times are UTC, rewards and
    credit are in units (NAME_micro: exact integers). The SQL runs in a process of its own that can read the archive
    and nothing else. A new workspace's first query builds its Parquet archive.

    Exit codes: 0 done, 1 the SQL failed or was refused, 2 wrong usage, 3 something that belongs to the answer is
    lost, 4 try again (too slow, the log or the archive do not answer).
    """
    form = form or _SUFFIXES.get(output.suffix.lower() if output else "", "table")
    form = "ndjson" if form == "jsonl" else form
    if sql is None or not sql.strip():
        _list_names(form)
        return
    if importlib.util.find_spec("duckdb") is None:  # said before a workspace is asked for
        raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
    if form in ("arrow", "parquet") and output is None and sys.stdout.isatty():
        raise click.UsageError(f"{form} is not for a terminal: give --output FILE or send it into a pipe")
    from spanloop.pipeline.query.child import started

    child = started()  # starts up while this process finds out what to read
    try:
        with _opened(
            child,
            workspace,
            config,
            archive_only,
            timeout_s=timeout,
            memory_mb=memory,
            threads=threads,
            tenant=tenant,
        ) as opened:
            begin = time.monotonic()
            with _progress() as progress:
                _write(opened, sql, form, output, progress)
            if stats:
                _say_stats(opened, time.monotonic() - begin)
            if opened.unreadable:
                click.echo(f"note: {opened.unreadable} records could not be read and give no rows", err=True)
            for line in opened.lost[:5]:
                click.echo(f"lost: {line}", err=True)
            if opened.lost:
                sys.exit(3)
    finally:
        child.close()


@contextmanager
def _opened(
    child: Child, workspace: Path | None, config: Path | None, archive_only: bool, **limits: Any
) -> Iterator[Query]:
    from spanloop.pipeline.query.session import Query, open_query

    if config is None and not any(name.upper().startswith("SPANLOOP_") for name in os.environ):
        with open_query(
            workspace or Path(".spanloop"), archive_only=archive_only, child=child, **limits
        ) as opened:
            yield opened
        return
    from spanloop.pipeline.archive import ArchiveStore
    from spanloop.pipeline.log.open import open_log
    from spanloop.schemas.settings import load_settings

    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    log = None if archive_only else open_log(settings, create=False)
    try:
        with Query(
            log, ArchiveStore.open(settings), child=child, cache=settings.workspace / "query-cache", **limits
        ) as opened:
            yield opened
    finally:
        if log is not None:
            log.close()


# ---------------------------------------------------------------- where it goes


def _write(
    opened: Query, sql: str, form: str, output: Path | None, progress: Callable[[float], None]
) -> None:
    if output is None:
        out = click.get_binary_stream("stdout")
        if form == "parquet":
            _parquet(opened, sql, out, progress)
        else:
            clean = _Screen(form) if out.isatty() else bytes
            for data in opened.chunks(sql, form, progress):
                out.write(clean(data))
        out.flush()
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            if form == "parquet":
                _parquet(opened, sql, file, progress)
            elif form == "arrow":
                _arrow_file(opened, sql, file, progress)
            else:
                for data in opened.chunks(sql, form, progress):
                    file.write(data)
        temporary.replace(output)
    except OSError as exc:
        raise ConfigError(f"cannot write {output}: {exc.strerror or exc}") from exc
    finally:
        temporary.unlink(missing_ok=True)


class _Screen:
    """Whatever comes out of the sandbox, it does not drive a terminal: JSON is escaped, elsewhere such characters are dropped."""

    def __init__(self, form: str) -> None:
        from spanloop.pipeline.query.render import printable
        from spanloop.pipeline.screen import escaped

        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._clean = escaped if form in ("json", "ndjson") else printable

    def __call__(self, data: bytes) -> bytes:
        return "\n".join(map(self._clean, self._decode(data).split("\n"))).encode()


def _parquet(opened: Query, sql: str, out: Any, progress: Callable[[float], None]) -> None:
    import pyarrow.parquet as pq

    reader = opened.arrow(sql, progress)
    with pq.ParquetWriter(out, reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)


def _arrow_file(opened: Query, sql: str, out: Any, progress: Callable[[float], None]) -> None:
    import pyarrow as pa

    reader = opened.arrow(sql, progress)
    with pa.ipc.new_file(out, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Per cent on stderr where a person looks and it takes longer than a second."""
    begin, shown = time.monotonic(), [False]
    wanted = sys.stderr.isatty()

    def show(percent: float) -> None:
        if wanted and time.monotonic() - begin > _QUIET_S:
            known = f"{percent:3.0f} %" if percent >= 0 else "..."
            click.echo(f"\rquery {known}  {time.monotonic() - begin:.0f} s ", nl=False, err=True)
            shown[0] = True

    try:
        yield show
    finally:
        if shown[0]:
            click.echo("\r" + " " * 30 + "\r", nl=False, err=True)


def _say_stats(opened: Query, seconds: float) -> None:
    held = "; ".join(opened.guards) or "none beyond DuckDB's own"
    click.echo(f"{opened.seconds:.3f} s in the sandbox, {seconds:.3f} s in all; confined by {held}", err=True)


# ---------------------------------------------------------------- without SQL


def _list_names(form: str) -> None:
    from spanloop.pipeline.query.describe import describe

    entries = describe()
    if form in ("json", "ndjson"):
        lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
        sys.stdout.write(
            "[" + ",\n".join(lines) + "]\n" if form == "json" else "".join(line + "\n" for line in lines)
        )
        return
    for entry in entries:
        name = entry.get("view") or entry["macro"]
        if name.endswith("_all"):
            continue
        columns = ", ".join(f"{column} {_short(type_)}" for column, type_ in entry["columns"].items())
        click.echo(f"{name}: {entry['meaning']}")
        click.echo(f"    {columns}")
        click.echo(f"    $ spanloop query {_quoted(entry['example'])}")
    extra = [entry["view"] for entry in entries if entry.get("view", "").endswith("_all")]
    click.echo(f"With every revision and the log offset: {', '.join(extra)}")


def _short(type_: str) -> str:
    base, brackets, rest = type_.partition("[")
    names = {"VARCHAR": "text", "BIGINT": "int", "DOUBLE": "float", "BOOLEAN": "bool", "TIMESTAMP": "time"}
    return names.get(base, base.lower()) + brackets + rest


def _quoted(sql: str) -> str:
    return '"' + sql.replace('"', '\\"') + '"'
