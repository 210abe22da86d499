"""The recorded APIs side by side: how each is asked for tokens, folded from a stream, shown to the client, and told to the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from spanloop.collectors import gateway_completions, gateway_responses
from spanloop.collectors.gateway_stream import ChunkFolder
from spanloop.collectors.gateway_tokens import Asked, ask_for_tokens, shown_chat

__all__ = ["CHAT", "COMPLETIONS", "DECIDE", "RESPONSES", "SHAPES", "Folder", "Shape", "shape_of"]


class Folder(Protocol):
    """Folds a stream's events into the answer that they spell."""

    def add(self, event: dict[str, Any], /) -> None:
        """Take in one event, as the server sent it."""
        ...

    def response(self) -> dict[str, Any] | None:
        """The answer so far; None before the first event."""
        ...


class Asking(Protocol):
    """Writes the request for the server; see ``gateway_tokens.ask_for_tokens``."""

    def __call__(self, body: dict[str, Any], model: str, *, tokens: bool) -> tuple[dict[str, Any], Asked]: ...


class Shape(msgspec.Struct, frozen=True):
    """One API."""

    name: str
    path: str
    """Below the upstream's base URL."""
    operation: str
    """``gen_ai.operation.name``."""
    ask: Asking
    shown: Callable[[dict[str, Any], Asked], dict[str, Any]]
    """An answer, or an event of its stream, without what the client did not ask for; the argument stays as it is."""
    folder: Callable[[], Folder]
    request_view: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """The request as a chat request."""
    response_view: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """The answer as a chat.completion."""


def _same(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body


CHAT = Shape("chat", "/chat/completions", "chat", ask_for_tokens, shown_chat, ChunkFolder, _same, _same)
RESPONSES = Shape(
    "responses", "/responses", "chat", gateway_responses.ask, gateway_responses.shown, gateway_responses.ResponseFolder,
    gateway_responses.request_view, gateway_responses.response_view,
)  # fmt: skip
COMPLETIONS = Shape(
    "completions", "/completions", "text_completion", gateway_completions.ask, gateway_completions.shown,
    gateway_completions.CompletionFolder, gateway_completions.request_view, gateway_completions.response_view,
)  # fmt: skip
SHAPES = {shape.name: shape for shape in (CHAT, RESPONSES, COMPLETIONS)}
DECIDE = Shape("decide", "/decide", "decide", ask_for_tokens, shown_chat, ChunkFolder, _same, _same)
"""Recorded beside them; ``gateway_decide`` asks and shows it itself."""


def shape_of(name: str) -> Shape:
    """The shape of a record."""
    return DECIDE if name == DECIDE.name else SHAPES.get(name, CHAT)
