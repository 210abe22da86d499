"""Verb ``explain``: a thin layer over ``credit.explain``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from spanloop.pipeline.assembly.report import plain_text
from spanloop.pipeline.attribution.cli import failure
from spanloop.pipeline.credit.explain import WORDS, Explanation, Line, explain_credit
from spanloop.pipeline.decisions.cli import decisions
from spanloop.pipeline.metrics_cli import metrics
from spanloop.pipeline.pomdp_cli import pomdp
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import load_settings

__all__ = ["explain"]

_LABEL_WIDTH = 44


@click.group()
def explain() -> None:
    """Show how a reward became credit, from the team down to the token, who is to blame for a failure, and what each agent saw and did.

    \b
    spanloop explain credit 132a50                  the beginning of an id is enough
    spanloop explain credit 132a50 --token          down to the tokens
    spanloop explain decisions 132a50               what was decided, what else was open, what it brought
    spanloop explain failure 132a50                 the agent and the step that are likely to blame
    spanloop explain pomdp 132a50                   who was active when; observations and actions
    spanloop explain metrics 132a50                 success, parallelism, collaboration, overhead
    """


explain.add_command(pomdp)
explain.add_command(failure)
explain.add_command(decisions)
explain.add_command(metrics)


@explain.command()
@click.argument("orchestration_id", metavar="ID")
@click.option("--agent", default="", help="Only this agent (name, role or id) and what is below it.")
@click.option(
    "--message",
    default="",
    help="Only this message: its call's id, with the accounts above it and its tokens.",
)
@click.option(
    "--token", is_flag=True, help="Down to the tokens; without it the tree ends at messages and tool calls."
)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="Folder of the workspace. Default: the settings' one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every account.")
def credit(
    orchestration_id: str,
    *,
    agent: str,
    message: str,
    token: bool,
    workspace: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Credit of the orchestration ID (the beginning of an id is enough when it is the only one).

    \b
    spanloop explain credit 3fa9
    spanloop explain credit 3fa9 --agent specialist --token
    spanloop explain credit 3fa9 --message chatcmpl-1

    Each line: credit, what the estimator said (raw, with its standard error), what reconciliation added (residual, and its share of
    what the account above had left), the estimator. "unidentified" and "unknown" are explained below the table, and so are the
    group of tries of the same task and, where Shapley values were exact, the values of all coalitions.
    Children sum exactly to their parent; leaves + baseline = reward. The sums are checked: exit code 1 when they do not hold.
    """
    from spanloop.pipeline.log.open import open_log

    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    log = open_log(settings, create=False)
    try:
        found = explain_credit(log, orchestration_id)
    finally:
        log.close()
    lines = _message(found.lines, message) if message else _chosen(found.lines, agent)
    if as_json:
        shown = msgspec.structs.replace(found, lines=tuple(lines))
        click.echo(json_shown(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()))
    else:
        _print(found, [line for line in lines if token or message or line.unit != "token"])
    if found.problems:
        sys.exit(1)


def _chosen(lines: Sequence[Line], agent: str) -> list[Line]:
    """The lines of one agent or role with all below; all lines without a name."""
    if not agent:
        return list(lines)
    kept: list[Line] = []
    depth = -1
    for line in lines:
        if 0 <= depth < line.depth:
            kept.append(line)
            continue
        depth = -1
        if line.unit in {"orchestrator", "role", "agent"} and agent in {line.label, line.subject, line.id}:
            kept.append(line)
            depth = line.depth
    if not kept:
        names = sorted({line.label for line in lines if line.unit in {"orchestrator", "role", "agent"}})
        raise SchemaError(f"no agent {agent!r} in this orchestration; there are {', '.join(names)}")
    return kept


def _message(lines: Sequence[Line], message: str) -> list[Line]:
    """A message's account with those above and below it."""
    known = {line.id: line for line in lines}
    own = next(
        (line for line in lines if line.unit == "message" and message in {line.id, line.subject}), None
    )
    if own is None:
        raise SchemaError(
            f"no message {message!r} in this orchestration; a message is named by its call's id"
        )
    kept = {own.id}
    at = own
    while at.parent in known:
        at = known[at.parent]
        kept.add(at.id)
    return [line for line in lines if line.id in kept or line.parent == own.id]


def _print(found: Explanation, lines: Sequence[Line]) -> None:
    click.echo(f"orchestration {found.orchestration_id}  revision {found.revision}  ({found.status})")
    click.echo(
        f"reward {found.reward:+.6f} = baseline {found.baseline:+.6f} + team {found.reward - found.baseline:+.6f}"
    )
    under = f"  reward definitions {found.definitions}" if found.definitions else ""
    click.echo(f"value model {found.value_model}{under}")
    for name, value, weight, status in found.channels:
        if weight or name == "outcome":
            shown = "missing" if value is None else f"{value:+.6f}"
            click.echo(f"  {name}: {shown} x {weight:g}  ({status})")
    click.echo()
    click.echo(
        f"{'account':<{_LABEL_WIDTH}} {'credit':>10} {'raw':>10} {'error':>9} {'residual':>10} {'of rest':>7}  estimator"
    )
    first = min((line.depth for line in lines), default=0)
    for line in lines:
        name = plain_text(line.label)
        label = "  " * (line.depth - first) + (name if name.startswith(line.unit) else f"{line.unit} {name}")
        raw, residual = (_number(value) for value in (line.raw, line.residual))
        error = f"{line.error:.3g}" if line.error else ""
        share = f"{line.share:.0%}" if line.share and line.residual != 0 else ""
        click.echo(
            f"{label[:_LABEL_WIDTH]:<{_LABEL_WIDTH}} {line.credit:>+10.6f} {raw:>10} {error:>9} {residual:>10} {share:>7}"
            f"  {line.estimator}"
        )
    click.echo()
    for name in dict.fromkeys(line.estimator for line in lines):
        if WORDS.get(name):
            click.echo(f"{name}: {WORDS[name]}")
    for game in found.coalitions:
        click.echo(
            "\ncoalitions of those that worked side by side, and the expected reward with their work alone:"
        )
        for item in game:
            click.echo(f"  {item.value:>+10.6f}  {plain_text(', '.join(item.agents)) or '(none)'}")
    click.echo()
    if found.group is not None:
        click.echo(found.group.said)
    if found.problems:
        click.echo("NOT conserved: " + "; ".join(found.problems))
    else:
        click.echo(
            f"conserved: children sum to their parent at all {len(found.lines)} accounts, leaves + baseline = reward"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.6f}"
