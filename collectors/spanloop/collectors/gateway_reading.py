"""A stream on its way through the gateway: what of it the client sees, and what of it is recorded.

Invariants: where nothing is taken out, the bytes go on as they came, whatever they are; what the record cannot read costs the record,
never the client.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from spanloop.collectors.gateway_call import Call
from spanloop.collectors.gateway_stream import SseSplitter, event_data, with_data

__all__ = ["Reading"]

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Reading:
    """The events of one call's stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._splitter = SseSplitter()
        self._folder = call.shape.folder()
        self._folds = True

    def take(self, piece: bytes) -> bytes:
        """What the client gets of a piece. Raises ValueError when an event that must be read grows beyond all measure."""
        if self._call.asked is not None:
            return b"".join([self._shown(event) for event in self._splitter.feed_raw(piece)])
        if self._folds:
            try:
                for event in self._splitter.feed_raw(piece):
                    self._fold(event)
            except ValueError as exc:
                self._folds = False
                _log.warning("the rest of a stream is not recorded: %s", exc)
        return piece

    def end(self) -> bytes:
        """What the client still gets when the upstream has ended: an event without its blank line."""
        rest = self._splitter.rest()
        if not rest:
            return b""
        if self._call.asked is not None:
            return self._shown(rest)
        self._fold(rest)
        return b""

    def response(self) -> dict[str, Any] | None:
        """The answer that the events spell so far."""
        return self._folder.response()

    def _fold(self, event: bytes) -> dict[str, Any] | None:
        """Take an event into the record; its data where that is an object that is no error."""
        data = event_data(event)
        if data is None or data == b"[DONE]":
            return None
        try:
            chunk = _decode(data)
        except _MALFORMED:
            chunk = None
        if not isinstance(chunk, dict) or chunk.get("error") or chunk.get("type") == "error":
            self._call.error = "upstream_error_event"
            return None
        try:
            self._folder.add(chunk)
        except Exception:  # an upstream may send anything
            _log.exception("an event of a stream is not recorded")
        return chunk

    def _shown(self, event: bytes) -> bytes:
        """An event as it came, or without what only the record needs. Empty: not for the client."""
        asked, chunk = self._call.asked, self._fold(event)
        if chunk is None or asked is None:
            return event
        shown = self._call.shape.shown(chunk, asked)
        if not asked.usage:
            if not shown.get("choices") and shown.get("usage") is not None:
                return b""
            shown.pop("usage", None)
        return event if shown == chunk else with_data(event, _encode(shown))
