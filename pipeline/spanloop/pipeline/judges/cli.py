"""Verb ``judge``: a thin layer over ``running``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spanloop.pipeline.finite import FiniteRange
from spanloop.schemas.errors import ConfigError, TransientError
from spanloop.schemas.settings import JudgeTerm, Settings, load_settings

if TYPE_CHECKING:
    from spanloop.pipeline.judges.running import Counts, Runner
    from spanloop.pipeline.ports import Log

__all__ = ["judge"]

_log = logging.getLogger("spanloop.judge")
AWAY_S = 30.0
"""Pause after a judge that does not answer."""


@click.command()
@click.option("--name", "names", multiple=True, help="Only this judge, such as clarity/1. Default: all.")
@click.option("--follow", is_flag=True, help="Go on until a signal, as orchestrations become final.")
@click.option("--every", "every_s", default=5.0, show_default=True, type=FiniteRange(min=0.1), help="Seconds between two looks.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Ask nothing: how many calls there would be.")
@click.option("--metrics-port", default=0, show_default=True, type=click.IntRange(0, 65535), help="With --follow: Prometheus metrics on 127.0.0.1; 0: none.")  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML) with [[judges]].")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder of the workspace. Default: the settings' one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object: counts by judge.")
def judge(
    names: tuple[str, ...],
    *,
    follow: bool,
    every_s: float,
    dry_run: bool,
    metrics_port: int,
    config: Path | None,
    workspace: Path | None,
    as_json: bool,
) -> None:
    """Ask the judges of the settings ([[judges]]) about orchestrations whose reward is final; verdicts become feedback.

    \b
    spanloop judge --config spanloop.toml --dry-run
    spanloop judge --config spanloop.toml
    spanloop judge --config spanloop.toml --follow

    Each agent is judged once by each judge; a run goes on where the last one ended, and two do no harm. Texts must be kept
    ([content] training = true). Verdicts pay only what you weigh them with ([[pipeline.rewards]], docs/rewards.md).
    """
    settings = load_settings(config, {"workspace": workspace} if workspace is not None else None)
    terms = _chosen(settings, names)
    from spanloop.pipeline.log.open import open_log

    log = open_log(settings, create=False)
    try:
        runners = {term.name: _runner(settings, term, log) for term in terms}
        if follow:
            _follow(runners, every_s, metrics_port)
            return
        counts = {name: runner.run(dry=dry_run) for name, runner in runners.items()}
    finally:
        log.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(counts), indent=2).decode())
    else:
        for name, found in counts.items():
            click.echo("\n".join(_lines(name, found, dry_run=dry_run)))
    if (
        any(c.without_texts and not (c.calls or c.known) for c in counts.values())
        and not settings.content.training
    ):
        raise ConfigError(
            "no texts to judge: this deployment keeps none; [content] training = true keeps those of spans received from then on"
        )


def _chosen(settings: Settings, names: tuple[str, ...]) -> list[JudgeTerm]:
    known = {term.name: term for term in settings.judges}
    if not known:
        raise ConfigError(
            "the settings name no judge: add a table [[judges]] with name, url, model, rubric and channel (docs/rewards.md), "
            "and give the file with --config"
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no judge {unknown[0]!r} in the settings; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def _runner(settings: Settings, term: JudgeTerm, log: Log) -> Runner:
    from spanloop.pipeline.clock import SystemClock
    from spanloop.pipeline.judges.openai_compatible import OpenAIJudge
    from spanloop.pipeline.judges.running import Runner
    from spanloop.pipeline.sealing.opening import open_vault

    asked = OpenAIJudge(
        term.name, term.url, term.model, key=term.key.get_secret_value(), timeout_s=term.timeout_s
    )
    window_ns = int(2e9 * settings.pipeline.retention_s)
    return Runner(log, term, asked, SystemClock(), window_ns=window_ns, vault=open_vault(settings))


def _follow(runners: Mapping[str, Runner], every_s: float, port: int) -> None:
    from spanloop.pipeline.archive.process import stopper

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s judge %(levelname)s %(message)s"
    )
    totals = {name: runner.totals for name, runner in runners.items()}
    away: dict[str, int] = dict.fromkeys(runners, 0)
    stop = stopper()
    end = _serve(totals, away, port)
    try:
        while not stop.is_set():
            wait_s = every_s
            for name, runner in runners.items():
                try:
                    found = runner.run()
                except TransientError as exc:
                    away[name] += 1
                    wait_s = AWAY_S
                    _log.warning("%s", exc.message)
                    continue
                if found.calls:
                    _log.info("; ".join(_lines(name, found, dry_run=False)))
            stop.wait(wait_s)
    finally:
        end()


def _lines(name: str, found: Counts, *, dry_run: bool) -> list[str]:
    asked = (
        f"{found.calls} calls would be made" if dry_run else f"{found.calls} calls, {found.verdicts} verdicts"
    )
    lines = [
        f"{name}: {found.orchestrations} orchestrations became final, {found.not_drawn} not drawn, {found.without_texts} without "
        f"texts; {asked}, {found.known} known"
    ]
    if found.doubtful:
        lines.append(
            f"  {found.doubtful} verdicts are not final: what was judged was cut, or is not to be trusted"
        )
    lines += [f"  {number} x {why}" for why, number in sorted(found.no_verdict.items())]
    if found.waiting:
        lines.append(f"  {found.waiting} cases wait: the judge's calls_per_day are used up")
    return lines


FAMILIES = {
    "orchestrations": "Final orchestrations that were looked at.",
    "calls": "Calls of the judge, failed ones included.",
    "verdicts": "Verdicts appended as feedback.",
    "doubtful": "Verdicts that are not final: cut or tainted.",
    "without_texts": "Orchestrations without texts that are kept.",
    "no_verdict": "Answers that are no verdict.",
    "away": "Times that the judge was given up for a while.",
}


def _serve(totals: Mapping[str, Counts], away: Mapping[str, int], port: int) -> Callable[[], None]:
    """Prometheus metrics on a port; returns what ends them."""
    if not port:
        return lambda: None
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily

    class Collector:
        def collect(self) -> Any:
            for field, text in FAMILIES.items():
                family = CounterMetricFamily(f"spanloop_judge_{field}", text, labels=["judge"])
                for name, counts in totals.items():
                    family.add_metric([name], _number(counts, away[name], field))
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry=registry)
    except OSError as exc:
        raise TransientError(
            f"metrics cannot be served on 127.0.0.1:{port}: {exc.strerror or exc}; set another --metrics-port, 0 for none"
        ) from exc

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)

    return end


def _number(counts: Counts, away: int, field: str) -> float:
    if field == "away":
        return away
    return sum(counts.no_verdict.values()) if field == "no_verdict" else getattr(counts, field)
