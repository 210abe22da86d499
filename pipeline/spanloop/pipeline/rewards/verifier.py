"""R6, a verifier or debater: its stated chance that the team is right, by a proper scoring rule against the outcome.

A proper rule is best answered with what one believes; agreeing with the team earns nothing by itself. Collusion (METHODS 1.2, P7):
a verifier that shares its model with those it judges is not independent; its score is reported under an estimator that says so and
its share of the team's channel is not paid. Talking costs a price a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from spanloop.pipeline.rewards.inputs import inputs_of
from spanloop.pipeline.rewards.outcome import OUTCOME, is_usable, outcome_reward
from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import agent_scores, mean_micro, status_of, told_about
from spanloop.schemas.canonical import MICRO, micro
from spanloop.schemas.events import FeedbackReceived, Reward
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["brier", "verdict"]


def brier(stated: int, outcome: int) -> int:
    """1 - (p - y)^2 in micro-units, p and y clipped to 0..1.

    >>> brier(800_000, 1_000_000), brier(800_000, 0)
    (960000, 360000)
    """
    p, y = (min(MICRO, max(0, value)) for value in (stated, outcome))
    return MICRO - round(Fraction((p - y) ** 2, MICRO))


@reward("verdict/1", family="R6")
def verdict(case: Case) -> list[Reward]:
    """Brier score of each verifier's stated chance of success.

    Options: channel (feedback that states the chance, on the verifier's span or response; "verdict"), message_price (units a
    message of the verifier beyond its first; 0), independent (whether a verifier of the same model as the others counts; false).
    """
    channel = str(case.option("channel", "verdict"))
    told = told_about(case.content, case.feedback, (channel,))
    stated = agent_scores(told)
    if case.outcome is None or not stated:
        return [Reward("R6", channel, "team", "", None, "missing", "")]
    models = _models(case.content)
    others = set().union(*(used for name, used in models.items() if name not in stated))
    price = micro(float(case.option("message_price", 0.0)))
    outcomes = [item for item in case.feedback if item.name == OUTCOME and is_usable(item.value)]
    free: list[str] = []
    prices: dict[str, int] = {}
    for agent in stated:
        own = models.get(agent, set())
        # Where nobody else was judged, or a model is unknown, it is not independent.
        apart = bool(own and others) and not own & others
        if apart or case.option("independent", default=False):
            free.append(agent)
        said = sum(e.type == "message" and e.agent_id == agent for e in case.content.events)
        prices[agent] = price * max(0, said - 1)

    def scored(seen: Sequence[FeedbackReceived], agents: Sequence[str]) -> int | None:
        """Mean score of the agents that had stated something, had only this been observed."""
        outcome = outcome_reward(seen).value
        by_agent = told.by_agent([item for item in seen if item.name != OUTCOME])
        if outcome is None:
            return None
        return mean_micro(
            brier(mean_micro(micro(item.value) for item in items) or 0, outcome) - prices[agent]
            for agent, items in by_agent.items()
            if agent in agents
        )

    def made(name: str, unit: str, agent: str, agents: Sequence[str]) -> Reward:
        items = [item for item in told.items if told.of[item.target_id] in agents]
        value = scored([*items, *outcomes], agents)
        if value is None:
            return Reward("R6", name, unit, agent, None, "missing", "")
        status = status_of(
            [*items, *outcomes], value, lambda seen: scored(seen, agents), unit_of=lambda item: item.name,
            needs={OUTCOME, channel},
        )  # fmt: skip
        parts = [part for a in agents for part in (a, stated[a].inputs, str(prices[a]))]
        ids = tuple(sorted(i for a in agents for i in stated[a].evidence))
        inputs = inputs_of(str(case.outcome), *parts)
        return Reward("R6", name, unit, agent, value, status, "", evidence=ids, inputs_hash=inputs)

    found = [
        made(channel if agent in free else f"{channel}:dependent", "agent", agent, (agent,))
        for agent in stated
    ]
    return [*found, made(channel, "team", "", free)]


def _models(content: OrchestrationContent) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for call in content.calls:
        model = call.policy_version.partition("@")[0] or call.model
        found.setdefault(call.agent_id, set()).update({model} if model else ())
    return found
