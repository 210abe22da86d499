"""The names that SQL may use over a workspace: views on top of the tables, at each orchestration's last revision.

Place in the flow: ``columns`` fills the tables from the log's records, ``archive`` keeps them as Parquet, ``query`` puts the
SQL of ``VIEWS`` and ``macros`` on top.

Invariants: a view shows an event of the log once, however often it was appended; nothing of an orchestration that a join
swallowed; NULL where the log does not say. Only the tables that a statement names are read.
"""

from __future__ import annotations

from typing import NamedTuple

from spanloop.pipeline.tables import TABLES, TABLES_OF_TOPIC, Table

__all__ = ["METRICS", "TABLES", "TABLES_OF_TOPIC", "VIEWS", "Table", "View", "last_rows"]


class View(NamedTuple):
    """A name that SQL may use: ``sql`` selects from tables named ``t_TABLE`` and from other views."""

    name: str
    tables: tuple[str, ...]
    """All tables that it reads, also through other views."""
    sql: str
    meaning: str
    example: str
    function: str = ""
    """The function of ours that ``sql`` uses; ``query.functions`` has it."""


METRICS = "_metrics"
_MERGED = "SELECT tenant, orchestration_id FROM t_orchestrations WHERE merged_into <> ''"


def last_rows(heads: str, where: str = "TRUE") -> str:
    """SQL of (tenant, orchestration_id, revision, partition, offset) of the last event of each orchestration in a table of
    one row an event, without those that a join swallowed. Of an event that was appended twice the later record counts."""
    return f"""SELECT tenant, orchestration_id, last.revision, last.partition, last."offset" FROM (
  SELECT tenant, orchestration_id, max({{'revision': revision, 'partition': partition, 'offset': "offset"}}) AS last
  FROM t_{heads} WHERE {where} GROUP BY tenant, orchestration_id
) ANTI JOIN ({_MERGED}) merged USING (tenant, orchestration_id)"""  # noqa: S608


def _last(table: str, *, of: str = "orchestrations") -> str:
    return f"""SELECT t.* EXCLUDE (partition, "offset") FROM t_{table} t
SEMI JOIN ({last_rows(of)}) l ON t.partition = l.partition AND t."offset" = l."offset\""""  # noqa: S608


def _plain(table: str) -> str:
    return f'SELECT * EXCLUDE (partition, "offset") FROM t_{table}'  # noqa: S608


_SPANS_SQL = (
    """SELECT * EXCLUDE (partition, "offset", position, repeat) FROM t_spans WHERE repeat IS NOT TRUE"""
)
"""Whether a span came before is found when it is archived or loaded (``archive.repeats``): no query groups all spans."""
_FEEDBACK_SQL = """SELECT f.* EXCLUDE (partition, "offset") FROM t_feedback f SEMI JOIN (
  SELECT last.partition, last."offset" FROM (
    SELECT max({'observed': observed_ns, 'id': feedback_id, 'partition': partition, 'offset': "offset"}) AS last
    FROM t_feedback GROUP BY tenant, target_kind, target_id, name, scorer)
) l ON f.partition = l.partition AND f."offset" = l."offset\""""
_ONCE = """SELECT * EXCLUDE (partition, "offset", nth) FROM (
  SELECT *, row_number() OVER (PARTITION BY {key} ORDER BY partition, "offset") AS nth FROM t_{table}) WHERE nth = 1"""

_WENT_ON_SQL = """SELECT c.tenant, c.orchestration_id, c.revision, 'stop' AS kind, a.name AS agent, c.agent_id, 'continue' AS chosen, c.id AS call_id,
    c.ended AS t, 1.0 AS confidence, 'turn_went_on' AS rule, TRUE AS goes_on
  FROM (SELECT k.*, row_number() OVER (PARTITION BY k.tenant, k.orchestration_id, k.agent_id ORDER BY k.started DESC, k.id DESC) AS nth
    FROM calls k SEMI JOIN (SELECT tenant, orchestration_id, id FROM agents WHERE parent_id = '') entry
      ON entry.tenant = k.tenant AND entry.orchestration_id = k.orchestration_id AND entry.id = k.agent_id) c
  JOIN agents a ON a.tenant = c.tenant AND a.orchestration_id = c.orchestration_id AND a.id = c.agent_id
  ANTI JOIN (SELECT tenant, orchestration_id, agent_id FROM events WHERE decision_kind = 'stop' AND options IS NOT NULL) told
    ON told.tenant = c.tenant AND told.orchestration_id = c.orchestration_id AND told.agent_id = c.agent_id
  WHERE c.nth > 1"""
"""Turns of entry agents before their last one, where the program told no stop decisions (``decisions.objects`` says the same)."""
_DECISIONS_SQL = f"""SELECT e.tenant, e.orchestration_id, e.revision,
  CASE e.kind WHEN 'spawn' THEN 'O1' WHEN 'delegate' THEN 'O2' WHEN 'message' THEN 'O3'
    WHEN 'aggregate' THEN 'O4' ELSE 'O5' END AS decision,
  e.kind, e.agent, e.agent_id,
  coalesce(nullif(e.chosen, ''), nullif(e.to_agent, ''), nullif(e.tool, ''), e.type) AS chosen, e.id AS event_id,
  nullif(e.call_id, '') AS call_id, e.t, s.policy_version, s.action, s.menu,
  CASE WHEN e.goes_on THEN NULL ELSE coalesce(e.propensities[list_position(e.options, e.chosen)], s.propensity) END AS propensity,
  CASE WHEN e.goes_on THEN NULL ELSE coalesce(d.value, s.value) END AS value, c.credit, c.credit_micro, e.confidence, e.rule, e.options,
  e.propensities, e.by_policy, d.option_values, d.effect, d.low, d.high,
  coalesce(d.status, CASE WHEN s.value IS NOT NULL AND NOT e.goes_on THEN 'model_based' ELSE 'unidentified' END) AS effect_status,
  d.reason, d.decision_model
FROM (SELECT tenant, orchestration_id, revision, type, coalesce(decision_kind, type) AS kind, agent, agent_id, chosen, to_agent, tool, id, call_id, t,
    confidence, rule, options, propensities, by_policy, FALSE AS goes_on
  FROM events WHERE type IN ('spawn', 'delegate', 'message', 'aggregate', 'stop') OR decision_kind IS NOT NULL
  UNION ALL BY NAME {_WENT_ON_SQL}) e
LEFT JOIN (SELECT hash(tenant, orchestration_id) AS job, hash(call_id) AS call, policy_version, response_token_ids AS action,
    menu_ids AS menu, exp(list_sum(logprobs)) AS propensity,
    menu_values[-1][list_position(menu_ids[-1], response_token_ids[-1])] AS value
  FROM samples) s ON s.job = hash(e.tenant, e.orchestration_id) AND s.call = hash(e.call_id)
LEFT JOIN (SELECT hash(tenant, orchestration_id) AS job, hash(subject) AS call, credit, credit_micro
  FROM credits WHERE unit = 'message' AND label = 'decision') c
  ON c.job = hash(e.tenant, e.orchestration_id) AND c.call = hash(e.call_id)
LEFT JOIN (
  SELECT t.tenant, t.orchestration_id, t.id, any_value(f.version) AS decision_model,
    map(list(f.option ORDER BY f.option), list(f.value ORDER BY f.option)) AS option_values,
    max(f.value) FILTER (f.option = t.chosen) AS value, max(f.effect) FILTER (f.option = t.chosen) AS effect,
    max(f.low) FILTER (f.option = t.chosen) AS low, max(f.high) FILTER (f.option = t.chosen) AS high,
    max(f.status) FILTER (f.option = t.chosen) AS status, max(nullif(f.reason, '')) FILTER (f.option = t.chosen) AS reason
  FROM (SELECT tenant, orchestration_id, id, chosen, decision_group, decision_context FROM events WHERE decision_group IS NOT NULL) t
  JOIN (SELECT DISTINCT tenant, orchestration_id, value_model FROM credits WHERE unit = 'team') v USING (tenant, orchestration_id)
  LEFT JOIN t_decision_effects x ON x.tenant = t.tenant AND x.value_model = v.value_model AND x.decision_group = t.decision_group
    AND x.context = t.decision_context AND x.option = t.chosen AND x.status <> 'unidentified'
  JOIN t_decision_effects f ON f.tenant = t.tenant AND f.value_model = v.value_model AND f.decision_group = t.decision_group
    AND f.context = coalesce(x.context, '')
  GROUP BY ALL
) d ON d.tenant = e.tenant AND d.orchestration_id = e.orchestration_id AND d.id = e.id"""  # noqa: S608
"""A decision that its program told has the menu and the propensities told, also where it was not to act. Else its propensity is that of the model call that took it: the product over its response tokens. Its value is what the
value model gave the option chosen at the last of them, which is the value of having decided so. Joined by two 64-bit hashes:
with three texts as key the tables of ten million spans would not fit in a gibibyte."""
_DECISION_TABLES = (
    "events", "orchestrations", "samples", "sample_heads", "credits", "credit_heads", "decision_effects", "calls", "agents",
)  # fmt: skip
_METRICS_SQL = f"""SELECT o.tenant, o.orchestration_id, o.revision, o.complete, o.task_key, o.started, r.value AS success, r.status AS success_status,
  o.m.parallel_efficiency, o.m.work_over_span, o.m.useful_agents, o.m.protocol_overhead, o.m.error_amplification, o.m.safety_events,
  o.m.interventions
FROM (
  SELECT o.*, {METRICS}(coalesce(a.items, []), coalesce(c.items, []), coalesce(e.items, []), coalesce(d.items, [])) AS m
  FROM orchestrations o
  LEFT JOIN (SELECT tenant, orchestration_id, list({{'id': id, 'name': name, 'parent_id': parent_id,
      'started': coalesce(epoch_us(started), 0), 'ended': coalesce(epoch_us(ended), 0)}}) AS items
    FROM agents GROUP BY tenant, orchestration_id) a USING (tenant, orchestration_id)
  LEFT JOIN (SELECT tenant, orchestration_id, list({{'id': id, 'agent_id': agent_id, 'started': coalesce(epoch_us(started), 0),
      'ended': coalesce(epoch_us(ended), 0), 'input_tokens': input_tokens, 'output_tokens': output_tokens}}) AS items
    FROM calls GROUP BY tenant, orchestration_id) c USING (tenant, orchestration_id)
  LEFT JOIN (SELECT tenant, orchestration_id, list({{'id': id, 'kind': type, 'agent_id': agent_id, 'to_agent': to_agent, 'to_id': to_id,
      'status': status, 'triggered': triggered, 'call_id': call_id}}) AS items
    FROM events GROUP BY tenant, orchestration_id) e USING (tenant, orchestration_id)
  LEFT JOIN (SELECT tenant, orchestration_id, list({{'src': src, 'dst': dst, 'kind': type}}) AS items
    FROM edges GROUP BY tenant, orchestration_id) d USING (tenant, orchestration_id)
) o LEFT JOIN (SELECT tenant, orchestration_id, value, status FROM rewards WHERE family = 'R1' AND name = 'outcome' AND unit = 'team') r
  USING (tenant, orchestration_id)"""  # noqa: S608
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
        "rewards", ("rewards", "reward_heads", "orchestrations"), _last("rewards", of="reward_heads"),
        "reward channels; missing is NULL, not zero",
        "SELECT family, name, status, count(*), avg(value) FROM rewards GROUP BY ALL ORDER BY 1, 2",
    ),
    View(
        "credits", ("credits", "credit_heads", "orchestrations"), _last("credits", of="credit_heads"),
        "the conserved ledger: a node's children sum exactly to it",
        "SELECT unit, label, count(*), avg(credit) FROM credits GROUP BY ALL ORDER BY 1, 4 DESC",
    ),
    View(
        "samples", ("samples", "sample_heads", "orchestrations"), _last("samples", of="sample_heads"),
        "training rows, one for each model call",
        "SELECT policy_version, count(*), avg(reward), avg(list_sum(advantages)) FROM samples GROUP BY 1",
    ),
    View(
        "excluded", ("excluded", "sample_heads", "orchestrations"), _last("excluded", of="sample_heads"),
        "calls that gave no training row, with the reason",
        "SELECT reason, sum(num_calls) FROM excluded GROUP BY 1",
    ),
    View(
        "decisions", _DECISION_TABLES, _DECISIONS_SQL,
        "orchestration decisions O1 spawn, O2 delegate, O3 message, O4 aggregate, O5 stop; NULL where nothing was logged",
        "SELECT decision, chosen, count(*), avg(propensity), avg(credit) FROM decisions GROUP BY 1, 2 ORDER BY 1, 3 DESC",
    ),
    View(
        "metrics", ("orchestrations", "agents", "calls", "events", "edges", "rewards", "reward_heads"), _METRICS_SQL,
        "E1 to E4 of each orchestration, as `spanloop explain metrics` tells them; NULL where it does not say",
        "SELECT task_key, count(*), avg(success), avg(parallel_efficiency), avg(protocol_overhead) FROM metrics GROUP BY 1", METRICS,
    ),
    View(
        "policies", ("policies",), _plain("policies") + ' ORDER BY t_policies."offset"',
        "candidates, gates, canaries, promotions, rollbacks and routing, in order",
        "SELECT logged, epoch, version, against, reason FROM policies WHERE type IN ('policy_promoted', 'policy_rolled_back')",
    ),
    View(
        "feedback", ("feedback",), _FEEDBACK_SQL, "scores and outcomes; of several by one scorer the last",
        "SELECT name, count(*), avg(value) FROM feedback GROUP BY 1",
    ),
    View(
        "models", ("models",), _ONCE.format(key="tenant, version", table="models"), "versions of the value models that credit used, and of decision models",
        "SELECT version, kind, trained_on, published FROM models ORDER BY published DESC LIMIT 5",
    ),
    View(
        "decision_effects", ("decision_effects",), _plain("decision_effects"),
        "what told decisions brought, by kind, role, menu and context ('': all), in each version of the decision models",
        "SELECT decision_group, option, effect, low, high, naive, status FROM decision_effects WHERE context = ''",
    ),
    View(
        "dead_letters", ("dead_letters",), _plain("dead_letters"), "what was refused, and why",
        "SELECT source, reason, count(*) FROM dead_letters GROUP BY ALL",
    ),
    View(
        "deadletters", ("dead_letters",), _plain("dead_letters"), "the same as dead_letters",
        "SELECT reason, count(*) FROM deadletters GROUP BY 1",
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
"""In an order in which each view comes after those that it selects from."""
