"""JSON that is nested deeper than a parser follows, cut down so that one deep value costs its span and not the request."""

from __future__ import annotations

import re

__all__ = ["TOO_DEEP", "shallower"]

TOO_DEEP = "(nested too deep)"
"""Stands where a list or map was cut out: a text is nothing that OTLP/JSON has there, so that its span is refused."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_OPEN = frozenset({b"[", b"{"})


def shallower(body: bytes, most: int) -> bytes:
    """``body`` with each list and map below level ``most`` replaced by TOO_DEEP; brackets in texts do not count. What is no JSON
    stays no JSON.

    >>> shallower(b'{"a": [[1, "]"], 2]}', 2)
    b'{"a": ["(nested too deep)", 2]}'
    """
    stand_in = b'"' + TOO_DEEP.encode() + b'"'
    parts: list[bytes] = []
    depth = kept = 0
    for token in _TOKEN.finditer(body):
        text = token.group()
        if text in _OPEN:
            depth += 1
            if depth == most + 1:
                parts += (body[kept : token.start()], stand_in)
                kept = len(body)
        elif len(text) == 1:
            depth -= 1
            if depth == most:
                kept = token.end()
    parts.append(body[kept:])
    return b"".join(parts)
