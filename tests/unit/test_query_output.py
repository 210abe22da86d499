"""What a query writes: forms, files, exit codes; and which way its files were found."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.archive import Archive, ArchiveStore, write_range
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.archive.writer import TABLES_VERSION as WRITTEN_VERSION
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.query import checked, render
from spanloop.pipeline.query.cli import query as command
from spanloop.pipeline.query.plan import TABLES_VERSION, names_in, sound_parts
from spanloop.pipeline.query.session import Query
from spanloop.pipeline.query.sources import Sources
from spanloop.pipeline.tables import TABLES, arrow_name
from spanloop.schemas.events import Event, FeedbackReceived, SpansReceived
from spanloop.schemas.spans import Span

T0 = 1_800_000_000_000_000_000
ESC = "\x1b[31mred\x1b[0m\x07"


def score(number: int, label: str = "", tenant: str = "default") -> FeedbackReceived:
    return FeedbackReceived(
        tenant=tenant, feedback_id=f"f{number}", target_kind="trace", target_id=f"t{number}", value=number / 4, label=label, scorer="s"
    )  # fmt: skip


def spans(trace: int, numbers: range, tenant: str = "default") -> SpansReceived:
    made = tuple(
        Span(trace_id=f"{trace:032x}", span_id=f"{n:016x}", name="chat", start_ns=T0 + n, end_ns=T0 + n + 5, attributes={"k": "v" * 30})
        for n in numbers
    )  # fmt: skip
    return SpansReceived(tenant=tenant, trace_id=f"{trace:032x}", spans=made)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith("SPANLOOP_")]:
        monkeypatch.delenv(name)
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(score(n, label)) for n, label in enumerate(["=1+1", "-2", ESC, 'a,"b"\nc', "ok"])])
    log.close()
    return tmp_path


def run(workspace: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--workspace", str(workspace)], catch_exceptions=True)


SQL = "SELECT feedback_id, label, value FROM feedback ORDER BY 1"


def test_csv_has_no_formulas_and_reads_back(workspace: Path) -> None:
    rows = list(csv.reader(io.StringIO(run(workspace, SQL, "--csv").stdout)))
    assert rows[0] == ["feedback_id", "label", "value"]
    assert [row[1] for row in rows[1:]] == ["'=1+1", "'-2", ESC, 'a,"b"\nc', "ok"]
    assert rows[3][2] == "0.5"
    assert run(workspace, "SELECT -1 AS n, '@x' AS t", "--csv").stdout == "n,t\n-1,'@x\n"


def test_the_table_moves_no_cursor(workspace: Path) -> None:
    out = run(workspace, SQL).stdout
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[31mred[0m" in out
    assert 'a,"b"\\nc' in out
    assert "\x1b" not in run(workspace, 'SELECT 1 AS "\x1b[2J"').stdout
    assert "\u202e" not in run(workspace, "SELECT 'a\u202eb' AS x").stdout


def test_json_is_valid_whatever_the_values(workspace: Path) -> None:
    sql = (
        "SELECT 'nan'::DOUBLE AS a, 170141183460469231731687303715884105727::HUGEINT AS b, MAP {'k': [1]} AS c, 'x'::BLOB AS d, "
        "1.50::DECIMAL(9,2) AS e, INTERVAL 1 DAY AS f, TIMESTAMPTZ '2027-01-15 09:00:00+01' AS g, {'i': NULL} AS h, uuid() IS NULL AS i"
    )
    (row,) = json.loads(run(workspace, sql, "--json").stdout)
    assert row["a"] == "nan"
    assert row["b"] == 2**127 - 1
    assert (row["c"], row["e"], row["g"], row["h"], row["i"]) == (
        {"k": [1]},
        1.5,
        "2027-01-15T08:00:00.000000Z",
        {"i": None},
        False,
    )
    assert run(workspace, "SELECT 1 WHERE false", "--json").stdout == "[]\n"


def test_arrow_and_parquet(workspace: Path, tmp_path: Path) -> None:
    piped = CliRunner().invoke(command, [SQL, "-f", "arrow", "--workspace", str(workspace)])
    assert pa.ipc.open_stream(piped.stdout_bytes).read_all()["value"].to_pylist() == [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    ]
    assert run(workspace, SQL, "-o", str(tmp_path / "x.arrow")).exit_code == 0
    assert pa.ipc.open_file(str(tmp_path / "x.arrow")).read_all().num_rows == 5
    assert run(workspace, SQL, "-o", str(tmp_path / "x.parquet")).exit_code == 0
    assert pq.read_table(tmp_path / "x.parquet")["label"].to_pylist()[2] == ESC
    assert (
        pq.read_table(
            io.BytesIO(
                CliRunner()
                .invoke(command, [SQL, "-f", "parquet", "--workspace", str(workspace)])
                .stdout_bytes
            )
        ).num_rows
        == 5
    )
    assert run(workspace, "SELECT 1 AS a WHERE false", "-o", str(tmp_path / "none.parquet")).exit_code == 0
    assert pq.read_table(tmp_path / "none.parquet").schema.names == ["a"]


def test_a_file_is_whole_or_not_there(workspace: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("before")
    failed = run(
        workspace,
        "SELECT 1 / (range - 50000) AS x, error('late') FROM range(100000) WHERE range > 60000",
        "-o",
        str(target),
    )
    assert failed.exit_code == 1
    assert target.read_text() == "before"
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
    assert run(workspace, "SELECT 7 AS n", "-o", str(target)).exit_code == 0
    assert target.read_text() == "n\n7\n"
    assert run(workspace, "SELECT 1", "-o", str(tmp_path / "no" / "such" / "x.csv")).exit_code != 0


def test_exit_codes(workspace: Path, tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        result = run(workspace, *arguments)
        return (
            result.exit_code
            if result.exception is None
            else getattr(result.exception, "exit_code", result.exit_code)
        )

    assert code("SELECT 1") == 0
    assert code("SELECT nonsense") == 1
    assert code("DROP VIEW feedback") == 1
    assert code("SELECT 1", "--timeout", "-1") == 2
    assert code("SELECT 1", "-f", "xml") == 2
    assert code("SELECT count(*) FROM range(1000000000000)", "--timeout", "0.3") == 4
    nowhere = CliRunner().invoke(command, ["SELECT 1", "--workspace", str(tmp_path / "nowhere")])
    assert getattr(nowhere.exception, "exit_code", None) == 2


def test_memory_is_bounded(workspace: Path) -> None:
    result = run(
        workspace,
        "SELECT count(DISTINCT x) FROM (SELECT repeat(range::VARCHAR, 50) AS x FROM range(30000000))",
        "--memory",
        "128",
    )
    assert "raise --memory" in str(result.exception)


def test_cells() -> None:
    assert render.plain(decimal.Decimal("NaN")) == "nan"
    assert render.plain(datetime.date(2027, 1, 2)) == "2027-01-02"
    assert "".join(render.as_ndjson(["a"], [(float("inf"),)])) == '{"a":"inf"}\n'
    assert "".join(render.as_table(["n"], [(1,), (None,)])) == "n\n-\n1\n\n(2 rows)\n"
    assert "there are more" in "".join(render.as_table(["n"], ((i,) for i in range(1001))))


# ---------------------------------------------------------------- where the rows come from


def log_of(*events: Event) -> MemoryLog:
    log = MemoryLog(ManualClock(T0))
    log.append([new_record(event) for event in events])
    return log


def archived(folder: Path, log: MemoryLog, topic: str, cuts: list[int]) -> None:
    """Ranges of a topic that end after so many records."""
    store = ArchiveStore(LocalFiles(folder))
    records = log.read([topic], {}, 10**6)
    for first, last in zip([0, *cuts], cuts, strict=False):
        if records[first:last]:
            write_range(store, topic, 0, records[first:last])


def test_names_are_found_in_the_text() -> None:
    names = names_in('SELECT * FROM Staleness() JOIN "spans" ON true')
    assert names.macros == ("staleness",)
    assert set(names.views) == {"spans", "calls", "orchestrations"}
    assert set(names.tables) == {"spans", "calls", "orchestrations", "policies"}
    assert names_in("SELECT 1").tables == ()


def test_what_is_written_down_twice_is_the_same() -> None:
    assert TABLES_VERSION == WRITTEN_VERSION
    for table in TABLES.values():
        assert {field.name: str(field.type) for field in table.schema} == {
            c: arrow_name(t) for c, t in table.columns.items()
        }


def test_manifests_alone_answer_where_all_is_archived_and_sound(tmp_path: Path) -> None:
    log = log_of(*(score(n) for n in range(6)))
    archived(tmp_path, log, "feedback", [2, 6])
    parts = sound_parts(str(tmp_path), log, ["feedback"])
    assert parts is not None
    files = {file for part in parts["feedback"] for file in part.files}
    assert files == set(Archive(log, tmp_path, fill=False).load(["feedback"])["feedback"].files)
    assert sound_parts(str(tmp_path), None, ["feedback", "spans"])["spans"] == []  # type: ignore[index]
    log.append([new_record(score(9))])
    assert sound_parts(str(tmp_path), log, ["feedback"]) is None  # something is newer
    victim = Path(sorted(files)[0])
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    assert sound_parts(str(tmp_path), None, ["feedback"]) is None
    victim.write_bytes(whole)
    manifest = next(tmp_path.glob("_ranges/feedback/0/0-1.json"))
    text = manifest.read_text()
    for broken in (
        "",
        text[:50],
        text.replace('"version": "2"', '"version": "1"'),
        text.replace("string", "int64"),
    ):
        manifest.write_text(broken)
        assert sound_parts(str(tmp_path), None, ["feedback"]) is None
    manifest.unlink()
    assert sound_parts(str(tmp_path), None, ["feedback"]) is None  # a gap


def test_older_files_lack_columns(tmp_path: Path) -> None:
    log = log_of(*(score(n) for n in range(4)))
    archived(tmp_path, log, "feedback", [2, 4])
    path = next(tmp_path.glob("_ranges/feedback/0/0-1.json"))
    manifest = json.loads(path.read_text())
    del manifest["schemas"]["feedback"]["label"]
    (info,) = (file for file in manifest["files"] if file["kind"] == "feedback")
    victim = tmp_path / info["path"]
    pq.write_table(pq.read_table(victim, partitioning=None).drop_columns(["label"]), victim)
    info["bytes"] = victim.stat().st_size
    del info["crc32"]
    path.write_text(json.dumps(manifest))
    for place in (None, log):
        with Query(place, tmp_path) as query:
            assert list(query.run("SELECT count(*), count(label), sum(value) FROM feedback")[1]) == [
                (4, 2, 1.5)
            ]


def test_a_flipped_bit_is_found_and_repaired(tmp_path: Path) -> None:
    """DuckDB reads no checksums: what it is given was compared with them."""
    log = log_of(*(spans(n, range(1, 40)) for n in range(1, 5)))
    archived(tmp_path, log, "spans", [2, 4])
    sql = "SELECT count(*), sum(start_ns - 1800000000000000000), min(attributes), bit_xor(hash(COLUMNS(*))) FROM spans"
    with Query(log, tmp_path) as query:
        good = list(query.run(sql)[1])
    for number, share in enumerate((0.2, 0.5, 0.9)):
        victim = sorted(tmp_path.glob("tables/spans/**/*.parquet"))[number % 2]
        data = bytearray(victim.read_bytes())
        data[int(len(data) * share)] ^= 4
        victim.write_bytes(data)
        with Query(log, tmp_path) as query:
            assert list(query.run(sql)[1]) == good
        assert victim.read_bytes() != bytes(data) if victim.exists() else True
    assert len(list(tmp_path.glob("_quarantine/*.parquet"))) == 3


def test_a_file_is_compared_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(*(score(n) for n in range(4)))
    archived(tmp_path, log, "feedback", [2, 4])
    seen: list[str] = []
    read = checked._crc
    monkeypatch.setattr(checked, "_crc", lambda path: seen.append(path) or read(path))
    counts = []
    for _ in range(3):
        sources = Sources(log, tmp_path, tenant=None, segment_records=None, cache=None)
        parts = sources.parts(["feedback"])
        counts.append(len(seen))
        sources.close()
    assert counts == [2, 2, 2]
    file = parts["feedback"][0].files[0]
    os.utime(file, ns=(1, 1))
    Sources(log, tmp_path, tenant=None, segment_records=None, cache=None).parts(["feedback"])
    assert seen[2:] == [file]
    (tmp_path / checked.LEDGER).write_text('{"x": 1')
    Sources(log, tmp_path, tenant=None, segment_records=None, cache=None).parts(["feedback"])
    assert len(seen) == 5


def test_one_tenant_sees_only_its_rows(tmp_path: Path) -> None:
    names = ["default", "a/b c", "ä", "it's"]
    log = log_of(*(spans(n, range(1, 3 + n), name.split("/")[0]) for n, name in enumerate(names)))
    sql = "SELECT tenant, count(*) FROM spans GROUP BY 1 ORDER BY 1"
    with Query(log, tmp_path / "none", segment_records=100) as query:
        every = list(query.run(sql)[1])
    assert len(every) == 4
    archived(tmp_path, log, "spans", [3])
    for tenant, number in every:
        for source in (log, None):
            with Query(source, tmp_path, tenant=tenant) as query:
                found = list(query.run(sql)[1])
            assert found == ([(tenant, number)] if source or tenant != "it's" else [])


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12), st.data())
def test_a_query_says_the_same_however_the_log_is_split(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Spans sent again, some archived in ranges, the rest live: as the log decoded at once."""
    log = log_of(*(spans(trace, range(1, 1 + n)) for trace, n in batches), *(score(n) for n in range(3)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(log.read(["spans"], {}, 100))), max_size=3)))
    folder = tmp_path_factory.mktemp("split")
    archived(folder, log, "spans", cuts)
    sql = (
        "SELECT (SELECT count(*) FROM spans), (SELECT count(*) FROM spans_all), (SELECT bit_xor(hash(s)) FROM spans_all s), "
        "(SELECT sum(value) FROM feedback)"
    )
    answers = []
    for place in (folder, tmp_path_factory.mktemp("live")):
        with Query(log, place) as query:
            row = list(
                query.run(sql.replace("hash(s)", 'hash((trace_id, span_id, "offset", attributes))'))[1]
            )
            answers.append(row)
    assert answers[0] == answers[1]
    assert answers[0][0][0] == len({(trace, n) for trace, size in batches for n in range(1, 1 + size)})
