"""Verb ``explain pomdp``: a thin layer over ``pomdp``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from spanloop.pipeline.assembly.report import aligned, plain_text
from spanloop.pipeline.pomdp import PomdpTrace, Step, pomdp_of
from spanloop.pipeline.screen import json_shown
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import OrchestrationRevised, decode
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["last_content", "pomdp"]


@click.command()
@click.argument("orchestration_id", metavar="ID")
@click.option("--agent", default="", help="Only this agent (name, role or id).")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder of the workspace. Default: the settings' one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object; times in nanoseconds since 1970.")
def pomdp(
    orchestration_id: str, agent: str, workspace: Path | None, config: Path | None, as_json: bool
) -> None:
    """Who was active when, and what each agent saw and did: the orchestration ID as a Dynamic-Dec-POMDP.

    \b
    spanloop explain pomdp 3fa9
    spanloop explain pomdp 3fa9 --agent researcher
    spanloop explain pomdp 3fa9 --json | jq '.changes[] | {t_ns, active}'

    A step is a model call: what the agent had seen since the last one, and what it did by it. The same is in SQL:
    spanloop query "FROM pomdp('3fa9')" and "FROM active_agents('3fa9')".
    """
    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    content = last_content(settings, orchestration_id)
    trace = _only(pomdp_of(content), agent)
    if as_json:
        click.echo(json_shown(msgspec.json.format(msgspec.json.encode(trace), indent=2).decode()))
        return
    click.echo("\n".join(_lines(trace, content.started_ns)))


def last_content(settings: Settings, prefix: str) -> OrchestrationContent:
    """The last revision of the orchestration that ``prefix`` names."""
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.log.scan import scan

    last: dict[tuple[str, str], OrchestrationRevised] = {}
    log = open_log(settings, create=False)
    try:
        for record in scan(log, (topics.ORCHESTRATIONS,)):
            try:
                event = decode(record.value)
            except SchemaError:
                continue
            if isinstance(event, OrchestrationRevised) and event.orchestration_id.startswith(prefix):
                last[event.tenant, event.orchestration_id] = event
    finally:
        log.close()
    found = [event for event in last.values() if event.content is not None]
    exact = [event for event in found if event.orchestration_id == prefix]
    if len(exact or found) != 1:
        what = "no orchestration" if not found else f"{len(found)} orchestrations"
        raise SchemaError(f"{what} with an id that begins with {prefix!r}; `spanloop traces` lists them")
    content = (exact or found)[0].content
    assert content is not None  # noqa: S101 - those without were left out
    return content


def _only(trace: PomdpTrace, agent: str) -> PomdpTrace:
    if not agent:
        return trace
    kept = tuple(run for run in trace.agents if agent in (run.name, run.role, run.id))
    if not kept:
        names = ", ".join(sorted({run.name for run in trace.agents}))
        raise SchemaError(f"no agent {agent!r} in this orchestration; there are {names}")
    return msgspec.structs.replace(trace, agents=kept)


def _lines(trace: PomdpTrace, start_ns: int) -> list[str]:
    names = {run.id: run.name for run in trace.agents}
    lines = [
        plain_text(
            f"orchestration {trace.orchestration_id}: at most {trace.most_active} agents at once"
            + ("; nobody was spawned" if trace.linear else "")
        ),
        *aligned(
            ("t s", "|I_t|", "joined", "left"),
            [
                (_seconds(c.t_ns, start_ns), len(c.active), " ".join(names.get(i, i) for i in c.joined),
                 " ".join(names.get(i, i) for i in c.left))
                for c in trace.changes
            ],
        ),
    ]  # fmt: skip
    for run in trace.agents:
        lines += ["", plain_text(f"agent {run.name}  {run.id}")]
        rows = [
            (s.index, _seconds(s.t_ns, start_ns), _seen(s), _done(s), s.policy_version or s.model)
            for s in run.steps
        ]
        lines += aligned(("step", "t s", "saw", "did", "model"), rows)
    return lines


def _seconds(t_ns: int, start_ns: int) -> str:
    return f"{(t_ns - start_ns) / 1e9:.3f}"


def _seen(step: Step) -> str:
    return ", ".join(
        f"{o.kind} {o.source} {o.status if o.status != 'ok' else ''}".strip() for o in step.observations
    )


def _done(step: Step) -> str:
    told = ", ".join(f"{act.kind} {act.target}".strip() for act in step.actions)
    return told or ("answered" if step.call_id else "")
