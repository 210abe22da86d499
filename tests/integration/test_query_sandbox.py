"""A stranger's SQL: refused or harmless, and over in time, whatever it tries."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.query.session import Query, QueryError
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import FeedbackReceived

SECRET = "canary-7f3a"
REFUSED = [
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_csv_auto('/etc/passwd')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_json('{secret}')",
    "SELECT * FROM read_ndjson_objects('{secret}')",
    "SELECT * FROM read_parquet('{other}')",
    "SELECT * FROM parquet_scan('{other}')",
    "SELECT * FROM parquet_metadata('{other}')",
    "SELECT * FROM parquet_schema('{other}')",
    "SELECT * FROM parquet_kv_metadata('{other}')",
    "SELECT * FROM parquet_file_metadata('{other}')",
    "SELECT * FROM parquet_bloom_probe('{other}', 'a', 1)",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM read_duckdb('{folder}/x.db')",
    "SELECT * FROM '{secret}'",
    "FROM '{other}'",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_text('{archive}/../secret.txt')",
    "SELECT * FROM read_text('{archive}/tables/../../secret.txt')",
    "SELECT * FROM read_text('file://{secret}')",
    "SELECT * FROM read_text('/proc/self/environ')",
    "SELECT * FROM read_text('/proc/self/root{secret}')",
    "SELECT * FROM read_csv('https://example.com/x.csv')",
    "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_text(['{secret}', '{secret}'])",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY (SELECT 1) TO '/dev/stdout'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/out.csv'",
    "EXPLAIN /* x */ COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY feedback FROM '{secret}'",
    "EXPORT DATABASE '{folder}/export'",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{folder}/x.db'",
    "DETACH memory",
    "USE memory",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{secret}'",
    "FORCE INSTALL spatial FROM community",
    "PRAGMA enable_profiling",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "CALL enable_logging('QueryLog', storage = 'file', storage_path = '{folder}/log')",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET allowed_paths",
    "SET allowed_directories = ['/']",
    "SET memory_limit = '64GB'",
    "CREATE TABLE x AS SELECT 1",
    "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "CREATE MACRO f() AS 1",
    "CREATE OR REPLACE VIEW feedback AS SELECT 1",
    "INSERT INTO feedback VALUES (1)",
    "UPDATE feedback SET value = 1",
    "DELETE FROM feedback",
    "DROP VIEW feedback",
    "VACUUM",
    "CHECKPOINT",
    "BEGIN",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY (SELECT 1) TO '{folder}/out.csv'",
    "SELECT * FROM query('SELECT * FROM read_text(''{secret}'')')",
    'SELECT * FROM "query"($$SELECT 1$$)',
    "SELECT * FROM query_table('feedback')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    "SELECT * FROM arrow_scan(1::UBIGINT, 2::UBIGINT, 3::UBIGINT)",
    "SELECT * FROM arrow_scan_dumb(1::UBIGINT, 2::UBIGINT, 3::UBIGINT)",
    "SELECT * FROM pandas_scan(1::UBIGINT)",
    'SELECT * FROM "arrow_scan" (1::UBIGINT, 2::UBIGINT, 3::UBIGINT)',
    "SELECT getenv('SPANLOOP_CANARY')",
    "SELECT * FROM sys",
    "SELECT * FROM os.environ",
]
HARMLESS = [
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM which_secret('s3://x', 's3')",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_extensions()",
    "SELECT * FROM duckdb_temporary_files()",
    "SELECT * FROM duckdb_logs",
    "SELECT * FROM pg_catalog.pg_settings",
    "SELECT * FROM pg_catalog.pg_tables",
    "SELECT * FROM information_schema.tables",
    "SELECT current_setting('secret_directory'), current_setting('allowed_paths')",
    "SELECT * FROM duckdb_external_file_cache()",
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
    "SELECT count(*) FROM range(1000000000000)",
    "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000000) c WHERE a.range + b.range = c.range",
    "SELECT * FROM range(1000000000000)",
    "SELECT length(repeat('x', 100000000000))",
    "SELECT length(repeat('x', 2000000000)) FROM range(100)",
    "SELECT list_sum(list_transform(range(1000000000), x -> x * 2))",
    "SELECT array_agg(repeat('x', 1000)) FROM range(10000000)",
    "SELECT regexp_matches(repeat('a', 10000000), '(a*)*b')",
    "SELECT regexp_replace(repeat('ab', 5000000), '(a|b)+?c', 'x', 'g')",
    "SELECT sleep_ms(60000)",
    "SELECT string_agg(a.range::VARCHAR, ',' ORDER BY hash(a.range)) FROM range(100000000) a",
    "SELECT " + "(" * 900 + "1" + ")" * 900,
    "SELECT " + "+".join(["1"] * 20_000),
    "SELECT '" + "x" * 2_000_000 + "'",
    "SELECT * FROM parquet_metadata('{own}')",
    "SELECT chr(27) || '[31m' AS \"\x1b[2J\"",
    "SELECT json_extract(repeat('[', 1000000), '$')",
    "SELECT * FROM test_all_types()",
    "FROM timeline('x'' OR 1=1 --')",
]
"""They may answer (nothing of interest), fail, or be stopped."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "secret.txt").write_text(SECRET)
    log = MemoryLog(ManualClock(1_800_000_000_000_000_000))
    log.append([
        new_record(FeedbackReceived(feedback_id=f"f{n}", target_kind="trace", target_id="x", value=0.5)) for n in range(4)
    ])  # fmt: skip
    with Query(log, folder / "archive", segment_records=2) as query:
        list(query.run("FROM feedback_all")[1])
    own = next((folder / "archive" / "tables" / "feedback").rglob("*.parquet"))
    other = folder / "other.parquet"
    other.write_bytes(own.read_bytes())
    names = {
        "folder": folder,
        "secret": folder / "secret.txt",
        "archive": folder / "archive",
        "own": own,
        "other": other,
    }
    return {name: str(path) for name, path in names.items()}


def ask(place: dict[str, str], sql: str, *, timeout_s: float = 1.5) -> tuple[str, bytes]:
    """How it ended (answered, refused, stopped) and everything that came out, message included."""
    for name, path in place.items():
        sql = sql.replace("{" + name + "}", path)
    with Query(None, Path(place["archive"]), timeout_s=timeout_s, memory_mb=200) as query:
        out = b""
        try:
            for data in query.chunks(sql, "ndjson"):
                out += data[: 2**20 - len(out)] if len(out) < 2**20 else b""
        except QueryError as exc:
            return "refused", exc.message.encode()
        except TransientError as exc:
            return "stopped", exc.message.encode()
        return "answered", out


def untouched(place: dict[str, str]) -> None:
    found = {path.name for path in Path(place["folder"]).iterdir()}
    assert found == {"secret.txt", "archive", "other.parquet"}


@pytest.mark.parametrize("sql", REFUSED, ids=range(len(REFUSED)))
def test_refused(place: dict[str, str], sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANLOOP_CANARY", SECRET)
    how, said = ask(place, sql)
    assert how == "refused", said[:300]
    assert SECRET.encode() not in said
    assert b"root:" not in said
    assert b"\n" not in said
    untouched(place)


@pytest.mark.parametrize("sql", HARMLESS, ids=range(len(HARMLESS)))
def test_harmless(place: dict[str, str], sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANLOOP_CANARY", SECRET)
    _, said = ask(place, sql)
    assert SECRET.encode() not in said
    assert b"\x1b" not in said
    untouched(place)


def test_the_corpus_is_large_enough() -> None:
    assert len(set(REFUSED)) + len(set(HARMLESS)) >= 100


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM range(1000000000000) t(x) WHERE x % 7 = 3",
        "SELECT sleep_ms(60000)",
        "FROM range(1000000000000)",
    ],
)
def test_stopped_in_time(place: dict[str, str], sql: str) -> None:
    """From the end of the time to the error: the process is gone by then."""
    with (
        Query(None, Path(place["archive"]), timeout_s=0.2) as query,
        pytest.raises(TransientError, match=r"longer than 0\.2 s") as stopped,
    ):
        for _ in query.chunks(sql, "csv"):
            pass
    assert stopped.value.attributes["late_s"] < 1.0


def test_the_process_dies_with_its_parent(place: dict[str, str]) -> None:
    code = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from spanloop.pipeline.query.session import Query\n"
        "query = Query(None, Path(sys.argv[1]))\n"
        "stream = query.chunks('FROM range(1000000000000)', 'csv')\n"
        "next(stream)\n"
        "print(query._running._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, place["archive"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    pid = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError("the sandbox outlived its parent")


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
def test_what_confines_it_is_said(place: dict[str, str]) -> None:
    with Query(None, Path(place["archive"])) as query:
        list(query.run("SELECT 1")[1])
        held = " ".join(query.guards)
    for guard in ("address space", "processor time", "no written files"):
        assert guard in held
    if os.uname().machine in ("x86_64", "aarch64"):
        assert "seccomp" in held


def test_guards_hold_below_duckdb(place: dict[str, str]) -> None:
    """Even a program in the sandbox's place could do nothing: guards are the kernel's, not DuckDB's."""
    code = f"""
import os, socket, sys
from spanloop.pipeline.query import guards
held = guards.limit(memory_bytes=2**28, cpu_s=5, files=50)
files, calls = guards.confine_files([{place["archive"]!r}]), guards.confine_syscalls()
def refused(act):
    try:
        act()
    except (OSError, MemoryError):
        return True
    return False
checks = [
    (files, lambda: open({place["secret"]!r})), (files, lambda: os.listdir("/")), (calls, lambda: socket.socket()),
    (calls, lambda: os.fork()), (calls, lambda: open({place["own"]!r}, "ab")), (calls, lambda: os.unlink({place["own"]!r})),
    (calls, lambda: os.kill(os.getppid(), 0)), (calls, lambda: os.mkdir({place["archive"]!r} + "/x")),
    (calls, lambda: os.execv(sys.executable, [sys.executable])), (held, lambda: bytearray(2**30)),
]
failed = [number for number, (guard, act) in enumerate(checks) if guard and not refused(act)]
opened = not refused(lambda: os.close(os.open({place["own"]!r}, os.O_RDONLY)))
print(failed, opened, bool(files), bool(calls))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("[] True"), (done.stdout, done.stderr)
