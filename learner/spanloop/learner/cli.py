"""Verbs ``policies`` and ``provenance``: what is registered, served and taught, and requests to the running learner.

Requests (inject, promote, rollback, freeze, unfreeze) are events on the policies topic: durable, taken once, in order, also by a
learner that is started later. ``--wait`` says how long to look for the answer. What is on the log without an answer is not
queued twice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spanloop.pipeline.finite import FiniteRange
from spanloop.pipeline.ports import Log, new_record
from spanloop.pipeline.screen import json_shown
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError, SpanloopError, TransientError
from spanloop.schemas.events import CandidateRegistered, PolicyCommand, PolicyCommandFinished, decode
from spanloop.schemas.ids import policy_name, policy_number
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.learner.promotion import PromotionState

__all__ = ["policies", "provenance"]

_CONFIG_OPTION = partial(
    click.option,
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file of settings.",
)
_WORKSPACE_OPTION = partial(
    click.option,
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder.  [default: the settings' one]",
)
_JSON_OPTION = partial(click.option, "--json", "as_json", is_flag=True, help="One JSON object.")
_CONFIG, _WORKSPACE, _JSON = _CONFIG_OPTION(), _WORKSPACE_OPTION(), _JSON_OPTION()
_WAIT = click.option(
    "--wait",
    type=FiniteRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the learner's answer.",
)
_REASON = click.option("--reason", default="", help="Why; kept with the event.")


class _Refused(SpanloopError):
    exit_code = 1


@dataclass
class _Place:
    """What was said of where and how, before or after the verb; settings are read when all of it is known."""

    config_file: Path | None
    workspace: Path | None
    as_json: bool

    @cached_property
    def settings(self) -> Settings:
        return load_settings(
            self.config_file, {"workspace": self.workspace} if self.workspace is not None else None
        )


def _also_after_the_verb(command: Callable[..., Any]) -> Callable[..., Any]:
    """The group's options, to be given after the verb too; there they win."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value and parameter.name is not None:
            setattr(context.obj, parameter.name, value)

    for option in (_JSON_OPTION, _WORKSPACE_OPTION, _CONFIG_OPTION):
        command = option(callback=keep, expose_value=False)(command)
    return command


@contextmanager
def _open(settings: Settings) -> Iterator[Log]:
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.sealing.opening import opened_log

    if not settings.bootstrap_servers and not settings.database.exists():
        raise SchemaError(
            f"{settings.workspace} is no workspace: it has no {settings.database.name}; name one with --workspace"
        )
    log = opened_log(open_log(settings, create=False), settings)
    try:
        yield log
    finally:
        log.close()


def _print_json(value: Any) -> None:
    click.echo(json_shown(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def _number(text: str) -> int:
    number = int(text) if text.isdigit() else policy_number(text)
    if number < 0:
        raise SchemaError(f"{text!r} is no version; give its number or its name, such as 12 or policy@v12")
    return number


# ---------------------------------------------------------------- policies


@click.group(invoke_without_command=True)
@_CONFIG
@_WORKSPACE
@_JSON
@click.pass_context
def policies(context: click.Context, config_file: Path | None, workspace: Path | None, as_json: bool) -> None:
    """List versions, promotions and routing; compare, promote, roll back, freeze.

    \b
    spanloop policies                          all versions and what serves
    spanloop policies show 12                  one version with its gates and canaries
    spanloop policies diff 11 12               weights, samples, evaluations and settings that differ
    spanloop policies promote 12 --reason "..." serves at once; what the gate said is kept with the reason
    spanloop policies rollback --reason "..."  the champion before this one serves again
    spanloop policies show 12 --workspace my-loop   options may stand before or after the verb
    """
    context.obj = _Place(config_file, workspace, as_json)
    if context.invoked_subcommand is None:
        context.invoke(list_)


@policies.command("list")
@_also_after_the_verb
@click.pass_context
def list_(context: click.Context) -> None:
    """All versions and what serves now."""
    place: _Place = context.obj
    with _open(place.settings) as log:
        state = _state(log, place.settings)
    rows = [_row(state, v) for v in sorted(state.versions)]
    if place.as_json:
        routing = None if state.routing is None else msgspec.to_builtins(state.routing)
        _print_json(
            {
                "champion": state.champion,
                "epoch": state.epoch,
                "frozen": state.frozen,
                "sentinels": [msgspec.to_builtins(alarm) for alarm in state.sentinels],
                "routing": routing,
                "versions": rows,
            }
        )
        return
    if not rows:
        click.echo("no versions yet: the learner registers the first one when it starts")
        return
    name = place.settings.gateway.policy
    click.echo(f"{'version':<12} {'batch':>5} {'taught':>7} {'status':<10} {'gate (lower bound)':<22} sha256")
    for row in rows:
        gate = (
            ""
            if row["gate"] is None
            else f"{'passed' if row['gate']['passed'] else 'failed'} ({row['gate']['lower']:+.4f})"
        )
        click.echo(
            f"{policy_name(name, row['version']):<12} {row['batch']:>5} {row['orchestrations']:>7} {row['status']:<10} {gate:<22} "
            f"{row['sha256'][:12]}"
        )
    click.echo(_serving_line(state, name))


def _state(log: Log, settings: Settings) -> PromotionState:
    from spanloop.learner.history import read_policies
    from spanloop.learner.promotion import fold

    return fold(read_policies(log, settings.tenant, settings.gateway.policy))


def _row(state: PromotionState, version: int) -> dict[str, Any]:
    candidate, gate = state.versions[version], state.gates.get(version)
    status = "candidate"
    if version == state.champion:
        status = "champion"
    elif state.canary is not None and version == state.canary.version:
        status = "canary"
    elif version in state.retired:
        status = "retired"
    elif version in state.champions:
        status = "former"
    elif state.routing is not None and version == state.routing.learner:
        status = "learning"
    return {
        "version": version,
        "parent": candidate.parent,
        "batch": candidate.batch,
        "orchestrations": candidate.orchestrations,
        "status": status,
        "injected": candidate.injected,
        "mlflow_version": candidate.mlflow_version,
        "path": candidate.path,
        "sha256": candidate.sha256,
        "gate": None
        if gate is None
        else {"against": gate.against, "passed": gate.passed, "estimate": unmicro(gate.estimate), "lower": unmicro(gate.lower),
              "ess": gate.ess, "n": gate.n, "reason": gate.reason},
        "dropped": candidate.dropped,
        "metrics": candidate.metrics,
    }  # fmt: skip


def _serving_line(state: PromotionState, name: str) -> str:
    if state.routing is None:
        return "nothing is routed to yet"
    parts = [f"champion {policy_name(name, state.routing.champion)} (epoch {state.epoch})"]
    if state.routing.learner >= 0:
        parts.append(
            f"learning {policy_name(name, state.routing.learner)} {state.routing.learning_share:.0%}"
        )
    if state.routing.canary >= 0:
        parts.append(f"canary {policy_name(name, state.routing.canary)} {state.routing.canary_share:.0%}")
    lines = ["serving: " + ", ".join(parts) + ("; frozen" if state.frozen else "")]
    for alarm in state.sentinels:
        lines.append(f"frozen by {alarm.reason}")
        such = f"such as {', '.join(alarm.orchestrations)}; " if alarm.orchestrations else ""
        lines.append(f"  {such}`spanloop policies unfreeze` accepts it")
    return "\n".join(lines)


def _audited(workspace: Path, version: int, policy: str) -> str:
    """What the last audit of a served version found; empty: it was not in routing then."""
    from spanloop.learner.audit import read_audit

    found = read_audit(workspace).get(version)
    if found is None:
        return ""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(found.at_ns / 1e9))
    return f"{found.told(policy)}, audited {when}"


@policies.command()
@click.argument("version")
@_also_after_the_verb
@click.pass_context
def show(context: click.Context, version: str) -> None:
    """One VERSION (12 or policy@v12) with every event about it."""
    place: _Place = context.obj
    number = _number(version)
    with _open(place.settings) as log:
        from spanloop.learner.history import read_policies

        state = _state(log, place.settings)
        if number not in state.versions:
            raise SchemaError(f"version {number} is not registered; `spanloop policies` lists what is")
        events = [
            msgspec.to_builtins(e)
            for e, _ in read_policies(log, place.settings.tenant, place.settings.gateway.policy)
            if number in (getattr(e, "version", None), getattr(e, "to", None))
        ]
    from spanloop.learner.artifact import signed_by
    from spanloop.learner.signing import trust_of

    workspace = place.settings.workspace
    row = {
        **_row(state, number),
        "served": _audited(workspace, number, place.settings.gateway.policy),
        "signed_by": signed_by(workspace / state.versions[number].path, trust_of(workspace)),
    }
    if place.as_json:
        _print_json({**row, "events": events})
        return
    for key, value in row.items():
        click.echo(f"{key:<15} {value if value not in ('', None) else '-'}")
    for event in events:
        shown = {
            k: v
            for k, v in event.items()
            if k not in ("type", "tenant", "policy", "metrics", "path", "sha256")
        }
        click.echo(f"{event['type']:<22} " + " ".join(f"{k}={v}" for k, v in shown.items()))


@policies.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Orchestrations and tensors printed; --json has all.",
)
@_also_after_the_verb
@click.pass_context
def diff(context: click.Context, a: str, b: str, limit: int) -> None:
    """What makes version B another than version A: weights, samples that taught it, evaluations, settings.

    \b
    spanloop policies diff 11 12
    spanloop policies diff policy@v3 policy@v12 --json
    """
    from spanloop.learner.differences import differences, lines

    place: _Place = context.obj
    settings = place.settings
    with _open(settings) as log:
        found = differences(log, settings, _number(a), _number(b))
    if place.as_json:
        _print_json(found)
        return
    for line in lines(found, settings.gateway.policy, limit):
        click.echo(line)


@policies.command()
@click.argument("version")
@click.option(
    "--without-evidence", is_flag=True, help="Although no gate speaks for it against the present champion."
)
@click.option("--reason", required=True, help="Why; kept with the event, beside what the gate said.")
@_WAIT
@_also_after_the_verb
@click.pass_context
def promote(context: click.Context, version: str, without_evidence: bool, reason: str, wait: float) -> None:
    """Let VERSION serve as champion now, without a canary.

    \b
    spanloop policies promote 12 --reason "reviewed by hand, incident 7"
    """
    place: _Place = context.obj
    number = _number(version)
    with _open(place.settings) as log:
        speaks, told = _state(log, place.settings).evidence(number)
    click.echo(f"{policy_name(place.settings.gateway.policy, number)}: {told}", err=True)
    if not speaks and not without_evidence:
        raise SchemaError(
            f"nothing speaks for version {number} against the present champion: {told}. --without-evidence promotes it nevertheless"
        )
    _ask(place, "promote", str(number), reason, wait)


@policies.command()
@click.option("--to", default="", help="Version to go back to.  [default: the champion before this one]")
@_REASON
@_WAIT
@_also_after_the_verb
@click.pass_context
def rollback(context: click.Context, to: str, reason: str, wait: float) -> None:
    """Let an older version serve instead of the champion, which is never promoted again."""
    _ask(context.obj, "rollback", str(_number(to)) if to else "", reason, wait)


@policies.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--unsigned", is_flag=True, help="Also a folder that nobody whom this workspace trusts has signed."
)
@_REASON
@_WAIT
@_also_after_the_verb
@click.pass_context
def inject(context: click.Context, path: Path, unsigned: bool, reason: str, wait: float) -> None:
    """Make the artifact folder PATH a candidate: next in line for gate and canary.

    The learner signs the version as injected. A folder with a wrong signature is refused always.
    """
    from spanloop.learner.artifact import signer_of
    from spanloop.learner.model import read_manifest
    from spanloop.learner.signing import trust_of

    place: _Place = context.obj
    read_manifest(path)  # a folder of something else is refused here, not when a learner next runs
    if not unsigned and not signer_of(path, trust_of(place.settings.workspace)):
        raise SchemaError(
            f"{path} is signed by nobody whom this workspace trusts: give --unsigned if you know where it comes from, or put the "
            "signer's public key into signing/trusted/"
        )
    _ask(context.obj, "inject", str(path.resolve()), reason, wait)


@policies.command()
@_REASON
@_WAIT
@_also_after_the_verb
@click.pass_context
def freeze(context: click.Context, reason: str, wait: float) -> None:
    """Stop training and promotions; the champion serves everything."""
    _ask(context.obj, "freeze", "", reason, wait)


@policies.command()
@_REASON
@_WAIT
@_also_after_the_verb
@click.pass_context
def unfreeze(context: click.Context, reason: str, wait: float) -> None:
    """Go on where freeze stopped."""
    _ask(context.obj, "unfreeze", "", reason, wait)


@policies.command()
@click.option(
    "--without",
    "sources",
    multiple=True,
    required=True,
    help="orchestration=ID, harness=NAME or group=NAME; repeatable.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for the new version; it must not be there."
)
@_also_after_the_verb
@click.pass_context
def retrain(context: click.Context, sources: tuple[str, ...], out: Path | None) -> None:
    """Say which versions a source taught, and with --out train again without it.

    The folder is signed; `spanloop policies inject FOLDER` makes it a candidate.

    \b
    spanloop policies retrain --without orchestration=4be1...
    spanloop policies retrain --without harness=old-desk --out clean
    """
    from spanloop.learner.artifact import Origin, code_version
    from spanloop.learner.model import save_artifact
    from spanloop.learner.retraining import retrain as train_again
    from spanloop.learner.retraining import taught_by_source
    from spanloop.learner.signing import open_signer
    from spanloop.learner.trainer import initial_policy
    from spanloop.learner.update import exact_numerics

    place: _Place = context.obj
    settings = place.settings
    with exact_numerics(), _open(settings) as log:
        taught = taught_by_source(log, settings, sources)
        sha256 = ""
        if out is not None:
            net, training = train_again(log, settings, sources)
            about = Origin(
                batch=training.state.batch, to_offset=training.state.to_offset, code=code_version(),
                injected=f"retrained without {', '.join(sources)}",
            )  # fmt: skip
            _, tokenizer, _ = initial_policy(settings)
            sha256 = save_artifact(
                out, net, tokenizer, about=msgspec.to_builtins(about), signer=open_signer(settings.workspace)
            )
    if place.as_json:
        _print_json({"orchestrations": taught.orchestrations, "versions": taught.versions, "sha256": sha256})
        return
    names = ", ".join(policy_name(settings.gateway.policy, v) for v in taught.versions)
    click.echo(f"{len(taught.orchestrations)} orchestrations trained on; they taught {names or 'no version'}")
    if out is not None:
        click.echo(
            f"trained again without them: {out} (sha256 {sha256[:12]}); spanloop policies inject {out}"
        )


def _ask(place: _Place, kind: str, argument: str, reason: str, wait: float) -> None:
    """Append the request, unless it waits there already, and wait for the learner's answer."""
    settings = place.settings
    command = PolicyCommand(
        tenant=settings.tenant, policy=settings.gateway.policy, command_id=uuid.uuid4().hex, kind=kind,
        argument=argument, reason=reason,
    )  # fmt: skip
    with _open(settings) as log:
        registered, waiting = _so_far(log, settings)
        if not registered and kind != "inject":
            raise SchemaError(
                f"there is no policy {settings.gateway.policy!r} of tenant {settings.tenant!r} in {settings.workspace} to {kind}: "
                "nothing was queued. A learner registers the first version when it starts (spanloop up with learner.enabled); "
                "check --workspace, or `spanloop doctor`"
            )
        if waiting and (waiting[-1].kind, waiting[-1].argument) == (kind, argument):
            command = waiting[-1]
            click.echo(
                f"{kind} is on the log already and has no answer yet: it is not queued again", err=True
            )
            after = -1
        else:
            if waiting:
                told = ", ".join(f"{c.kind} {c.argument}".strip() for c in waiting)
                click.echo(f"note: the learner takes first what waits on the log: {told}", err=True)
            (appended,) = log.append([new_record(command)])
            after = appended.offset
        answer = _answer(log, command, after, wait)
    if answer is None:
        raise TransientError(
            f"{kind} is on the log, but no learner took it within {wait:.0f} s; it will when `spanloop up` runs: "
            "do not repeat it"
        )
    if place.as_json:
        _print_json(answer)
    if answer.status != "done":
        raise _Refused(f"{kind} was refused: {answer.message}")
    if not place.as_json:
        about = f": {policy_name(settings.gateway.policy, answer.version)}" if answer.version >= 0 else ""
        click.echo(f"{kind} done{about}")


def _so_far(log: Log, settings: Settings) -> tuple[bool, list[PolicyCommand]]:
    """Whether any version is registered, and the requests without an answer, in order."""
    from spanloop.learner.history import read_policies

    registered = False
    waiting: dict[str, PolicyCommand] = {}
    for event, _ in read_policies(log, settings.tenant, settings.gateway.policy):
        if isinstance(event, PolicyCommand):
            waiting[event.command_id] = event
        elif isinstance(event, PolicyCommandFinished):
            waiting.pop(event.command_id, None)
        registered = registered or isinstance(event, CandidateRegistered)
    return registered, list(waiting.values())


def _answer(log: Log, command: PolicyCommand, after: int, wait: float) -> PolicyCommandFinished | None:
    deadline = time.monotonic() + wait
    while True:
        for record in log.read([command.TOPIC], {command.TOPIC: after}, 500):
            after = record.offset
            event = decode(record.value)
            if isinstance(event, PolicyCommandFinished) and event.command_id == command.command_id:
                return event
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


# ---------------------------------------------------------------- provenance


@click.command()
@click.argument("version", required=False)
@click.option(
    "--orchestration",
    default="",
    help="The other way: which versions it taught; the beginning of an id is enough.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Orchestrations printed; --json has all.",
)
@_CONFIG
@_WORKSPACE
@_JSON
def provenance(
    *,
    version: str | None,
    orchestration: str,
    limit: int,
    config_file: Path | None,
    workspace: Path | None,
    as_json: bool,
) -> None:
    """Show which orchestrations taught VERSION, or which versions an orchestration taught.

    \b
    spanloop provenance 12                  batches, offsets and the last orchestrations
    spanloop provenance --orchestration ID  which versions learned from it
    """
    if (version is None) == (not orchestration):
        raise click.UsageError("give either a VERSION or --orchestration ID")
    place = _Place(config_file, workspace, as_json)
    with _open(place.settings) as log:
        if version is None:
            _show_taught(log, place, orchestration)
        else:
            _show_history(log, place, _number(version), limit)


def _show_taught(log: Log, place: _Place, orchestration: str) -> None:
    from spanloop.learner.provenance import policy_config, taught_by

    settings = place.settings
    config = policy_config(settings.workspace, _state(log, settings))
    orchestration, batch, versions = taught_by(
        log, config, orchestration, tenant=settings.tenant, policy=settings.gateway.policy
    )
    if place.as_json:
        _print_json({"orchestration_id": orchestration, "batch": batch, "versions": versions})
    elif batch < 0:
        click.echo(
            f"no batch was trained on {orchestration} (held out, stale, not closed yet, or not of this workspace)"
        )
    else:
        names = [policy_name(settings.gateway.policy, v) for v in versions]
        click.echo(f"{orchestration} was in batch {batch}; it taught " + (f"{names[0]} and, through it, {names[1]} .. {names[-1]}"
                   if len(names) > 1 else names[0] if names else "a version that is being registered"))  # fmt: skip


def _show_history(log: Log, place: _Place, number: int, limit: int) -> None:
    from spanloop.learner.provenance import policy_config
    from spanloop.learner.provenance import provenance as history_of

    settings = place.settings
    config = policy_config(settings.workspace, _state(log, settings))
    history = history_of(log, config, number, tenant=settings.tenant, policy=settings.gateway.policy)
    if place.as_json:
        _print_json(history)
        return
    name = policy_name(settings.gateway.policy, number)
    candidate = history.candidate
    click.echo(f"{name}  sha256 {candidate.sha256}  MLflow version {candidate.mlflow_version}")
    if candidate.injected:
        click.echo(f"put there by hand ({candidate.injected}): no orchestration of this workspace taught it")
        return
    total = sum(len(b.lessons) for b in history.batches)
    click.echo(
        f"{len(history.batches)} batches, {total} orchestrations, descends from {policy_name(settings.gateway.policy, 0)}"
    )
    for batch in history.batches:
        dropped = ", ".join(f"{n} {reason}" for reason, n in batch.dropped.items())
        click.echo(
            f"  batch {batch.batch:>4} -> v{batch.version:<4} samples ({batch.from_offset}, {batch.to_offset}]  "
            f"{len(batch.lessons)} orchestrations" + (f"; not used: {dropped}" if dropped else "")
        )
    lessons = [lesson for batch in history.batches for lesson in batch.lessons]
    if limit and lessons:
        click.echo(f"last {min(limit, len(lessons))}:")
        for lesson in lessons[-limit:]:
            acted = ",".join(f"v{v}" for v in lesson.acted_by)
            traces = " ".join(lesson.trace_ids[:3])
            click.echo(
                f"  {lesson.orchestration_id} reward {lesson.reward:+.3f} acted by {acted}  traces {traces}"
            )
