"""R4, progress: each turn is paid by how much of the declared way it went, as a difference of potentials.

F = Phi(after) - Phi(before), and what was gained is given back at the end: over an orchestration the sum is 0 whatever the agents
do, so it cannot change what is optimal (METHODS 2.7), and steps that get nowhere earn nothing (no step padding).
"""

from __future__ import annotations

from collections.abc import Sequence

from spanloop.pipeline.rewards.inputs import inputs_of
from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.shaping import potential_rewards
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import ModelCall

__all__ = ["milestones"]


@reward("milestones/1", family="R4")
def milestones(case: Case) -> list[Reward]:
    """Share of the declared milestones reached, as potentials of the turns in time.

    Options: tools (names whose first result without error is a milestone).
    """
    tools: object = case.option("tools", ())
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise ConfigError("reward milestones/1 needs the option tools = ['search', 'write_report']")
    wanted = {str(tool) for tool in tools}
    calls = sorted(case.content.calls, key=lambda c: (c.start_ns, c.id))
    of_call = {event.id: event.call_id for event in case.content.events if event.type == "tool_call"}
    reached: dict[str, str] = {}
    results = [
        e for e in case.content.events if e.type == "tool_result" and e.status != "error" and e.tool in wanted
    ]
    into = {e.dst: e.src for e in case.content.edges if e.type == "tool_dependency"}
    for event in sorted(results, key=lambda e: (e.t_ns, e.id)):
        turn = of_call.get(into.get(event.id, ""), "") or _turn_before(calls, event.agent_id, event.t_ns)
        if turn:
            reached.setdefault(event.tool, turn)
    gained: dict[str, int] = {}
    for turn in reached.values():
        gained[turn] = gained.get(turn, 0) + 1
    phi = [0]
    for call in calls:
        phi.append(phi[-1] + gained.get(call.id, 0))
    steps = potential_rewards(phi)
    scale = MICRO // len(wanted)
    inputs = inputs_of(
        *(part for reach in sorted(reached.items()) for part in reach), calls[-1].id if calls else ""
    )
    return [
        Reward("R4", "milestones", "turn", call.id, round(step) * scale, "final", "", inputs_hash=inputs)
        for call, step in zip(calls, steps, strict=False)
        if step
    ]


def _turn_before(calls: Sequence[ModelCall], agent: str, t_ns: int) -> str:
    """The agent's last call that had begun."""
    before = [c for c in calls if c.agent_id == agent and c.start_ns <= t_ns]
    return before[-1].id if before else ""
