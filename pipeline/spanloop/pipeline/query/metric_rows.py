"""E1 to E4 of an orchestration for SQL: the function behind the view ``metrics``.

Place in the flow: ``sandbox`` registers ``row`` in DuckDB. The numbers come from ``rewards.metrics``, so that the view and
`spanloop explain metrics` say the same (to the microsecond that tables keep).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spanloop.pipeline.rewards.metrics import metrics_of
from spanloop.schemas.orchestration import (
    Agent,
    Edge,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

__all__ = ["PARAMETERS", "RETURNS", "row"]

PARAMETERS = (
    "STRUCT(id VARCHAR, name VARCHAR, parent_id VARCHAR, started BIGINT, ended BIGINT)[]",
    "STRUCT(id VARCHAR, agent_id VARCHAR, started BIGINT, ended BIGINT, input_tokens BIGINT, output_tokens BIGINT)[]",
    "STRUCT(id VARCHAR, kind VARCHAR, agent_id VARCHAR, to_agent VARCHAR, to_id VARCHAR, status VARCHAR, triggered BOOLEAN, "
    "call_id VARCHAR)[]",
    "STRUCT(src VARCHAR, dst VARCHAR, kind VARCHAR)[]",
)
RETURNS = (
    "STRUCT(parallel_efficiency DOUBLE, work_over_span DOUBLE, useful_agents DOUBLE, protocol_overhead DOUBLE, "
    "error_amplification DOUBLE, safety_events BIGINT, interventions BIGINT)"
)
_NAMES = (
    "parallel_efficiency", "work_over_span", "useful_agents", "protocol_overhead", "error_amplification", "safety_events",
    "interventions",
)  # fmt: skip
_Rows = Sequence[Mapping[str, Any]]


def row(agents: _Rows, calls: _Rows, events: _Rows, edges: _Rows) -> dict[str, Any]:
    """Metrics of one orchestration of what the tables keep, with microseconds for nanoseconds."""
    found = msgspec.structs.asdict(metrics_of(_content(agents, calls, events, edges)))
    return {name: found[name] for name in _NAMES}


def _content(agents: _Rows, calls: _Rows, events: _Rows, edges: _Rows) -> OrchestrationContent:
    return OrchestrationContent(
        orchestration_id="", tenant="", trace_ids=(), tokens=TokenUsage(), started_ns=0, ended_ns=0,
        edges=tuple(Edge(e["src"], e["dst"], e["kind"]) for e in edges),
        events=tuple(
            OrchestrationEvent(
                e["id"], e["kind"], "", 0, 1.0, "", (), agent_id=e["agent_id"], to=e["to_agent"], to_id=e["to_id"],
                status=e["status"], triggered=e["triggered"], call_id=e["call_id"],
            )
            for e in events
        ),
        agents=tuple(
            Agent(a["id"], a["name"], parent_id=a["parent_id"], started_ns=a["started"], ended_ns=a["ended"]) for a in agents
        ),
        calls=tuple(
            ModelCall(
                c["id"], c["agent_id"], (), c["started"], c["ended"], input_tokens=c["input_tokens"],
                output_tokens=c["output_tokens"],
            )
            for c in calls
        ),
    )  # fmt: skip
