"""Verb ``explain decisions``: a thin layer over ``decisions.explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from spanloop.pipeline.assembly.report import aligned, plain_text
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.settings import load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.decisions.explain import Explained
    from spanloop.pipeline.decisions.objects import DecisionObject, Option

__all__ = ["decisions"]

_OPTIONS_SHOWN = 4


@click.command()
@click.argument("orchestration_id", metavar="ID")
@click.option(
    "--kind", default="", help="Only this kind: O1 to O5, or spawn, delegate, message, aggregate, stop."
)
@click.option(
    "--newest", is_flag=True, help="Ask the newest decision models, not those that the credit goes with."
)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder of the workspace. Default: the settings' one.")  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object with everything known of each decision."
)
def decisions(
    orchestration_id: str,
    *,
    kind: str,
    newest: bool,
    workspace: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Every decision O1 to O5 of the orchestration ID: what was open, how likely, what it brought, what else would have.

    \b
    spanloop explain decisions 3fa9
    spanloop explain decisions 3fa9 --kind O5 --newest
    spanloop explain decisions 3fa9 --json | jq '.decisions[] | {code, chosen, effect, status}'

    A star marks the choice. An effect has a 90 % interval, or the reason why the log cannot tell one.
    """
    from spanloop.pipeline.decisions.explain import explain_decisions
    from spanloop.pipeline.decisions.told import CODES
    from spanloop.pipeline.log.open import open_log

    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    log = open_log(settings, create=False)
    try:
        found = explain_decisions(log, orchestration_id, newest=newest, words=settings.pipeline.value_words)
    finally:
        log.close()
    if kind:
        known = [word for pair in CODES.items() for word in pair]
        if kind not in known:
            raise click.BadParameter(
                f"{kind!r} is none: give {', '.join(sorted(known))}", param_hint="--kind"
            )
        kept = tuple(item for item in found.decisions if kind in (item.code, item.kind))
        found = msgspec.structs.replace(found, decisions=kept)
    if as_json:
        click.echo(json_shown(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()))
        return
    click.echo("\n".join(_lines(found)))


def _lines(found: Explained) -> list[str]:
    first = min((item.t_ns for item in found.decisions), default=0)
    model = (
        f"{found.decision_model} (of {found.trained_on} orchestrations)" if found.decision_model else "none"
    )
    lines = [
        plain_text(f"orchestration {found.orchestration_id}  revision {found.revision}"),
        plain_text(f"value model {found.value_model or 'none'}  decision models {model}"),
        *(f"note: {note}" for note in found.notes),
        "",
        *aligned(
            ("t s", "", "agent", "options: propensity, value", "effect", "90 %", "margin", "credit", "status"),
            [_row(item, first) for item in found.decisions],
        ),
    ]  # fmt: skip
    reasons = dict.fromkeys(f"{item.status}: {item.reason}" for item in found.decisions if item.reason)
    return [*lines, *(["", *map(plain_text, reasons)] if reasons else [])]


def _row(item: DecisionObject, first: int) -> tuple[str, ...]:
    shown = [_option(option, item.chosen) for option in _shown(item)]
    if len(item.options) > len(shown):
        shown.append(f"+{len(item.options) - len(shown)}")
    interval = "" if item.low is None or item.high is None else f"{item.low:+.3f}..{item.high:+.3f}"
    return (
        f"{(item.t_ns - first) / 1e9:.3f}", f"{item.code} {item.kind}", item.agent, ", ".join(shown) or f"*{item.chosen}",
        _number(item.effect), interval, _number(item.margin),
        "" if item.credit is None else f"{unmicro(item.credit):+.6f}", item.status,
    )  # fmt: skip


def _shown(item: DecisionObject) -> list[Option]:
    """The first options of the menu; the chosen one is always among them."""
    first, rest = list(item.options[:_OPTIONS_SHOWN]), item.options[_OPTIONS_SHOWN:]
    chosen = next((option for option in rest if option.name == item.chosen), None)
    return first if chosen is None else [*first[:-1], chosen]


def _option(option: Option, chosen: str) -> str:
    parts = [f"{'*' if option.name == chosen else ''}{option.name}"]
    if option.propensity is not None:
        parts.append(f"{option.propensity:.2f}")
    if option.value is not None:
        parts.append(f"{option.value:+.3f}")
    return " ".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"
