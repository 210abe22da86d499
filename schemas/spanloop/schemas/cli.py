"""The console script ``spanloop``: what a verb needs started comes first, then all the rest (``verbs``)."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_EARLY = {"query": "spanloop.pipeline.query.child:start_early"}
"""What a verb starts before anything else is imported, so that it is ready when it is needed."""


STOPPED = 130
"""Exit code after Ctrl-C, wherever it came."""


def main() -> None:
    """Run the CLI; see ``verbs.main``."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(STOPPED)


def _run() -> None:
    short = _head_start(sys.argv[1:])
    from spanloop.schemas import verbs

    if not short:
        verbs.main()
        return
    try:
        verbs.main()
    except SystemExit as exc:
        _leave(exc)
        raise


def _head_start(words: Sequence[str]) -> bool:
    """Start what the verb needs; returns whether it is one whose process lives for a moment only."""
    if len(words) < 2 or words[0] not in _EARLY or {"-h", "--help"} & set(words):
        return False
    gc.set_threshold(_YOUNG)
    module, _, name = _EARLY[words[0]].partition(":")
    getattr(importlib.import_module(module), name)()
    return True


_YOUNG = 200_000
"""New objects from which a short process looks for garbage: importing makes fewer, and each look costs milliseconds."""


def _leave(exc: SystemExit) -> None:
    """End the process without taking down its modules one by one, which takes longer than small queries do. Returns where
    that way of leaving would lose something: a message, or bytes that cannot be written."""
    if exc.code is not None and not isinstance(exc.code, int):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
    atexit._run_exitfuncs()
    os._exit(exc.code or 0)


if __name__ == "__main__":
    main()
