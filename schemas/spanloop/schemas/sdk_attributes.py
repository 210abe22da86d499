"""Span attributes that our SDK writes and its dialect reads: one list for both sides.

They are the sender's own claims about its run. What only a trusted component may say (``spanloop.policy.version``, token ids,
``spanloop.harness``) has other names, which the receiver removes from a sender's spans.
"""

from __future__ import annotations

import math
import re

__all__ = [
    "ACT",
    "ACTS",
    "BY_POLICY",
    "CALL",
    "CHOSEN",
    "DECIDED_BY",
    "DECISION",
    "DECISIONS",
    "HARNESS",
    "OPTIONS",
    "OPTIONS_MAX",
    "OPTION_CHARS",
    "PREFIX",
    "PROPENSITIES",
    "REASON",
    "SCOPE",
    "SOURCES",
    "SOURCES_MAX",
    "TARGET",
    "TARGET_ID",
    "TRUNCATED",
    "is_kind",
    "kind_of",
    "menu_problem",
]

SCOPE = "spanloop.sdk"
"""Instrumentation scope of the SDK's spans."""
PREFIX = "spanloop.sdk."

ACTS = (
    "agent", "spawn", "delegate", "message", "receive", "aggregate", "stop", "decision", "tool", "model_call", "guardrail",
)  # fmt: skip
"""Values of ACT."""
DECISIONS = ("spawn", "delegate", "message", "aggregate", "stop")
"""Values of DECISION, O1 to O5: when to spawn, whom to delegate to, how to communicate, how to aggregate, when to stop."""
_OWN = re.compile(r"own:[A-Za-z0-9_.\-/ ]{1,64}")
"""Kinds of decision that a deployment names itself."""
OPTIONS_MAX = 256
"""Options of one decision; a longer menu is cut and its propensities are unusable."""
OPTION_CHARS = 128
STATE_MAX = 16
"""Numbers that describe the situation of one decision."""
SOURCES_MAX = 1024

ACT = "spanloop.sdk.act"
TARGET = "spanloop.sdk.target"
"""Name of the other party."""
TARGET_ID = "spanloop.sdk.target.id"
"""Span id of the other party's run, or of the act that made it."""
SOURCES = "spanloop.sdk.sources"
"""Span ids of runs or delegations whose results an aggregate uses."""
DECISION = "spanloop.sdk.decision"
OPTIONS = "spanloop.sdk.options"
PROPENSITIES = "spanloop.sdk.propensities"
"""Probability with which each option was drawn, in the order of OPTIONS."""
CHOSEN = "spanloop.sdk.chosen"
BY_POLICY = "spanloop.sdk.by_policy"
STATE_NAMES = "spanloop.sdk.state.names"
STATE_VALUES = "spanloop.sdk.state.values"
"""What the decider saw, numbers in the order of STATE_NAMES."""
DECIDED_BY = "spanloop.sdk.decided_by"
"""Span id of the decision that an act carries out."""
CALL = "spanloop.sdk.call"
"""Response id or span id of the model call that took a decision."""
HARNESS = "spanloop.sdk.harness"
REASON = "spanloop.sdk.reason"
TRUNCATED = "spanloop.sdk.truncated"
"""True where a value was cut or left out."""

_SUM_TOLERANCE = 1e-3


def is_kind(kind: str) -> bool:
    """Whether it is one of DECISIONS, or a kind that a deployment names itself.

    >>> is_kind("spawn"), is_kind("own:which-queue"), is_kind("swpan")
    (True, True, False)
    """
    return kind in DECISIONS or _OWN.fullmatch(kind) is not None


def kind_of(name: str) -> str:
    """The kind that a caller of /v1/decide means: O1 to O5 by code or name; any other name is the caller's own, with a mark.

    >>> kind_of("O2"), kind_of("stop"), kind_of("which queue?")
    ('delegate', 'stop', 'own:which queue_')
    """
    if name in DECISIONS:
        return name
    if len(name) == 2 and name[0] in "Oo" and name[1] in "12345":
        return DECISIONS[int(name[1]) - 1]
    return name if is_kind(name) else "own:" + (re.sub(r"[^A-Za-z0-9_.\-/ ]", "_", name)[:64] or "_")


def menu_problem(options: tuple[str, ...], propensities: tuple[float, ...], chosen: str = "") -> str:
    """Why propensities are unusable; empty when they are a distribution over the options under which ``chosen`` can be drawn.

    >>> menu_problem(("a", "b"), (0.25, 0.75)), menu_problem(("a", "b"), (0.5, 0.4))
    ('', 'they sum to 0.9, expected 1')
    >>> menu_problem(("a", "b"), (0.0, 1.0), "a")
    'the choice has propensity 0, it could not be drawn'
    """
    if len(options) != len(propensities):
        return f"{len(propensities)} for {len(options)} options"
    if len(set(options)) != len(options):
        return "an option occurs twice"
    if not all(math.isfinite(p) and 0.0 <= p <= 1.0 for p in propensities):
        return "one is outside 0..1"
    total = math.fsum(propensities)
    if abs(total - 1.0) > _SUM_TOLERANCE:
        return f"they sum to {total:.6g}, expected 1"
    if chosen in options and propensities[options.index(chosen)] == 0.0:
        return "the choice has propensity 0, it could not be drawn"
    return ""
