"""From credited conversations to the rows of a data set: supervised, weighted, preference pairs, labels.

Place in the flow: ``source`` yields ``Example``s in order, a ``Rows`` or ``Pairs`` turns them into rows, ``write`` keeps them.
Invariants: pure; a row depends on its example (a pair on the examples of one prompt) and on the ``Wish``; every example that
is offered becomes part of a row or is counted under a reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from spanloop.pipeline.export.messages import Conversation, Message
from spanloop.schemas.canonical import bytes_hash, canonical_json, unmicro

__all__ = [
    "DEFINITIONS", "FORMATS", "LEVELS", "PAIRED", "Call", "Chosen", "Example", "Wish", "answer_key", "best_of_groups",
    "pair_row", "pairs_of", "prompt_key", "row_of", "scored",
]  # fmt: skip

FORMATS = ("openai", "openai-dpo", "sft", "weighted", "dpo", "kto")
PAIRED = frozenset({"openai-dpo", "dpo"})
LEVELS = ("reward", "team", "role", "agent", "turn", "message")
"""reward: the orchestration's; team: that minus the baseline; the others: the account of the ledger that the call is under."""

DEFINITIONS = {
    "openai": "messages; of the assistant's messages only the last has weight 1: it alone is trained on",
    "openai-dpo": "input.messages; preferred_output scored higher than non_preferred_output for the same prompt",
    "sft": "prompt, completion (TRL, conversational): the completion alone is trained on",
    "weighted": "prompt, completion, weight = min(weight_max, exp(score / beta))",
    "dpo": "prompt, chosen, rejected: two answers to the same prompt, chosen scored higher by at least the margin",
    "kto": "prompt, completion, label: true where score >= margin, false where score <= -margin, left out between",
}


class Wish(msgspec.Struct, frozen=True):
    """What is asked for."""

    form: str
    """One of FORMATS."""
    level: str = "turn"
    """One of LEVELS: what the score is."""
    tenant: str = ""
    roles: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    policy_versions: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    min_reward: float | None = None
    min_score: float | None = None
    best: int = 0
    """Keep the orchestrations with so many best rewards of each group (same task and harness); 0: all."""
    margin: float = 0.0
    beta: float = 1.0
    weight_max: float = 10.0
    pairs: int = 1
    """At most so many pairs a prompt."""
    split: str = "train"
    """train, held-out or all."""
    provisional: bool = False


class Call(msgspec.Struct, frozen=True):
    """A model call with its credit; no text."""

    tenant: str
    orchestration_id: str
    started_ns: int
    call_id: str
    call_ns: int
    agent: str
    role: str
    model: str
    policy_version: str
    status: str
    span_ids: tuple[str, ...]
    trace_ids: frozenset[str]
    group: str
    held_out: bool
    lossy: bool
    reward: int | None
    """Micro-units; None: missing."""
    reward_status: str
    scores: dict[str, int | None]
    """Micro-credits by level."""


class Example(msgspec.Struct, frozen=True):
    """A call with its words."""

    call: Call
    conversation: Conversation
    score: int
    """Micro-units, at the level asked for."""


def _about(example: Example, wish: Wish) -> dict[str, Any]:
    call = example.call
    return {
        "orchestration_id": call.orchestration_id,
        "call_id": call.call_id,
        "tenant": call.tenant,
        "agent": call.agent,
        "role": call.role,
        "model": call.model,
        "policy_version": call.policy_version,
        "reward": unmicro(call.reward or 0),
        "level": wish.level,
        "score": unmicro(example.score),
    }


def row_of(example: Example, wish: Wish) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """(row, what it is made of) in an unpaired format, or the reason why the example gives none."""
    said = example.conversation
    about = _about(example, wish)
    if wish.form == "openai":
        return _openai(said.prompt, said.answer, said.tools), about
    row: dict[str, Any] = {
        "prompt": list(said.prompt),
        "completion": [said.answer],
        "tools": _tools_text(said),
    }
    if wish.form == "weighted":
        exponent = min(unmicro(example.score) / wish.beta, math.log(wish.weight_max))
        row["weight"] = round(math.exp(exponent), 6)
    elif wish.form == "kto":
        score = unmicro(example.score)
        if abs(score) < wish.margin or (wish.margin == 0.0 and score == 0.0):
            return "undecided"
        row["label"] = score > 0
    return row | about, about


def _openai(prompt: Sequence[Message], answer: Message, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    before = [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]
    row: dict[str, Any] = {"messages": [*before, answer | {"weight": 1}]}
    return row | ({"tools": list(tools)} if tools else {})


def _tools_text(said: Conversation) -> str:
    """Definitions as JSON text: their schemas have no common columns."""
    return canonical_json(list(said.tools)).decode() if said.tools else ""


# ---------------------------------------------------------------- pairs


class Chosen(msgspec.Struct, frozen=True):
    """An answer to a prompt, as much as choosing pairs needs."""

    answer: str
    """Hash of its words."""
    score: int
    place: int
    """Where the example is kept."""


def prompt_key(example: Example) -> str:
    """What may be compared: the same words asked with the same tools, of one tenant."""
    said = example.conversation
    return bytes_hash(canonical_json([example.call.tenant, list(said.prompt), list(said.tools)]))


def answer_key(example: Example) -> str:
    """Hash of the words of an answer; ids of tool calls are no words."""
    answer = example.conversation.answer
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    return bytes_hash(canonical_json([answer["content"], calls]))


def pairs_of(answers: Sequence[Chosen], wish: Wish) -> tuple[list[tuple[Chosen, Chosen]], Counter[str]]:
    """(better, worse) answers to one prompt, and why the others are in no pair.

    An answer given several times counts once, with its mean score. The best goes with the worst, the second best with the
    second worst, and so on while they differ by more than nothing and at least the margin.

    >>> found, left = pairs_of([Chosen("a", 900_000, 0), Chosen("b", 100_000, 1), Chosen("b", 300_000, 2)], Wish("dpo"))
    >>> [(better.place, worse.place) for better, worse in found], dict(left)
    ([(0, 1)], {'same_answer': 1})
    """
    by_answer: dict[str, list[Chosen]] = {}
    for item in answers:
        by_answer.setdefault(item.answer, []).append(item)
    left: Counter[str] = Counter()
    left["same_answer"] += len(answers) - len(by_answer)
    distinct = [
        msgspec.structs.replace(same[0], score=round(sum(item.score for item in same) / len(same)))
        for same in by_answer.values()
    ]
    distinct.sort(key=lambda item: (-item.score, item.place))
    if len(distinct) == 1:
        left["only_answer"] += 1
        return [], +left
    found: list[tuple[Chosen, Chosen]] = []
    for better, worse in zip(distinct, reversed(distinct), strict=True):
        gap = better.score - worse.score
        if len(found) >= wish.pairs or gap <= 0 or unmicro(gap) < wish.margin:
            break
        found.append((better, worse))
    left["in_no_pair"] += len(distinct) - 2 * len(found)
    return found, +left


def pair_row(better: Example, worse: Example, wish: Wish) -> tuple[dict[str, Any], dict[str, Any]]:
    """(row, what it is made of) of a preference."""
    said = better.conversation
    chosen, rejected = said.answer, worse.conversation.answer
    about = {"chosen": _about(better, wish), "rejected": _about(worse, wish)}
    if wish.form == "openai-dpo":
        given: dict[str, Any] = {"messages": list(said.prompt)} | (
            {"tools": list(said.tools)} if said.tools else {}
        )
        return {"input": given, "preferred_output": [chosen], "non_preferred_output": [rejected]}, about
    flat = {
        f"{side}_{key}": value
        for side, told in about.items()
        for key, value in told.items()
        if key != "level"
    }
    row = {
        "prompt": list(said.prompt),
        "chosen": [chosen],
        "rejected": [rejected],
        "tools": _tools_text(said),
    }
    return row | {"level": wish.level} | flat, about


def scored(call: Call, wish: Wish) -> int | str:
    """The call's score, or why it is not wanted. Needs no text."""
    if (wish.split == "train" and call.held_out) or (wish.split == "held-out" and not call.held_out):
        return "held_out" if call.held_out else "not_held_out"
    if not _asked_for(call, wish):
        return "not_asked_for"
    if call.status == "error":
        return "error"
    if call.reward is None:
        return "no_reward"
    if call.reward_status == "provisional" and not wish.provisional:
        return "provisional_reward"
    score = call.reward if wish.level == "reward" else call.scores.get(wish.level)
    if score is None:
        return "no_credit"
    if wish.min_reward is not None and unmicro(call.reward) < wish.min_reward:
        return "below_min_reward"
    if wish.min_score is not None and unmicro(score) < wish.min_score:
        return "below_min_score"
    return score


def _asked_for(call: Call, wish: Wish) -> bool:
    return (
        (not wish.roles or call.role in wish.roles)
        and (not wish.agents or call.agent in wish.agents)
        and (not wish.policy_versions or call.policy_version in wish.policy_versions)
    )


def best_of_groups(calls: Sequence[Call], best: int) -> set[tuple[str, str]]:
    """(tenant, orchestration id) of the ``best`` best rewarded orchestrations of each group; of equals the earlier one."""
    by_group: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for call in calls:
        group = by_group.setdefault((call.tenant, call.group), {})
        group[call.orchestration_id] = (-(call.reward or 0), call.started_ns)
    return {
        (tenant, name)
        for (tenant, _), group in by_group.items()
        for name in sorted(group, key=lambda n, g=group: (*g[n], n))[:best]
    }
