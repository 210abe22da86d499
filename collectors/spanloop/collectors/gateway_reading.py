"""A stream on its way through the gateway: what of it the client sees, and what of it is recorded.

Invariants: where nothing is taken out, the bytes go on as they came, whatever they are, and are not read here; what the record
cannot read costs the record, never the client.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from spanloop.collectors.gateway_call import Call
from spanloop.collectors.gateway_finished import ANSWER_BYTES_MAX
from spanloop.collectors.gateway_shapes import CHAT, RESPONSES
from spanloop.collectors.gateway_stream import SseSplitter, chunk_of, event_data, with_data
from spanloop.collectors.gateway_tokens import shown_chat_bytes
from spanloop.collectors.untyped import text, the_map

__all__ = ["Reading"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Reading:
    """The events of one call's stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._splitter = SseSplitter()
        self._looks = call.shape is RESPONSES
        """For the id of the answer."""
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def answer(self) -> bytes:
        """What came, for the record."""
        return b"".join(self._pieces)

    def take(self, piece: bytes) -> bytes:
        """What the client gets of a piece. Raises ValueError when an event that must be read grows beyond all measure."""
        if self._size < ANSWER_BYTES_MAX:
            self._pieces.append(piece)
            self._size += len(piece)
        if self._call.asked is not None:
            return b"".join([self._shown(event) for event in self._splitter.feed_raw(piece)])
        if self._looks:
            try:
                for event in self._splitter.feed_raw(piece):
                    self._look(chunk_of(event))
            except ValueError as exc:
                self._looks = False
                _log.warning("a stream is passed on without its id: %s", exc)
        return piece

    def end(self) -> bytes:
        """What the client still gets when the upstream has ended: an event without its blank line."""
        rest = self._splitter.rest()
        return self._shown(rest) if rest and self._call.asked is not None else b""

    def _look(self, chunk: dict[str, Any] | None) -> None:
        if self._looks and chunk is not None and (found := text(the_map(chunk.get("response")).get("id"))):
            self._call.response_id = found
            self._looks = False

    def _shown(self, event: bytes) -> bytes:
        """An event as it came, or without what only the record needs. Empty: not for the client."""
        asked = self._call.asked
        if self._call.shape is CHAT and asked is not None and (data := event_data(event)) is not None:
            try:
                told = shown_chat_bytes(data, asked, event=True)
            except msgspec.DecodeError:  # the end's mark, or something odd
                pass
            else:
                return event if told is data else with_data(event, told) if told else b""
        chunk = chunk_of(event)
        if chunk is None or asked is None or chunk.get("error") or chunk.get("type") == "error":
            return event
        self._look(chunk)
        shown = self._call.shape.shown(chunk, asked)
        if not asked.usage:
            if not shown.get("choices") and shown.get("usage") is not None:
                return b""
            shown.pop("usage", None)
        return event if shown == chunk else with_data(event, _encode(shown))
