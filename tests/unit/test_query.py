"""The read side: what SQL sees is what the log says, through whichever mix of archive files and live tail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.columns import build
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord, NewRecord, new_record
from spanloop.pipeline.query.cli import query as query_command
from spanloop.pipeline.query.describe import describe
from spanloop.pipeline.query.session import Query, QueryError, open_query
from spanloop.pipeline.views import TABLES, TABLES_OF_TOPIC, VIEWS
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, TransientError
from spanloop.schemas.events import (
    CandidateRegistered,
    CreditAssigned,
    CreditNode,
    DeadLettered,
    DecisionModelPublished,
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    PolicyPromoted,
    Reward,
    RewardsComputed,
    RoutingChanged,
    Sample,
    SamplesBuilt,
    SpansReceived,
    ValueModelPublished,
)
from spanloop.schemas.orchestration import (
    Agent,
    Decision,
    Edge,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
    ToolCall,
)
from spanloop.schemas.spans import Span

T0 = 1_800_000_000_000_000_000


def span(trace: int, number: int, **attributes: object) -> Span:
    return Span(
        trace_id=f"{trace:032x}",
        span_id=f"{trace * 100 + number:016x}",
        name="chat policy",
        start_ns=T0 + number * 1_000_000,
        end_ns=T0 + number * 1_000_000 + 2_500_000,
        parent_span_id=f"{1:016x}",
        attributes={"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 15, **attributes},
        resource={"service.name": "desk"},
        scope="pydantic-ai",
    )


def spans(trace: int, numbers: range | list[int] = range(1, 4)) -> SpansReceived:
    return SpansReceived(trace_id=f"{trace:032x}", spans=tuple(span(trace, n) for n in numbers))


def orchestration(number: int, revision: int = 1, *, num_events: int = 2) -> OrchestrationRevised:
    name = f"o{number}"
    content = OrchestrationContent(
        orchestration_id=name,
        tenant="default",
        trace_ids=(f"{number + 1:032x}",),
        events=tuple(
            OrchestrationEvent(
                id=f"{name}e{i}", type="spawn", agent="desk", t_ns=T0 + i, confidence=0.9, rule="agent_under_tool",
                evidence=("s1",), to="specialist", tool="spawn", call_id="c1",
                decision=Decision("spawn", "spawn", ("spawn", "alone"), (0.5, 0.5), True),
            )
            for i in range(num_events)
        ),
        edges=(Edge(f"{name}e0", f"{name}e1", "temporal"),),
        agents=(Agent("a1", "desk", role="desk"), Agent("a2", "specialist", parent_id="a1")),
        calls=(
            ModelCall(
                "c1", "a1", ("s1",), T0, T0 + 5, policy_version="policy@v3", tool_calls=(ToolCall("t", "spawn"),), output_tokens=3, input_tokens=15
            ),
        ),
        tokens=TokenUsage(input=15, output=3, calls=1),
        started_ns=T0,
        ended_ns=T0 + 4_000_000,
        flags=("cycle",),
    )  # fmt: skip
    return OrchestrationRevised(
        orchestration_id=name, revision=revision, complete=True, content_hash="h", content=content
    )


def credit(number: int, revision: int, amounts: tuple[int, ...]) -> CreditAssigned:
    nodes = [CreditNode("team", "team", "", "team", sum(amounts))]
    nodes += [
        CreditNode(f"n{i}", "role", "team", f"role{i}", a, raw=a, variance=0.25)
        for i, a in enumerate(amounts)
    ]
    return CreditAssigned(
        orchestration_id=f"o{number}", revision=revision, orchestration_revision=1, reward=sum(amounts), baseline=0,
        value_model="v1", nodes=tuple(nodes),
    )  # fmt: skip


def sample_set(number: int, revision: int = 1, rows: int = 1, **excluded: int) -> SamplesBuilt:
    row = Sample(
        "c1", "a1", "desk", "policy@v3", (5, 6), (7, 8), (-0.5, 0.0), (250_000, -250_000), ("n0", "n1"),
        menu_ids=((7, 9), (8,)), menu_logprobs=((-0.5, -0.9), (0.0,)), menu_values=((1_000_000, 0), (0,)),
    )  # fmt: skip
    return SamplesBuilt(
        orchestration_id=f"o{number}", revision=revision, group="g", harness="h", reward=500_000, baseline=0,
        value_model="v1", holdout=False, rows=(row,) * rows, excluded=excluded,
    )  # fmt: skip


def rewards(number: int, revision: int, value: int | None) -> RewardsComputed:
    reward = Reward(
        "R1",
        "outcome",
        "team",
        "",
        value,
        "missing" if value is None else "final",
        "outcome/1",
        weight=1_000_000,
        inputs_hash="1e" * 8,
    )
    return RewardsComputed(
        orchestration_id=f"o{number}", revision=revision, orchestration_revision=1, rewards=(reward,), team=value,
        status=reward.status, definitions="0f" * 8,
    )  # fmt: skip


_EFFECT = {
    "option": "spawn", "taken": 5, "value": 0.75, "value_error": 0.1, "effect": 0.25, "error": 0.1, "low": 0.1, "high": 0.4,
    "naive": -0.1, "status": "ok", "reason": "",
}  # fmt: skip


def everything() -> list[Event]:
    return [
        spans(1), spans(2), orchestration(1), rewards(1, 1, None), rewards(1, 2, 500_000), credit(1, 2, (300_000, 200_000)),
        sample_set(1, opt_out=2), FeedbackReceived(feedback_id="f1", target_kind="trace", target_id="x", value=0.5, comment="c", observed_ns=T0),
        CandidateRegistered(
            version=1, parent=0, batch=1, mlflow_version="1", path="policies/policy@v1", sha256="s", orchestrations=128
        ),
        PolicyPromoted(epoch=1, version=1, previous=0, reason="canary"),
        RoutingChanged(sequence=1, champion=1, learner=2, learning_share=0.5),
        ValueModelPublished(version="v1", kind="bag", trained_on=64, parameters={"w": [0.5]}),
        DecisionModelPublished(
            version="d1", value_model="v1", kind="decisions/1", trained_on=9,
            parameters={"effects": [["spawn||alone|spawn", "", [_EFFECT]]]},
        ),
        DeadLettered(source="otlp", reason="zero id", sha256="aa", size=10, details={"field": "trace_id"}),
    ]  # fmt: skip


def memory_log(*events: Event) -> MemoryLog:
    log = MemoryLog(ManualClock(T0))
    log.append([new_record(event) for event in events])
    return log


def ask(log: MemoryLog, folder: Path, sql: str, segment_records: int = 5_000) -> list[tuple]:
    with Query(log, folder, segment_records=segment_records) as opened:
        return list(opened.run(sql)[1])


def test_every_view_answers_its_example_and_shows_a_row(tmp_path: Path) -> None:
    log = memory_log(*everything())
    with Query(log, tmp_path) as opened:
        for view in VIEWS.values():
            opened.run(view.example)
            assert next(opened.run(f"SELECT count(*) FROM {view.name}")[1]) > (0,), view.name  # noqa: S608


def test_every_column_is_filled_by_some_event() -> None:
    """A column that no event can fill is a builder that reads a field that was renamed."""
    log = memory_log(
        *everything(),
        SpansReceived(
            trace_id="a" * 32,
            spans=(
                span(
                    9, 1, **{"gen_ai.agent.name": "desk", "gen_ai.tool.name": "look", "gen_ai.response.model": "policy",
                             "gen_ai.response.id": "r", "gen_ai.usage.output_tokens": 3, "spanloop.policy.version": "policy@v3"}
                ),
            ),
        ),
    )  # fmt: skip
    never = {"canary", "verdict", "passed", "estimate", "lower", "upper", "share", "triggered", "operation"}
    for topic in topics.ALL_TOPICS:
        built, bad = build(topic, log.read([topic], {}, 1000))
        assert bad == 0
        for name, table in built.items():
            empty = {c for c in table.column_names if table[c].null_count == table.num_rows}
            assert empty <= never | {"started", "ended"}, (name, empty)


def test_spans_become_rows_with_their_attributes(tmp_path: Path) -> None:
    log = memory_log(spans(1))
    sql = """SELECT span_id, duration_ms, operation, input_tokens, service, attributes->>'gen_ai.operation.name', started
             FROM spans ORDER BY span_id LIMIT 1"""
    row = ask(log, tmp_path, sql)[0]
    assert row[:6] == (f"{101:016x}", 2.5, "chat", 15, "desk", "chat")
    assert row[6].timestamp() == pytest.approx(T0 / 1e9 + 0.001, abs=86_400)


def test_a_span_sent_twice_in_other_batches_is_one_row(tmp_path: Path) -> None:
    log = memory_log(spans(1, [1, 2]), spans(1, [2, 3]))
    assert ask(log, tmp_path, "SELECT count(*) FROM spans") == [(3,)]
    assert ask(log, tmp_path, "SELECT count(*) FROM spans_all") == [(4,)]


def test_views_show_the_last_revision_and_all_shows_each(tmp_path: Path) -> None:
    log = memory_log(
        orchestration(1, 1, num_events=2), orchestration(2, 1), orchestration(1, 2, num_events=5)
    )
    assert ask(
        log, tmp_path, "SELECT revision, num_events FROM orchestrations WHERE orchestration_id='o1'"
    ) == [(2, 5)]
    assert ask(log, tmp_path, "SELECT count(*) FROM events WHERE orchestration_id='o1'") == [(5,)]
    assert ask(log, tmp_path, "SELECT count(*) FROM orchestrations_all") == [(3,)]
    assert ask(log, tmp_path, "SELECT count(*) FROM events_all") == [(9,)]


def test_an_orchestration_lost_in_a_join_is_void_everywhere(tmp_path: Path) -> None:
    gone = OrchestrationRevised(orchestration_id="o1", revision=2, complete=True, merged_into="o2")
    log = memory_log(
        orchestration(1), orchestration(2), credit(1, 1, (5,)), credit(2, 1, (7,)), rewards(1, 1, 5), gone
    )
    assert ask(log, tmp_path, "SELECT orchestration_id FROM orchestrations") == [("o2",)]
    assert ask(log, tmp_path, "SELECT DISTINCT orchestration_id FROM credits") == [("o2",)]
    assert ask(log, tmp_path, "SELECT count(*) FROM rewards") == [(0,)]


def test_a_last_revision_without_rows_hides_the_rows_before_it(tmp_path: Path) -> None:
    log = memory_log(sample_set(1, 1), sample_set(2, 1), sample_set(1, 2, rows=0, no_token_ids=3))
    assert ask(log, tmp_path, "SELECT orchestration_id FROM samples") == [("o2",)]
    assert ask(log, tmp_path, "SELECT reason, num_calls FROM excluded") == [("no_token_ids", 3)]


def test_credit_comes_in_units_and_exact_integers(tmp_path: Path) -> None:
    log = memory_log(credit(1, 1, (300_000, 200_001)))
    sql = "SELECT sum(credit_micro) FILTER (parent = 'team'), max(reward), max(credit_micro) FILTER (unit = 'team') FROM credits"
    assert ask(log, tmp_path, sql) == [(500_001, 0.500001, 500_001)]


def test_of_several_scores_by_one_scorer_the_latest_observed_counts(tmp_path: Path) -> None:
    def score(name: str, value: float, at: int) -> FeedbackReceived:
        return FeedbackReceived(
            feedback_id=name, target_kind="trace", target_id="x", value=value, observed_ns=at, scorer="s"
        )

    log = memory_log(score("b", 0.7, 20), score("a", 0.1, 10))
    assert ask(log, tmp_path, "SELECT value FROM feedback") == [(0.7,)]


@pytest.mark.parametrize("segment_records", [1, 2, 3, 7, 5_000])
def test_files_and_tail_together_are_the_log(tmp_path: Path, segment_records: int) -> None:
    log = memory_log(*(spans(i) for i in range(1, 8)), *(orchestration(i) for i in range(5)))
    sql = "SELECT (SELECT count(*) FROM spans), (SELECT count(*) FROM events), (SELECT sum(start_ns) FROM spans)"
    expected = ask(
        memory_log(*(spans(i) for i in range(1, 8)), *(orchestration(i) for i in range(5))),
        tmp_path / "x",
        sql,
    )
    for _ in range(2):  # the first makes the files, the second uses them
        assert ask(log, tmp_path / "archive", sql, segment_records) == expected
    log.append([new_record(spans(50))])
    assert ask(log, tmp_path / "archive", "SELECT count(*) FROM spans", segment_records) == [(24,)]
    assert bool(list((tmp_path / "archive").glob("tables/spans/**/*.parquet"))) == (segment_records < 5_000)


def test_a_damaged_file_is_rebuilt(tmp_path: Path) -> None:
    log = memory_log(*(spans(i) for i in range(1, 7)))
    sql = "SELECT count(*), sum(start_ns), min(name) FROM spans"
    good = ask(log, tmp_path, sql, 2)

    def files() -> list[Path]:
        return sorted(tmp_path.glob("tables/spans/**/*.parquet"))

    first = files()[0]
    first.write_bytes(first.read_bytes()[:100])  # truncated: no footer
    assert ask(log, tmp_path, sql, 2) == good
    first.write_bytes(b"")
    assert ask(log, tmp_path, sql, 2) == good
    last = files()[-1]
    whole = last.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    last.write_bytes(b"PAR1" + bytes(footer - 4) + whole[footer:])  # sound footer, broken pages
    assert ask(log, tmp_path, sql, 2) == good
    assert len(list(tmp_path.glob("_quarantine/*.parquet"))) == 2  # the repair found both
    assert ask(log, tmp_path, sql, 2) == good
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_archive_of_another_log_is_not_believed(tmp_path: Path) -> None:
    ask(memory_log(*(spans(i) for i in range(1, 5))), tmp_path, "SELECT count(*) FROM spans", 2)
    other = memory_log(*(spans(i, [1]) for i in range(11, 15)))
    assert ask(other, tmp_path, "SELECT count(*) FROM spans", 2) == [(4,)]


def test_a_disk_that_refuses_the_cache_does_not_refuse_the_query(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("a file where the folder should be")
    assert ask(memory_log(spans(1), spans(2)), tmp_path / "archive", "SELECT count(*) FROM spans", 1) == [
        (6,)
    ]


def test_unreadable_records_give_no_rows_and_are_counted(tmp_path: Path) -> None:
    log = memory_log(spans(1))
    log.append(
        [
            NewRecord("spans", "k", "bad", b"{nonsense"),
            NewRecord("spans", "k", "future", b'{"type":"spans_received","schema_version":9}'),
        ]
    )
    with Query(log, tmp_path) as opened:
        assert next(opened.run("SELECT count(*) FROM spans")[1]) == (3,)
        assert opened.unreadable == 2


def test_texts_and_numbers_that_columns_cannot_hold_do_not_fail() -> None:
    huge = Span(trace_id="a" * 32, span_id="b" * 16, name="n", start_ns=2**64 - 1, end_ns=0,
                attributes={"gen_ai.usage.input_tokens": "many", "gen_ai.agent.name": ["x"]})  # fmt: skip
    records = [
        LogRecord("spans", 0, "k", "e", new_record(SpansReceived(trace_id="a" * 32, spans=(huge,))).value, T0)
    ]
    table = build("spans", records)[0]["spans"]
    assert table["input_tokens"].to_pylist() == [None]
    assert table["agent"].to_pylist() == ['["x"]']
    assert table["start_ns"].to_pylist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM nowhere", "nowhere"),
        ("SELECT colour FROM spans", "colour"),
        ("SELECT 1; SELECT 2", "one SQL statement, got 2"),
        ("DROP TABLE spans", "DROP is refused"),
        ("COPY (SELECT 1) TO 'x.csv'", "COPY is refused"),
        ("INSERT INTO spans VALUES (1)", "INSERT is refused"),
        ("SET threads = 4", "SET is refused"),
        ("SELECT * FROM read_csv('/etc/hosts')", "disabled"),
        ("SELECT '\udcff'", "not valid UTF-8"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO 'x.csv'", "COPY is refused"),
    ],
)
def test_wrong_sql_is_one_clear_line_with_the_views(tmp_path: Path, sql: str, says: str) -> None:
    with pytest.raises(QueryError) as caught:
        ask(memory_log(), tmp_path, sql)
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert "orchestrations" in caught.value.message
    assert not list(tmp_path.rglob("*.csv"))


def test_a_query_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    with (
        Query(memory_log(), tmp_path, timeout_s=0.2) as opened,
        pytest.raises(TransientError, match="longer than"),
    ):
        list(
            opened.run(
                "SELECT count(*) FROM range(100000000) a, range(100000) b WHERE a.range % 7 = b.range % 5"
            )[1]
        )


def test_a_query_that_is_stopped_between_rows_says_so_too(tmp_path: Path) -> None:
    with Query(memory_log(), tmp_path, timeout_s=0.3) as opened:
        rows = opened.run("SELECT a.range FROM range(1000000000) a, range(1000000) b")[1]
        with pytest.raises(TransientError, match="longer than"):
            for _ in rows:
                pass


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_timeout_is_a_number_of_seconds(seconds: str) -> None:
    assert CliRunner().invoke(query_command, ["SELECT 1", "--timeout", seconds]).exit_code == 2


def test_every_table_belongs_to_a_topic_and_every_view_to_tables() -> None:
    assert {name for names in TABLES_OF_TOPIC.values() for name in names} == set(TABLES)
    assert {name for view in VIEWS.values() for name in view.tables} <= set(TABLES)
    assert {"spans", "events", "edges", "orchestrations", "rewards", "credits", "samples", "policies"} <= set(
        VIEWS
    )
    described = {entry["view"]: entry["columns"] for entry in describe() if "view" in entry}
    assert described["spans"]["trace_id"] == "VARCHAR"
    assert "offset" in described["orchestrations_all"]


class TestCommand:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        log = SqliteLog(tmp_path / "spanloop.db")
        log.append([new_record(event) for event in everything()])
        log.close()
        return tmp_path

    def run(self, *args: str) -> str:
        result = CliRunner().invoke(query_command, args, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    def test_forms(self, workspace: Path) -> None:
        sql = "SELECT family, value, evidence FROM rewards"
        where = ("--workspace", str(workspace))
        assert json.loads(self.run(sql, "--json", *where)) == [{"family": "R1", "value": 0.5, "evidence": []}]
        assert self.run(sql, "--ndjson", *where) == '{"family":"R1","value":0.5,"evidence":[]}\n'
        assert self.run(sql, "--csv", *where) == "family,value,evidence\nR1,0.5,[]\n"
        table = self.run(sql, *where)
        assert table.splitlines()[0].split() == ["family", "value", "evidence"]
        assert table.endswith("(1 rows)\n")
        assert json.loads(self.run("SELECT * FROM spans WHERE false", "--json", *where)) == []

    def test_times_print_as_utc(self, workspace: Path) -> None:
        row = json.loads(
            self.run("SELECT min(started) AS t FROM spans", "--ndjson", "--workspace", str(workspace))
        )
        assert row == {"t": "2027-01-15T08:00:00.001000Z"}

    def test_without_sql_it_lists_views_with_working_examples(self, workspace: Path) -> None:
        listed = self.run()
        assert all(f"{name}: " in listed for name in VIEWS if not name.endswith("_all"))
        for entry in json.loads(self.run("--json")):
            self.run(entry["example"], "--workspace", str(workspace))

    def test_no_workspace_says_how_to_get_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no workspace"), open_query(tmp_path):
            pass
        assert not (tmp_path / "spanloop.db").exists()
