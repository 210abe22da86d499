"""Files of OTLP requests: formats are found out, errors name file and record and do not end the reading."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from otlp_requests import as_json, as_protobuf, corpora, span

from spanloop.pipeline.otlp.files import detect_format, read_requests, read_spans
from spanloop.schemas.errors import ConfigError

REQUESTS = [[span(1), span(2)], [span(3, attributes={"long": "x" * 9000})], [span(4)]]
IDS = [f"{n:016x}" for n in (1, 2, 3, 4)]


def _varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + _varint(n >> 7)


def _pretty(data: bytes) -> bytes:
    return json.dumps(json.loads(data), indent=2).encode()


FORMS: dict[str, Callable[[], bytes]] = {
    "lines": lambda: b"\n".join(as_json(r) for r in REQUESTS),
    "lines with blanks and bom": lambda: (
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(as_json(r) for r in REQUESTS) + b"\n"
    ),
    "document": lambda: _pretty(as_json([s for r in REQUESTS for s in r])),
    "one line": lambda: as_json([s for r in REQUESTS for s in r]),
    "array": lambda: b"[" + b",\n".join(as_json(r) for r in REQUESTS) + b"]",
    "length4": lambda: b"".join(len(p).to_bytes(4, "big") + p for p in map(as_protobuf, REQUESTS)),
    "varint": lambda: b"".join(_varint(len(p)) + p for p in map(as_protobuf, REQUESTS)),
    "protobuf": lambda: as_protobuf([s for r in REQUESTS for s in r]),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_spans(tmp_path: Path, form: str, zipped: bool) -> None:
    path = tmp_path / "file"
    data = FORMS[form]()
    path.write_bytes(gzip.compress(data) if zipped else data)
    batches = list(read_spans(path))
    assert [s.span_id for b in batches for s in b.spans] == IDS
    assert not any(b.rejected for b in batches)


def test_a_bad_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_bytes(b"{broken\n" + as_json([span(1)]) + b'\n{"oops": 1}\n' + as_json([span(2)]))
    batches = list(read_spans(path))
    assert [s.span_id for b in batches for s in b.spans] == IDS[:2]
    reasons = [r.reason for b in batches for r in b.rejected]
    assert [r.split(":")[0] for r in reasons] == ["spans.jsonl line 1", "spans.jsonl line 3"]


@pytest.mark.parametrize("form", ["length4", "varint"])
def test_a_file_that_was_cut_gives_what_is_whole(tmp_path: Path, form: str) -> None:
    path = tmp_path / "spans.pb"
    path.write_bytes(FORMS[form]()[:-5])
    batches = list(read_spans(path))
    assert [s.span_id for b in batches for s in b.spans] == IDS[:3]
    assert "spans.pb record 3: the file ends after" in batches[-1].rejected[0].reason


def test_damaged_lengths_and_gzip_are_reported(tmp_path: Path) -> None:
    good = as_protobuf([span(1)])
    path = tmp_path / "spans.pb"
    path.write_bytes(len(good).to_bytes(4, "big") + good + b"\xff\xff\xff\xff more")
    batches = list(read_spans(path))
    assert (len(batches[0].spans), "length is damaged" in batches[1].rejected[0].reason) == (1, True)
    path.write_bytes(gzip.compress(FORMS["lines"]() * 50)[:-200])
    assert "gzip stream is damaged" in list(read_spans(path))[-1].rejected[0].reason


@pytest.mark.parametrize("data", [b"hello", b"PAR1....", b"\x00" * 64, b"SQLite format 3\x00"])
def test_other_files_are_refused_with_a_hint(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="expected OTLP"):
        list(read_spans(path))


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert list(read_requests(tmp_path / "empty")) == []
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_spans(tmp_path / "none"))
    assert detect_format(b"") == ""


def test_specification_example_with_upper_case_ids() -> None:
    (batch,) = read_spans(corpora() / "otlp-proto-examples" / "trace.json")
    assert (batch.spans[0].trace_id, batch.rejected) == ("5b8efff798038103d269b633813fc60c", [])


def test_a_pipe_is_refused_because_the_format_is_told_by_reading_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe"):
        list(read_spans(tmp_path / "pipe"))
