"""Questions about one orchestration or one policy version, as table macros: ``SELECT * FROM timeline('3fa9')``.

Place in the flow: on top of ``tables`` and ``views``; ``query`` creates those that a statement names. An orchestration is given
by its id or the beginning of it; a beginning that several ids share is refused.

Invariants: as in ``views``: the last revision, nothing that a join swallowed, NULL where the log does not say.
"""

from __future__ import annotations

from typing import NamedTuple

from spanloop.pipeline.views import last_rows

__all__ = ["ACTIVE_AGENTS", "CRITICAL_PATH", "MACROS", "POMDP_STEPS", "Macro"]

CRITICAL_PATH = "_critical_path"
POMDP_STEPS = "_pomdp_steps"
ACTIVE_AGENTS = "_active_agents"
"""Functions that the sandbox registers (``query.functions``) where a statement needs them."""


class Macro(NamedTuple):
    """A table macro. Its parameters must not be names of columns that ``sql`` uses without a table."""

    name: str
    parameters: str
    tables: tuple[str, ...]
    views: tuple[str, ...]
    sql: str
    meaning: str
    example: str
    call: str
    """As people call it."""
    function: str = ""
    """The function of ours that ``sql`` uses."""


def _one(heads: str) -> str:
    """CTEs ``found`` and ``one``: the event of the orchestration that the parameter names."""
    matching = last_rows(heads, where="starts_with(orchestration_id, orchestration)")
    return f"""found AS MATERIALIZED ({matching}),
one AS MATERIALIZED (SELECT * FROM found WHERE (orchestration_id = orchestration
  OR NOT EXISTS (SELECT 1 FROM found WHERE orchestration_id = orchestration))
  AND CASE WHEN (SELECT count(*) FROM found WHERE orchestration_id <> orchestration) > 1
    AND NOT EXISTS (SELECT 1 FROM found WHERE orchestration_id = orchestration)
    THEN error('several orchestrations begin with ' || orchestration || ': give more digits') ELSE TRUE END)"""  # noqa: S608


def _of(table: str) -> str:
    """Rows of a table that belong to ``one``."""
    return (
        f"SELECT x.* FROM t_{table} x JOIN one ON x.orchestration_id = one.orchestration_id "  # noqa: S608
        'AND x.partition = one.partition AND x."offset" = one."offset"'
    )


_CRITICAL = f"""WITH {_one("orchestrations")}, a AS ({_of("agents")}), c AS ({_of("calls")}), e AS ({_of("events")}),
path AS (SELECT unnest({CRITICAL_PATH}(
  coalesce((SELECT list({{'id': a.id, 'name': a.name, 'parent_id': a.parent_id, 'started': coalesce(epoch_us(a.started), 0),
    'ended': coalesce(epoch_us(a.ended), 0)}}) FROM a), []),
  coalesce((SELECT list({{'id': c.id, 'agent_id': c.agent_id, 'started': coalesce(epoch_us(c.started), 0),
    'ended': coalesce(epoch_us(c.ended), 0)}}) FROM c), []),
  coalesce((SELECT list({{'to_id': e.to_id, 'call_id': e.call_id}}) FROM e
    WHERE e.type IN ('spawn', 'delegate') AND e.to_id <> '' AND e.call_id <> ''), []))) AS p)
SELECT p.step, p.kind, p.node AS id, p.agent_id, p.agent, c.model, nullif(c.policy_version, '') AS policy_version,
  make_timestamp(p.started) AS started, p.own_us / 1000.0 AS ms, p.total_us / 1000.0 AS total_ms, p.span_us / 1000.0 AS span_ms,
  p.work_us / 1000.0 AS work_ms, CASE WHEN p.span_us > 0 THEN p.work_us / p.span_us END AS parallelism
FROM path LEFT JOIN c ON p.kind = 'call' AND c.id = p.node ORDER BY p.step"""  # noqa: S608

_RUNS = """coalesce((SELECT list({'id': a.id, 'name': a.name, 'role': a.role, 'parent_id': a.parent_id,
    'started': coalesce(epoch_us(a.started), 0), 'ended': coalesce(epoch_us(a.ended), 0)} ORDER BY a.started, a.id) FROM a), [])"""

_POMDP = f"""WITH {_one("orchestrations")}, a AS ({_of("agents")}), c AS ({_of("calls")}), e AS ({_of("events")}),
parts AS (SELECT unnest({POMDP_STEPS}({_RUNS},
  coalesce((SELECT list({{'id': c.id, 'agent_id': c.agent_id, 'started': coalesce(epoch_us(c.started), 0), 'model': c.model,
    'policy_version': c.policy_version}} ORDER BY c.started, c.id) FROM c), []),
  coalesce((SELECT list({{'id': e.id, 'kind': e.type, 'agent': e.agent, 'agent_id': e.agent_id, 'to_agent': e.to_agent,
    'to_id': e.to_id, 'tool': e.tool, 'status': e.status, 'triggered': e.triggered, 't': e.t_ns // 1000,
    'call_id': e.call_id}} ORDER BY e.t_ns, e.rn) FROM (SELECT *, row_number() OVER () AS rn FROM e) e), []))) AS p)
SELECT p.agent_id, p.agent, p.role, p.step, make_timestamp(p.t) AS t, nullif(p.call_id, '') AS call_id, nullif(p.model, '') AS model,
  nullif(p.policy_version, '') AS policy_version, p.part, p.kind, p.other, p.status, nullif(p.event_id, '') AS event_id,
  make_timestamp(p.moment) AS moment
FROM parts"""  # noqa: S608

_ACTIVE = f"""WITH {_one("orchestrations")}, a AS ({_of("agents")}),
changes AS (SELECT unnest({ACTIVE_AGENTS}({_RUNS})) AS p)
SELECT make_timestamp(p.t) AS t, p.num_active, p.active, p.joined, p.gone FROM changes"""  # noqa: S608

_FAN_OUT = f"""WITH RECURSIVE {_one("orchestrations")}, a AS MATERIALIZED ({_of("agents")}),
deep(id, depth) AS (
  SELECT a.id, 0 FROM a WHERE a.parent_id = '' OR a.parent_id NOT IN (SELECT b.id FROM a b)
  UNION ALL SELECT a.id, deep.depth + 1 FROM a JOIN deep ON a.parent_id = deep.id AND a.id <> a.parent_id WHERE deep.depth < 64),
child AS (SELECT a.*, greatest(a.ended, a.started + INTERVAL 1 microsecond) AS until FROM a WHERE a.parent_id <> '' AND a.parent_id <> a.id),
moves AS (SELECT child.parent_id, child.started AS moment, 1 AS delta FROM child UNION ALL SELECT child.parent_id, child.until, -1 FROM child),
running AS (SELECT parent_id, sum(delta) OVER (PARTITION BY parent_id ORDER BY moment, delta ROWS UNBOUNDED PRECEDING) AS n FROM moves),
most AS (SELECT parent_id, max(n)::BIGINT AS n FROM running GROUP BY parent_id),
sums AS (SELECT parent_id, count(*) AS started_agents, list(DISTINCT role ORDER BY role) AS roles, count(*) FILTER (status = 'ok') AS ok,
  count(*) FILTER (status <> 'ok') AS failed, min(started) AS first_started, max(ended) AS last_ended,
  (epoch_us(max(ended)) - epoch_us(min(started))) / 1000.0 AS wall_ms, sum(epoch_us(ended) - epoch_us(started)) / 1000.0 AS busy_ms
  FROM child GROUP BY parent_id)
SELECT s.parent_id AS agent_id, a.name AS agent, a.role, min(deep.depth) AS depth, s.started_agents, s.roles, most.n AS max_parallel, s.ok,
  s.failed, s.first_started, s.last_ended, s.wall_ms, s.busy_ms, CASE WHEN s.wall_ms > 0 THEN s.busy_ms / s.wall_ms END AS parallelism
FROM sums s LEFT JOIN a ON a.id = s.parent_id LEFT JOIN deep ON deep.id = s.parent_id LEFT JOIN most ON most.parent_id = s.parent_id
GROUP BY ALL ORDER BY depth, first_started, agent_id"""  # noqa: S608

_CREDIT = f"""WITH RECURSIVE {_one("credit_heads")}, c AS MATERIALIZED ({_of("credits")}),
tree(node, depth, path) AS (
  SELECT c.node, 0, [c.node] FROM c WHERE c.parent = ''
  UNION ALL SELECT c.node, tree.depth + 1, list_append(tree.path, CASE WHEN c.unit = 'token'
      THEN lpad(regexp_extract(c.node, '\\d+$'), 8, '0')
      ELSE regexp_extract(c.label, '^\\D*') || lpad(regexp_extract(c.label, '\\d+$'), 8, '0') END || ' ' || c.node)
    FROM c JOIN tree ON c.parent = tree.node WHERE tree.depth < 32)
SELECT tree.depth, c.unit, c.label, c.credit, c.credit_micro, c.raw, c.credit - c.raw AS residual, c.variance, c.estimator,
  CASE WHEN total.credit_micro <> 0 THEN c.credit_micro / total.credit_micro END AS share, c.node, c.parent, c.subject, c.reward,
  c.baseline, c.value_model, c.revision
FROM tree JOIN c ON c.node = tree.node LEFT JOIN c total ON total.parent = '' ORDER BY tree.path"""  # noqa: S608

_TIMELINE = f"""WITH {_one("orchestrations")}, o AS ({_of("orchestrations")}), e AS ({_of("events")}), c AS ({_of("calls")}),
a AS ({_of("agents")}),
h AS ({last_rows("credit_heads", where="starts_with(orchestration_id, orchestration)")}),
credit AS (SELECT k.subject, k.unit, any_value(k.credit) AS credit FROM t_credits k JOIN h ON k.orchestration_id = h.orchestration_id
  AND k.partition = h.partition AND k."offset" = h."offset" WHERE k.unit IN ('turn', 'tool_call', 'agent') GROUP BY ALL),
names AS (SELECT a.id, any_value(a.name) AS name FROM a GROUP BY a.id),
rows AS (
  SELECT a.started AS t, 0 AS rank, 'agent' AS kind, a.role AS what, a.name AS agent, a.id AS agent_id, '' AS other, a.status,
    (epoch_us(a.ended) - epoch_us(a.started)) / 1000.0 AS duration_ms, NULL::BIGINT AS tokens, NULL::VARCHAR AS policy_version,
    k.credit, a.id, NULL::DOUBLE AS confidence, '' AS rule FROM a LEFT JOIN credit k ON k.unit = 'agent' AND k.subject = a.id
  UNION ALL
  SELECT c.started, 1, 'call', c.model, coalesce(names.name, ''), c.agent_id, array_to_string(c.tools, ' '), c.status,
    (epoch_us(c.ended) - epoch_us(c.started)) / 1000.0, c.input_tokens + c.output_tokens, nullif(c.policy_version, ''), k.credit,
    c.id, NULL, '' FROM c LEFT JOIN names ON names.id = c.agent_id LEFT JOIN credit k ON k.unit = 'turn' AND k.subject = c.id
  UNION ALL
  SELECT e.t, 2, 'event', e.type, e.agent, e.agent_id, coalesce(nullif(e.to_agent, ''), e.tool), e.status, NULL, NULL, NULL, k.credit,
    e.id, e.confidence, e.rule FROM e LEFT JOIN credit k ON k.unit = 'tool_call' AND k.subject = e.id)
SELECT r.t, (epoch_us(r.t) - epoch_us((SELECT min(o.started) FROM o))) / 1000.0 AS ms, r.kind, r.what, r.agent, r.other, r.status,
  r.duration_ms, r.tokens, r.policy_version, r.credit, r.id, r.agent_id, r.confidence, r.rule
FROM rows r ORDER BY r.t NULLS FIRST, r.rank, r.id"""  # noqa: S608

_STALENESS = """WITH served AS (
  SELECT tenant, policy_version, count(*) AS calls, min(started) AS first_call, max(started) AS last_call
  FROM calls WHERE policy_version <> '' GROUP BY ALL),
jobs AS (SELECT tenant, policy_version, count(*) AS orchestrations
  FROM (SELECT tenant, unnest(policy_versions) AS policy_version FROM orchestrations) GROUP BY ALL),
named AS (SELECT *, regexp_extract(policy_version, '^(.*)@v\\d+$', 1) AS policy,
    CAST(regexp_extract(policy_version, '@v(\\d+)$', 1) AS BIGINT) AS version
  FROM served LEFT JOIN jobs USING (tenant, policy_version) WHERE regexp_matches(policy_version, '@v\\d+$')),
registered AS (SELECT tenant, policy, max(version) AS newest FROM t_policies WHERE type = 'candidate_registered' GROUP BY ALL),
newest AS (SELECT s.tenant, s.policy, greatest(max(s.version), coalesce(max(r.newest), -1)) AS version
  FROM named s LEFT JOIN registered r USING (tenant, policy) GROUP BY ALL)
SELECT s.tenant, s.policy, s.version, s.calls, s.orchestrations, s.first_call, s.last_call, n.version AS newest_version,
  n.version - s.version AS lag, n.version - s.version <= bound AS within_bound
FROM named s JOIN newest n USING (tenant, policy) ORDER BY s.tenant, s.policy, s.version DESC"""

_PROVENANCE = f"""WITH RECURSIVE candidate AS (
  SELECT p.tenant, p.policy, p.version, p.batch, p.against AS parent FROM t_policies p
  WHERE p.type = 'candidate_registered' AND p.policy = of_policy AND coalesce(p.reason, '') = ''),
line AS (
  SELECT candidate.* FROM candidate WHERE candidate.version = of_version
  UNION SELECT c.* FROM candidate c JOIN line ON c.tenant = line.tenant AND c.version = line.parent AND c.version < line.version),
batch AS (SELECT line.tenant, line.version, line.batch, CAST(p.details->>'from_offset' AS BIGINT) AS after,
    CAST(p.details->>'to_offset' AS BIGINT) AS until
  FROM line JOIN t_policies p ON p.tenant = line.tenant AND p.policy = line.policy AND p.batch = line.batch
  WHERE p.type = 'batch_committed'),
own AS (SELECT s.partition, s."offset", any_value(s.reward) AS reward, bool_or(s.holdout) AS holdout, count(*) AS num_rows,
    list(DISTINCT s.policy_version ORDER BY s.policy_version) AS acted_by, sum(len(s.response_token_ids))::BIGINT AS tokens
  FROM t_samples s GROUP BY ALL),
last AS (SELECT l.tenant, l.orchestration_id, o.trace_ids FROM ({last_rows("orchestrations")}) l JOIN t_orchestrations o
  ON o.partition = l.partition AND o."offset" = l."offset")
SELECT b.version, b.batch, h.tenant, h.orchestration_id, h.revision,
  CASE WHEN own.num_rows IS NULL THEN 'no rows' WHEN own.holdout THEN 'held out' ELSE 'offered' END AS role, own.reward, own.acted_by,
  own.num_rows, own.tokens, last.trace_ids
FROM batch b JOIN t_sample_heads h ON h.tenant = b.tenant AND h."offset" > b.after AND h."offset" <= b.until
LEFT JOIN own ON own.partition = h.partition AND own."offset" = h."offset"
LEFT JOIN last ON last.tenant = h.tenant AND last.orchestration_id = h.orchestration_id
ORDER BY b.version, h."offset\""""  # noqa: S608

MACROS: dict[str, Macro] = {
    macro.name: macro
    for macro in (
        Macro(
            "critical_path", "orchestration", ("orchestrations", "agents", "calls", "events"), (), _CRITICAL,
            "the heaviest causal path through model calls and agents: its last total_ms is the span L, work_ms is W",
            "SELECT step, agent, ms, total_ms, parallelism FROM critical_path('3fa9')", "critical_path(id)", CRITICAL_PATH,
        ),
        Macro(
            "pomdp", "orchestration", ("orchestrations", "agents", "calls", "events"), (), _POMDP,
            "what each agent saw and did, step by step: a row for each observation and action (`spanloop explain pomdp`)",
            "SELECT agent, step, part, kind, other, status FROM pomdp('3fa9')", "pomdp(id)", POMDP_STEPS,
        ),
        Macro(
            "active_agents", "orchestration", ("orchestrations", "agents"), (), _ACTIVE,
            "the set of active agents from each time on, and who joined and left",
            "SELECT t, num_active, joined, gone FROM active_agents('3fa9')", "active_agents(id)", ACTIVE_AGENTS,
        ),
        Macro(
            "fan_out", "orchestration", ("orchestrations", "agents"), (), _FAN_OUT,
            "for each agent that started others: how many, how many at once, how they ended",
            "SELECT agent, started_agents, max_parallel, failed FROM fan_out('3fa9')", "fan_out(id)",
        ),
        Macro(
            "credit_flow", "orchestration", ("credit_heads", "credits", "orchestrations"), (), _CREDIT,
            "the ledger as a tree, depth first: what each account got, of which estimator, and its share of the team's",
            "SELECT repeat('  ', depth) || label AS account, credit, share, estimator FROM credit_flow('3fa9') WHERE unit <> 'token'",
            "credit_flow(id)",
        ),
        Macro(
            "timeline", "orchestration", ("orchestrations", "events", "calls", "agents", "credits", "credit_heads"), (), _TIMELINE,
            "agents, model calls and events in order, with duration, tokens and credit",
            "SELECT ms, kind, what, agent, other, status, credit FROM timeline('3fa9')", "timeline(id)",
        ),
        Macro(
            "staleness", "bound := 4", ("calls", "orchestrations", "policies"), ("calls", "orchestrations"), _STALENESS,
            "policy versions that served, and how many versions each lags behind the newest (bound: what the learner accepts)",
            "SELECT version, calls, lag, within_bound FROM staleness()", "staleness()",
        ),
        Macro(
            "provenance", "of_version, of_policy := 'policy'",
            ("policies", "sample_heads", "samples", "orchestrations"), (), _PROVENANCE,
            "orchestrations in the batches of a version and of those that it descends from; `spanloop provenance` says which of the "
            "offered ones the learner took",
            "SELECT version, role, count(*), avg(reward) FROM provenance(3) GROUP BY ALL", "provenance(version)",
        ),
    )
}  # fmt: skip
