"""A finished call as the serving path hands it over, and the reading that it spared itself.

Place: the event loop makes a ``Finished`` of what it has at hand, bodies as they came; the recorder reads the bodies, folds a stream,
takes the fingerprints, and makes the span. Pure but for the memory of response ids.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import msgspec

from spanloop.collectors.gateway_record import CallRecord, Redact, Seal, call_event
from spanloop.collectors.gateway_shapes import DECIDE, Shape, shape_of
from spanloop.collectors.gateway_stream import EVENT_BYTES_MAX, SseSplitter, chunk_of
from spanloop.collectors.harness import harness_fingerprint
from spanloop.collectors.untyped import text
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import SpansReceived
from spanloop.schemas.settings import Settings

__all__ = ["ANSWER_BYTES_MAX", "Events", "Finished", "call_record"]

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder().decode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

ANSWER_BYTES_MAX = 48 * 2**20
"""Of a longer stream the beginning is recorded."""
IDS_MAX = 100_000
"""Response ids that are remembered."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """All that the serving path knows of a call. ``CallRecord`` says what the fields mean."""

    tenant: str
    shape: str
    call_id: str
    request: bytes
    """The body as the client sent it."""
    answer: bytes
    """The answer as the server sent it; empty: no usable one."""
    folds: bool
    """``answer`` is a stream of events."""
    runtime: str
    """What runs the agent."""
    sticky: str
    """What keeps the conversation on its version."""
    sticky_source: str
    route: str
    policy_version: str
    exploration: float
    asked_tokens: bool
    start_ns: int
    end_ns: int
    status: int
    error: str
    parent: tuple[str, str] | None
    task_key: str
    turn_type: str
    server_address: str
    server_port: int
    trace_id: str = ""
    fallback: str = ""


def call_record(call: Finished, key: bytes) -> CallRecord:
    """What is recorded of a call. ``key``: secret of the workspace's hashes."""
    shape = shape_of(call.shape)
    request: dict[str, Any] = _decode(call.request)
    response, problem = _folded(shape, call) if call.folds else _whole(call)
    return CallRecord(
        tenant=call.tenant,
        shape=call.shape,
        call_id=call.call_id,
        request=request,
        response=response,
        route=call.route,
        policy_version=call.policy_version,
        exploration=call.exploration,
        asked_tokens=call.asked_tokens,
        conversation=digest("conversation", key, call.sticky),
        conversation_source=call.sticky_source,
        harness=harness_fingerprint(shape.request_view(request), runtime=call.runtime, key=key),
        start_ns=call.start_ns,
        end_ns=call.end_ns,
        status=call.status,
        error=call.error or problem,
        parent=call.parent,
        task_key=call.task_key,
        turn_type=call.turn_type,
        server_address=call.server_address,
        server_port=call.server_port,
        trace_id=call.trace_id,
        fallback=call.fallback,
        streamed=bool(request.get("stream")),
    )


def _whole(call: Finished) -> tuple[dict[str, Any] | None, str]:
    """The answer and what is wrong with it."""
    if not call.answer:
        return None, "" if call.error or call.status >= 300 else "upstream_malformed"
    try:
        response = _decode(call.answer)
    except _MALFORMED:
        response = None
    return (response, "") if isinstance(response, dict) else (None, "upstream_malformed")


def _folded(shape: Shape, call: Finished) -> tuple[dict[str, Any] | None, str]:
    """The answer that a stream's events spell, as far as they came, and what is wrong with it."""
    folder, problem = shape.folder(), ""
    for event in _events(call):
        chunk = chunk_of(event)
        if chunk is None:
            continue
        if chunk.get("error") or chunk.get("type") == "error":
            problem = "upstream_error_event"
            continue
        try:
            folder.add(chunk)
        except Exception:  # an upstream may send anything
            _log.exception("an event of a stream is not recorded")
    return folder.response(), problem


def _events(call: Finished) -> list[bytes]:
    """The whole events of a stream, and the last one without its blank line where the stream was not cut off."""
    splitter = SseSplitter(ANSWER_BYTES_MAX + EVENT_BYTES_MAX)
    events = splitter.feed_raw(call.answer)
    rest = splitter.rest()
    if call.error or len(call.answer) >= ANSWER_BYTES_MAX or len(rest) > EVENT_BYTES_MAX:
        return events
    return [*events, rest]


class Events:
    """Finished calls to the events of the log.

    Args:
        settings: The deployment.
        key: Secret of the workspace's hashes.
        redact: What stays of a span where content is off; None: no messages at all.
        seal: What becomes of a span where content is kept under keys.
    """

    def __init__(
        self, settings: Settings, *, key: bytes = b"", redact: Redact | None = None, seal: Seal | None = None
    ) -> None:
        self._content = settings.content.training
        self._max_attribute_bytes = settings.collector.max_attribute_bytes
        self._key = key
        self._redact = redact
        self._seal = seal
        self._seen: OrderedDict[str, None] = OrderedDict()

    def __call__(self, call: Finished) -> SpansReceived:
        """The event of one call."""
        record = call_record(call, self._key)
        again = (
            record.shape != DECIDE.name
        )  # a decision that is asked again under its id is the same decision
        if again and record.response is not None and self._is_repeated(text(record.response.get("id"))):
            record = msgspec.structs.replace(record, repeated=True)
        return call_event(
            record,
            content=self._content,
            redact=self._redact,
            max_attribute_bytes=self._max_attribute_bytes,
            seal=self._seal,
        )

    def _is_repeated(self, response_id: str) -> bool:
        """Whether another call has had this id: a server that repeats its ids (or takes them from the client's X-Request-Id)
        must not make two calls one."""
        if not response_id:
            return False
        if response_id in self._seen:
            return True
        self._seen[response_id] = None
        while len(self._seen) > IDS_MAX:
            self._seen.popitem(last=False)
        return False
