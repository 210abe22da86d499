"""JSON rows made in DuckDB are those that Python would have made."""

from __future__ import annotations

import json
import math

import pytest

duckdb = pytest.importorskip("duckdb")

from spanloop.pipeline.query import render, sandbox

TEXTS = "(VALUES (NULL), (''), ('a'), ('say \"hi\"'), ('back\\slash'), ('line' || chr(10)), (chr(31) || chr(127)), ('日本 é'), ('50 %s'))"
PLAIN = (
    f"SELECT t, t || 'x' AS u FROM {TEXTS} v(t)",  # noqa: S608
    "SELECT * FROM (VALUES (1, true, 2::TINYINT, 170141183460469231731687303715884105727::HUGEINT), (NULL, NULL, NULL, NULL)) v(a, b, c, d)",
    "SELECT * FROM (VALUES (0.1::DOUBLE), (1e-7), (1e15), (1e16), (1e300), (-2.5), (NULL), ('nan'), ('inf'), ('-inf')) v(x)",
    "SELECT TIMESTAMP '2027-01-15 08:00:00' AS t, TIMESTAMP '1969-12-31 23:59:59.000001' AS u, NULL::TIMESTAMP AS v",
    'SELECT 1 AS a, \'b\' AS "it\'s 100 %", 2 AS a, \'z\' AS "q""q"',
    "SELECT range AS n, 'text ' || range AS t FROM range(4100) ORDER BY n DESC",
    "SELECT 1 AS a WHERE false",
    "SELECT 1 AS a;",
    "SELECT 1 AS a -- said",
    "WITH x AS (SELECT 1 AS a) FROM x",
)
OTHER = (
    "SELECT [1, 2] AS a",
    "SELECT 1.5::DECIMAL(4, 2) AS a",
    "SELECT DATE '2027-01-15' AS a",
    "SELECT 1.5::FLOAT AS a",
    "SELECT 1 AS a; -- said",
    "EXPLAIN SELECT 1",
    "SELECT nothing",
)


@pytest.fixture
def connection():
    with duckdb.connect(":memory:", config={"threads": "1"}) as opened:
        yield opened


def in_python(connection, sql: str, form: str) -> str:
    connection.execute(sql)
    names = [column[0] for column in connection.description]
    return "".join(render.FORMS[form](names, iter(connection.fetchall())))


def in_duckdb(connection, sql: str, form: str) -> str:
    lines = sandbox._lines(connection, sql)
    assert lines is not None
    connection.execute(lines)
    blocks = iter(lambda: [row[0] for row in connection.fetchmany(sandbox._FETCH_ROWS)], [])
    return "".join(render.framed(form, blocks))


@pytest.mark.parametrize("form", ["ndjson", "json"])
@pytest.mark.parametrize("sql", PLAIN)
def test_the_same_values_in_the_same_order(connection, sql, form):
    made, expected = in_duckdb(connection, sql, form), in_python(connection, sql, form)
    if form == "json":
        made, expected = json.loads(made), json.loads(expected)
        assert made == expected
        assert [list(row) for row in made] == [list(row) for row in expected]
    else:
        assert made.count("\n") == expected.count("\n")
        assert [json.loads(line) for line in made.splitlines()] == [
            json.loads(line) for line in expected.splitlines()
        ]


@pytest.mark.parametrize("sql", OTHER)
def test_whatever_is_not_plain_is_left_to_python(connection, sql):
    assert sandbox._lines(connection, sql) is None


def test_times_without_end_are_texts(connection):
    made = json.loads(in_duckdb(connection, "SELECT 'infinity'::TIMESTAMP AS t", "ndjson"))
    assert made == {"t": "infinity"}


def test_floats_come_back_bit_for_bit(connection):
    sql = "SELECT (random() - 0.5) * 10 ** (40 * random() - 20) AS x FROM range(2000)"
    connection.execute(f"CREATE TABLE drawn AS {sql}")
    values = [row[0] for row in connection.execute("SELECT x FROM drawn").fetchall()]
    made = in_duckdb(connection, "SELECT x FROM drawn", "ndjson").splitlines()
    assert [json.loads(line)["x"] for line in made] == values
    assert all(math.isfinite(value) for value in values)
