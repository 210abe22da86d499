"""The names that SQL may use over a workspace: tables (every revision) and the views on top (the last one).

Place in the flow: ``columns`` fills the tables from the log's records, ``archive`` keeps them as Parquet, ``query`` puts the
SQL of ``VIEWS`` on top. Values come in units (DOUBLE) and, with the suffix ``_micro``, as the exact integers of the
ledger; times are UTC.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from spanloop.schemas import topics

__all__ = ["TABLES", "TABLES_OF_TOPIC", "VIEWS", "Table", "View"]

_STR, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TIME = pa.timestamp("us")
_STRS, _INTS, _FLOATS = pa.list_(_STR), pa.list_(_INT), pa.list_(_FLOAT)


class Table(NamedTuple):
    """One Arrow table that a topic feeds."""

    name: str
    topic: str
    schema: pa.Schema


class View(NamedTuple):
    """A name that SQL may use: ``sql`` selects from tables named ``t_TABLE``."""

    name: str
    tables: tuple[str, ...]
    sql: str
    meaning: str
    example: str


def _table(name: str, topic: str, /, **columns: pa.DataType) -> Table:
    return Table(name, topic, pa.schema([*columns.items(), ("partition", pa.int32()), ("offset", _INT)]))


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
            evidence=_STRS, call_id=_STR,
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
            value_micro=_INT, status=_STR, estimator=_STR, weight=_FLOAT, scaffold=_BOOL, evidence=_STRS, team=_FLOAT,
            team_micro=_INT, team_status=_STR, computed=_TIME,
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
            menu_ids=pa.list_(_INTS), menu_logprobs=pa.list_(_FLOATS), menu_values=pa.list_(_FLOATS),
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
            "feedback", topics.FEEDBACK, tenant=_STR, feedback_id=_STR, target_kind=_STR, target_id=_STR, name=_STR,
            value=_FLOAT, label=_STR, comment=_STR, scorer=_STR, final=_BOOL, observed=_TIME, observed_ns=_INT, received=_TIME,
        ),
        _table(
            "models", topics.MODELS, tenant=_STR, version=_STR, kind=_STR, trained_on=_INT, published=_TIME, parameters=_STR,
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


def _last(table: str, *, of: str = "orchestrations") -> str:
    """Rows of the last revision of each orchestration, without those that a join swallowed."""
    return f"""SELECT t.* EXCLUDE (partition, "offset") FROM t_{table} t
SEMI JOIN (SELECT tenant, orchestration_id, max(revision) AS revision FROM t_{of} GROUP BY tenant, orchestration_id) l
USING (tenant, orchestration_id, revision)
ANTI JOIN (SELECT tenant, orchestration_id FROM t_orchestrations WHERE merged_into <> '') m
USING (tenant, orchestration_id)"""  # noqa: S608


def _plain(table: str) -> str:
    return f'SELECT * EXCLUDE (partition, "offset") FROM t_{table}'  # noqa: S608


_SPANS_SQL = (
    """SELECT * EXCLUDE (partition, "offset", position, repeat) FROM t_spans WHERE repeat IS NOT TRUE"""
)
"""Whether a span came before is found when it is archived or loaded (``archive.repeats``): no query groups all spans."""
_FEEDBACK_SQL = """SELECT * EXCLUDE (partition, "offset") FROM t_feedback WHERE "offset" IN
(SELECT arg_max("offset", (observed_ns, feedback_id)) FROM t_feedback GROUP BY tenant, target_kind, target_id, name, scorer)"""
_ORDERED = ("orchestrations", "rewards", "credits", "samples", "feedback")

_BASES: tuple[View, ...] = (
    View(
        "spans", ("spans",), _SPANS_SQL, "every span received, once; attributes as JSON text",
        "SELECT operation, count(*), round(avg(duration_ms), 1) AS ms FROM spans GROUP BY 1 ORDER BY 2 DESC",
    ),
    View(
        "events", ("events", "orchestrations"), _last("events"), "what happened in each orchestration, with rule and confidence",
        "SELECT type, rule, count(*), min(confidence) FROM events GROUP BY ALL ORDER BY 3 DESC",
    ),
    View(
        "edges", ("edges", "orchestrations"), _last("edges"), "edges between events",
        "SELECT type, count(*) FROM edges GROUP BY 1",
    ),
    View(
        "orchestrations", ("orchestrations",), _last("orchestrations"), "one row for each job, at its last revision",
        "SELECT orchestration_id, agents, num_calls, duration_ms FROM orchestrations ORDER BY started DESC LIMIT 10",
    ),
    View(
        "agents", ("agents", "orchestrations"), _last("agents"), "agent instances (runs), not agent names",
        "SELECT role, count(*), avg(epoch_ms(ended) - epoch_ms(started)) AS ms FROM agents GROUP BY 1",
    ),
    View(
        "calls", ("calls", "orchestrations"), _last("calls"), "model calls, with the policy version that answered",
        "SELECT policy_version, count(*), sum(output_tokens) FROM calls GROUP BY 1 ORDER BY 2 DESC",
    ),
    View(
        "rewards", ("rewards", "reward_heads", "orchestrations"), _last("rewards", of="reward_heads"), "reward channels; missing is NULL, not zero",
        "SELECT family, name, status, count(*), avg(value) FROM rewards GROUP BY ALL ORDER BY 1, 2",
    ),
    View(
        "credits", ("credits", "credit_heads", "orchestrations"), _last("credits", of="credit_heads"),
        "the conserved ledger: a node's children sum exactly to it",
        "SELECT unit, label, count(*), avg(credit) FROM credits GROUP BY ALL ORDER BY 1, 4 DESC",
    ),
    View(
        "samples", ("samples", "sample_heads", "orchestrations"), _last("samples", of="sample_heads"), "training rows, one for each model call",
        "SELECT policy_version, count(*), avg(reward), avg(list_sum(advantages)) FROM samples GROUP BY 1",
    ),
    View(
        "excluded", ("excluded", "sample_heads", "orchestrations"), _last("excluded", of="sample_heads"),
        "calls that gave no training row, with the reason",
        "SELECT reason, sum(num_calls) FROM excluded GROUP BY 1",
    ),
    View(
        "policies", ("policies",), _plain("policies") + " ORDER BY t_policies.\"offset\"",
        "candidates, gates, canaries, promotions, rollbacks and routing, in order",
        "SELECT logged, epoch, version, against, reason FROM policies WHERE type IN ('policy_promoted', 'policy_rolled_back')",
    ),
    View(
        "feedback", ("feedback",), _FEEDBACK_SQL, "scores and outcomes; of several by one scorer the last",
        "SELECT name, count(*), avg(value) FROM feedback GROUP BY 1",
    ),
    View(
        "models", ("models",), _plain("models"), "versions of the value models that credit used",
        "SELECT version, kind, trained_on, published FROM models ORDER BY published DESC LIMIT 5",
    ),
    View(
        "dead_letters", ("dead_letters",), _plain("dead_letters"), "what was refused, and why",
        "SELECT source, reason, count(*) FROM dead_letters GROUP BY ALL",
    ),
)  # fmt: skip
VIEWS: dict[str, View] = {view.name: view for view in _BASES} | {
    f"{name}_all": View(
        f"{name}_all",
        (name,),
        f"SELECT * FROM t_{name}",  # noqa: S608
        f"{name} with every revision and the log offset",
        f"SELECT count(*) FROM {name}_all",  # noqa: S608
    )
    for name in (*_ORDERED, "events", "edges", "spans")
}
