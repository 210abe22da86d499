"""``spanloop feedback``; ``spanloop import`` is in ``import_cli``."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spanloop.collectors.import_cli import import_
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError, TransientError
from spanloop.schemas.settings import Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.ports import Log
    from spanloop.schemas.events import FeedbackReceived

__all__ = ["feedback", "import_"]

_WORKSPACE = click.option(
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder.  [default: .spanloop]",
)
_CONFIG = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."
)


def _settings(config: Path | None, workspace: Path | None, tenant: str | None) -> Settings:
    flags: dict[str, Any] = {}
    if workspace is not None:
        flags["workspace"] = workspace
    if tenant is not None:
        flags["tenant"] = tenant
    return load_settings(config, flags)


@click.command()
@click.option("--orchestration", help="Id of the orchestration that is scored.")
@click.option("--trace", help="Or of a trace of it.")
@click.option("--span", help="Or of a span.")
@click.option("--response", help="Or of a model's response (the id in its answer).")
@click.option("--value", required=True, type=float, help="The score; the outcome is usually between 0 and 1.")
@click.option("--name", default="outcome", show_default=True, help="Channel; outcome is the team's reward.")
@click.option("--label", default="", help="Short label, such as resolved.")
@click.option("--comment", default="", help="Free text; kept only where the deployment keeps content.")
@click.option("--id", "feedback_id", default="", help="Your own id; another value under it is a correction.")
@click.option(
    "--url", help="Collector, e.g. http://127.0.0.1:4318; without it the workspace's log is written."
)
@click.option("--key", envvar="SPANLOOP_KEY", help="Scorer's key for --url.  [env: SPANLOOP_KEY]")
@_WORKSPACE
@_CONFIG
@click.option("--tenant", help="Tenant, when writing to a workspace.  [default: the settings' tenant]")
def feedback(  # noqa: PLR0917 - one argument an option
    orchestration: str | None, trace: str | None, span: str | None, response: str | None, value: float, name: str,
    label: str, comment: str, feedback_id: str, url: str | None, key: str | None, workspace: Path | None,
    config: Path | None, tenant: str | None,
) -> None:  # fmt: skip
    """Send an outcome for an orchestration, a trace, a span or a model's response.

    What names a trace or an orchestration that nobody has seen yet is kept and counts when it comes; a note says so.

    \b
    spanloop feedback --trace 0c9663e2c8bb0c690c352a978ee1cd91 --value 1
    spanloop feedback --response chatcmpl-42 --value 0.2 --name helpful --url http://127.0.0.1:4318
    spanloop feedback --orchestration ID --value 0 --id ticket-17 --comment "customer came back"
    """
    item: dict[str, Any] = {"value": value, "name": name, "label": label, "comment": comment}
    targets = {"orchestration_id": orchestration, "trace_id": trace, "span_id": span, "response_id": response}
    item |= {k: v for k, v in targets.items() if v is not None}
    if feedback_id:
        item["feedback_id"] = feedback_id
    answer = _post(url, key, item) if url else _append(_settings(config, workspace, tenant), item)
    if answer["rejected"]:
        raise SchemaError("refused: " + "; ".join(r["reason"] for r in answer["rejected"]))
    click.echo("known already" if answer["duplicates"] else "accepted")
    for note in answer.get("notes", []):
        click.echo(f"note: {note['note']}", err=True)


def _append(settings: Settings, item: dict[str, Any]) -> dict[str, Any]:
    from spanloop.collectors.feedback import parse_feedback
    from spanloop.collectors.redaction import Redactor, workspace_key
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.ports import new_record

    if not settings.bootstrap_servers and not settings.database.exists():
        raise ConfigError(
            f"no log in {settings.workspace}: give --workspace, or --url of a running collector, or import spans first"
        )
    redactor = Redactor(settings.content, workspace_key(settings))
    parsed = parse_feedback(
        item, tenant=settings.tenant, scorer="local", now_ns=time.time_ns(), redactor=redactor
    )
    log = open_log(settings)
    try:
        appended = log.append([new_record(event) for event in parsed.events])
        notes = [{"note": note} for event in parsed.events if (note := _unknown(log, settings, event))]
    finally:
        log.close()
    return {"rejected": parsed.rejected, "duplicates": sum(a.duplicate for a in appended), "notes": notes}


_WHERE_KNOWN = {"trace": topics.SPANS, "orchestration": topics.ORCHESTRATIONS}
"""Topics whose keys name the target; spans and responses stand inside values, which a verb does not search."""


def _unknown(log: Log, settings: Settings, event: FeedbackReceived) -> str:
    """What to check when a workspace has no such trace or orchestration; empty: it has, or it cannot be told quickly."""
    from spanloop.pipeline.log.sqlite import SqliteLog

    topic = _WHERE_KNOWN.get(event.target_kind)
    if topic is None or not isinstance(log, SqliteLog):
        return ""
    ending = f"/{event.target_id}"
    tenants = [key.removesuffix(ending) for key in log.keys_ending(topic, ending)]
    if event.tenant in tenants:
        return ""
    note = (
        f"it is durable, but {settings.workspace} knows no {event.target_kind} {event.target_id} of tenant {event.tenant!r} yet; "
        f"it waits for it ({settings.pipeline.retention_s:g} s while the pipeline runs), then becomes a dead letter. "
    )
    if tenants:
        return (
            note + f"Tenant {', '.join(map(repr, tenants))} has one of this id: send it again with --tenant"
        )
    return note + "Check the id, and --tenant and --workspace; `spanloop traces` lists what is known"


def _post(url: str, key: str | None, item: dict[str, Any]) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} is no http address; expected e.g. http://127.0.0.1:4318")
    address = url.rstrip("/")
    address = address if address.endswith("/v1/feedback") else f"{address}/v1/feedback"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(address, json.dumps(item).encode(), headers)  # noqa: S310 - checked above
    try:
        with _opener(address).open(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as exc:
        body = exc.read(65_536)
        try:
            found = json.loads(body)
        except ValueError:
            found = {}
        if isinstance(found, dict) and found.get("rejected"):
            return found | {"duplicates": 0}
        message = found.get("message") if isinstance(found, dict) else None
        kind = TransientError if exc.code in (408, 429, 502, 503, 504) else ConfigError
        raise kind(f"{address} answered {exc.code}: {message or exc.reason}") from exc
    except (OSError, ValueError) as exc:
        raise TransientError(
            f"cannot reach {address}: {exc}; is the collector running (spanloop up)?"
        ) from exc


def _opener(address: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment is for other hosts, never for this machine."""
    host = urllib.parse.urlsplit(address).hostname or ""
    local = host in {"localhost", "::1"} or host.startswith("127.")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
