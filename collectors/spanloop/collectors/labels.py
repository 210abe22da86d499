"""Which texts look like names or ids, and which hold something like a secret."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["HEX", "HEX_BYTES", "LABEL_MAX", "has_secret", "looks_like_label"]

LABEL_MAX = 256
"""Characters of the longest label; longer texts are not remembered either."""
_LABEL = re.compile(r"[^\x00-\x1f\x7f\"'`<>{}=?&\\]{0,256}\Z")
_SECRET = re.compile(
    r"[\w.+-]+@[\w-]+\.\w"  # e-mail
    r"|://[^/\s]*@"  # user and password in a URL
    r"|\beyJ[\w-]*\."  # JSON web token
    r"|bearer\s+\S"
    r"|\b(?:sk|pk|rk|glpat|xox[a-z]|hf|gh[opsu]|github_pat)[-_][\w-]{8,}|\bA[KS]IA[0-9A-Z]{12}|\bAIza[\w-]{20}"
    r"|\+\d[\d ().-]{6,}\d"  # phone
    r"|\b(?:password|passwd|pwd|secret|api[_-]?key|token)\s*:\s*\S"
    r"|\b\d{3}-\d{2}-\d{4}\b",
    re.IGNORECASE,
)
HEX = re.compile(r"(?=[0-9]*[a-f])[0-9a-f]{1,64}\Z")
"""An id in hex with a letter in it: nothing of _SECRET or _CARD can stand there."""
HEX_BYTES = re.compile(HEX.pattern.encode())
"""The same in bytes."""
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")


def looks_like_label(text: str) -> bool:
    """True for a short text without quotes, braces or control characters that holds nothing like a secret.

    >>> looks_like_label("chat fake-model"), looks_like_label("mail pat@example.com")
    (True, False)
    """
    return HEX.match(text) is not None or (len(text) <= LABEL_MAX and _looks_like_label(text))


@lru_cache(8192)
def _looks_like_label(text: str) -> bool:
    return _LABEL.match(text) is not None and not has_secret(text)


def has_secret(text: str) -> bool:
    """Whether the text holds something like a key, a password, a card, a phone number or an address."""
    if _SECRET.search(text):
        return True
    return any(_luhn(found.group()) for found in _CARD.finditer(text))


def _luhn(text: str) -> bool:
    digits = [int(c) for c in reversed(text) if c.isdigit()]
    return sum(sum(divmod(2 * d, 10)) if i % 2 else d for i, d in enumerate(digits)) % 10 == 0
