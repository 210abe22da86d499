"""From samples on the log to training examples, and the advantages that they are trained with.

Place: ``window`` decides which of them a batch trains on. Invariants: pure, no torch; what gives no example says why; every
number that leaves here is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from spanloop.schemas.canonical import unmicro
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.ids import policy_number

__all__ = [
    "ADVANTAGE_MAX",
    "Call",
    "Decision",
    "GroupAdvantages",
    "Rollout",
    "group_advantages",
    "to_rollout",
    "with_advantages",
]

ADVANTAGE_MAX = 100.0
"""An advantage or value beyond this many units of reward is refused as malformed, not scaled."""
MENU_MASS_MIN = 0.999
"""A logged menu with less probability than this was cut (top_logprobs): its distribution is unknown."""


class Decision(msgspec.Struct, frozen=True):
    """One response token that had a choice."""

    position: int
    """Index in prompt + response of the token before it: where the logits that chose it are."""
    menu: tuple[int, ...]
    """Empty: the whole vocabulary was open."""
    chosen: int
    """Index in ``menu``; 0 without one."""
    behaviour: float
    """Logged log-probability of the mixture that sampled it, nats."""
    advantage: float
    """Of the token's account, units of reward."""
    values: tuple[float, ...] = ()
    """Counterfactual values of the menu, units of reward; empty when unknown."""
    account: str = ""


class Call(msgspec.Struct, frozen=True):
    """One model call with at least one decision."""

    ids: tuple[int, ...]
    """Prompt and response tokens."""
    decisions: tuple[Decision, ...]
    weight: float = 1.0
    call_id: str = ""
    role: str = ""


class Rollout(msgspec.Struct, frozen=True):
    """One orchestration as a training example."""

    orchestration_id: str
    revision: int
    group: str
    reward: float
    baseline: float
    versions: tuple[int, ...]
    """Policy versions that acted, ascending."""
    calls: tuple[Call, ...]
    forced: int = 0
    """Tokens without a choice; they carry no gradient."""
    frozen: int = 0
    """Rows of roles that are not trained."""
    corrects: int = 0
    """Batch that taught an earlier revision, where this makes up for what it got wrong; 0: it is taught for the first time."""

    @property
    def num_decisions(self) -> int:
        return sum(len(call.decisions) for call in self.calls)


def _finite(values: Iterable[float | None], bound: float = math.inf) -> bool:
    return all(v is not None and math.isfinite(v) and abs(v) <= bound for v in values)


def _whole(row: Sample, index: int) -> bool:
    """Whether the options of a token are not known: no menu, or one that the server cut (the gateway then records the
    sampled token alone, with its probability)."""
    if not row.menu_ids or not row.menu_ids[index]:
        return True
    if len(row.menu_logprobs) != len(row.menu_ids):
        return False
    return math.fsum(map(math.exp, row.menu_logprobs[index])) < MENU_MASS_MIN


def _decisions(row: Sample, full_vocabulary: bool) -> tuple[list[Decision], int] | str:
    count = len(row.response_token_ids)
    if not (len(row.logprobs) == len(row.advantages) == count) or len(row.menu_ids) not in (0, count):
        return "malformed"
    if not _finite(row.logprobs) or not _finite(map(unmicro, row.advantages), ADVANTAGE_MAX):
        return "non_finite"
    if any(logp > 1e-4 for logp in row.logprobs):
        return "non_finite"
    if not row.menu_ids and not full_vocabulary:
        return "no_menu"
    found: list[Decision] = []
    forced = 0
    for index, token in enumerate(row.response_token_ids):
        if full_vocabulary and _whole(row, index):
            if row.cut:
                return "truncated_sampling"
            found.append(
                Decision(
                    position=len(row.prompt_token_ids) + index - 1,
                    menu=(),
                    chosen=0,
                    behaviour=min(0.0, row.logprobs[index]),
                    advantage=unmicro(row.advantages[index]),
                    account=row.accounts[index] if len(row.accounts) == count else "",
                )
            )
            continue
        menu = row.menu_ids[index]
        if token not in menu or len(set(menu)) != len(menu):
            return "malformed"
        if len(menu) == 1:
            forced += 1
            continue
        if (
            len(row.menu_logprobs) == count
            and math.fsum(map(math.exp, row.menu_logprobs[index])) < MENU_MASS_MIN
        ):
            return "menu_cut"
        values = row.menu_values[index] if len(row.menu_values) == count else ()
        if values and (len(values) != len(menu) or not _finite(map(unmicro, values), ADVANTAGE_MAX)):
            return "non_finite"
        found.append(
            Decision(
                position=len(row.prompt_token_ids) + index - 1,
                menu=menu,
                chosen=menu.index(token),
                behaviour=min(0.0, row.logprobs[index]),
                advantage=unmicro(row.advantages[index]),
                values=tuple(map(unmicro, values)),
                account=row.accounts[index] if len(row.accounts) == count else "",
            )
        )
    return found, forced


def to_rollout(
    built: SamplesBuilt,
    *,
    vocabulary_size: int,
    context: int,
    full_vocabulary: bool = False,
    roles: Collection[str] = (),
) -> Rollout | str:
    """The training example of one orchestration, or the reason why it gives none.

    Args:
        built: A record of the samples topic.
        vocabulary_size: Of the policy.
        context: Longest prompt + response in tokens.
        full_vocabulary: Take a token without a menu as a decision over the whole vocabulary, instead of refusing the row.
        roles: Those that are trained; rows of others are left out. Empty: all.
    """
    calls: list[Call] = []
    versions: set[int] = set()
    forced = frozen = 0
    if not built.rows:
        return "no_rows"
    if not _finite((unmicro(built.reward), unmicro(built.baseline)), ADVANTAGE_MAX):
        return "non_finite"
    for row in built.rows:
        if roles and row.role not in roles:
            frozen += 1
            continue
        ids = (*row.prompt_token_ids, *row.response_token_ids)
        if not row.prompt_token_ids or not row.response_token_ids:
            return "erased" if row.sealed else "malformed"
        if len(ids) > context:
            return "too_long"
        if any(not 0 <= token < vocabulary_size for token in ids):
            return "vocabulary"
        if any(not 0 <= token < vocabulary_size for menu in row.menu_ids for token in menu):
            return "vocabulary"
        version = policy_number(row.policy_version)
        if version < 0:
            return "foreign_policy"
        if not _finite((row.weight,), ADVANTAGE_MAX) or row.weight < 0:
            return "non_finite"
        versions.add(version)
        got = _decisions(row, full_vocabulary)
        if isinstance(got, str):
            return got
        decisions, without_choice = got
        forced += without_choice
        if decisions:
            calls.append(Call(ids, tuple(decisions), row.weight, row.call_id, row.role))
    if not calls:
        return "frozen_roles" if frozen == len(built.rows) else "no_choice"
    return Rollout(
        orchestration_id=built.orchestration_id,
        revision=built.revision,
        group=built.group,
        reward=unmicro(built.reward),
        baseline=unmicro(built.baseline),
        versions=tuple(sorted(versions)),
        calls=tuple(calls),
        forced=forced,
        frozen=frozen,
    )


class GroupAdvantages(msgspec.Struct, frozen=True):
    """Group-relative advantages; None where the reward was not finite (dropped)."""

    values: tuple[float | None, ...]
    dropped: int
    flat: bool
    """One member, or no spread: every advantage is 0 and the group teaches nothing."""


def group_advantages(rewards: Sequence[float | None]) -> GroupAdvantages:
    """(R - mean) / sigma with the sample sigma (n - 1), over the finite members of one group.

    >>> group_advantages([1, 0, 0, 1]).values[0]
    0.8660254037844386
    >>> group_advantages([0.7]).flat
    True

    Source: GRPO, arXiv 2402.03300; sample sigma as in verl and TRL (METHODS 2.8). A singleton is 0 and takes the
    learned baseline instead (METHODS 3.1 b).
    """
    finite = [float(r) for r in rewards if r is not None and math.isfinite(r)]
    dropped = len(rewards) - len(finite)
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    spread = math.fsum((r - mean) ** 2 for r in finite) / (len(finite) - 1) if len(finite) > 1 else 0.0
    scale = math.sqrt(spread)
    flat = not scale > 1e-9 or not math.isfinite(scale)
    values = tuple(
        None if r is None or not math.isfinite(r) else 0.0 if flat else (float(r) - mean) / scale
        for r in rewards
    )
    return GroupAdvantages(values, dropped, flat)


def with_advantages(rollouts: Sequence[Rollout], mode: str) -> tuple[list[Rollout], dict[str, int]]:
    """Rollouts with the advantages of ``mode`` on their decisions, and counts to report.

    ledger keeps each token's account and forgets menu values; group gives every decision the group-relative outcome;
    all_action keeps accounts and menu values (decisions without values fall back to their account).
    """
    if mode == "all_action":
        missing = sum(not d.values for r in rollouts for c in r.calls for d in c.decisions)
        return list(rollouts), {"decisions_without_values": missing} if missing else {}
    if mode == "ledger":
        return [_map(r, lambda d: msgspec.structs.replace(d, values=())) for r in rollouts], {}
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(index)
    advantage = [0.0] * len(rollouts)
    flat = 0
    for members in groups.values():
        got = group_advantages([rollouts[i].reward for i in members])
        flat += got.flat * len(members)
        for index, value in zip(members, got.values, strict=True):
            advantage[index] = value or 0.0
    mapped = [
        _map(r, lambda d, a=a: msgspec.structs.replace(d, advantage=a, values=()))
        for r, a in zip(rollouts, advantage, strict=True)
    ]
    return mapped, {"flat_groups": flat} if flat else {}


def _map(rollout: Rollout, change: Callable[[Decision], Decision]) -> Rollout:
    calls = tuple(
        msgspec.structs.replace(call, decisions=tuple(map(change, call.decisions))) for call in rollout.calls
    )
    return msgspec.structs.replace(rollout, calls=calls)
