"""A call of somebody else's code that may take for ever: it is waited for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

_T = TypeVar("_T")


def within(timeout_s: float, call: Callable[[], _T]) -> tuple[_T | None, str]:
    """What ``call`` returned and an empty text, or None and why: too slow, or the name of its exception.

    It runs in a thread of its own that is not waited for beyond ``timeout_s``; what it returns later is dropped.

    >>> within(1.0, lambda: 2), within(1.0, lambda: 1 // 0)
    ((2, ''), (None, 'failed: ZeroDivisionError'))
    """
    found: list[_T] = []
    failed: list[str] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as exc:
            failed.append(f"failed: {type(exc).__name__}")

    thread = threading.Thread(target=run, name="spanloop-bounded", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0], ""
    return None, failed[0] if failed else f"no answer within {timeout_s:g} s"
