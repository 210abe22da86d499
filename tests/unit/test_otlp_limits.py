"""Bounds on bodies and spans."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from spanloop.collectors import limits
from spanloop.collectors.limits import (
    MAX_SPAN_BYTES,
    TRUNCATED,
    BodyTooLargeError,
    cut_text,
    expand,
)
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span, SpanEvent


def cut_span(span: Span, max_bytes: int) -> Span:
    return limits.cut_span(span, max_bytes)


BASE = Span("a" * 32, "b" * 16, "n", 1, 2)


def _with(**attributes: object) -> Span:
    return Span("a" * 32, "b" * 16, "n", 1, 2, attributes=attributes)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(b"hello")),
        ("gzip", gzip.compress(b"hel") + gzip.compress(b"lo")),
        ("deflate", zlib.compress(b"hello")),
        ("deflate", zlib.compress(b"hello")[2:-4]),
    ],
    ids=["gzip", "two members", "zlib", "raw deflate"],
)
def test_expand(encoding: str, data: bytes) -> None:
    assert expand(data, encoding, 5) == b"hello"
    with pytest.raises(BodyTooLargeError, match="max_expanded_bytes"):
        expand(data, encoding, 4)
    with pytest.raises(SchemaError):
        expand(data[:-1], encoding, 100)


def test_expand_refuses_what_is_not_compressed() -> None:
    with pytest.raises(SchemaError, match="Content-Encoding"):
        expand(b'{"resourceSpans":[]}', "gzip", 100)


def test_a_bomb_never_holds_more_than_the_limit() -> None:
    bomb = gzip.compress(bytes(64 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            expand(bomb, "gzip", 4 * 2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", range(12))
def test_text_is_cut_at_a_character(size: int) -> None:
    text = "aä€\U0001f98ab"
    cut = cut_text(text, size)
    assert text.startswith(cut)
    assert len(cut.encode()) <= size or cut == text
    assert len(text[: len(cut) + 1].encode()) > size or cut == text


def test_nothing_to_cut_is_the_same_object() -> None:
    assert cut_span(BASE, 256) is BASE


def test_long_values_are_cut_and_listed() -> None:
    span = _with(long="x" * 1000, fine="y", items=["z" * 400] * 3, blob={"$bytes": "A" * 1000}, n=7)
    cut = cut_span(span, 256)
    assert cut.attributes[TRUNCATED] == ["blob", "items", "long"]
    assert (cut.attributes["long"], cut.attributes["fine"], cut.attributes["n"]) == ("x" * 256, "y", 7)
    assert cut.attributes["items"].startswith('["zzz')
    assert len(cut.attributes["blob"]["$bytes"]) % 4 == 0
    assert all(len(canonical_json(v)) <= 260 for v in cut.attributes.values())
    assert cut_span(cut, 256).attributes == cut.attributes


def test_names_events_and_resource_are_cut_too() -> None:
    span = Span(
        "a" * 32, "b" * 16, "n" * 999, 1, 2, status_message="m" * 999, resource={"r": "r" * 999},
        events=(SpanEvent("e" * 999, 1, {"k": "v" * 999}),),
    )  # fmt: skip
    cut = cut_span(span, 256)
    assert max(map(len, (cut.name, cut.status_message, cut.resource["r"], cut.events[0].name))) == 256
    assert len(cut.events[0].attributes["k"]) == 256
    assert set(cut.attributes[TRUNCATED]) == {"name", "status_message", "r", "event name", "k"}


def test_token_arrays_are_exempt() -> None:
    ids = list(range(50_000))
    cut = cut_span(_with(**{"spanloop.prompt_token_ids": ids, "other": "x" * 999}), 256)
    assert cut.attributes["spanloop.prompt_token_ids"] == ids


@pytest.mark.parametrize(
    "span",
    [
        _with(**{f"k{i}": "x" * 60_000 for i in range(128)}),
        _with(**{f"k{i}": "x" * 600 for i in range(10_000)}),
        Span("a" * 32, "b" * 16, "n", 1, 2, events=tuple(SpanEvent("e" * 60_000) for _ in range(100))),
        Span("a" * 32, "b" * 16, "n", 1, 2, resource={f"k{i}": "x" * 60_000 for i in range(20)}),
        _with(**{"k" * 500_000 + str(i): 1 for i in range(10)}),
    ],
    ids=["large", "many", "events", "resource", "keys"],
)
def test_a_whole_span_is_bounded(span: Span) -> None:
    cut = cut_span(span, 65_536)
    assert len(canonical_json(cut)) <= 2 * MAX_SPAN_BYTES
    assert cut.attributes[TRUNCATED]
