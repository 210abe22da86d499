"""``spanloop deadletters``: list what was refused, show one with its bytes, send it again after a fix."""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from spanloop.pipeline.screen import json_shown
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["deadletters"]

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 2_000
"""Bytes of a refused record that ``show`` prints."""


def _since(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """``90m``, ``2d`` or an ISO date with or without time (UTC) as nanoseconds since the epoch."""
    if not value:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    if match:
        return time.time_ns() - round(float(match[1]) * _UNITS[match[2]] * 1e9)
    try:
        moment = datetime.datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a duration (90s, 15m, 2h, 7d) nor a date (2026-12-01T08:00)"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp() * 1e9)


_WHERE: list[_Option] = [
    click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."),
    click.option(
        "--workspace",
        type=click.Path(path_type=Path, file_okay=False),
        help="Workspace folder.  [default: the settings' one]",
    ),
]
_FILTERS: list[_Option] = [
    click.option("--reason", default="", help="Only those whose reason contains this text."),
    click.option("--source", default="", help="Only those of a source (otlp, assembly, stage:shard-0-of-4, feedback ...), or of its beginning."),
    click.option("--tenant", default="", help="Only those of a tenant."),
    click.option("--since", "since_ns", callback=_since, help="Only newer ones: 90s, 15m, 2h, 7d, or a date and time (UTC)."),
]  # fmt: skip


def _with(options: list[_Option]) -> _Option:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _settings(config: Path | None, workspace: Path | None) -> Settings:
    return load_settings(config, {"workspace": workspace} if workspace is not None else None)


@click.group()
def deadletters() -> None:
    """Look at what was refused, and send it again after a fix.

    Nothing that spanloop refuses is lost without a trace: a span that cannot be decoded, a record on which a stage raises,
    feedback whose target never came each leave a dead letter with the reason, the size and the digest of the bytes.

    \b
    spanloop deadletters list --since 2h
    spanloop deadletters show 3f9a1c
    spanloop deadletters replay --reason "schema_version" --dry-run
    """


@deadletters.command("list")
@_with(_WHERE)
@_with(_FILTERS)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Newest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, all of them, oldest first.")
def list_letters(  # noqa: PLR0917 - one argument an option
    config: Path | None, workspace: Path | None, reason: str, source: str, tenant: str, since_ns: int, limit: int, as_json: bool
) -> None:  # fmt: skip
    """List dead letters, newest first, and count them by source and reason.

    \b
    spanloop deadletters list
    spanloop deadletters list --source otlp --reason "bad span: id" --since 1d
    spanloop deadletters list --json | jq -r .reason | sort | uniq -c
    """
    from collections import Counter, deque

    from spanloop.pipeline.letters import Filter, Letter, read_letters
    from spanloop.pipeline.log.open import open_log

    log = open_log(_settings(config, workspace), create=False)
    try:
        newest: deque[Letter] = deque(maxlen=limit)
        kinds: Counter[tuple[str, str]] = Counter()
        for letter in read_letters(log, Filter(reason, source, tenant, since_ns)):
            kinds[(letter.event.source, letter.event.reason)] += 1
            newest.append(letter)
            if as_json:
                click.echo(json_shown(json.dumps(letter.row(), ensure_ascii=False, sort_keys=True)))
    finally:
        log.close()
    if as_json:
        return
    for letter in reversed(newest):
        row = letter.row()
        click.echo(
            f"{letter.letter_id[:12]}  {_time(letter.recorded_ns)}  {row['size']:>8} B  {_plain(row['source']):22} "
            f"{_plain(row['origin']):16} {_plain(row['reason'])}"
        )
    total = sum(kinds.values())
    click.echo(f"{total} dead letters" + (f", the newest {limit} above" if total > limit else ""), err=True)
    for (where, why), count in kinds.most_common(10) if total > 1 else ():
        click.echo(f"  {count:>6}  {_plain(where)}: {_plain(why)}", err=True)


@deadletters.command("show")
@click.argument("letter_id", metavar="ID")
@_with(_WHERE)
@click.option(
    "--bytes",
    "target",
    type=click.Path(path_type=Path),
    help="Write the refused bytes to this file; - is stdout.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the bytes in base64 under data.")
def show(letter_id: str, config: Path | None, workspace: Path | None, target: Path | None, as_json: bool) -> None:  # fmt: skip
    """Show one dead letter: where it came from, why it was refused, and the bytes as far as they are kept.

    \b
    spanloop deadletters show 3f9a1c
    spanloop deadletters show 3f9a1c --bytes refused.bin
    """
    import base64

    from spanloop.pipeline.letters import Originals, find_letters
    from spanloop.pipeline.log.open import open_log
    from spanloop.schemas.errors import TerminalError

    log = open_log(_settings(config, workspace), create=False)
    try:
        letter = find_letters(log, [letter_id])[0]
        content = Originals(log, [letter]).content(letter)
    finally:
        log.close()
    if target is not None:
        if content is None:
            raise TerminalError(
                f"the bytes of {letter.letter_id} are neither in the letter nor on the log any more"
            )
        if str(target) == "-":
            sys.stdout.buffer.write(content)
        else:
            target.write_bytes(content)
            click.echo(f"{len(content)} bytes written to {target}", err=True)
        return
    row = letter.row()
    if as_json:
        row["data"] = base64.b64encode(content).decode() if content is not None else None
        click.echo(json_shown(json.dumps(row, ensure_ascii=False, sort_keys=True)))
        return
    for name in ("id", "tenant", "source", "origin", "reason", "size", "sha256"):
        click.echo(f"{name:10} {_plain(str(row[name]))}")
    click.echo(f"{'recorded':10} {_time(letter.recorded_ns)}")
    for name, value in letter.event.details.items():
        click.echo(f"{name:10} {_plain(str(value))}")
    if content is None:
        click.echo("bytes      gone: not in the letter (content.training is off) nor on the log any more")
    else:
        where = "in the letter" if letter.kept() is not None else "on the log"
        cut = ", the first shown" if len(content) > _SHOWN else ""
        click.echo(
            f"bytes      {where}{cut}:\n{_plain(content[:_SHOWN].decode('utf-8', 'backslashreplace'))}"
        )


@deadletters.command("replay")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_with(_WHERE)
@_with(_FILTERS)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="All dead letters; needed when neither ids nor filters are given.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would become of each.")
@click.option(
    "--attempt",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Count up to send letters again that were sent again before.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with counts and the letters.")
def replay(  # noqa: PLR0917 - one argument an option
    ids: tuple[str, ...], config: Path | None, workspace: Path | None, reason: str, source: str, tenant: str, since_ns: int,
    everything: bool, dry_run: bool, attempt: int, as_json: bool,
) -> None:  # fmt: skip
    """Send dead letters again on the path that refused them, after what refused them was fixed.

    What would be refused again is counted and left alone. Replaying twice changes nothing. Exit code 3: some could not
    be sent.

    \b
    spanloop deadletters replay 3f9a1c 77aa01
    spanloop deadletters replay --source stage:assembly --since 2d --dry-run
    spanloop deadletters replay --all
    """
    from spanloop.collectors.batches import Intake
    from spanloop.collectors.deadletters_replay import OUTCOMES, counted
    from spanloop.collectors.deadletters_replay import replay as send
    from spanloop.collectors.redaction import Redactor, workspace_key
    from spanloop.collectors.sealing import open_sealer
    from spanloop.pipeline.letters import Filter, find_letters, read_letters
    from spanloop.pipeline.log.open import open_log

    wanted = Filter(reason, source, tenant, since_ns)
    if ids and (everything or wanted != Filter()):
        raise click.UsageError("give ids or filters, not both")
    if not ids and wanted == Filter() and not everything:
        raise click.UsageError("name letters by id or by a filter, or say --all")
    settings = _settings(config, workspace)
    log = open_log(settings, create=False)
    try:
        letters = find_letters(log, ids) if ids else list(read_letters(log, wanted))
        redactor = Redactor(settings.content, workspace_key(settings))
        intake = Intake(
            redactor,
            settings.collector.max_attribute_bytes,
            keep_content=settings.content.clear,
            sealer=open_sealer(settings),
        )
        last = time.monotonic()

        def progress(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= 1.0:
                last = time.monotonic()
                click.echo(f"{done} of {len(letters)} dead letters", err=True)

        results = send(log, letters, intake, attempt=attempt, dry_run=dry_run, progress=progress)
    finally:
        log.close()
    counts = counted(results)
    failed = counts["refused"] + counts["gone"]
    if as_json:
        rows = [{"id": r.letter.letter_id, "outcome": r.outcome, "why": r.why} for r in results]
        click.echo(
            json_shown(json.dumps({"dry_run": dry_run, **counts, "letters": rows}, ensure_ascii=False))
        )
        sys.exit(3 if failed else 0)
    for result in results:
        if result.why:
            click.echo(
                f"{result.letter.letter_id[:12]}  {OUTCOMES[result.outcome]}: {_plain(result.why)}", err=True
            )
    would = "would be " if dry_run else ""
    click.echo(
        f"{len(results)} dead letters: {would}sent {counts['sent']}, sent before {counts['there']}, "
        f"refused again {counts['refused']}, gone {counts['gone']}"
    )
    sys.exit(3 if failed else 0)


def _time(ns: int) -> str:
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _plain(text: str) -> str:
    """Text for a terminal: no control characters but line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
