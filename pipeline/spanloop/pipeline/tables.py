"""Tables that the log's topics feed: every revision, as ``columns`` makes them and ``archive`` keeps them.

Place in the flow: below ``views`` and ``macros``, which select from them. Values come in units (float) and, with the suffix
``_micro``, as the exact integers of the ledger; times are UTC. Types are named here without pyarrow, so that a query over
archived files needs to import neither it nor numpy.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from spanloop.schemas import topics

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TABLES", "TABLES_OF_TOPIC", "Table", "arrow_name", "sql_type"]

_STR, _INT, _FLOAT, _BOOL, _TIME = "str", "int", "float", "bool", "time"
_STRS, _INTS, _FLOATS = "str[]", "int[]", "float[]"
_SQL = {
    _STR: "VARCHAR",
    _INT: "BIGINT",
    "int32": "INTEGER",
    _FLOAT: "DOUBLE",
    _BOOL: "BOOLEAN",
    _TIME: "TIMESTAMP",
}
_ARROW = {
    _STR: "string",
    _INT: "int64",
    "int32": "int32",
    _FLOAT: "double",
    _BOOL: "bool",
    _TIME: "timestamp[us]",
}


class Table(NamedTuple):
    """One table that a topic feeds."""

    name: str
    topic: str
    columns: dict[str, str]
    """Column -> type: str, int, int32, float, bool, time (microseconds), with [] for each level of lists."""

    @property
    def schema(self) -> pa.Schema:
        """As Arrow has it."""
        return _schema(self.name)


def sql_type(type_: str) -> str:
    """DuckDB's name of a column type.

    >>> sql_type("int[][]")
    'BIGINT[][]'
    """
    base, brackets, rest = type_.partition("[")
    return _SQL[base] + brackets + rest


def arrow_name(type_: str) -> str:
    """What ``str`` gives for the Arrow type, as manifests keep it.

    >>> arrow_name("float[]")
    'list<item: double>'
    """
    if type_.endswith("[]"):
        return f"list<item: {arrow_name(type_[:-2])}>"
    return _ARROW[type_]


@cache
def _schema(name: str) -> pa.Schema:
    import pyarrow as pa

    known = {
        _STR: pa.string(),
        _INT: pa.int64(),
        "int32": pa.int32(),
        _FLOAT: pa.float64(),
        _BOOL: pa.bool_(),
        _TIME: pa.timestamp("us"),
    }

    def type_of(type_: str) -> pa.DataType:
        return pa.list_(type_of(type_[:-2])) if type_.endswith("[]") else known[type_]

    return pa.schema([(column, type_of(type_)) for column, type_ in TABLES[name].columns.items()])


def _table(name: str, topic: str, /, **columns: str) -> Table:
    return Table(name, topic, {**columns, "partition": "int32", "offset": _INT})


_ORCHESTRATION = {"tenant": _STR, "orchestration_id": _STR, "revision": _INT}
_LEDGER = {**_ORCHESTRATION, "orchestration_revision": _INT}

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        _table(
            "spans", topics.SPANS, tenant=_STR, trace_id=_STR, span_id=_STR, parent_span_id=_STR, name=_STR, kind=_INT,
            status=_STR, status_message=_STR, started=_TIME, ended=_TIME, duration_ms=_FLOAT, start_ns=_INT, end_ns=_INT,
            operation=_STR, agent=_STR, tool=_STR, model=_STR, response_id=_STR, input_tokens=_INT, output_tokens=_INT,
            policy_version=_STR, scope=_STR, service=_STR, attributes=_STR, events=_STR, links=_STR, resource=_STR,
            source=_STR, received=_TIME, position=_INT, repeat=_BOOL,
        ),
        _table(
            "orchestrations", topics.ORCHESTRATIONS, **_ORCHESTRATION, complete=_BOOL, merged_into=_STR, content_hash=_STR,
            started=_TIME, ended=_TIME, duration_ms=_FLOAT, num_events=_INT, num_edges=_INT, num_agents=_INT, num_calls=_INT,
            input_tokens=_INT, output_tokens=_INT, unknown_calls=_INT, agents=_STRS, policy_versions=_STRS, task_key=_STR,
            trace_ids=_STRS, flags=_STRS, revised=_TIME,
        ),
        _table(
            "events", topics.ORCHESTRATIONS, **_ORCHESTRATION, id=_STR, type=_STR, agent=_STR, agent_id=_STR, to_agent=_STR,
            to_id=_STR, tool=_STR, status=_STR, triggered=_BOOL, mode=_STR, t=_TIME, t_ns=_INT, confidence=_FLOAT, rule=_STR,
            evidence=_STRS, call_id=_STR, decision_kind=_STR, chosen=_STR, options=_STRS, propensities=_FLOATS, by_policy=_BOOL,
            decision_group=_STR, decision_context=_STR,
        ),
        _table("edges", topics.ORCHESTRATIONS, **_ORCHESTRATION, src=_STR, dst=_STR, type=_STR),
        _table(
            "agents", topics.ORCHESTRATIONS, **_ORCHESTRATION, id=_STR, name=_STR, role=_STR, parent_id=_STR, span_id=_STR,
            started=_TIME, ended=_TIME, status=_STR, virtual=_BOOL,
        ),
        _table(
            "calls", topics.ORCHESTRATIONS, **_ORCHESTRATION, id=_STR, agent_id=_STR, model=_STR, policy_version=_STR,
            harness=_STR, task_key=_STR, input_tokens=_INT, output_tokens=_INT, started=_TIME, ended=_TIME, status=_STR,
            tools=_STRS, span_ids=_STRS,
        ),
        _table(
            "rewards", topics.REWARDS, **_LEDGER, family=_STR, name=_STR, unit=_STR, unit_id=_STR, value=_FLOAT,
            value_micro=_INT, status=_STR, estimator=_STR, weight=_FLOAT, scaffold=_BOOL, evidence=_STRS,
            inputs_hash=_STR, team=_FLOAT, team_micro=_INT, team_status=_STR, definitions=_STR, computed=_TIME,
        ),
        _table(
            "credits", topics.CREDITS, **_LEDGER, reward=_FLOAT, baseline=_FLOAT, value_model=_STR, node=_STR, unit=_STR,
            parent=_STR, label=_STR, credit=_FLOAT, credit_micro=_INT, raw=_FLOAT, variance=_FLOAT, estimator=_STR,
            subject=_STR,
        ),
        _table(
            "samples", topics.SAMPLES, **_ORCHESTRATION, group_id=_STR, harness=_STR, reward=_FLOAT, baseline=_FLOAT,
            value_model=_STR, holdout=_BOOL, call_id=_STR, agent_id=_STR, role=_STR, policy_version=_STR, weight=_FLOAT,
            prompt_token_ids=_INTS, response_token_ids=_INTS, logprobs=_FLOATS, advantages=_FLOATS, accounts=_STRS,
            menu_ids="int[][]", menu_logprobs="float[][]", menu_values="float[][]",
        ),
        _table("reward_heads", topics.REWARDS, **_ORCHESTRATION),
        _table("credit_heads", topics.CREDITS, **_ORCHESTRATION),
        _table("sample_heads", topics.SAMPLES, **_ORCHESTRATION),
        _table("excluded", topics.SAMPLES, **_ORCHESTRATION, reason=_STR, num_calls=_INT),
        _table(
            "policies", topics.POLICIES, tenant=_STR, policy=_STR, type=_STR, logged=_TIME, version=_INT, against=_INT, epoch=_INT,
            batch=_INT, canary=_INT, share=_FLOAT, verdict=_STR, passed=_BOOL, estimate=_FLOAT, lower=_FLOAT, upper=_FLOAT,
            n=_INT, reason=_STR, details=_STR,
        ),
        _table(
            "feedback", topics.FEEDBACK, tenant=_STR, feedback_id=_STR, target_kind=_STR, target_id=_STR, trace_id=_STR, name=_STR,
            value=_FLOAT, label=_STR, comment=_STR, scorer=_STR, final=_BOOL, observed=_TIME, observed_ns=_INT, received=_TIME,
        ),
        _table(
            "models", topics.MODELS, tenant=_STR, version=_STR, kind=_STR, trained_on=_INT, published=_TIME, parameters=_STR,
        ),
        _table(
            "decision_effects", topics.MODELS, tenant=_STR, version=_STR, value_model=_STR, decision_group=_STR, context=_STR,
            option=_STR, taken=_INT, value=_FLOAT, value_error=_FLOAT, effect=_FLOAT, error=_FLOAT, low=_FLOAT, high=_FLOAT,
            naive=_FLOAT, status=_STR, reason=_STR,
        ),
        _table(
            "dead_letters", topics.DEAD_LETTERS, tenant=_STR, source=_STR, reason=_STR, size=_INT, sha256=_STR, logged=_TIME,
            details=_STR, data=_STR,
        ),
    )
}  # fmt: skip
TABLES_OF_TOPIC: dict[str, tuple[str, ...]] = {
    topic: tuple(table.name for table in TABLES.values() if table.topic == topic)
    for topic in topics.ALL_TOPICS
}
