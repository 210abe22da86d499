"""Why a step is suspected, in words: the features that speak against it more than against the log's average step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spanloop.pipeline.attribution.features import FEATURES
from spanloop.pipeline.attribution.model import terms

__all__ = ["PHRASES", "reasons"]

PHRASES: Mapping[str, tuple[str, str]] = {
    "executor": ("it only reports what ran", "it decides; others only report what ran"),
    "chat_opening": ("it opens the conversation", "it does not open the conversation"),
    "chat_second": ("it is the first answer to the opening", ""),
    "chat_early": ("it is early", "it is not early"),
    "chat_late": ("it is late", "it is not late"),
    "chat_last": ("it is the last turn", "it is not the last turn"),
    "hub_plan": ("it plans", "it acts, where others plan"),
    "hub_instruct": ("it gives out work", "it does not give out work"),
    "hub_work": ("it is work that an agent handed back", "it is no delegated work"),
    "hub_work_first": ("it is the first work handed back", ""),
    "hub_work_second": ("it is the second work handed back", ""),
    "hub_work_third": ("it is the third work handed back", ""),
    "hub_late": ("it is late", "it is not late"),
    "agent_first": ("it is this agent's first turn", "this agent had spoken before"),
    "agent_share": ("this agent takes more of the turns than others", "this agent takes fewer turns"),
    "failed": ("its status is an error", ""),
    "code": ("it holds code or a command", "it holds no code"),
    "result_failed": ("what it had executed failed", "what it had executed did not fail"),
    "result_ok": ("what it had executed ran, and was relied on", ""),
    "supposes": ("it supposes, estimates or simulates instead of finding out", "it supposes little"),
    "gives_up": ("it tells of errors or of not being able to", "it tells of no trouble"),
    "confirms": ("it confirms or concludes", "it confirms nothing"),
    "answer": ("it is the first to say what the last answer rests on", "the last answer does not rest on it"),
    "new_words": ("it brings in much that nobody had said", "it builds on what was already said"),
    "new_numbers": ("it brings in numbers that nobody had said", "it brings in no numbers"),
    "long": ("it says a lot", "it says little"),
    "short": ("it says next to nothing", "it is more than a line"),
    "repeats": ("it repeats an earlier turn of this agent", "it does not repeat itself"),
    "doubted": ("the next one to speak tells of trouble", "the next one to speak tells of no trouble"),
}
"""Feature: what it says when it is above the log's average and counts against the step, and when it is below and does."""
_LEAST = 0.05
"""Log-odds below which a feature is not worth a word."""


def reasons(
    row: Sequence[float], usual: Sequence[float], weights: Mapping[str, float], most: int = 3
) -> tuple[str, ...]:
    """Up to ``most`` reasons for the step with ``row`` in a log with ``usual_row``, the strongest first, with their log-odds."""
    found: dict[str, float] = {}
    for name, added in terms(row, usual, weights):
        if added < _LEAST:
            break
        above = weights[name] > 0
        phrase = PHRASES[name][0 if above else 1]
        if phrase:
            found.setdefault(phrase, added)
    return tuple(f"{phrase} (+{added:.2f})" for phrase, added in list(found.items())[:most])


assert set(PHRASES) == set(FEATURES)  # noqa: S101 - a feature without words cannot be explained
