"""Verb ``explain metrics``: a thin layer over ``rewards.metrics``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import msgspec

from spanloop.pipeline.pomdp_cli import last_content
from spanloop.pipeline.rewards.metrics import Metrics, metrics_of
from spanloop.pipeline.screen import json_shown
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import Reward, RewardsComputed, decode
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["metrics"]

_ROWS = (
    ("E1", "success", "outcome"),
    ("E2", "parallel_efficiency", "work / makespan"),
    ("E2", "work_over_span", "work / longest causal path"),
    ("E3", "useful_agents", "sub-agents' actions whose work reached the end"),
    ("E3", "redundant_messages", "messages that repeat one (needs texts)"),
    ("E4", "protocol_overhead", "tokens that only coordinated"),
    ("E4", "error_amplification", "events reached by errors / first errors"),
    ("E4", "safety_events", "triggered"),
    ("E4", "interventions", "of people"),
)


@click.command()
@click.argument("orchestration_id", metavar="ID")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="Folder of the workspace. Default: the settings' one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; null is unknown.")
def metrics(orchestration_id: str, workspace: Path | None, config: Path | None, as_json: bool) -> None:
    """E1 to E4 and the five trace metrics of the orchestration ID (arXiv 2605.02801, table 13).

    \b
    spanloop explain metrics 3fa9
    spanloop explain metrics 3fa9 --json | jq .parallel_efficiency

    A metric that the orchestration does not tell of is unknown, not zero.
    """
    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    content = last_content(settings, orchestration_id)
    found = metrics_of(
        content, _rewards(settings, content.tenant, content.orchestration_id), _texts(settings, content)
    )
    if as_json:
        click.echo(json_shown(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()))
        return
    click.echo(f"orchestration {content.orchestration_id}")
    for dimension, name, meaning in _ROWS:
        click.echo(f"{dimension}  {name.replace('_', ' '):<20} {_shown(found, name):>10}  {meaning}")


def _shown(found: Metrics, name: str) -> str:
    value = getattr(found, name)
    return "unknown" if value is None else f"{value:g}" if isinstance(value, int) else f"{value:.4f}"


def _texts(settings: Settings, content: OrchestrationContent) -> dict[str, str]:
    """What was said in messages between agents, by event, where it is kept."""
    from spanloop.pipeline.attribution.explain import words_said
    from spanloop.pipeline.log.open import open_log

    messages = [event for event in content.events if event.type == "message" and event.to != "user"]
    if not messages:
        return {}
    log = open_log(settings, create=False)
    try:
        words = words_said(log, content)
    finally:
        log.close()
    shared = Counter(event.evidence for event in messages)
    messages = [
        event for event in messages if shared[event.evidence] == 1
    ]  # else whose words they are is not known
    said = {e.id: "\n".join(words[span].text for span in e.evidence if span in words) for e in messages}
    return {name: text for name, text in said.items() if text}


def _rewards(settings: Settings, tenant: str, name: str) -> tuple[Reward, ...]:
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.log.scan import scan

    last: RewardsComputed | None = None
    log = open_log(settings, create=False)
    try:
        for record in scan(log, (topics.REWARDS,)):
            if record.key != f"{tenant}/{name}":
                continue
            try:
                event = decode(record.value)
            except SchemaError:
                continue
            if isinstance(event, RewardsComputed):
                last = event
    finally:
        log.close()
    return last.rewards if last is not None else ()
