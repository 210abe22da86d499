"""feedback(): outcomes and scores to the feedback endpoint, from a thread of their own.

Invariants: the host never waits and never sees an exception; memory is bounded (a full queue drops the newest and counts it); an
item is sent until the endpoint has it, refuses it or ``TRIES_MAX`` tries failed; each item has an id and a time from the start, so
that a repeat is the same feedback. A forked child begins with an empty queue.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Any

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.trace import get_current_span

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._blocks import Block
from spanloop.collectors.sdk._failures import failed

__all__ = ["feedback", "flush_feedback"]

QUEUE_MAX = 10_000
BATCH_MAX = 100
TRIES_MAX = 12
PAUSE_FIRST_S = 0.25
PAUSE_MAX_S = 30.0
TIMEOUT_S = 10.0
EXIT_S = 2.0
"""The end of the process waits for the queue this long at most."""
_COMMENT_CHARS = 4096


class Sender:
    """The queue and its thread."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._items: deque[tuple[str, str, dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = 0
        self._closing = False

    def put(self, url: str, token: str, item: dict[str, Any]) -> bool:
        """Queue an item; False when the queue is full."""
        with self._changed:
            if len(self._items) + self._busy >= QUEUE_MAX:
                return False
            self._items.append((url, token, item))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="spanloop-feedback", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; False when it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, timeout_s)

    def close(self) -> None:
        """Send what waits, for EXIT_S at most."""
        if self._items or self._busy:
            self._closing = True
            with self._changed:
                self._changed.notify_all()
            if not self.flush(EXIT_S):
                failed(
                    "feedback was not sent before the process ended", "the endpoint did not take it in time"
                )

    def _work(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items))
                url, token, _ = self._items[0]
                batch = []
                while self._items and len(batch) < BATCH_MAX and self._items[0][:2] == (url, token):
                    batch.append(self._items.popleft()[2])
                self._busy = len(batch)
            try:
                self._send(url, token, batch)
            except Exception as exc:
                failed("sending feedback", exc)
            with self._changed:
                self._busy = 0
                self._changed.notify_all()

    def _send(self, url: str, token: str, batch: list[dict[str, Any]]) -> None:
        pause_s = PAUSE_FIRST_S
        body = json.dumps(batch).encode()
        for _ in range(TRIES_MAX):
            again_s = _post(url, token, body)
            if again_s is None:
                return
            if self._closing:
                time.sleep(PAUSE_FIRST_S)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._closing, min(max(pause_s, again_s), PAUSE_MAX_S))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        failed("feedback was given up", f"no answer in {TRIES_MAX} tries")


def _post(url: str, token: str, body: bytes) -> float | None:
    """Send once; None when it is done (taken, or refused for good), else the seconds that the endpoint asks to wait."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310  checked in _target
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            rejected = json.loads(answer.read() or b"{}").get("rejected")
        if rejected:
            failed("feedback was refused", str(rejected)[:200])
        return None
    except urllib.error.HTTPError as exc:
        if exc.code != 429 and exc.code < 500:
            failed("feedback was refused", f"HTTP {exc.code}: {exc.read(200).decode('utf-8', 'replace')}")
            return None
        wait = exc.headers.get("Retry-After", "")
        return float(wait) if wait.isascii() and wait.isdigit() else 0.0
    except (OSError, ValueError, AttributeError):
        return 0.0


_sender = Sender()
os.register_at_fork(after_in_child=_sender._reset)
atexit.register(_sender.close)


def feedback(
    value: float,
    *,
    name: str = "outcome",
    target: Any = None,
    trace_id: str = "",
    span_id: str = "",
    response_id: str = "",
    orchestration_id: str = "",
    label: str = "",
    comment: str = "",
    final: bool = True,
    feedback_id: str = "",
    endpoint: str = "",
    token: str = "",
) -> str:
    """Tell how it went: a score or an outcome for a trace, a span, a model's response or an orchestration.

    Without a target it is for the trace that the host is in. The endpoint believes it only with a scorer's credential.

    Args:
        value: the score, finite.
        target: a block of this SDK: its span in its trace (an agent run, a delegation).
        feedback_id: a later feedback under the same id corrects this one. Default: a new one.
        endpoint: default SPANLOOP_FEEDBACK_ENDPOINT, else /v1/feedback at OTEL_EXPORTER_OTLP_ENDPOINT.
        token: the scorer's key. Default SPANLOOP_SCORER_TOKEN.

    Returns:
        The feedback id; empty when it could not be queued, which is counted in ``failures()``.
    """
    try:
        item: dict[str, Any] = {}
        if isinstance(target, Block) and target.span_id:
            trace_id, span_id = target.trace_id, target.span_id
        given = {
            "orchestration_id": orchestration_id,
            "response_id": response_id,
            "span_id": span_id,
            "trace_id": trace_id,
        }
        item |= {key: _values.label(text, {}) for key, text in given.items() if text}
        if not item:
            current = get_current_span().get_span_context()
            if not current.is_valid:
                failed(
                    "feedback without a target",
                    "give trace_id, span_id, response_id or a block, or call it inside a block",
                )
                return ""
            item["trace_id"] = f"{current.trace_id:032x}"
        number = float(value)
        if not math.isfinite(number):
            failed("feedback with a value that is no number", "expected a finite number")
            return ""
        chosen_id = _values.label(feedback_id, {}) or secrets.token_hex(16)
        item |= {"value": number, "name": _values.label(name, {}, 64), "final": bool(final), "feedback_id": chosen_id,
                 "observed_at": time.time_ns()}  # fmt: skip
        if label:
            item["label"] = _values.label(label, {}, 64)
        if comment:
            item["comment"] = _values.label(comment, {}, _COMMENT_CHARS)
        url = _endpoint(endpoint)
        if not _sender.put(url, token or os.environ.get("SPANLOOP_SCORER_TOKEN", ""), item):
            failed("feedback was dropped", f"{QUEUE_MAX} wait already")
            return ""
        return chosen_id
    except Exception as exc:
        failed("feedback()", exc)
        return ""


def flush_feedback(timeout_s: float = 10.0) -> bool:
    """Wait until all feedback is sent, refused or given up; False when it takes longer."""
    return _sender.flush(timeout_s)


def _endpoint(given: str) -> str:
    url = given or os.environ.get("SPANLOOP_FEEDBACK_ENDPOINT", "")
    if not url:
        base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or "http://127.0.0.1:4318"
        url = base.rstrip("/") + "/v1/feedback"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the feedback endpoint is no http address: {url[:64]}")
    return url
