"""Verb ``demo``: a thin layer over ``demo.run_demo`` that prints the outcome and three commands to try."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

__all__ = ["demo"]

MINUTES = 5.8
DECISIONS_MINUTES = 3.9
CONCURRENCY = 32
TICKETS = 5_000
DECISIONS_TICKETS = 2_000
DECISIONS_CONCURRENCY = 8
"""Its clients are so light that more would outrun the pipeline."""


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.5),
    default=None,
    help="For everything: start, live part, evaluation, report.  [default: 5.8, with --decisions 3.9]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of tickets, policy and evaluation.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    help="Folder of workspace, logs, results.json and report.html.",
)
@click.option(
    "--decisions",
    is_flag=True,
    help="A team whose LLM is closed (a script stands for it): it asks /v1/decide, and a decision policy is trained.",
)
@click.option("--no-inject", is_flag=True, help="Leave out the bad candidate.")
@click.option("--plain", is_flag=True, help="Lines instead of a live display.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=None,
    help="Tickets in work at once, in each of the two clients.  [default: 32, with --decisions 8]",
)
@click.option(
    "--tickets",
    type=click.IntRange(min=100),
    default=None,
    help="Fresh tickets on which each version is evaluated.  [default: 5000, with --decisions 2000]",
)
def demo(
    *,
    minutes: float | None,
    seed: int,
    out: Path,
    decisions: bool,
    no_inject: bool,
    plain: bool,
    concurrency: int | None,
    tickets: int | None,
) -> None:
    """Run the whole loop on this machine and watch the policy improve.

    A desk of agents (pydantic-ai) works tickets through the gateway; its spans and outcomes become orchestrations, rewards and credit; the
    learner makes candidates; gate and canary decide which of them serves. Near the end a bad candidate is injected.
    Afterwards every champion is evaluated on fresh tickets against random and the exact optimum.

    \b
    spanloop demo
    spanloop demo --minutes 3 --seed 1 --out /tmp/demo --plain
    spanloop demo --decisions
    """
    from spanloop.pipeline.demo import Options, run_demo

    signal.signal(signal.SIGTERM, _interrupt)
    options = Options(
        minutes=minutes or (DECISIONS_MINUTES if decisions else MINUTES),
        seed=seed,
        out=out,
        inject=not no_inject,
        decisions=decisions,
        plain=plain,
        concurrency=concurrency or (DECISIONS_CONCURRENCY if decisions else CONCURRENCY),
        tickets=tickets or (DECISIONS_TICKETS if decisions else TICKETS),
    )
    try:
        results = run_demo(options)
    except KeyboardInterrupt:
        click.echo("stopped; nothing is left running", err=True)
        sys.exit(130)
    click.echo(summary(results, out))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _side(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def summary(results: dict[str, Any], out: Path) -> str:
    """The outcome in a few lines, and three commands."""
    champion, last, totals = results["champion"], results["last_candidate"], results["totals"]
    injection = results["injection"]
    lines = [
        "",
        f"tickets {totals['tickets']} ({totals['tickets_per_s']:.1f}/s), spans {totals['spans']} ({totals['spans_per_s']:.0f}/s), "
        f"updates {totals['updates']}, promotions {sum(p['kind'] == 'promotion' for p in results['promotions']) - 1}",
        f"f of the champion v{champion['version']}       {_side(champion['f'])}   (0 random, 1 optimum, 95 % interval, fresh tickets)",
        f"f of the last candidate v{last['version']} {_side(last['f'])}",
        "beats its best state-blind rule   "
        + "  ".join(
            f"{name} {'yes' if found['beats_blind'] else 'no'} ({found['gain']['mean']:+.3f})"
            for name, found in results["decisions"].items()
        ),
        f"tickets that gating cost          {results['gating_cost']['tickets']} ({results['gating_cost']['share']:.0%})",
    ]
    if injection is not None:
        lines.append(f"injected bad candidate v{injection['version']}        {injection['outcome']}")
    lines += ["", f"report: {out / 'report.html'}   figures: {out / 'results.json'}", "", "try:"]
    return "\n".join([*lines, *(f"  {command}" for command in commands(results, out))])


def commands(results: dict[str, Any], out: Path) -> list[str]:
    """Three commands that show more of this run."""
    workspace = shlex.quote(str(out / "workspace"))
    sql = "SELECT policy_version, count(*) AS calls, round(avg(reward), 3) AS reward FROM samples GROUP BY 1 ORDER BY 3 DESC LIMIT 5"
    return [
        f"spanloop explain credit {results['example'][:12]} --workspace {workspace}",
        f'spanloop query "{sql}" --workspace {workspace}',
        f"spanloop provenance {results['champion']['version']} --workspace {workspace}",
    ]
