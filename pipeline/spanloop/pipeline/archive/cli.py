"""``spanloop archive follow|once|verify|compact|status``: a thin layer over ``archiver``, ``repair`` and ``compaction``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spanloop.pipeline.screen import json_shown
from spanloop.schemas.errors import SpanloopError, TransientError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.archive.archiver import Archiver
    from spanloop.pipeline.archive.manifest import Range
    from spanloop.pipeline.archive.repair import Report
    from spanloop.pipeline.ports import Log

__all__ = ["archive"]

_PROGRESS_S = 1.0


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="JSON instead of text."),
        click.option(
            "--workspace",
            type=click.Path(path_type=Path, file_okay=False),
            help="Workspace folder.  [default: the settings' one]",
        ),
        click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="TOML file of settings.",
        ),
    ):
        command = option(command)
    return command


@click.group()
def archive() -> None:
    """Keep all topics of the log as Parquet files, on disk or in S3.

    \b
    spanloop archive follow                       # until Ctrl-C; `spanloop up` over Kafka runs it
    spanloop archive once                         # up to the log's end as it is now
    spanloop archive status
    spanloop archive verify --deep
    SPANLOOP_ARCHIVE__URL=s3://bucket/spanloop spanloop archive once
    """


@contextlib.contextmanager
def _opened(config_file: Path | None, workspace: Path | None) -> Iterator[tuple[Settings, Log, Archiver]]:
    from spanloop.pipeline.archive.archiver import Archiver
    from spanloop.pipeline.archive.raw import ArchiveStore
    from spanloop.pipeline.log.open import open_log

    settings = load_settings(config_file, {"workspace": workspace} if workspace is not None else None)
    log = open_log(settings, create=False)
    try:
        store = ArchiveStore.open(settings)
        yield settings, log, Archiver(log, store, settings, say=lambda line: click.echo(line, err=True))
    except OSError as exc:
        raise TransientError(
            f"the archive does not take or give what it must: {exc}; nothing is lost, the log keeps it. Free space, or see "
            "whether archive.url and archive.endpoint can be reached, then run it again"
        ) from exc
    finally:
        log.close()


def _line(item: Range) -> str:
    return f"{item.source:16} {item.name:>20}  {item.records:8,} records  {item.bytes / 2**20:8.1f} MiB"


def _progress(what: str) -> Callable[[int, int], None]:
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            click.echo(f"{what} {done} of {total} ranges", err=True)

    return tell


def _emit(value: Any) -> None:
    click.echo(json_shown(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def _reported(report: Report) -> str:
    return (
        f"{report.files} files of {report.ranges} ranges checked: {len(report.quarantined)} quarantined, "
        f"{report.rebuilt} rebuilt, {len(report.lost)} lost"
    )


@archive.command()
@_options
def follow(config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """Archive what comes until Ctrl-C, then what is left. Where disk or store refuse, it waits and goes on by itself.

    \b
    spanloop archive follow
    spanloop archive follow --config spanloop.toml --json | tee ranges.ndjson
    """
    from spanloop.pipeline.archive.process import stopper

    def show(item: Range) -> None:
        if as_json:
            click.echo(msgspec.json.encode({"source": item.source, "first": item.first, "last": item.last,
                                            "records": item.records, "bytes": item.bytes}))  # fmt: skip
        else:
            click.echo(_line(item))

    with _opened(config_file, workspace) as (_, _log, archiver), archiver.writing():
        stop = stopper()
        archiver.follow(stop.wait, show, lambda report: click.echo(_reported(report), err=True))
        click.echo(
            f"stopped; {archiver.status.records:,} records archived in {archiver.status.ranges} ranges",
            err=True,
        )


@archive.command()
@_options
def once(config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """Archive up to the log's end as it is now. Ctrl-C keeps the ranges that are written; the next run goes on there.

    \b
    spanloop archive once
    spanloop archive once --workspace ./demo --json
    """
    start = time.monotonic()
    with _opened(config_file, workspace) as (_, _log, archiver), archiver.writing():
        try:
            archiver.start(_progress("checked"))
            records = archiver.drain(lambda item: None if as_json else click.echo(_line(item)))
        except KeyboardInterrupt:
            click.echo(
                f"stopped; {archiver.status.records:,} records are archived, the next run goes on", err=True
            )
            sys.exit(130)
        seconds = time.monotonic() - start
        if as_json:
            _emit({"records": records, "ranges": archiver.status.ranges, "seconds": seconds})
        else:
            click.echo(f"{records:,} records archived in {archiver.status.ranges} ranges, {seconds:.1f} s")


@archive.command()
@_options
@click.option("--deep", is_flag=True, help="Read every page, not only sizes and footers.")
def verify(config_file: Path | None, workspace: Path | None, as_json: bool, deep: bool) -> None:
    """Check every file, set bad ones aside in _quarantine/ with the reason, rebuild them. Exit code 1: something is lost.

    \b
    spanloop archive verify
    spanloop archive verify --deep --json
    """
    from spanloop.pipeline.archive.cleaning import sweep
    from spanloop.pipeline.archive.raw import ArchiveStore
    from spanloop.pipeline.archive.repair import verify as check

    with _opened(config_file, workspace) as (settings, log, archiver), archiver.writing():
        store = ArchiveStore.open(settings)
        report = check(store, log, deep=deep, progress=_progress("checked"))
        sweep(store)
    if as_json:
        _emit(report)
    else:
        for word, lines in (
            ("quarantined", report.quarantined),
            ("lost", report.lost),
            ("gap", report.open_gaps),
        ):
            for line in lines:
                click.echo(f"{word}  {line}")
        click.echo(_reported(report))
    sys.exit(1 if report.lost or report.open_gaps else 0)


@archive.command()
@_options
def compact(config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """Merge small files: those of finished days, and of today where there are many. Queries go on meanwhile.

    \b
    spanloop archive compact
    SPANLOOP_ARCHIVE__COMPACT_BELOW_MB=64 spanloop archive compact
    """
    from spanloop.pipeline.archive.cleaning import sweep
    from spanloop.pipeline.archive.compaction import compact as merge
    from spanloop.pipeline.archive.raw import ArchiveStore

    def show(item: Range, parts: int) -> None:
        if not as_json:
            click.echo(f"{_line(item)}  from {parts}")

    with _opened(config_file, workspace) as (settings, _log, archiver), archiver.writing():
        store = ArchiveStore.open(settings)
        fewer = merge(store, below_bytes=settings.archive.compact_below_mb * 2**20, progress=show)
        swept = sweep(store)
    if as_json:
        _emit({"fewer_ranges": fewer, "removed_files": swept})
    else:
        click.echo(
            f"{fewer} ranges fewer, {swept} replaced files removed (others stay 10 minutes for running queries)"
        )


@archive.command()
@_options
def status(config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """Show what is archived, what waits, what was set aside or lost. Exit code 1: something needs a person.

    \b
    spanloop archive status
    spanloop archive status --json
    """
    from spanloop.pipeline.archive.overview import overview
    from spanloop.pipeline.archive.raw import ArchiveStore
    from spanloop.pipeline.log.open import open_log

    settings = load_settings(config_file, {"workspace": workspace} if workspace is not None else None)
    store = ArchiveStore.open(settings)
    log: Log | None = None
    try:
        with contextlib.suppress(SpanloopError):
            log = open_log(settings, create=False)
        found = overview(store, log, settings.workspace)
    except OSError as exc:
        raise TransientError(
            f"the archive {store.files.uri('')} cannot be read: {exc}; is it reachable, are archive.url and archive.endpoint right?"
        ) from exc
    finally:
        if log is not None:
            log.close()
    if as_json:
        _emit(found)
        sys.exit(0 if found.healthy else 1)
    click.echo(f"archive   {found.root}")
    click.echo(f"archiver  {found.archiver}{': ' + found.reason if found.reason else ''}")
    for row in found.sources:
        behind = "log not reached" if row.behind is None else f"{row.behind:,} offsets behind"
        click.echo(
            f"  {row.source:16} {row.records:10,} records {row.ranges:5} ranges {row.files:6} files "
            f"{row.bytes / 2**20:10.1f} MiB  to {row.contained}, {behind}"
        )
    for word, lines in (("quarantined", found.quarantined), ("lost", found.lost), ("gap", found.gaps)):
        for line in lines:
            click.echo(f"{word}  {line}")
    sys.exit(0 if found.healthy else 1)
