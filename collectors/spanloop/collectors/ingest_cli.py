"""``spanloop ingest``."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["ingest"]

PROGRESS_S = 5.0


@click.command()
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="Topic of the Collector, as it is named on the brokers; may be repeated.  [default: kafka.otlp_topics, else otlp_spans]",
)
@click.option(
    "--encoding",
    type=click.Choice(["auto", "otlp_proto", "otlp_json"]),
    default="auto",
    show_default=True,
    help="How the records are written.",
)
@click.option(
    "--group",
    default="ingest",
    show_default=True,
    help="Consumer group (behind kafka.prefix): processes of one group share the partitions, another group reads everything again.",
)
@click.option("--once", is_flag=True, help="Stop at the end of what is there now.")
@click.option(
    "--on-lost",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do where records were deleted before they were read.",
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Workspace folder, for the key of the hashes.  [default: the settings' one]",
)
@click.option("--tenant", help="Tenant of the spans.  [default: the settings' tenant]")
@click.option("--json", "as_json", is_flag=True, help="At the end, print the counts as one JSON line.")
def ingest(  # noqa: PLR0917 - one argument an option
    topics: tuple[str, ...], encoding: str, group: str, once: bool, on_lost: str, config: Path | None,
    workspace: Path | None, tenant: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Take spans and log records from the topics of the OpenTelemetry Collector's Kafka exporter.

    Records may be otlp_proto or otlp_json, keyed by trace or not. The receiver's limits and redaction apply. Runs until
    Ctrl-C, which loses nothing; start several to share the partitions. Exit code 3 with --once: some records were refused
    and are dead letters now (`spanloop deadletters list --source ingest`), the others are in.

    \b
    spanloop ingest
    spanloop ingest --topic otlp_spans --topic otlp_logs --encoding otlp_proto
    spanloop ingest --once --group backfill --json
    """
    flags: dict[str, Any] = {}
    if workspace is not None:
        flags["workspace"] = workspace
    if tenant is not None:
        flags["tenant"] = tenant
    settings = load_settings(config, flags)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s ingest %(levelname)s %(message)s"
    )
    if not settings.bootstrap_servers:
        raise ConfigError(
            "no Kafka: set bootstrap_servers in the settings or SPANLOOP_BOOTSTRAP_SERVERS; without Kafka let the Collector "
            "send OTLP/HTTP to `spanloop up`"
        )
    try:
        done = _run(settings, topics, once=once, encoding=encoding, group=group, on_lost=on_lost)
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{exc.name} is not installed: pip install 'spanloop[collect,kafka]'") from exc
    if as_json:
        click.echo(json.dumps(done))
    else:
        click.echo(_line(done))
    if once and done["refused"]:
        sys.exit(SchemaError.exit_code)


def _run(settings: Settings, topics: tuple[str, ...], *, once: bool, **options: str) -> dict[str, int]:
    import msgspec

    from spanloop.collectors.batches import Intake
    from spanloop.collectors.ingest import DEFAULT_TOPICS, Ingested, Ingestor
    from spanloop.collectors.redaction import Redactor, workspace_key
    from spanloop.collectors.sealing import open_sealer
    from spanloop.pipeline.log.kafka import KafkaLog

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings.workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
    intake = Intake(
        Redactor(settings.content, workspace_key(settings)),
        settings.collector.max_attribute_bytes,
        keep_content=settings.content.clear,
        sealer=open_sealer(settings),
    )
    shown_at, shown = time.monotonic(), 0

    def progress(so_far: Ingested) -> None:
        nonlocal shown_at, shown
        if time.monotonic() - shown_at < PROGRESS_S:
            return
        shown_at = time.monotonic()
        if so_far.records != shown:
            shown = so_far.records
            click.echo(f"{_line(msgspec.to_builtins(so_far))} so far", err=True)

    log = KafkaLog(settings.bootstrap_servers, settings.kafka)
    try:
        named = topics or settings.kafka.otlp_topics or DEFAULT_TOPICS
        ingestor = Ingestor(settings, log, intake, topics=named, **options)
        try:
            if once:
                ingestor.once(stop, progress)
            else:
                click.echo(json.dumps({"ready": "ingest", "url": ""}))
                sys.stdout.flush()
                ingestor.follow(stop, progress)
        finally:
            ingestor.close()
    finally:
        log.close()
    return msgspec.to_builtins(ingestor.done)


def _line(done: dict[str, int]) -> str:
    skipped = f", {done['skipped']} gone before they were read" if done["skipped"] else ""
    return f"{done['spans']} spans of {done['records']} records, {done['refused']} refused{skipped}"
