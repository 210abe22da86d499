"""Does one agent's input repeat what another one said? Compared by hashes, since texts leave with the span.

An engine passes a node's answer on inside a frame of its own words ("From x:", "- Agent: ..."), so that besides
the whole text its lines are hashed, bare and without a leading label. Where texts were dropped only whole parts
can be compared.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.dialects.operation import text_hash

__all__ = ["answer_echoes", "input_echoes"]

_MIN_CHARS = 8
"""Shorter texts ("yes", "done") are said by everybody and are no evidence."""
_LINES = 256
_HASHES = 128
_LABEL = re.compile(r"[\s>*#-]*(?:\[?[\w .@/-]{1,64}\]?\s*:)?\s*")


def answer_echoes(texts: list[Any]) -> tuple[str, ...]:
    """Hashes of an answer: of each whole text and of its longest line.

    >>> len(answer_echoes(["one line of text"])), len(answer_echoes(["a line of text\\nand a longer line"]))
    (1, 2)
    """
    found = set()
    for text in texts[:_LINES]:
        found.add(_hash(text))
        if isinstance(text, str):
            found.add(_hash(max(text.splitlines(), key=lambda line: (len(line.strip()), line), default="")))
    return _sorted(found)


def input_echoes(texts: list[Any]) -> tuple[str, ...]:
    """Hashes of the pieces of an input: each whole text and each line, bare and without its label.

    >>> set(answer_echoes(["Total 180 EUR"])) <= set(input_echoes(["From budget:\\n  - Agent: Total 180 EUR\\n"]))
    True
    """
    found: set[str] = set()
    left = _LINES
    for text in texts[:_LINES]:
        found |= {_hash(text), _hash(_bare(text))}
        for line in text.splitlines()[:left] if isinstance(text, str) else ():
            left -= 1
            found |= {_hash(line), _hash(_bare(line))}
    return _sorted(found)


def _bare(text: Any) -> Any:
    return text[match.end() :] if isinstance(text, str) and (match := _LABEL.match(text)) else ""


def _hash(text: Any) -> str:
    return "" if isinstance(text, str) and len(text.strip()) < _MIN_CHARS else text_hash(text)


def _sorted(found: set[str]) -> tuple[str, ...]:
    return tuple(sorted(found - {""}))[:_HASHES]
