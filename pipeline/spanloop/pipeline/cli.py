"""Verbs ``up``, ``config``, ``doctor`` and ``verify``: thin layers over supervisor, settings, doctor and verify."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spanloop.pipeline.screen import json_shown
from spanloop.schemas.errors import ConfigError, SpanloopError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.verify import Verified

__all__ = ["config", "doctor", "up", "verify"]

_CONFIG = click.option(
    "--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."
)
_WORKSPACE = click.option(
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder.  [default: the settings' one]",
)


def _settings(config_file: Path | None, workspace: Path | None) -> Settings:
    return load_settings(config_file, {"workspace": workspace} if workspace is not None else None)


def _print_json(value: Any) -> None:
    click.echo(json_shown(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def _names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@click.command()
@_CONFIG
@_WORKSPACE
@click.option(
    "--without",
    multiple=True,
    callback=_names,
    help="Processes to leave out: collector, pipeline, gateway, serving, learner, archiver; comma-separated.",
)
@click.option(
    "--status-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with state, pids, urls and restarts, rewritten once a second.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when everything is ready.")
def up(
    config_file: Path | None,
    workspace: Path | None,
    without: list[str],
    status_file: Path | None,
    as_json: bool,
) -> None:
    """Run collector, pipeline, gateway, serving and learner until Ctrl-C.

    A process that crashes is started again. Ctrl-C stops them in order and loses nothing; the next start goes on from
    there. Logs go to stderr, pids and urls also to run.json in the workspace.

    \b
    spanloop up
    spanloop up --config spanloop.toml
    spanloop up --without serving,learner --workspace /var/lib/spanloop
    """
    from spanloop.pipeline.supervisor import supervise

    def ready(report: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(report))
            return
        for name, url in report["urls"].items():
            click.echo(f"{name:10} {url}")
        click.echo(f"workspace  {report['workspace']}\nready; Ctrl-C stops")

    settings = _settings(config_file, workspace)
    sys.exit(supervise(settings, config_file, without=without, status_file=status_file, on_ready=ready))


@click.group()
def config() -> None:
    """Show settings: resolved, as an example file, or as a JSON Schema.

    \b
    spanloop config show --config spanloop.toml
    spanloop config example > spanloop.toml
    spanloop config schema
    """


@config.command("show")
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="One JSON array of {setting, value, origin}.")
def config_show(config_file: Path | None, as_json: bool) -> None:
    """Print every setting with its value and where that comes from; secrets are masked."""
    from spanloop.pipeline.settings_text import resolved

    rows = resolved(load_settings(config_file), config_file)
    if as_json:
        _print_json(rows)
        return
    width = max(len(row["setting"]) for row in rows)
    for row in rows:
        click.echo(
            f"{row['setting']:{width}}  {json.dumps(row['value'], ensure_ascii=False)}  ({row['origin']})"
        )


@config.command("example")
def config_example() -> None:
    """Print a TOML file with every setting, its default and its meaning."""
    from spanloop.pipeline.settings_text import example

    click.echo(example(), nl=False)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the settings file."""
    _print_json(Settings.model_json_schema())


@click.command()
@_CONFIG
@_WORKSPACE
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """Say what can be learned from each deployment, what is missing, and which setting adds it.

    Also looks at workspace, disk, ports and installed packages. Without --config, the file that `spanloop up` runs the
    workspace with, or ran it with last. Exit code 1: something keeps spanloop from running.

    \b
    spanloop doctor
    spanloop doctor --config spanloop.toml --json
    """
    from spanloop.pipeline.assembly.report import plain_text
    from spanloop.pipeline.doctor import Check, diagnose, lines

    settings = _settings(config_file, workspace)
    running_with = _config_of_run(settings.workspace) if config_file is None else None
    if running_with is not None:
        settings = _settings(running_with, settings.workspace)
    found = diagnose(settings)
    if running_with is not None:
        told = f"from {running_with}, as `spanloop up` was started with it; --config names another file"
        found.checks.insert(0, Check("settings", "ok", told))
    if as_json:
        _print_json({**msgspec.to_builtins(found), "healthy": found.healthy})
    else:
        for line in lines(found):
            click.echo(plain_text(line))
    sys.exit(0 if found.healthy else 1)


def _config_of_run(workspace: Path) -> Path | None:
    """The settings file of the `up` that runs a workspace, or ran there last; None: it had none, or there is none."""
    from spanloop.pipeline.workspace import LAST_RUN, read_run

    run = read_run(workspace) or read_run(workspace, LAST_RUN)
    config_file = Path(str(run.get("config") or ""))
    return config_file if config_file.is_file() else None


@click.command()
@_CONFIG
@_WORKSPACE
@click.option("--archive", "archived", is_flag=True, help="Replay the archive with Beam; over Kafka always.")
@click.option(
    "--from",
    "since",
    default="",
    metavar="TIME",
    help="With --archive: orchestrations that began then or later.",
)
@click.option(
    "--to",
    "until",
    default="",
    metavar="TIME",
    help="With --archive: UTC day (to its end) or time (exclusive).",
)
@click.option("--workers", type=click.IntRange(1), help="With --archive: processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(
    *, config_file: Path | None, workspace: Path | None, archived: bool, since: str, until: str, workers: int | None, as_json: bool
) -> None:  # fmt: skip
    """Rebuild orchestrations, rewards and credit from spans, feedback and value models, and compare with the log.

    Compared is the content of each orchestration's last revision, by hash. Give the settings that the pipeline runs
    with. Nothing is written. With --archive, and over Kafka, the archive is replayed and compared with what it holds of
    the derived topics. Exit code 1: something differs; the ids are printed.

    \b
    spanloop verify
    spanloop verify --config spanloop.toml --json
    spanloop verify --archive --from 2026-11-01 --to 2026-11-30
    """
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # before numpy is imported: small matrices, maybe a busy machine
    settings = _settings(config_file, workspace)
    archived = archived or bool(settings.bootstrap_servers)
    if (since or until) and not archived:
        raise ConfigError("--from and --to go with --archive: the embedded log is verified as a whole")
    if archived:
        from spanloop.pipeline.archive.raw import ArchiveStore
        from spanloop.pipeline.replay.checking import verify_archive
        from spanloop.pipeline.replay.cli import teller

        store = ArchiveStore.open(settings)
        found = verify_archive(
            settings, store, settings.workspace / "replays", time.time_ns(), since=since, until=until,
            workers=workers or os.cpu_count() or 1, tell=teller(quiet=as_json),
        )  # fmt: skip
        found.unread_records = _unarchived(settings, store.contained())
    else:
        found = _verify_log(settings)
    if as_json:
        _print_json(found)
    else:
        _print_verified(found)
    sys.exit(1 if found.differences else 0)


def _unarchived(settings: Settings, contained: Mapping[str, int]) -> int:
    """Records of spans that the archive has not yet, 0 where there is no log to ask."""
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.log.scan import scan
    from spanloop.schemas import topics

    try:
        log = open_log(settings, create=False)
    except SpanloopError:
        return 0
    try:
        return sum(1 for _ in scan(log, [topics.SPANS], after=contained))
    finally:
        log.close()


def _verify_log(settings: Settings) -> Verified:
    from spanloop.pipeline.clock import SystemClock
    from spanloop.pipeline.log.sqlite import SqliteLog
    from spanloop.pipeline.sealing.opening import open_vault
    from spanloop.pipeline.state.sqlite import SqliteState
    from spanloop.pipeline.verify import verify as replay

    log = SqliteLog(settings.database, create=False)
    state = SqliteState(settings.database, create=False)
    try:
        return replay(log, state, settings.pipeline, SystemClock(), vault=open_vault(settings))
    finally:
        log.close()
        state.close()


def _print_verified(found: Verified) -> None:
    for item in found.differences:
        click.echo(
            f"differs  {item.orchestration_id}  {item.what}  recorded {item.recorded or '-'}  replayed {item.replayed or '-'}"
        )
    verdict = f"{len(found.differences)} differ" if found.differences else "all equal"
    click.echo(
        f"{found.orchestrations} orchestrations, {found.rewards} rewards and {found.credits} credits replayed from "
        f"{found.span_records} records of spans in {found.seconds:.1f} s: {verdict}"
    )
    for count, text in (
        (found.open, "still open"),
        (found.behind, "not yet credited"),
        (found.late, "with spans later than the retention"),
        (found.erased, "credits whose token ids were erased, or content.keys names no store that has them"),
        (found.unread_records, "records of spans not yet assembled or archived"),
    ):
        if count:
            click.echo(f"  not compared: {count} {text}")
    if found.other_definitions:
        click.echo(
            f"  {found.other_definitions} rewards were recorded under other definitions than the settings have now"
        )
    if found.differences:
        click.echo(
            "  were the settings of [pipeline], or spanloop's version, changed since? verify replays with those of now; "
            "what an older version published stands until something of it comes again",
            err=True,
        )
