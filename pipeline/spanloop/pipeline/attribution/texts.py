"""What a span says in words: the text that its agent, model or tool put out.

Place in the flow: the read side only. Assembly never sees a text; attribution reads it from the stored spans, where the
deployment keeps content. A dropped text still tells its length.
Invariants: total; nothing is kept beyond the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from spanloop.schemas.spans import Span

__all__ = ["NOTHING", "Words", "join_words", "words_of"]

CHARS_MAX = 20_000
"""Characters of one step that are read: its beginning."""
_DEPTH_MAX = 12
_OUTPUTS = (
    "gen_ai.output.messages",
    "gen_ai.tool.call.result",
    "output.value",
    "traceloop.entity.output",
    "langfuse.observation.output",
    "mlflow.spanOutputs",
    "gcp.vertex.agent.llm_response",
    "gcp.vertex.agent.tool_response",
    "tool_response",
    "response",
    "final_result",
)
"""Attributes that hold what a span put out, the plainest first."""
_PREFIXES = ("llm.output_messages.", "gen_ai.completion.")
_ENDS = (".content", ".text", ".arguments")
_SAYS = frozenset(
    {"text", "content", "result", "response", "output", "arguments", "value", "message", "parts"}
)
"""Keys of structured output below which words stand; the others hold ids, roles and types."""

_EMPTY = frozenset({"text", "tool_call", "tool_call_response", "reasoning", "thinking"})
"""Types of message parts. Instrumentations that were told to leave contents out write a part's type, id and name alone."""
_STRUCTURE = frozenset({"type", "id", "name"})


class Words(msgspec.Struct, frozen=True):
    """The text of a step, or what is left of it."""

    text: str = ""
    length: int = 0
    """Characters, also of a text that was dropped."""
    dropped: bool = False
    """Some of it was not kept."""


NOTHING = Words()


def words_of(span: Span) -> Words:
    """What ``span`` put out, then its error message.

    >>> span = Span(trace_id="a" * 32, span_id="b" * 16, name="x", start_ns=0, end_ns=1, attributes={"output.value": "four"})
    >>> words_of(span).text
    'four'
    """
    attributes = span.attributes
    found = next((said for key in _OUTPUTS if (said := list(_said(attributes.get(key), 0)))), None)
    if found is None:
        keys = sorted(key for key in attributes if key.startswith(_PREFIXES) and key.endswith(_ENDS))
        found = [part for key in keys for part in _said(attributes[key], 0)]
    errors: list[Any] = [span.status_message] if span.status_message else []
    errors += [event.attributes.get("exception.message") for event in span.events]
    return _joined([*found, *(part for error in errors for part in _said(error, 0))])


def join_words(parts: Iterable[Words]) -> Words:
    """Several spans of one step, in their order."""
    kept = list(parts)
    return Words(
        "\n".join(part.text for part in kept if part.text)[:CHARS_MAX],
        sum(part.length for part in kept),
        any(part.dropped for part in kept),
    )


def _joined(parts: list[str | int]) -> Words:
    texts = [part for part in parts if isinstance(part, str) and part]
    lost = [part for part in parts if isinstance(part, int)]
    return Words("\n".join(texts)[:CHARS_MAX], sum(map(len, texts)) + sum(lost), bool(lost))


def _said(value: Any, depth: int) -> Iterator[str | int]:
    """Texts in ``value``; of a dropped one its length."""
    if depth > _DEPTH_MAX:
        return
    if isinstance(value, str):
        parsed = _structure(value)
        if parsed is None:
            yield value
        else:
            yield from _said(parsed, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _said(item, depth + 1)
    elif isinstance(value, dict):
        if any(key.startswith("$") for key in value):
            length = value.get("$redacted")
            yield length if isinstance(length, int) and not isinstance(length, bool) else 0
            return
        known = [key for key in value if key in _SAYS]
        if not known and value.keys() <= _STRUCTURE and value.get("type") in _EMPTY:
            return
        for key in known or value:
            yield from _said(value[key], depth + 1)


def _structure(text: str) -> Any:
    """Messages that were written as JSON; None: plain words."""
    if not text.startswith(("[{", '{"')) or len(text) > 1_000_000:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
