"""What a person sees while the demo runs: a panel that is redrawn on a terminal, else a line every five seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from spanloop.pipeline.demo_watch import Band, Watch
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.events import (
    CanaryFinished,
    CanaryStarted,
    Event,
    GateEvaluated,
    PolicyPromoted,
    PolicyRolledBack,
)

__all__ = ["Point", "Screen", "event_line", "point_of"]

LINE_EVERY_S = 5.0


class Point(msgspec.Struct, frozen=True):
    """The state of the demo at one moment; the report draws them."""

    t_s: float
    tickets: int
    spans: int
    tickets_per_s: float
    spans_per_s: float
    lag_s: float
    champion: int
    champion_return: Band
    candidate_return: Band
    challenger: int
    canary: int
    staleness: float


def point_of(watch: Watch, t_s: float, now_ns: int, before: Point | None) -> Point:
    """The present state; rates are since ``before``."""
    tickets, spans = len(watch.served), watch.num_spans
    span_s = t_s - before.t_s if before is not None else 0.0
    return Point(
        t_s=t_s,
        tickets=tickets,
        spans=spans,
        tickets_per_s=(tickets - before.tickets) / span_s if before is not None and span_s > 0 else 0.0,
        spans_per_s=(spans - before.spans) / span_s if before is not None and span_s > 0 else 0.0,
        lag_s=watch.lag_s(now_ns),
        champion=watch.champion,
        champion_return=watch.champion_return,
        candidate_return=watch.candidate_return,
        challenger=watch.routing.learner if watch.routing is not None else -1,
        canary=watch.canary.version if watch.canary is not None else -1,
        staleness=watch.staleness,
    )


def event_line(event: Event) -> str:
    """One line about an event of the policies topic that a person wants to know; empty for the others."""
    match event:
        case PolicyPromoted(version=0):
            return "v0 serves: the first policy, close to random"
        case PolicyPromoted():
            return f"v{event.version} is champion (epoch {event.epoch}), before it v{event.previous}: {event.reason}"
        case PolicyRolledBack():
            return f"v{event.version} is rolled back, v{event.to} serves: {event.reason}"
        case CanaryStarted():
            return (
                f"v{event.version} is in canary on {event.share:.0%} of the tickets, against v{event.against}"
            )
        case CanaryFinished():
            sides = (
                f"{unmicro(event.difference):+.3f} [{unmicro(event.lower):+.3f}, {unmicro(event.upper):+.3f}]"
            )
            return (
                f"canary of v{event.version}: {event.verdict} after {event.n_version} against {event.n_against} tickets, "
                f"difference {sides}"
            )
        case GateEvaluated(passed=True):
            return (
                f"v{event.version} passes the offline gate against v{event.against}: estimate "
                f"{unmicro(event.estimate):+.3f}, lower bound {unmicro(event.lower):+.3f} on {event.n} tickets"
            )
        case _:
            return ""


def _band(value: Band) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]" if value.count else "-"


def _version(number: int) -> str:
    return f"v{number}" if number >= 0 else "-"


def point_line(point: Point) -> str:
    """A point as a line of text."""
    return (
        f"{point.t_s:5.0f} s  {point.tickets_per_s:5.1f} tickets/s  {point.spans_per_s:5.0f} spans/s  lag {point.lag_s:4.1f} s  "
        f"champion {_version(point.champion)} {_band(point.champion_return)}  candidates {_band(point.candidate_return)}  "
        f"challenger {_version(point.challenger)}  canary {_version(point.canary)}  staleness {point.staleness:.1f}"
    )


class Screen:
    """Shows points and lines. With ``plain`` or without a terminal it only prints lines."""

    def __init__(self, *, plain: bool, end_s: float) -> None:
        self._end_s = end_s
        self._shown_s = -LINE_EVERY_S
        self._lines: list[str] = []
        self._live: Any = None
        if not plain and sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(refresh_per_second=4, transient=True)
            self._live.start()
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        text = f"{time.monotonic() - self._started:5.0f} s  {line}"
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def show(self, point: Point) -> None:
        """Show the present state."""
        if self._live is not None:
            self._live.update(self._panel(point))
        elif point.t_s - self._shown_s >= LINE_EVERY_S:
            self._shown_s = point.t_s
            sys.stdout.write(point_line(point) + "\n")
            sys.stdout.flush()

    def _panel(self, point: Point) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 3))
        rows = [
            (
                "elapsed",
                f"{point.t_s:.0f} of {self._end_s:.0f} s",
                "tickets",
                f"{point.tickets} ({point.tickets_per_s:.1f}/s)",
            ),
            ("lag", f"{point.lag_s:.1f} s", "spans", f"{point.spans} ({point.spans_per_s:.0f}/s)"),
            ("champion", _version(point.champion), "its return", _band(point.champion_return)),
            ("challenger", _version(point.challenger), "candidates' return", _band(point.candidate_return)),
            ("canary", _version(point.canary), "staleness", f"{point.staleness:.1f} updates"),
        ]
        for left, a, right, b in rows:
            table.add_row(f"[dim]{left}[/]", f"[bold]{a}[/]", f"[dim]{right}[/]", f"[bold]{b}[/]")
        return Panel(table, title="spanloop demo: the dispatch desk", border_style="cyan", expand=False)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
