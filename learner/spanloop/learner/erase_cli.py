"""Verb ``erase``: make one person's content unreadable, for good."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.settings import load_settings

if TYPE_CHECKING:
    from spanloop.learner.erasing import Plan

__all__ = ["erase"]


@click.command()
@click.argument("subject")
@click.option("--tenant", default="", help="Whose subject it is.  [default: the settings' tenant]")
@click.option("--dry-run", is_flag=True, help="Say what would be erased; change nothing.")
@click.option(
    "--readmit", is_flag=True, help="Let later traces of an erased subject be kept again; bring nothing back."
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."
)
@click.option(
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder.  [default: the settings' one]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def erase(
    *,
    subject: str,
    tenant: str,
    dry_run: bool,
    readmit: bool,
    config_file: Path | None,
    workspace: Path | None,
    as_json: bool,
) -> None:
    """Destroy the keys of SUBJECT's content: texts, token ids and log-probabilities of all traces that name them.

    SUBJECT is a value of one of content.subjects, ATTRIBUTE=VALUE, trace=ID or orchestration=ID. Structure, hashes, rewards
    and credit stay. Restart the learner and the pipeline afterwards, so that their memory forgets too. Exit code 3: some of
    the traces were written without keys, so that what stands in the clear is not erased.

    \b
    spanloop erase u-1 --dry-run
    spanloop erase user.id=u-1 --tenant acme
    spanloop erase trace=4bf92f3577b34da6a3ce929d0e0e4736
    """
    from spanloop.learner.erasing import erase as destroy
    from spanloop.learner.erasing import plan_erasure, subjects_of
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.sealing.opening import OpenedLog, open_vault

    settings = load_settings(config_file, {"workspace": workspace} if workspace is not None else None)
    tenant = tenant or settings.tenant
    vault = open_vault(settings)
    if vault is None:
        raise ConfigError(
            "there is no key store: content.subject_keys was never on here, nothing can be erased by key"
        )
    if not settings.bootstrap_servers and not settings.database.exists():
        raise SchemaError(f"{settings.workspace} is no workspace: it has no {settings.database.name}")
    log = OpenedLog(open_log(settings, create=False), vault)
    try:
        if readmit:
            vault.keys.readmit(tenant, subjects_of(vault, tenant, subject, settings.content.subjects))
            click.echo("later traces of this subject are kept again; what was erased stays so")
            return
        plan = plan_erasure(log, vault, settings, subject, tenant=tenant)
        if not dry_run:
            destroy(
                log, vault, plan, erasure_id=uuid.uuid4().hex, subject=subject, policy=settings.gateway.policy,
                now_ns=time.time_ns(),
            )  # fmt: skip
    finally:
        log.close()
    if as_json:
        click.echo(
            msgspec.json.format(msgspec.json.encode({"erased": not dry_run, "plan": plan}), indent=2).decode()
        )
    else:
        _print(plan, dry_run)
    if plan.clear and not dry_run:
        raise SystemExit(3)


def _print(plan: Plan, dry_run: bool) -> None:
    verb = "would be destroyed" if dry_run else "destroyed"
    click.echo(
        f"{plan.keys} keys {verb}: {len(plan.trace_ids)} traces, {len(plan.orchestration_ids)} orchestrations "
        f"of tenant {plan.tenant}"
    )
    if plan.versions:
        click.echo("taught by them, weights unchanged: " + ", ".join(f"v{v}" for v in plan.versions))
    if plan.value_models:
        click.echo("value models that may have learned from them: " + ", ".join(plan.value_models))
    if plan.clear:
        click.echo(
            f"{len(plan.clear)} traces never had a key (written before content.subject_keys, or without content): "
            + ", ".join(plan.clear[:5])
            + (" ..." if len(plan.clear) > 5 else "")
        )
    if not dry_run:
        click.echo("back-ups of the key store still open this content: delete or rotate them now")
