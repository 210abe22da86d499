"""``spanloop import``."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.collectors.importers.importing import Imported

__all__ = ["import_"]

_FORMATS = ("auto", "otlp", "openai-agents", "langfuse", "phoenix", "who-and-when", "tau-bench", "survey")
_STOPPED = 130


@click.command("import")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder.  [default: .spanloop]",
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings.")
@click.option("--tenant", help="Tenant of the spans.  [default: the settings' tenant]")
@click.option(
    "--format",
    "wanted",
    type=click.Choice(_FORMATS),
    default="auto",
    show_default=True,
    help="Read records of this format only.",
)
@click.option("--no-scores", is_flag=True, help="Leave out scores and rewards that the files hold.")
@click.option("--again", is_flag=True, help="Read files from the start, also what was imported before.")
@click.option("--dry-run", is_flag=True, help="Read and count, write nothing.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON line.")
def import_(  # noqa: PLR0917 - one argument an option
    paths: tuple[Path, ...], workspace: Path | None, config: Path | None, tenant: str | None, wanted: str,
    no_scores: bool, again: bool, dry_run: bool, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Append files, folders or standard input (-) to the log.

    Reads OTLP (JSON lines or documents, protobuf behind lengths), traces of the openai-agents SDK's own exporter, Langfuse and
    Phoenix exports, Who&When and tau-bench logs, and traces in the survey's format; plain or packed (gzip, bzip2, xz, zip). The
    content tells which. Importing again adds nothing; a run that was stopped goes on where it was. What cannot be read is
    counted, kept as a dead letter and named with its line; the rest is imported.

    \b
    spanloop import spans.otlp.jsonl
    spanloop import langfuse-export.json.gz traces/ --workspace /var/lib/spanloop
    spanloop import results.json --dry-run
    zcat old.jsonl.gz | spanloop import - --json

    Exit codes: 0 all is in; 2 nothing could be read; 3 some records or files were refused, the others are in; 4 the log refused,
    run it again; 130 stopped, run it again to go on.
    """
    from spanloop.collectors.batches import Intake
    from spanloop.collectors.importers.importing import Importer
    from spanloop.collectors.importers.showing import Progress
    from spanloop.collectors.redaction import Redactor, workspace_key
    from spanloop.collectors.sealing import open_sealer
    from spanloop.pipeline.formats.opened import found_files

    settings = _settings(config, workspace, tenant)
    sources = found_files(list(paths))
    if not dry_run:
        settings.workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = secrets.token_bytes(32) if dry_run else workspace_key(settings)
    redactor = Redactor(settings.content, key)
    intake = Intake(
        redactor,
        settings.collector.max_attribute_bytes,
        keep_content=settings.content.clear,
        sealer=None if dry_run else open_sealer(settings),
    )
    log = None if dry_run else _open(settings)
    try:
        importer = Importer(
            log,
            intake,
            redactor,
            tenant=settings.tenant,
            now_ns=time.time_ns(),
            max_nesting=settings.collector.max_nesting,
            wanted="" if wanted == "auto" else wanted,
            scores=not no_scores,
            checkpoints=None if log is None or again else _checkpoints(settings, log, wanted, no_scores),
        )
        progress = Progress(sources, importer.total)
        try:
            found = importer.run(sources, (lambda *_: None) if quiet else progress)
        except KeyboardInterrupt:
            progress.close()
            click.echo(
                f"stopped after {importer.total.spans} spans: run the same command again to go on", err=True
            )
            sys.exit(_STOPPED)
        finally:
            progress.close()
    finally:
        if log is not None:
            log.close()
    _report(found, settings, dry=dry_run, as_json=as_json)


def _settings(config: Path | None, workspace: Path | None, tenant: str | None) -> Settings:
    flags: dict[str, Any] = {}
    if workspace is not None:
        flags["workspace"] = workspace
    if tenant is not None:
        flags["tenant"] = tenant
    return load_settings(config, flags)


def _open(settings: Settings) -> Any:
    from spanloop.pipeline.log.open import open_log

    return open_log(settings)


def _checkpoints(settings: Settings, log: Any, wanted: str, no_scores: bool) -> Any:
    """Checkpoints for this log and these rules: with others, a file becomes other events."""
    from spanloop.collectors.importers.checkpoints import Checkpoints

    content = settings.content
    rules = json.dumps(
        [settings.tenant, content.training, content.subject_keys, sorted(content.allow), settings.collector.max_attribute_bytes,
         settings.collector.max_nesting, wanted, no_scores, settings.bootstrap_servers or str(settings.database.resolve())]
    )  # fmt: skip
    return Checkpoints(settings.workspace / "imports", log, rules)


def _report(found: Imported, settings: Settings, *, dry: bool, as_json: bool) -> None:
    from spanloop.collectors.importers.showing import summary
    from spanloop.pipeline.assembly.report import plain_text

    for reason in (*found.unreadable, *found.reasons):
        click.echo(f"refused: {plain_text(reason)}", err=True)
    if (unnamed := found.rejected - len(found.reasons)) > 0:
        click.echo(
            f"refused: {'and ' if found.reasons else ''}{unnamed} more, named by an earlier run or too many to name",
            err=True,
        )
    if as_json:
        counts = {k: getattr(found, k) for k in ("files", "spans", "events", "duplicates", "rejected")}
        if found.scores:
            counts["scores"] = found.scores
        if found.unreadable:
            counts["unreadable"] = len(found.unreadable)
        click.echo(json.dumps(counts))
    else:
        click.echo(summary(found, dry=dry))
        click.echo(_next(found, settings, dry=dry), err=True)
    if found.rejected or found.unreadable:
        sys.exit(SchemaError.exit_code)


def _next(found: Imported, settings: Settings, *, dry: bool) -> str:
    """What to run now."""
    from spanloop.pipeline.workspace import read_run, running

    where = "" if str(settings.workspace) == ".spanloop" else f" --workspace {settings.workspace}"
    if dry:
        return "next: the same without --dry-run"
    if "pipeline" in running(read_run(settings.workspace)):
        lines = [f"next: spanloop traces{where}   (spanloop up runs there and takes it in)"]
    else:
        lines = [f"next: spanloop up{where}   (orchestrations, rewards, credit), then spanloop traces{where}"]
    if found.rejected:
        lines.append(f"      spanloop deadletters list{where}   shows what was refused")
    return "\n".join(lines)
