"""Verb ``explain failure``: a thin layer over ``attribution.explain``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from spanloop.pipeline.assembly.report import aligned, plain_text
from spanloop.pipeline.attribution.explain import Failure, explain_failure
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.settings import load_settings

__all__ = ["failure"]


@click.command()
@click.argument("orchestration_id", metavar="ID")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="Steps in the table.")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder of the workspace. Default: the settings' one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every agent and step.")
def failure(
    orchestration_id: str, top: int, workspace: Path | None, config: Path | None, as_json: bool
) -> None:
    """Which agent and which step made the orchestration ID fail, with probabilities. Calls no model.

    \b
    spanloop explain failure 3fa9
    spanloop explain failure 3fa9 --top 10
    spanloop explain failure 3fa9 --json | jq '.steps[0] | {step, agent, probability, span_ids}'

    It compares the steps of the log with each other: who acted when, what was said, what the answer rests on; where the
    orchestration has credit, the ledger's losses too. Take it as where to look first: it is wrong often, and the table says how
    often it was on logs with known culprits. Texts are read where the deployment keeps them and never printed.
    """
    from spanloop.pipeline.log.open import open_log

    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    log = open_log(settings, create=False)
    try:
        found = explain_failure(log, orchestration_id)
    finally:
        log.close()
    if as_json:
        click.echo(json_shown(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()))
        return
    click.echo("\n".join(_lines(found, top)))


def _lines(found: Failure, top: int) -> list[str]:
    lines = [
        plain_text(
            f"orchestration {found.orchestration_id}  {found.model}  confidence {found.confidence}, no model was called"
        ),
        *(f"  {plain_text(note)}" for note in found.notes),
        *(plain_text(f"  {source} heard with weight {weight:.2f}") for source, weight in found.opinions),
        "",
        *aligned(
            ("agent", "P", "steps"), [(a.agent or "?", f"{a.probability:.3f}", a.steps) for a in found.agents]
        ),
        "",
        *aligned(
            ("step", "agent", "kind", "P", "evidence", "why"),
            [
                (s.step, s.agent or "?", s.kind, f"{s.probability:.3f}", " ".join(s.span_ids[:1]), "; ".join(s.reasons))
                for s in found.steps[:top]
            ],
        ),
    ]  # fmt: skip
    if len(found.steps) > top:
        rest = 1 - sum(s.probability for s in found.steps[:top])
        lines.append(f"{len(found.steps) - top} more steps hold {rest:.3f}")
    return [*lines, "", *_accuracy(found.accuracy)]


def _accuracy(measured: Mapping[str, Any]) -> list[str]:
    if not measured:
        return ["how often such answers are right was not measured for these weights"]
    told = [
        f"{kind} logs: agent {_part(part['agent'])}, step {_part(part['step_0'])}, step within 3 {_part(part['step_3'])}"
        for kind, part in measured.items()
    ]
    return ["how often the first answer was right on labelled logs not seen before (95 % interval):"] + [
        f"  {line}" for line in told
    ]


def _part(value: Mapping[str, Any]) -> str:
    low, high = value["wilson95"]
    return f"{value['mean']:.2f} ({low:.2f} to {high:.2f})"
