"""Server-sent events of a streamed chat: splitting the bytes, and folding chunks into the response they spell. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from spanloop.collectors.untyped import maps, number, text, the_map

__all__ = ["EVENT_BYTES_MAX", "ChunkFolder", "SseSplitter", "chunk_of", "event_data", "plain", "with_data"]

_decode = msgspec.json.Decoder().decode

EVENT_BYTES_MAX = 16 * 2**20
"""A longer event is an error of the upstream."""
_BLANK = re.compile(rb"\r?\n\r?\n")
TOOL_CALLS_MAX = 1024
"""Tool calls of one message that are recorded."""


class SseSplitter:
    """Bytes in any pieces to whole events. ``limit``: bytes of a longer one are an error."""

    def __init__(self, limit: int = EVENT_BYTES_MAX) -> None:
        self._limit = limit
        self._buffer = b""
        self._seen = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Events that are complete with these bytes, without their blank line. Raises ValueError when one grows beyond all
        measure."""
        return [plain(event) for event in self.feed_raw(data) if event.strip()]

    def feed_raw(self, data: bytes) -> list[bytes]:
        """Events that are complete with these bytes, each with its blank line, byte for byte. Raises ValueError as ``feed``."""
        self._buffer += data
        events = []
        at = 0
        for end in _BLANK.finditer(self._buffer, max(0, self._seen - 3)):
            events.append(self._buffer[at : end.end()])
            at = end.end()
        self._buffer = self._buffer[at:]
        self._seen = len(self._buffer)
        if self._seen > self._limit:
            raise ValueError(f"an event of the stream has more than {self._limit} bytes")
        return events

    def rest(self) -> bytes:
        """What came after the last whole event."""
        rest, self._buffer, self._seen = self._buffer, b"", 0
        return rest


def plain(event: bytes) -> bytes:
    """An event with line feeds only, without its blank line."""
    return event.replace(b"\r\n", b"\n").strip(b"\n")


def _is_one_line(event: bytes) -> bool:
    """Whether an event is ``data: `` and a text, as nearly all are."""
    return event.startswith(b"data: ") and event.endswith(b"\n\n") and event.find(b"\n") == len(event) - 2


def with_data(event: bytes, data: bytes) -> bytes:
    """An event with other data; its further fields stay.

    >>> with_data(b"event: a\\ndata: {}\\n\\n", b"[]")
    b'event: a\\ndata: []\\n\\n'
    """
    if _is_one_line(event):
        return b"data: " + data + b"\n\n"
    kept = [line for line in plain(event).split(b"\n") if not line.startswith(b"data:")]
    return b"".join(line + b"\n" for line in kept) + b"data: " + data + b"\n\n"


def event_data(event: bytes) -> bytes | None:
    """The data of an event; None for comments and other fields."""
    if _is_one_line(event):
        return event[6:-2].removesuffix(b"\r")
    lines = [line[5:].removeprefix(b" ") for line in plain(event).split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """The object in an event's data; None where there is none to expect. Data that is no object is told as an error.

    >>> chunk_of(b'data: {"a": 1}\\n\\n'), chunk_of(b"data: [DONE]\\n\\n"), chunk_of(b"data: what\\n\\n")
    ({'a': 1}, None, {'error': 'no object'})
    """
    data = event_data(event)
    if data is None or data == b"[DONE]":
        return None
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        chunk = None
    return chunk if isinstance(chunk, dict) else {"error": "no object"}


class ChunkFolder:
    """Folds chat.completion.chunk objects into the chat.completion object of the same call."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.num_chunks = 0

    def add(self, chunk: dict[str, Any]) -> None:
        """Take in one chunk, as the server sent it."""
        self.num_chunks += 1
        for name in ("id", "created", "model", "usage", "prompt_token_ids", "system_fingerprint"):
            if chunk.get(name) is not None:
                self._head[name] = chunk[name]
        for part in maps(chunk.get("choices")):
            index = int(number(part.get("index")) or 0)
            choice = self._choices.setdefault(
                index,
                {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None},
            )
            if part.get("finish_reason") is not None:
                choice["finish_reason"] = part["finish_reason"]
            if isinstance(part.get("token_ids"), list):
                choice.setdefault("token_ids", []).extend(part["token_ids"])
            if content := maps(the_map(part.get("logprobs")).get("content")):
                choice.setdefault("logprobs", {"content": []})["content"].extend(content)
            _fold_delta(choice["message"], the_map(part.get("delta")))

    def response(self) -> dict[str, Any] | None:
        """The response so far; None before the first chunk."""
        if not self.num_chunks:
            return None
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._head, "object": "chat.completion", "choices": choices}


def _fold_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["role"] = text(delta.get("role")) or message["role"]
    for name in ("content", "refusal", "reasoning_content"):
        if piece := text(delta.get(name)):
            message[name] = (message.get(name) or "") + piece
    for part in maps(delta.get("tool_calls")):
        calls = message.setdefault("tool_calls", [])
        index = int(number(part.get("index")) or 0)
        if not 0 <= index < TOOL_CALLS_MAX:
            continue
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        function, told = calls[index]["function"], the_map(part.get("function"))
        calls[index]["id"] = text(part.get("id")) or calls[index]["id"]
        function["name"] += text(told.get("name"))
        function["arguments"] += text(told.get("arguments"))
