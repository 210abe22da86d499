"""Verbs ``assemble`` (a file of spans or a survey trace -> orchestrations) and ``traces`` (those of a
workspace)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import (
    CLOCK_SKEW,
    aligned,
    orchestration_line,
    orchestration_table,
    plain_text,
    trace_row,
)
from spanloop.pipeline.assembly.survey import SurveyTrace, from_survey, is_survey, survey_of, to_survey
from spanloop.pipeline.ports import Log
from spanloop.pipeline.screen import escaped
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.events import OrchestrationRevised, RewardsComputed, decode
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Settings, load_settings
from spanloop.schemas.spans import Span

__all__ = ["assemble", "traces"]

_PEEK = 64 * 2**10
_SURVEY_BYTES = 256 * 2**20
_REASONS = 5
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encode = msgspec.json.Encoder().encode
_Key = tuple[str, str]
"""Tenant and orchestration."""

_form = [
    click.option(
        "--ndjson", "form", flag_value="ndjson", help="One JSON object a line (default into a pipe)."
    ),
    click.option("--json", "form", flag_value="json", help="One JSON array."),
    click.option("--table", "form", flag_value="table", help="For reading (default on a terminal)."),
]


def _forms(command: Any) -> Any:
    for option in reversed(_form):
        command = option(command)
    return command


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@_forms
@click.option(
    "--format",
    "shape",
    type=click.Choice(["spanloop", "survey"]),
    default="spanloop",
    show_default=True,
    help="survey: the orchestration-trace format of the LLM multi-agent RL survey, with empty rewards.",
)
@click.option("--tenant", default="default", show_default=True, help="Tenant that the ids are made for.")
def assemble(path: Path, form: str | None, shape: str, tenant: str) -> None:
    """Turn a file of spans into orchestration traces, one a line.

    PATH holds OTLP (JSON or protobuf), traces of the openai-agents SDK's own exporter, a Langfuse or Phoenix
    export, a Who&When or tau-bench log, or a trace in the survey's format, also packed (gzip, zip); the bytes
    tell which. What cannot be read is counted on stderr, the rest is assembled; the exit code is then 3.

    \b
    spanloop assemble spans.otlp.jsonl
    zcat old.jsonl.gz | spanloop assemble - --json
    spanloop assemble spans.otlp.jsonl --ndjson | jq '.events[].type'
    spanloop assemble spans.otlp.jsonl --format survey --json > traces.json
    """
    surveys = _read_surveys(path, tenant)
    if surveys is not None:
        found, rejected = surveys, []
    else:
        spans, rejected, scores = _read_spans(path)
        if scores:
            click.echo(
                f"{scores} scores are no part of an orchestration: spanloop import takes them", err=True
            )
        if not spans and not rejected:
            click.echo(f"{path} holds no spans", err=True)
        found = assemble_spans(spans, tenant)
        if spans and not found:
            click.echo(f"none of the {len(spans)} spans in {path} says anything of agents", err=True)
    _print_all(found, form or ("table" if sys.stdout.isatty() else "ndjson"), shape)
    if rejected:
        click.echo(f"{len(rejected)} spans or records could not be read and were left out:", err=True)
        for reason in rejected[:_REASONS]:
            click.echo(f"  {plain_text(reason)}", err=True)
        if len(rejected) > _REASONS:
            click.echo(f"  and {len(rejected) - _REASONS} more", err=True)
        sys.exit(3)


def _read_spans(path: Path) -> tuple[list[Span], list[str], int]:
    """(spans, why others were left out, number of scores) of a file."""
    from spanloop.pipeline.formats.reading import read_files
    from spanloop.pipeline.otlp.log_ids import identified

    spans: list[Span] = []
    rejected: list[str] = []
    scores = 0
    for part in read_files(path):
        spans.extend(map(identified, part.read.spans))
        rejected.extend(item.reason for item in part.read.rejected)
        scores += len(part.read.feedback)
    return spans, rejected, scores


def _read_surveys(path: Path, tenant: str) -> list[SurveyTrace] | None:
    """Survey traces of a file: one document, a list of them, or one a line; None when it holds something
    else."""
    if not path.is_file():  # a pipe is read once
        return None
    try:
        with path.open("rb") as handle:
            head = handle.read(_PEEK)
            if head.lstrip()[:1] not in (b"{", b"[") or b'"resourceSpans"' in head or b'"events"' not in head:
                return None
            body = head + handle.read(_SURVEY_BYTES)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}") from exc
    try:
        document = msgspec.json.decode(body)
        documents = document if isinstance(document, list) else [document]
    except _NO_JSON:
        try:
            documents = msgspec.json.Decoder().decode_lines(body)
        except _NO_JSON:
            return None
    if not documents or not all(is_survey(item) for item in documents):
        return None
    try:
        return [from_survey(item, tenant) for item in documents]
    except SchemaError as exc:
        raise SchemaError(f"{path} is not a valid survey trace: {exc.message}") from exc


def _print_all(found: Iterable[OrchestrationContent | SurveyTrace], form: str, shape: str) -> None:
    if form == "table" and shape == "spanloop":
        for item in found:
            content = item.content if isinstance(item, SurveyTrace) else item
            click.echo("\n".join(orchestration_table(content)))
        return
    _print_objects((o for item in found if (o := _object(item, shape)) is not None), form)


def _object(item: OrchestrationContent | SurveyTrace, shape: str) -> dict[str, Any] | None:
    if shape != "survey":
        return orchestration_line(item.content if isinstance(item, SurveyTrace) else item)
    if isinstance(item, SurveyTrace):
        return to_survey(item)
    if not item.events:
        click.echo(
            f"left out {item.orchestration_id}: the survey's format needs at least one event", err=True
        )
        return None
    return to_survey(survey_of(item))


def _json(item: dict[str, Any]) -> bytes:
    encoded = _encode(item)
    return escaped(encoded.decode()).encode() if sys.stdout.isatty() else encoded


def _print_objects(objects: Iterable[dict[str, Any]], form: str) -> None:
    out = click.get_binary_stream("stdout")
    if form == "json":
        out.write(b"[")
        for number, item in enumerate(objects):
            out.write((b",\n" if number else b"") + _json(item))
        out.write(b"]\n")
        return
    for item in objects:
        out.write(_json(item) + b"\n")


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder of the workspace. Default: the settings' one.")  # fmt: skip
@_forms
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest so many.")
@click.option(
    "--format",
    "shape",
    type=click.Choice(["rows", "survey"]),
    default="rows",
    show_default=True,
    help="survey: whole traces in the survey's format, one a line; what was imported from it comes out as it was.",
)
def traces(workspace: Path | None, config: Path | None, form: str | None, limit: int, shape: str) -> None:
    """List the orchestrations of a workspace, newest first: last revision, agents, tokens, reward, policy
    versions.

    \b
    spanloop traces --workspace .spanloop --limit 5
    spanloop traces --ndjson | jq 'select(.reward == null)'
    spanloop traces --format survey --limit 100 > survey.jsonl
    """
    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    if shape == "survey":
        _print_objects(_documents(settings, limit), "json" if form == "json" else "ndjson")
        return
    rows = sorted(_rows(settings), key=lambda row: (-row["started_ns"], row["orchestration_id"]))
    form = form or ("table" if sys.stdout.isatty() else "ndjson")
    if form != "table":
        _print_objects(rows[:limit], form)
        return
    cells = [
        (r["orchestration_id"], r["revision"], "" if r["complete"] else "provisional", " ".join(r["agents"][:6]), r["events"],
         r["tokens"], r["reward"], r["reward_status"], " ".join(r["policy_versions"]),
         " ".join(flag for flag in r["flags"] if flag.startswith(CLOCK_SKEW)))
        for r in rows[:limit]
    ]  # fmt: skip
    names = ("orchestration", "rev", "state", "agents", "events", "tokens", "reward", "", "policy", "note")
    click.echo("\n".join(aligned(names, cells)))
    click.echo(f"({min(limit, len(rows))} of {len(rows)} orchestrations)")


def _documents(settings: Settings, limit: int) -> Iterator[dict[str, Any]]:
    """The newest orchestrations in the survey's format."""
    from spanloop.pipeline.formats.survey_export import survey_documents
    from spanloop.pipeline.log.open import open_log

    log = open_log(settings, create=False)
    try:
        last, rewards = _read_log(log)
        found = [
            (revised.content, rewards.get(key))
            for key, revised in last.items()
            if revised.content is not None
        ]
        found.sort(key=lambda item: (-item[0].started_ns, item[0].orchestration_id))
        for document, note in survey_documents(log, found[:limit]):
            if note:
                click.echo(note, err=True)
            if document is not None:
                yield document
    finally:
        log.close()


def _rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """One row for each orchestration that was not merged into another, from its last revision."""
    from spanloop.pipeline.log.open import open_log

    log = open_log(settings, create=False)
    try:
        last, rewards = _read_log(log)
    finally:
        log.close()
    for key, revised in last.items():
        if revised.content is not None:
            yield trace_row(revised, revised.content, rewards.get(key))


def _read_log(log: Log) -> tuple[dict[_Key, OrchestrationRevised], dict[_Key, RewardsComputed]]:
    """Last revisions and last rewards by tenant and orchestration."""
    from spanloop.pipeline.log.scan import scan

    rewards: dict[_Key, RewardsComputed] = {}
    last: dict[_Key, OrchestrationRevised] = {}
    for record in scan(log, (topics.REWARDS, topics.ORCHESTRATIONS)):
        try:
            event = decode(record.value)
        except SchemaError:
            continue
        if isinstance(event, RewardsComputed):
            rewards[(event.tenant, event.orchestration_id)] = event
        elif isinstance(event, OrchestrationRevised):
            last[(event.tenant, event.orchestration_id)] = event
    return last, rewards
