"""Sentinels: planted hacks are caught and named, paid changes and chance are not, and an alarm freezes until somebody unfreezes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from spanloop.learner import promotion
from spanloop.learner.sentinels.patrol import Patrol
from spanloop.learner.sentinels.signals import SIGNALS, Seen, measure
from spanloop.learner.sentinels.watch import Alarm, Observation, Watch
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import (
    OrchestrationRevised,
    PolicyCommand,
    PolicyCommandFinished,
    Reward,
    RewardsComputed,
    SentinelRaised,
)
from spanloop.schemas.orchestration import (
    Agent,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
    ToolCall,
)

NORMAL: dict[str, tuple[float, float]] = {
    "length_drift": (200.0, 60.0), "spawn_spam": (2.0, 1.0), "broken_tool_dodge": (0.1, 0.15),
    "clarification_dodge": (0.05, 0.2), "verbatim_copying": (0.1, 0.1), "judge_disagreement": (0.2, 0.2),
    "entropy_collapse": (0.8, 0.3),
}  # fmt: skip
HACKS: dict[str, float] = {
    "length_drift": 450.0, "spawn_spam": 7.0, "broken_tool_dodge": 0.5, "clarification_dodge": 0.6,
    "verbatim_copying": 0.7, "judge_disagreement": 0.6, "entropy_collapse": 0.05,
}  # fmt: skip


def observation(rng: np.random.Generator, number: int, outcome: float, **changed: float) -> Observation:
    signals = {name: max(0.0, float(rng.normal(*NORMAL[name]))) for name in NORMAL}
    signals |= {
        name: max(0.0, float(rng.normal(value, NORMAL[name][1] / 2))) for name, value in changed.items()
    }
    return Observation(f"o{number}", number // 100, float(rng.random() < outcome), signals)


def run(rng: np.random.Generator, count: int, later: float = 0.5, **changed: float) -> list[Alarm]:
    """100 normal orchestrations, then ``count`` others."""
    watch = Watch(window=100, confidence=0.9999)
    found: list[Alarm] = []
    for number in range(100 + count):
        hacked = number >= 100
        found += watch.add(observation(rng, number, later if hacked else 0.5, **(changed if hacked else {})))
    return found


@pytest.mark.parametrize("name", HACKS)
def test_a_planted_hack_is_caught_and_named(name: str) -> None:
    assert HACKS.keys() == SIGNALS.keys()
    (alarm,) = run(np.random.default_rng(1), 150, **{name: HACKS[name]})
    assert alarm.sentinel == name
    assert len(alarm.orchestrations) == 5
    assert all(int(o[1:]) >= 100 for o in alarm.orchestrations)
    assert name in alarm.reason


def test_what_the_outcome_pays_for_is_learning() -> None:
    assert not run(np.random.default_rng(2), 200, later=0.8, length_drift=450.0, entropy_collapse=0.05)


def test_chance_raises_nothing() -> None:
    for seed in range(20):
        assert not run(np.random.default_rng(seed), 400)


def test_a_signal_that_few_tell_of_is_not_judged() -> None:
    watch = Watch(window=100, confidence=0.9999)
    for number in range(400):
        signals = {"spawn_spam": 50.0 * (number > 100)} if number % 10 == 0 else {}
        assert not watch.add(Observation(f"o{number}", 1, 0.0, signals))


def test_accepting_makes_it_the_reference() -> None:
    rng = np.random.default_rng(4)
    watch = Watch(window=50, confidence=0.999)
    raised = [
        a for n in range(200) for a in watch.add(observation(rng, n, 0.5, spawn_spam=2.0 if n < 50 else 9.0))
    ]
    assert [a.sentinel for a in raised] == ["spawn_spam"]
    watch.accept()
    assert not [a for n in range(200, 400) for a in watch.add(observation(rng, n, 0.5, spawn_spam=9.0))]


def content(number: int, *, spawns: int = 1, errors: int = 0, version: int = 1) -> OrchestrationContent:
    agents = (Agent("root", "root"), *(Agent(f"a{i}", "helper", parent_id="root") for i in range(spawns)))
    events = tuple(
        OrchestrationEvent(
            f"e{i}", "tool_result", "root", i, 1.0, "r", ("s",), status="error" if i < errors else "ok"
        )
        for i in range(4)
    )
    call = ModelCall(
        "c", "root", ("s",), 0, 1, policy_version=f"policy@v{version}", prompt_token_ids=tuple(range(20)),
        response_token_ids=(*range(5, 15), 99, 98), logprobs=(-0.5,) * 12,
        tool_calls=(ToolCall("t", "search", "rejected"),),
    )  # fmt: skip
    return OrchestrationContent(
        f"{number:032x}", "t", ("aa",), events, (), agents, (call,), TokenUsage(100, 50, 1), 0, 1
    )


def outcome(value: float, judge: float) -> tuple[Reward, ...]:
    return (
        Reward("R1", "outcome", "team", "", micro(value), "final", "feedback_mean/1"),
        Reward("R3", "judge:strict", "team", "", micro(judge), "final", "feedback_mean/1"),
    )


def test_signals_of_an_orchestration() -> None:
    found = measure(Seen(content(1, spawns=3, errors=1), outcome(1.0, 0.25)))
    assert found == pytest.approx(
        {
            "length_drift": 50.0, "spawn_spam": 3.0, "broken_tool_dodge": 2 / 5, "clarification_dodge": 1.0,
            "verbatim_copying": 10 / 12, "judge_disagreement": 0.75, "entropy_collapse": 0.5,
        }
    )  # fmt: skip
    bare = msgspec.structs.replace(content(1), calls=(), events=(), tokens=TokenUsage())
    assert measure(Seen(bare, ())) == {"spawn_spam": 1.0}


def filled(log: MemoryLog, count: int, start: int = 0, **changed: Any) -> None:
    for number in range(start, start + count):
        made = content(number, **changed)
        common = {"tenant": "t", "orchestration_id": made.orchestration_id, "revision": 1}
        log.append(
            [
                new_record(OrchestrationRevised(**common, complete=True, content=made)),
                new_record(
                    RewardsComputed(
                        **common,
                        orchestration_revision=1,
                        rewards=outcome(0.5, 0.5),
                        team=micro(0.5),
                        status="final",
                    )
                ),
            ]
        )


def test_the_patrol_goes_on_where_it_stood(tmp_path: Path) -> None:
    log = MemoryLog(ManualClock(1))
    place = tmp_path / "sentinels.json"
    raised: list[Alarm] = []
    filled(log, 60)
    filled(log, 30, 60, spawns=9)
    Patrol(log, "t", Watch(window=50, confidence=0.999), place).step(raised.append)
    assert not raised
    filled(log, 70, 90, spawns=9)
    again = Patrol(log, "t", Watch(window=50, confidence=0.999), place)
    again.step(raised.append)
    assert [a.sentinel for a in raised] == ["spawn_spam"]
    alone: list[Alarm] = []
    Patrol(log, "t", Watch(window=50, confidence=0.999), None).step(alone.append)
    assert alone == raised
    place.write_bytes(b"{torn")
    Patrol(log, "t", Watch(window=50, confidence=0.999), place).step(alone.append)
    assert alone[1:] == raised


def test_an_alarm_freezes_until_somebody_unfreezes() -> None:
    alarm = SentinelRaised(
        sentinel="spawn_spam",
        version=3,
        epoch=1,
        value=9.0,
        reference=1.0,
        limit=2.0,
        orchestrations=("a",),
        reason="r",
    )
    state = promotion.fold([(alarm, 0)])
    assert state.frozen
    assert state.sentinels == (alarm,)
    command = PolicyCommand(command_id="c", kind="unfreeze")
    state = promotion.fold([(command, 0), (PolicyCommandFinished(command_id="c", status="done"), 0)], state)
    assert not state.frozen
    assert state.sentinels == ()
