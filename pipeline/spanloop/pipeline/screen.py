"""JSON for a terminal: what strangers wrote does not drive it. Into files and pipes JSON goes as it is.

Inside a JSON text a character and its escape are the same, so nothing is lost by it.
"""

from __future__ import annotations

import sys

__all__ = ["escaped", "json_shown"]


def escaped(text: str) -> str:
    r"""JSON with each character that steers a terminal, turns the direction of writing or is not seen as ``\uXXXX``.

    >>> print(escaped('"a' + chr(0x9B) + 'b' + chr(0x202E) + chr(0xE0001) + 'é"'))
    "a\u009bb\u202e\udb40\udc01é"
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def json_shown(text: str) -> str:
    """``text`` (JSON) for standard output: escaped where that is a terminal."""
    return escaped(text) if sys.stdout.isatty() else text
