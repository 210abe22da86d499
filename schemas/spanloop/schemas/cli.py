"""The console script ``spanloop``: what a verb needs started comes first, then all the rest (``verbs``)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

_EARLY = {"query": "spanloop.pipeline.query.child:start_early"}
"""What a verb starts before anything else is imported, so that it is ready when it is needed."""


def main() -> None:
    """Run the CLI; see ``verbs.main``."""
    _head_start(sys.argv[1:])
    from spanloop.schemas import verbs

    verbs.main()


def _head_start(words: Sequence[str]) -> None:
    if len(words) > 1 and words[0] in _EARLY and not {"-h", "--help"} & set(words):
        module, _, name = _EARLY[words[0]].partition(":")
        getattr(importlib.import_module(module), name)()


if __name__ == "__main__":
    main()
