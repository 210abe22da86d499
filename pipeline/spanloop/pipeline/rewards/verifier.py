"""R6, a verifier or debater: its stated chance that the team is right, by a proper scoring rule against the outcome.

A proper rule is best answered with what one believes; agreeing with the team earns nothing by itself. Collusion (METHODS 1.2, P7):
a verifier that shares its model with those it judges is not independent; its score is reported under an estimator that says so and
its share of the team's channel is not paid. Talking costs a price a message.
"""

from __future__ import annotations

from fractions import Fraction

from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import agent_scores, mean_micro
from spanloop.schemas.canonical import MICRO, micro
from spanloop.schemas.events import Reward
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
    stated = agent_scores(case.content, case.feedback, channel)
    if case.outcome is None or not stated:
        return [Reward("R6", channel, "team", "", None, "missing", "")]
    models = _models(case.content)
    price = micro(float(case.option("message_price", 0.0)))
    found: list[Reward] = []
    paid: list[int] = []
    settled = True
    for agent, (chance, final, ids) in stated.items():
        others = set().union(*(used for name, used in models.items() if name not in stated))
        own = models.get(agent, set())
        apart = (
            bool(own and others) and not own & others
        )  # nobody judged but itself, or unknown: not independent
        dependent = not apart and not case.option("independent", default=False)
        said = sum(e.type == "message" and e.agent_id == agent for e in case.content.events)
        value = brier(chance, case.outcome) - price * max(0, said - 1)
        name = f"{channel}:dependent" if dependent else channel
        status = "final" if final else "provisional"
        found.append(Reward("R6", name, "agent", agent, value, status, "", evidence=ids))
        settled = settled and final
        if not dependent:
            paid.append(value)
    team = mean_micro(paid)
    status = "missing" if team is None else "final" if settled else "provisional"
    return [*found, Reward("R6", channel, "team", "", team, status, "")]


def _models(content: OrchestrationContent) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for call in content.calls:
        model = call.policy_version.partition("@")[0] or call.model
        found.setdefault(call.agent_id, set()).update({model} if model else ())
    return found
