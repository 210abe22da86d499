"""Verb ``export``: a thin layer over ``source`` and ``write``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spanloop.pipeline.export.rows import FORMATS, LEVELS, Wish
from spanloop.pipeline.finite import FiniteRange
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.export.messages import Conversation
    from spanloop.pipeline.export.rows import Call
    from spanloop.pipeline.export.write import Card

__all__ = ["export"]


def _time(context: click.Context, option: click.Parameter, value: str | None) -> str:
    """A time as SQL has it, in UTC."""
    if not value:
        return ""
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            "give an ISO time, such as 2027-01-31 or 2027-01-31T12:00:00Z", context, option
        ) from None
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S.%f")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="See docs/export.md.")
@click.option("--parquet", is_flag=True, help="Parquet instead of JSON lines (not for OpenAI).")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="turn",
    show_default=True,
    help="What a call is scored by: the reward, or the ledger's account that it is under.",
)
@click.option("--role", "roles", multiple=True, help="Only calls of agents in this role.")
@click.option("--agent", "agents", multiple=True, help="Only calls of agents of this name.")
@click.option(
    "--policy-version", "policy_versions", multiple=True, help="Only calls that this version answered."
)
@click.option("--tenant", default="", help="Only this tenant's orchestrations.")
@click.option("--since", callback=_time, help="Orchestrations that began at this time or later.")
@click.option("--until", callback=_time, help="Orchestrations that began before this time.")
@click.option(
    "--min-reward", type=FiniteRange(), help="Rejection sampling: orchestrations rewarded at least so much."
)
@click.option("--min-score", type=FiniteRange(), help="Rejection sampling: calls scored at least so much.")
@click.option(
    "--best",
    type=click.IntRange(min=0),
    default=0,
    help="Rejection sampling: the so many best rewarded orchestrations of each task.",
)
@click.option(
    "--margin",
    type=FiniteRange(min=0),
    default=0.0,
    help="Least difference of a pair; half-width of what gets no label.",
)
@click.option(
    "--pairs", type=click.IntRange(min=1), default=1, show_default=True, help="Pairs a prompt, at most."
)
@click.option(
    "--beta",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Weights are exp(score / beta).",
)
@click.option(
    "--weight-max", type=FiniteRange(min=1), default=10.0, show_default=True, help="Largest weight."
)
@click.option(
    "--split",
    type=click.Choice(["train", "held-out", "all"]),
    default="train",
    show_default=True,
    help="Held-out orchestrations judge policies: training on them blinds the gate.",
)
@click.option("--provisional", is_flag=True, help="Also orchestrations whose reward may still change.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="Folder of the workspace. Default: the settings' one.",
)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--archive-only", is_flag=True, help="Only what is archived: the log is not opened.")
@click.option(
    "--timeout",
    type=FiniteRange(min=1, max=1e6),
    default=600.0,
    show_default=True,
    help="Seconds before a query is stopped.",
)
@click.option(
    "--memory",
    type=click.IntRange(min=64),
    default=1024,
    show_default=True,
    help="Memory limit of the queries in MiB.",
)
@click.option("--json", "as_json", is_flag=True, help="The card as JSON.")
def export(out: Path, *, workspace: Path | None, config: Path | None, archive_only: bool, timeout: float, memory: int, parquet: bool, as_json: bool, **asked: Any) -> None:  # fmt: skip
    """Write model calls with their words and credit to the folder OUT, as a data set for fine-tuning.

    \b
    spanloop export sft --format sft --min-reward 0.8 --min-score 0
    spanloop export weighted --format weighted --beta 0.2 --parquet
    spanloop export pairs --format dpo --level turn --margin 0.1
    spanloop export openai --format openai --role researcher --best 1

    A row is one model call: what it was asked, and what it answered. Only deployments with content.training keep the words. OUT
    holds the rows, card.json (counts, what was left out and why, offsets, hash) and, for OpenAI, index.jsonl.

    Exit codes: 0 done, 1 it failed, 2 wrong usage, 3 something that belongs to it is lost, 4 try again.
    """
    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    if not settings.content.training:
        raise ConfigError(
            "content.training is off: this deployment did not opt in to training on its content; "
            "if it did, name its settings with --config (or SPANLOOP_CONTENT__TRAINING=true)"
        )
    card = _export(out, Wish(**asked), settings, archive_only=archive_only, parquet=parquet, timeout_s=timeout, memory_mb=memory)  # fmt: skip
    if as_json:
        import msgspec

        click.echo(json_shown(msgspec.json.format(canonical_json(card), indent=2).decode()))
    else:
        _say(out, card)
    if card.lost:
        raise SystemExit(3)


def _export(out: Path, wish: Wish, settings: Settings, *, archive_only: bool, parquet: bool, timeout_s: float, memory_mb: int) -> Card:  # fmt: skip
    from spanloop.pipeline.archive import ArchiveStore
    from spanloop.pipeline.export.source import calls_of, offsets_of, words_of_calls
    from spanloop.pipeline.export.write import write_data_set
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.query.session import Query
    from spanloop.pipeline.sealing.opening import open_vault

    with ExitStack() as stack:
        log = None if archive_only else open_log(settings, create=False)
        if log is not None:
            stack.callback(log.close)
        vault = open_vault(settings)
        if vault is not None:
            stack.callback(vault.keys.close)
        query = stack.enter_context(
            Query(
                log,
                ArchiveStore.open(settings),
                tenant=wish.tenant or None,
                cache=settings.workspace / "query-cache",
                timeout_s=timeout_s,
                memory_mb=memory_mb,
            )
        )
        offsets = offsets_of(query)
        calls = list(calls_of(query, holdout=settings.pipeline.holdout, since=wish.since, until=wish.until))
        lost: set[str] = set(query.lost)

        def words(some: Sequence[Call]) -> Iterator[tuple[Call, Conversation | str]]:
            yield from words_of_calls(query, some, vault)
            lost.update(query.lost)

        return write_data_set(
            out, wish, calls, words, parquet=parquet, offsets=offsets, lost=lambda: tuple(sorted(lost))
        )


def _say(out: Path, card: Card) -> None:
    click.echo(
        f"{card.rows} rows from {card.used} of {card.calls} model calls in {card.orchestrations} orchestrations: {out / card.file}"
    )
    for reason, count in card.excluded.items():
        click.echo(f"  left out: {count} {reason.replace('_', ' ')}")
    for note, count in card.notes.items():
        click.echo(f"  note: {count} {note.replace('_', ' ')}", err=True)
    for line in card.lost[:5]:
        click.echo(f"lost: {line}", err=True)
