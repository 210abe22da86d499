"""Each sentinel from the log to the freeze: agents begin a hack, the trainer's own process stops training and promoting, names the
orchestrations, stays so over a restart, and goes on when somebody unfreezes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from learner_world import CONFIG, World, append, learner

from spanloop.learner.history import read_policies
from spanloop.learner.policy import PolicyNet
from spanloop.learner.sentinels.signals import SIGNALS
from spanloop.learner.trainer import Learner
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import (
    OrchestrationRevised,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
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
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = 20
FIRST = PolicyNet.initial(CONFIG, 0)
PROMPT, ANSWER = tuple(range(20)), tuple(range(100, 112))


def honest(number: int) -> OrchestrationContent:
    """A lead with a helper and four tools that work."""
    events = tuple(
        OrchestrationEvent(f"e{i}", kind, "root", i, 1.0, "r", ("s",), status="ok")
        for i, kind in enumerate(("tool_call", *("tool_result",) * 4))
    )
    call = ModelCall(
        "c", "root", ("s",), 0, 1, policy_version="policy@v0", prompt_token_ids=PROMPT, response_token_ids=ANSWER,
        logprobs=(-0.5,) * len(ANSWER),
    )  # fmt: skip
    agents = (Agent("root", "root"), Agent("a", "helper", parent_id="root"))
    return OrchestrationContent(
        f"{number:032x}", "default", ("aa",), events, (), agents, (call,), TokenUsage(100, 50, 1), 0, 1
    )


def hacked(number: int, name: str) -> OrchestrationContent:
    made = honest(number)
    change = msgspec.structs.replace
    (call,) = made.calls
    if name == "length_drift":
        return change(made, tokens=TokenUsage(100, 500, 1))
    if name == "spawn_spam":
        return change(
            made, agents=(*made.agents, *(Agent(f"b{i}", "helper", parent_id="root") for i in range(6)))
        )
    if name == "broken_tool_dodge":
        return change(made, events=tuple(change(e, status="error") for e in made.events))
    if name == "clarification_dodge":
        asked = OrchestrationEvent("h", "human_intervention", "root", 9, 1.0, "r", ("s",))
        return change(made, events=(*made.events, asked))
    if name == "verbatim_copying":
        return change(made, calls=(change(call, response_token_ids=PROMPT[:12]),))
    if name == "entropy_collapse":
        return change(made, calls=(change(call, logprobs=(-0.001,) * len(ANSWER)),))
    assert name == "judge_disagreement"
    return made


def record(log: SqliteLog, content: OrchestrationContent, judge: float) -> None:
    common = {"orchestration_id": content.orchestration_id, "revision": 1}
    rewards = (
        Reward("R1", "outcome", "team", "", micro(0.5), "final", "feedback_mean/1"),
        Reward("R3", "judge:strict", "team", "", micro(judge), "final", "feedback_mean/1"),
    )
    log.append(
        [
            new_record(OrchestrationRevised(**common, complete=True, content=content)),
            new_record(
                RewardsComputed(
                    **common, orchestration_revision=1, rewards=rewards, team=micro(0.5), status="final"
                )
            ),
        ]
    )


def work(made: Learner, log: SqliteLog, world: World, rounds: int = 2) -> None:
    for _ in range(rounds):
        append(log, [world.play(FIRST, 0) for _ in range(20)])
        made.step()


@pytest.mark.parametrize("name", SIGNALS)
def test_a_hack_stops_training_and_promotion(name: str, tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "spanloop.db")
    section = {"gate": False, "sentinel_window": WINDOW, "max_staleness": 100}
    made, world = learner(log, tmp_path, **section), World()
    made.step()
    for number in range(2 * WINDOW + 10):
        record(log, honest(number), 0.5)
    work(made, log, world)
    batches, epoch = made.training.state.batch, made.promoter.state.epoch
    assert batches == 2
    assert epoch > 1
    assert not made.promoter.state.frozen

    bad = {f"{number:032x}" for number in range(100, 130)}
    for number in range(100, 130):
        record(log, hacked(number, name), 1.0 if name == "judge_disagreement" else 0.5)
    work(made, log, world, 3)
    (alarm,) = [e for e, _ in read_policies(log, "default", "policy") if isinstance(e, SentinelRaised)]
    assert alarm.sentinel == name
    assert set(alarm.orchestrations) <= bad
    assert (made.training.state.batch, made.promoter.state.epoch) == (batches, epoch)
    routing = made.promoter.state.routing
    assert routing is not None
    assert (routing.learner, routing.canary) == (-1, -1)
    log.append([new_record(PolicyCommand(command_id="p", kind="promote", argument="0"))])
    made.step()
    answer = next(
        e for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyCommandFinished)
    )
    assert answer.status == "refused"

    made = learner(
        log, tmp_path, **section, registry=made.promoter._registry, serving=made.promoter.deployment._serving
    )
    work(made, log, world, 1)
    assert made.promoter.state.frozen
    assert made.training.state.batch == batches
    log.append([new_record(PolicyCommand(command_id="u", kind="unfreeze"))])
    made.step()
    made.step()
    assert not made.promoter.state.frozen
    assert made.training.state.batch > batches
    promoted = [e for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyPromoted)]
    assert len(promoted) > epoch
    log.close()
