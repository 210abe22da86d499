"""Files cut into records: which framing the bytes have, going on behind a bad record and from any place."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest

from spanloop.pipeline.formats import framing
from spanloop.pipeline.formats.framing import Place, records
from spanloop.pipeline.formats.opened import Source, found_files, opened
from spanloop.pipeline.formats.reading import read_files
from spanloop.pipeline.formats.stream import Stream
from spanloop.schemas.errors import ConfigError

VALUES = [{"n": n, "text": 'a "quoted" } ] \\ text', "list": [[], {}, [1, 2]]} for n in range(5)]


def cut(data: bytes, place: Place | None = None):
    return list(records(Stream(io.BytesIO(data)), "f", place))


def values(data: bytes) -> list:
    return [json.loads(r.body) for r in cut(data) if not r.problem]


FORMS = {
    "lines": "\n".join(map(json.dumps, VALUES)),
    "lines with blanks": "\n\r\n".join(map(json.dumps, VALUES)) + "\n\n",
    "values over lines": "\n".join(json.dumps(v, indent=1) for v in VALUES),
    "values in a row": "\x1e".join(json.dumps(v, indent=1) for v in VALUES),
    "list": json.dumps(VALUES),
    "list over lines": json.dumps(VALUES, indent=2),
    "list without breath": json.dumps(VALUES, separators=(",", ":")) + "\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
def test_every_framing_gives_the_same_values(form, bom):
    assert values(bom + FORMS[form].encode()) == VALUES


@pytest.mark.parametrize("form", FORMS)
def test_reading_goes_on_at_any_record(form):
    data = FORMS[form].encode()
    stream = Stream(io.BytesIO(data))
    places = [(stream.taken, r.place, r) for r in records(stream, "f")]
    for number, (taken, place, _) in enumerate(places):
        rest = Stream(io.BytesIO(data))
        assert rest.skip(taken)
        assert list(records(rest, "f", place)) == [r for _, _, r in places[number + 1 :]]


def test_a_bad_line_costs_only_itself_wherever_it_stands():
    good = [json.dumps(v) for v in VALUES]
    for place in range(len(good) + 1):
        lines = [*good[:place], '{"cut": [', *good[place:]]
        found = cut("\n".join(lines).encode())
        assert [r.where for r in found] == [f"f line {n + 1}" for n in range(6)]
        assert found[place].body.startswith(b'{"cut": [')


def test_what_follows_a_list_that_is_cut_is_told():
    data = FORMS["list"].encode()
    for size in (1, 30, len(data) // 2, len(data) - 1):
        found = cut(data[:size])
        assert found[-1].problem in ("the file ends within it", "the list does not end")
        assert [json.loads(r.body) for r in found[:-1]] == VALUES[: len(found) - 1]


def test_a_long_document_of_one_list_is_read_element_by_element(monkeypatch):
    monkeypatch.setattr(framing, "DOCUMENT_BYTES", 200)
    data = json.dumps({"resourceSpans": VALUES, "more": {"x": [1]}}).encode()
    found = cut(data)
    assert [json.loads(r.body) for r in found] == [{"resourceSpans": [v]} for v in VALUES]
    assert {len(r.body) < 200 for r in found} == {True}
    data = json.dumps({"data": VALUES}, indent=1).encode()
    assert values(data) == VALUES


def test_records_over_the_limit_are_named_and_bounded(monkeypatch):
    monkeypatch.setattr(framing, "MAX_RECORD_BYTES", 300)
    monkeypatch.setattr(framing, "_KEPT", 10)
    lines = [json.dumps({"n": 1}), json.dumps({"n": "x" * 1000}), json.dumps({"n": 3})]
    found = cut("\n".join(lines).encode())
    assert [(r.problem != "", len(r.body) <= 10) for r in found] == [
        (False, True),
        (True, True),
        (False, True),
    ]
    assert json.loads(found[2].body) == {"n": 3}


def test_strings_are_no_brackets_even_across_reads():
    value = {"k": "]}" * 400_000 + '\\"' + "[{" * 3, "e": "\\"}
    assert values(json.dumps([value, value]).encode()) == [value, value]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_packed_files(tmp_path, pack):
    path = tmp_path / "x"
    path.write_bytes(pack(FORMS["lines"].encode()))
    with opened(Source(path)) as (stream, _):
        assert [json.loads(r.body) for r in records(stream, "x")] == VALUES
    path.write_bytes(pack(FORMS["lines"].encode() * 3000)[:-30])
    with opened(Source(path)) as (stream, _):
        assert "stream is damaged" in list(records(stream, "x"))[-1].problem


def test_members_of_an_archive_and_files_of_a_folder(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one/b.jsonl", FORMS["lines"])
        archive.writestr("one/a.json.gz", gzip.compress(FORMS["list"].encode()))
        archive.writestr("__MACOSX/x", "junk")
    (tmp_path / "z.txt").write_text("no spans")
    (tmp_path / ".hidden").write_text("{}")
    sources = found_files([tmp_path])
    assert [s.name for s in sources] == ["a.zip:one/a.json.gz", "a.zip:one/b.jsonl", "z.txt"]
    for source in sources[:2]:
        assert source.size > 0
        with opened(source) as (stream, _):
            assert [json.loads(r.body) for r in records(stream, source.name)] == VALUES


def test_what_cannot_be_opened_is_named(tmp_path: Path):
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04 and no more")
    for path in (tmp_path / "bad.zip", tmp_path / "none"):
        with pytest.raises(ConfigError, match=path.name):
            found_files([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file in"):
        found_files([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="UTF-16"):
        cut("{}".encode("utf-16"))


def test_an_archive_of_many_members_is_opened_once(tmp_path, monkeypatch):
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(300):
            archive.writestr(f"{n:03}.jsonl", FORMS["lines"])
    directories = []
    read = zipfile.ZipFile._RealGetContents  # reads the archive's directory
    monkeypatch.setattr(
        zipfile.ZipFile, "_RealGetContents", lambda self: (directories.append(self.filename), read(self))
    )
    found = found_files([path])
    assert sum(s.size for s in found) == 300 * len(FORMS["lines"])
    assert len(list(read_files(path))) == 300 * len(VALUES)
    assert len(directories) == 3  # found_files, and read_files: the names, then the members
