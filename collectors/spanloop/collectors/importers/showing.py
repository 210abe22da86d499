"""How far an import is: on a terminal one line that changes, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import click

from spanloop.collectors.importers.importing import Imported
from spanloop.pipeline.formats.opened import Source

__all__ = ["Progress", "summary"]

_SCREEN_S = 0.2
_LINE_S = 10.0


class Progress:
    """Shows the state of an import on stderr.

    Args:
        sources: all that is imported.
        total: counted by the importer.
        clock: monotonic seconds.
    """

    def __init__(
        self, sources: Sequence[Source], total: Imported, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sources = sources
        self._total = total
        self._clock = clock
        self._sizes = [source.size for source in sources]
        self._began = self._last = clock()
        self._screen = sys.stderr.isatty()

    def __call__(self, number: int, done: int) -> None:
        """``done`` bytes of source ``number`` are read."""
        now = self._clock()
        if now - self._last < (_SCREEN_S if self._screen else _LINE_S):
            return
        self._last = now
        line = self.line(number, done, now - self._began)
        click.echo(f"\r\x1b[K{line}" if self._screen else line, nl=not self._screen, err=True)

    def line(self, number: int, done: int, seconds: float) -> str:
        """One line: file, counts, rate, share, time left."""
        line = f"{self._sources[number].name}"
        if len(self._sources) > 1:
            line += f" ({number + 1} of {len(self._sources)})"
        line += f": {self._total.spans:,} spans"
        if seconds > 0:
            line += f", {self._total.spans / seconds:,.0f}/s"
        whole = sum(self._sizes)
        read = sum(self._sizes[:number]) + min(done, self._sizes[number])
        if whole and all(self._sizes):
            line += f", {read / whole:.0%}"
            if 0 < read < whole and seconds > 1:
                line += f", {_duration((whole - read) * seconds / read)} left"
        return line

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._screen:
            click.echo("\r\x1b[K", nl=False, err=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def summary(found: Imported, *, dry: bool) -> str:
    """What became of the files, in one sentence."""
    text = (
        f"{found.spans} spans from {found.files} files: {found.events} new events, {found.duplicates} known already, "
        f"{found.rejected} refused"
    )
    if found.scores:
        text += f", {found.scores} scores"
    if found.ignored:
        text += f", {found.ignored} left out (no agents, or scores that are no numbers)"
    if dry:
        text = f"would import {text}".replace("new events", "events").replace(
            f", {found.duplicates} known already", ""
        )
    if found.continued:
        text += f"; {found.continued} files continued where an earlier run stopped"
    if found.passed_over:
        text += f"; {found.passed_over} files in no known format passed over"
    return text
