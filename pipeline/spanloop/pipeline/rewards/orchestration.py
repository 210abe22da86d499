"""R7 as PARL defines it: critical steps, parallelism and finish rate, and the general work/span form.

A *stage* is the turns of a main agent up to and including one that starts sub-agents, with those sub-agents side by side.
CriticalSteps C = sum over stages (S_main + max_i S_sub_i); r_parallel = 1 - C / S_total; r_finish = share of the spawned
that ended ok. A sub-agent that starts agents itself counts with its own critical steps.
Invariants: pure; every value is finite; 0/0 is 0 and flagged by an estimator name of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from operator import attrgetter

import msgspec

from spanloop.pipeline.rewards.inputs import inputs_of
from spanloop.schemas.canonical import MICRO, micro
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationContent

__all__ = [
    "Stage",
    "critical_steps",
    "makespan",
    "orchestration_rewards",
    "parallel_share",
    "parl_reward",
    "stages_of",
    "work_and_span",
    "work_graph",
]

_json = msgspec.json.Encoder(order="deterministic").encode
ESTIMATOR = "parl/1"
NOTHING_SPAWNED = "parl/1:nothing_spawned"


class Stage(msgspec.Struct, frozen=True):
    """Steps of the main agent, and critical and total steps of each sub-agent that ran beside the others."""

    main: int
    subs: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    """Total steps of each sub-agent; empty: the same as ``subs``."""


def critical_steps(stages: Sequence[Stage]) -> tuple[int, int]:
    """(C, S_total) of stages.

    Source: Kimi K2.5 (arXiv 2602.02276), PARL; METHODS 2.1.

    >>> critical_steps([Stage(1), Stage(1, (5, 9, 4)), Stage(2, (3, 3)), Stage(1)])
    (17, 29)
    """
    critical = total = 0
    for stage in stages:
        critical += stage.main
        total += stage.main
        if stage.subs:
            critical += max(stage.subs)
        if stage.totals or stage.subs:
            total += sum(stage.totals or stage.subs)
    return critical, total


def parallel_share(critical: int, total: int) -> float:
    """r_parallel = 1 - C / S_total: 0 when serial, towards 1 - 1/n for n even branches.

    >>> round(parallel_share(17, 29), 6)
    0.413793
    """
    return 1.0 - critical / total if total else 0.0


def parl_reward(outcome: float, parallel: float, finish: float, weights: tuple[float, float]) -> float:
    """r = r_perf + lambda1 * r_parallel + lambda2 * r_finish, in units.

    >>> round(parl_reward(1.0, 1 - 15 / 29, 4 / 5, (0.25, 0.25)), 6)
    1.32069
    """
    return outcome + weights[0] * parallel + weights[1] * finish


def work_and_span(weights: Mapping[str, int], after: Mapping[str, AbstractSet[str]]) -> tuple[int, int]:
    """(W, L): all work, and the heaviest path through the order ``after`` (predecessors of each node).

    Nodes on a cycle are left out of L.

    >>> work_and_span({"o": 1, "a": 5, "b": 3, "c": 6, "g": 1}, {"a": {"o"}, "b": {"o"}, "c": {"o"}, "g": {"a", "b", "c"}})
    (16, 8)
    """
    followers: dict[str, list[str]] = {}
    missing = dict.fromkeys(weights, 0)
    for node, sources in after.items():
        if node not in weights:
            continue
        for source in sources:
            if source in weights:
                missing[node] += 1
                followers.setdefault(source, []).append(node)
    longest = dict.fromkeys(weights, 0)
    ready = [node for node, count in missing.items() if count == 0]
    span = 0
    while ready:
        node = ready.pop()
        length = longest[node] + weights[node]
        span = max(span, length)
        for follower in followers.get(node, ()):
            longest[follower] = max(longest[follower], length)
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return sum(weights.values()), span


def makespan(intervals: Sequence[tuple[int, int]]) -> int:
    """Time from the first start to the last end; 0 for no intervals.

    >>> makespan([(0, 1), (1, 6), (1, 4), (3, 9), (9, 10)])
    10
    """
    if not intervals:
        return 0
    return max(end for _, end in intervals) - min(start for start, _ in intervals)


class _Family(msgspec.Struct):
    """Turns and sub-agents of each agent, and the turn that started each sub-agent."""

    calls: dict[str, list[ModelCall]]
    children: dict[str, list[Agent]]
    started_by: dict[str, str]


def _family(content: OrchestrationContent) -> _Family:
    known = {agent.id for agent in content.agents}
    strangers = sorted({call.agent_id or "unattributed" for call in content.calls} - known)
    calls: dict[str, list[ModelCall]] = {}
    for call in sorted(content.calls, key=attrgetter("start_ns", "id")):
        calls.setdefault(call.agent_id or "unattributed", []).append(call)
    children: dict[str, list[Agent]] = {}
    for agent in sorted(content.agents, key=attrgetter("started_ns", "id")):
        parent = agent.parent_id if agent.parent_id in known and agent.parent_id != agent.id else ""
        children.setdefault(parent, []).append(agent)
    children.setdefault("", []).extend(Agent(name, name) for name in strangers)
    started_by = {
        event.to_id: event.call_id
        for event in content.events
        if event.type in {"spawn", "delegate"} and event.to_id and event.call_id
    }
    return _Family(calls, children, started_by)


def stages_of(content: OrchestrationContent) -> list[Stage]:
    """The stages of the entry agents, in time; agents without a parent run one after the other."""
    return _stages_of(_family(content))


def _stages_of(family: _Family) -> list[Stage]:
    stages: list[Stage] = []
    for agent in family.children.get("", ()):
        stages += _stages(agent, family, frozenset())
    return stages


def _critical_of(agent: Agent, family: _Family, above: frozenset[str]) -> tuple[int, int]:
    """``critical_steps`` of an agent's stages; one that started nobody has a single stage."""
    if agent.id not in family.children:
        alone = len(family.calls.get(agent.id, ())) or 1
        return alone, alone
    return critical_steps(_stages(agent, family, above))


def _stages(agent: Agent, family: _Family, above: frozenset[str]) -> list[Stage]:
    turns = family.calls.get(agent.id, [])
    index = {call.id: i for i, call in enumerate(turns)}
    groups: dict[int, list[Agent]] = {}
    for child in family.children.get(agent.id, ()):
        if child.id in above or len(above) > 64:
            continue
        at = index.get(family.started_by.get(child.id, ""))
        if at is None:
            at = max((i for i, call in enumerate(turns) if call.start_ns <= child.started_ns), default=-1)
        groups.setdefault(at, []).append(child)
    stages: list[Stage] = []
    main = 0 if turns else (0 if groups else 1)
    for at in range(-1, len(turns)):
        main += at >= 0
        if at in groups:
            pairs = [_critical_of(child, family, above | {agent.id, child.id}) for child in groups[at]]
            stages.append(Stage(main, tuple(c for c, _ in pairs), tuple(t for _, t in pairs)))
            main = 0
    return [*stages, Stage(main)] if main else stages


def orchestration_rewards(
    content: OrchestrationContent, weights: tuple[int, int], *, complete: bool = True
) -> list[Reward]:
    """R7 channels of a team: parl_parallel and parl_finish (paid by ``weights``), critical_steps and work_span (reported).

    Args:
        content: The orchestration.
        weights: Micro-weights of r_parallel and r_finish; 0 where the outcome's gate is shut.
        complete: False: closed by time-out, so that more of it may come.
    """
    family = _family(content)
    stages = _stages_of(family)
    critical, total = critical_steps(stages)
    spawned = [agent for agent in content.agents if agent.parent_id]
    finished = sum(agent.status == "ok" for agent in spawned)
    finish = round(MICRO * finished / len(spawned)) if spawned else 0
    graph = _work_graph(content, family)
    work, span = work_and_span(*graph)
    estimator = ESTIMATOR if spawned else NOTHING_SPAWNED
    status = "final" if complete else "provisional"
    steps = inputs_of(_json(stages))
    ends = inputs_of(*(part for agent in spawned for part in (agent.id, agent.status)))

    def reward(name: str, value: int, inputs: str, weight: int = 0) -> Reward:
        return Reward(
            "R7", name, "team", "", value, status, estimator, weight=weight, scaffold=weight > 0, inputs_hash=inputs
        )  # fmt: skip

    return [
        reward("parl_parallel", micro(parallel_share(critical, total)), steps, weights[0]),
        reward("parl_finish", finish, ends, weights[1]),
        reward("critical_steps", critical * MICRO, steps),
        reward("work_span", round(MICRO * work / span) if span else 0, inputs_of(_json(graph))),
    ]


def work_graph(content: OrchestrationContent) -> tuple[dict[str, int], dict[str, set[str]]]:
    """What was worked on and in which order, for ``work_and_span``: model calls by id and agents that make none as
    "agent:ID" with their nanoseconds, and the predecessors of each, by structure and not by clock."""
    return _work_graph(content, _family(content))


def _work_graph(content: OrchestrationContent, family: _Family) -> tuple[dict[str, int], dict[str, set[str]]]:
    weights: dict[str, int] = {}
    after: dict[str, set[str]] = {}
    chains: dict[str, list[str]] = {}
    for agent in (a for siblings in family.children.values() for a in siblings):
        calls = family.calls.get(agent.id, [])
        chains[agent.id] = [call.id for call in calls] or [f"agent:{agent.id}"]
        if not calls and not family.children.get(agent.id):
            weights[chains[agent.id][0]] = max(0, agent.ended_ns - agent.started_ns)
        elif not calls:
            weights[chains[agent.id][0]] = 0
        for call in calls:
            spent = call.end_ns - call.start_ns
            weights[call.id] = spent if spent > 0 else 0
        for earlier, later in pairwise(chains[agent.id]):
            after.setdefault(later, set()).add(earlier)
    for agent in content.agents:
        if agent.parent_id not in chains or agent.parent_id == agent.id:
            continue
        parent = chains[agent.parent_id]
        start = family.started_by.get(agent.id, "")
        at = (
            parent.index(start)
            if start in parent
            else _turn_before(agent, family.calls.get(agent.parent_id, []))
        )
        if at >= 0:
            after.setdefault(chains[agent.id][0], set()).add(parent[at])
        if at + 1 < len(parent):
            after.setdefault(parent[at + 1], set()).add(chains[agent.id][-1])
    return weights, after


def _turn_before(agent: Agent, turns: Sequence[ModelCall]) -> int:
    if not turns:
        return 0
    return max((i for i, call in enumerate(turns) if call.start_ns <= agent.started_ns), default=-1)
