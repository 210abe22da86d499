"""Verbs ``replay`` and ``diff``: thin layers over ``driver``, ``whole`` and ``diff``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spanloop.pipeline.finite import FiniteRange
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.errors import ConfigError, SpanloopError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.replay.diff import Diff
    from spanloop.pipeline.replay.driver import Progress
    from spanloop.pipeline.replay.results import Manifest

__all__ = ["diff", "opened", "replay", "teller"]

_FOLDER = "replays"
_TELL_S = 10.0
"""Between two lines of progress where there is no terminal."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object."),
        click.option("--archive", "archive_url", default="", help="Folder or s3://bucket/prefix.  [default: the settings' one]"),
        click.option(
            "--workspace", type=click.Path(path_type=Path, file_okay=False), help="Workspace folder.  [default: the settings' one]"
        ),
        click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."),
    ):  # fmt: skip
        command = option(command)
    return command


def opened(config_file: Path | None, workspace: Path | None, archive_url: str) -> tuple[Settings, Any, Path]:
    """Settings, archive, folder of result sets."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: small matrices, many processes
    from spanloop.pipeline.archive.raw import ArchiveStore

    flags: dict[str, Any] = {"workspace": workspace} if workspace is not None else {}
    if archive_url:
        flags["archive"] = {"url": archive_url}
    settings = load_settings(config_file, flags or None)
    return settings, ArchiveStore.open(settings), settings.workspace / _FOLDER


def teller(*, quiet: bool) -> Callable[[Progress], None] | None:
    """Shows progress on stderr: one line that changes on a terminal, else a line every ten seconds."""
    if quiet:
        return None
    screen = sys.stderr.isatty()
    last = {"phase": "", "seconds": 0.0}

    def tell(now: Progress) -> None:
        rate = now.done / now.seconds if now.seconds > 0 else 0.0
        line = f"{now.phase:10} {now.spans:,} spans"
        if now.orchestrations:
            line += f", {now.orchestrations:,} orchestrations"
        if now.spans and now.seconds > 1:
            line += f", {now.spans / now.seconds:,.0f} spans/s"
        if now.total:
            line += f", {min(1.0, now.done / now.total):.0%}"
            if rate and now.done < now.total:
                line += f", {_duration((now.total - now.done) / rate)} left"
        if screen:
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
        elif now.seconds - (float(last["seconds"]) if now.phase == last["phase"] else 0.0) >= _TELL_S:
            click.echo(line, err=True)
            last.update(phase=now.phase, seconds=now.seconds)

    return tell


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _print_json(value: Any) -> None:
    click.echo(json_shown(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


@click.command()
@click.option(
    "--from",
    "since",
    default="",
    metavar="TIME",
    help="UTC day or time: orchestrations that began then or later.",
)
@click.option("--to", "until", default="", metavar="TIME", help="UTC day (to its end) or time (exclusive).")
@click.option("--name", default="", help="Name of the result set.  [default: made of range and rewards file]")
@click.option(
    "--rewards",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with another reward definition: parallel_weight, finish_weight, tool_weight, outcome_floor, holdout, credit.",
)
@click.option(
    "--models",
    type=click.Choice(["recorded", "newest"]),
    default="recorded",
    show_default=True,
    help="Value models: the version that the stream credited each orchestration with, or the last one published.",
)
@click.option(
    "--runner",
    default="direct",
    show_default=True,
    help="direct (here), flink, dataflow, or a Beam runner's class.",
)
@click.option(
    "--runner-option",
    "runner_options",
    multiple=True,
    metavar="K=V",
    help="Option of Beam, e.g. flink_master=host:8081.",
)
@click.option(
    "--results", default="", help="Folder or s3:// of result sets that all workers of another runner reach."
)
@click.option(
    "--workers", type=click.IntRange(1), help="Processes of the direct runner.  [default: one a core]"
)
@click.option(
    "--bucket-mb",
    type=FiniteRange(min=0.001),
    default=128.0,
    show_default=True,
    help="Spans (as on the log) that the direct runner takes at once: less is less memory, and less to do again.",
)
@click.option("--restart", is_flag=True, help="Throw away what is there under the name, finished or not.")
@_options
def replay(
    *, since: str, until: str, name: str, rewards: Path | None, models: str, runner: str, runner_options: tuple[str, ...], results: str,
    workers: int | None, bucket_mb: float, restart: bool, config_file: Path | None, workspace: Path | None, archive_url: str, as_json: bool,
) -> None:  # fmt: skip
    """Make orchestrations, rewards, credit and samples again from the archive, with Beam.

    The same code as the stream's makes them, so without --rewards the content of each orchestration has the stream's hash
    (`spanloop verify --archive` proves it). Ctrl-C or a kill loses at most the buckets in hand: the same command goes on.

    \b
    spanloop replay --from 2026-11-01 --to 2026-11-30
    spanloop replay --rewards tools.toml --name tools && spanloop diff recorded tools
    spanloop replay --runner flink --runner-option flink_master=jobs:8081 --results s3://bucket/replays
    """
    from spanloop.pipeline.replay.driver import replay as run_here
    from spanloop.pipeline.replay.plan import CHUNK_BYTES, make_plan
    from spanloop.pipeline.replay.results import RECORDED

    settings, store, root = opened(config_file, workspace, archive_url)
    name = name or "-".join(
        part for part in ("replay", since, until, rewards.stem if rewards else "") if part
    ).replace(":", "")
    if name == RECORDED:
        raise ConfigError("--name recorded stands for what the stream published: give another")
    plan = make_plan(
        settings, store, name=name, since=since, until=until, rewards=rewards, models=models,
        bucket_bytes=int(bucket_mb * 2**20), chunk_bytes=min(CHUNK_BYTES, int(bucket_mb * 2**20)),
    )  # fmt: skip
    if runner == "direct":
        if runner_options or results:
            raise ConfigError("--runner-option and --results are for other runners than direct")
        tell = teller(quiet=as_json)
        try:
            manifest = run_here(
                plan, store, root, workers=workers or os.cpu_count() or 1, tell=tell, restart=restart
            )
        except KeyboardInterrupt:
            click.echo("\nstopped; the same command goes on where this one was", err=True)
            sys.exit(130)
        finally:
            if tell is not None and sys.stderr.isatty():
                click.echo("", err=True)
    else:
        from spanloop.pipeline.replay.progress import quiet_beam

        quiet_beam()
        from spanloop.pipeline.replay.whole import replay_whole

        url = results or str(root.absolute())
        endpoint = settings.archive.endpoint if "://" in url else ""
        manifest = replay_whole(plan, store, url, endpoint, runner=runner, options=runner_options)
    if as_json:
        _print_json(manifest)
    else:
        _print_manifest(manifest, root)


def _print_manifest(manifest: Manifest, root: Path) -> None:
    counts = manifest.counts
    rate = counts.spans / manifest.seconds if manifest.seconds else 0.0
    click.echo(
        f"{manifest.name}: {counts.orchestrations:,} orchestrations ({counts.credited:,} credited, {counts.incomplete:,} incomplete) "
        f"from {counts.spans:,} spans in {manifest.seconds:.1f} s, {rate:,.0f} spans/s"
    )
    for count, text in (
        (counts.outside, "orchestrations began outside the range"),
        (counts.feedback_expired, "feedbacks left out: the stream gave them up, their target came too late"),
        (counts.feedback_unmatched, "feedbacks on nothing in the range"),
        (
            counts.problems,
            "orchestrations without credit: their value model is missing, or they cannot be made",
        ),
        (
            counts.erased,
            "orchestrations whose token ids cannot be read (erased, or content.keys names no store that has them): no token accounts",
        ),
        (counts.bad, "records or spans that cannot be read: bad.jsonl names them"),
    ):
        if count:
            click.echo(f"  {count:,} {text}")
    click.echo(f"  {root / manifest.name}")
    click.echo(f"compare: spanloop diff recorded {manifest.name}")


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--top",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Largest changes of each kind to show.",
)
@click.option("--exit-code", is_flag=True, help="Exit code 1 when anything differs.")
@_options
def diff(
    *, a: str, b: str, top: int, exit_code: bool, config_file: Path | None, workspace: Path | None, archive_url: str, as_json: bool
) -> None:  # fmt: skip
    """Compare two replays: what changes from A to B, by how much, and what the learner would have been taught.

    A and B are names of replays; `recorded` is what the stream published. Exit code 0, with --exit-code 1 when anything differs,
    2 on errors.

    \b
    spanloop diff recorded tools
    spanloop diff before after --top 20
    spanloop diff recorded replay --exit-code --json     # in CI
    """
    from spanloop.pipeline.replay.diff import diff as compare
    from spanloop.pipeline.replay.published import published_set
    from spanloop.pipeline.replay.results import RECORDED, ResultSet
    from spanloop.pipeline.replay.tables import lines

    try:
        settings, store, root = opened(config_file, workspace, archive_url)
        sides = [
            published_set(settings, store, root) if name == RECORDED else ResultSet(root / name)
            for name in (a, b)
        ]
        found = compare(*sides, top=top)
    except SpanloopError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(2)
    if as_json:
        _print_json({"equal": found.equal, **msgspec.to_builtins(found)})
    else:
        _print_lines(found, lines)
    sys.exit(1 if exit_code and not found.equal else 0)


def _print_lines(found: Diff, lines: Callable[[Diff], list[str]]) -> None:
    from spanloop.pipeline.assembly.report import plain_text

    for line in lines(found):
        click.echo(plain_text(line))
