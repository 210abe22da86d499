"""The port for a judge of failures: somebody, usually a language model, who reads the steps and names one.

spanloop ships none and needs none. A judge gets the steps as data and answers in one fixed schema; what it says is checked
against the log, and it can shift probabilities but never decide alone (``pooling``). Texts of a log were written by strangers
and may address the judge: whoever writes one must hand them over as quoted data, and an answer that is more than the schema
is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from spanloop.pipeline.attribution.pooling import Opinion, verdict_opinion
from spanloop.pipeline.attribution.steps import Step
from spanloop.pipeline.bounded import within

__all__ = ["Judge", "JudgeCase", "Verdict", "ask"]

_NAME_MAX = 200


class JudgeCase(msgspec.Struct, frozen=True):
    """What a judge is asked about: the steps that can be to blame, in order."""

    orchestration_id: str
    steps: tuple[Step, ...]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a judge may answer, and nothing else."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    """``Step.index``."""
    agent: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)]
    """Who took that step; a verdict whose agent is another's is refused."""
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)]
    judge: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)]
    """Name and version of the judge."""


class Judge(Protocol):
    """The port."""

    def __call__(self, case: JudgeCase) -> bytes:
        """A Verdict as JSON."""
        ...


def ask(judge: Judge, case: JudgeCase, timeout_s: float) -> Opinion | str:
    """The judge's opinion, or why it has none: too slow, an exception, or an answer that is no verdict on these steps.

    The judge runs in a thread of its own that is not waited for beyond ``timeout_s``.
    """
    answer, why = within(timeout_s, lambda: judge(case))
    if why:
        return f"the judge: {why}"
    return _checked(answer, case.steps)


def _checked(answer: Any, steps: Sequence[Step]) -> Opinion | str:
    try:
        verdict = msgspec.json.decode(answer, type=Verdict)
    except (msgspec.DecodeError, TypeError, ValueError) as exc:
        return f"the judge's answer is no verdict: {exc}"
    at = next((step for step in steps if step.index == verdict.step), None)
    if at is None or at.agent != verdict.agent:
        return f"the judge blames {verdict.agent!r} for step {verdict.step}, which is not in this log"
    opinion = verdict_opinion(steps, verdict.step, verdict.confidence, f"judge {verdict.judge}")
    return opinion or "the judge has no confidence"
