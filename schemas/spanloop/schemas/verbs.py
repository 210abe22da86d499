"""The verbs of ``spanloop``: entry points (group ``spanloop.cli``) that each room declares;
a verb's module is imported only when the verb is run, so ``--help`` is quick and an agent's machine needs no torch."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from spanloop.schemas.errors import SpanloopError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["main"]

_SUMMARY = {
    "demo": "Run the whole loop on this machine and watch the policy improve.",
    "up": "Run collectors, pipeline, serving and learner as one supervised local system.",
    "assemble": "Turn a file of spans into orchestration traces, one a line.",
    "process": "A worker of the Kafka runtime: spans to orchestrations, rewards, credit, samples.",
    "ingest": "Take in what the OpenTelemetry Collector's Kafka exporter writes.",
    "import": "Append files to the log: OTLP, openai-agents, Langfuse, Phoenix, benchmark logs.",
    "replay": "Make orchestrations, rewards, credit and samples again from the archive, also under other rewards.",
    "diff": "Compare two replays: what changes, and what the learner would have been taught.",
    "archive": "Keep the log as Parquet files, on disk or in S3; check, merge, show them.",
    "query": "Run SQL (DuckDB) over a workspace.",
    "traces": "List the orchestrations of a workspace.",
    "explain": "Show how a reward became credit, who is to blame for a failure, and what each agent saw and did.",
    "export": "Write data sets for fine-tuning: supervised, weighted, preference pairs.",
    "provenance": "Show which orchestrations taught a policy version.",
    "policies": "List versions, promotions and routing; roll back.",
    "feedback": "Send an outcome for an orchestration, trace, span or response.",
    "judge": "Ask the judges of the settings about what agents said; verdicts become feedback.",
    "erase": "Destroy the keys of one person's content, for good; structure, rewards and credit stay.",
    "verify": "Prove that the log replays to the same orchestrations, rewards and credit.",
    "deadletters": "List what was refused, show it, send it again after a fix.",
    "config": "Show settings with where each comes from.",
    "doctor": "Say what can be learned here, what is missing and which setting adds it.",
}
_EXTRA = {"aiohttp": "collect", "google": "collect", "opentelemetry": "collect", "apache_beam": "replay", "duckdb": "pipeline", "pyarrow": "pipeline",
          "numpy": "pipeline", "rich": "pipeline", "torch": "learn", "mlflow": "learn", "safetensors": "learn",
          "pydantic_ai": "demo", "matplotlib": "demo"}  # fmt: skip
_GROUP = "spanloop.cli"


def _own_verbs() -> dict[str, str]:
    """Verb -> module:name from the entry points of this distribution, read without ``importlib.metadata``, which takes longer to
    import than most verbs. Empty where they are not found; the long way finds them then."""
    for folder in sys.path:
        try:
            name = next(
                (
                    n
                    for n in os.listdir(folder or ".")
                    if n.startswith("spanloop-") and n.endswith(".dist-info")
                ),
                "",
            )
            if not name:
                continue
            with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        section = text.partition(f"[{_GROUP}]\n")[2].partition("\n[")[0]
        pairs = (line.partition("=") for line in section.splitlines())
        return {verb.strip(): place.strip() for verb, equals, place in pairs if equals}
    return {}


def _loaded(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class _Verbs(click.Group):
    def _entry_points(self) -> dict[str, EntryPoint]:
        from importlib import metadata

        return {e.name: e for e in metadata.entry_points(group=_GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            self._entry_points(), key=lambda n: (list(_SUMMARY).index(n) if n in _SUMMARY else 99, n)
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _own_verbs().get(cmd_name)
        if place is not None:
            return _loaded(place)  # type: ignore[return-value]
        entry = self._entry_points().get(cmd_name)
        if entry is None:
            return None
        return entry.load()

    def invoke(self, ctx: click.Context) -> object:
        """Ctrl-C while a verb is loaded, or in one that has nothing to say of it, ends the process as a shell expects."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUMMARY.get(name, "")) for name in self.list_commands(ctx)])


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="spanloop")
def _cli() -> None:
    """spanloop learns from production: the spans your agents already emit become a better policy in serving.

    \b
    spanloop demo                                   the whole loop, about six minutes
    spanloop assemble spans.otlp.jsonl --ndjson     orchestrations from a file
    spanloop up --config spanloop.toml              your own system
    """


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK = _FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
"""What a file or its disk refuses is no fault of the program: one line says it."""


def main() -> None:
    """Run the CLI; our own errors become one line on stderr and an exit code (1 error, 2 usage, 3 bad input, 4 try again)."""
    try:
        _cli.main(prog_name="spanloop", standalone_mode=True)
    except ModuleNotFoundError as exc:
        extra = _EXTRA.get((exc.name or "").split(".")[0])
        if extra is None:
            raise
        click.echo(
            f"error: this verb needs {exc.name}, which is not installed: pip install 'spanloop[{extra}]'",
            err=True,
        )
        sys.exit(2)
    except SpanloopError as exc:
        shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in exc.message)
        click.echo(f"error: {shown}", err=True)
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as exc:
        if exc.errno not in _DISK:
            raise
        where = f"{exc.filename}: " if exc.filename else ""
        click.echo(
            f"error: {where}{exc.strerror}: give this user write permission there, or free some space",
            err=True,
        )
        sys.exit(4 if exc.errno in _FULL else 1)
