"""The conserved ledger: one tree of integer accounts from the team down to the tokens.

    team (reward - baseline)
    |- orchestrator            entry agents
    |  `- agent > turn > { message > tokens, tool calls }
    |- role ...                the other agents, instances under their role
    |  `- agent > { turn > ..., message (what its report brought beyond its valued decisions) }
    `- environment             a role that nobody plays: chance, and what no account explains

Invariants: the children of every account sum to it exactly; leaves + baseline = reward; account ids and credits do not
depend on the order of anything; an account with estimate 0 and variance 0 gets exactly 0; the ledger is a pure function of
(content, reward, value model), so taking a reward back and giving it again restores it bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from spanloop.pipeline.credit.anchors import (
    DEFAULT,
    ENVIRONMENT,
    NULL,
    UNKNOWN,
    Anchored,
    Choice,
    Estimates,
    Value,
)
from spanloop.pipeline.credit.cast import Cast, cast_of, role_of
from spanloop.pipeline.credit.estimates import estimate
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.pipeline.credit.states import RAW, Encoder
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import NO_VARIANCE, CreditNode
from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = [
    "Account",
    "Ledger",
    "account_of",
    "agent_top",
    "agent_tree",
    "build_ledger",
    "check_ledger",
    "ledger_of",
    "node_of",
    "settle",
    "sum_of",
    "team_account",
    "turn_tree",
]

TEAM = "team"
TOTAL = "sum/1"


class Account(msgspec.Struct, frozen=True, gc=False):
    """An account before it is settled."""

    id: str
    unit: str
    parent: str
    label: str
    estimate: Anchored
    subject: str = ""


class Ledger(msgspec.Struct, frozen=True):
    """A settled ledger."""

    reward: int
    baseline: int
    level: str
    """token, message or team: where a token's training account is."""
    nodes: tuple[CreditNode, ...]
    estimates: Estimates


def settle(accounts: Sequence[Account], total: int) -> tuple[CreditNode, ...]:
    """Split ``total`` down a tree of accounts (parents first; the first one is the root).

    Each account's children get its credit by ``reconcile``. The result is in the order given.
    """
    children: dict[str, list[Account]] = {}
    for account in accounts[1:]:
        below = children.get(account.parent)
        if below is None:
            children[account.parent] = [account]
        else:
            below.append(account)
    credit = {accounts[0].id: total}
    nodes: list[CreditNode] = []
    for account in accounts:
        name = account.id
        own = credit[name]
        below = children.get(name)
        if below is None:
            pass
        elif len(below) == 1:
            credit[below[0].id] = own
        else:
            items = [child.estimate for child in below]
            ids = [child.id for child in below]
            shares = reconcile(own, [item.anchor for item in items], [item.weight for item in items], ids)
            credit.update(zip(ids, shares, strict=True))
        item = account.estimate
        nodes.append(  # ``node_of``, without a call a node
            CreditNode(
                name,
                account.unit,
                account.parent,
                account.label,
                own,
                item.raw,
                item.variance or NO_VARIANCE,
                item.estimator,
                account.subject,
            )
        )
    return tuple(nodes)


def node_of(account: Account, credit: int) -> CreditNode:
    """A settled account."""
    item = account.estimate
    return CreditNode(
        account.id,
        account.unit,
        account.parent,
        account.label,
        credit,
        item.raw,
        item.variance or NO_VARIANCE,
        item.estimator,
        account.subject,
    )


def team_account(total: int) -> Account:
    """The root."""
    return Account(TEAM, "team", "", "team", Anchored(total, 0.0, None, 0.0, "reward - baseline"))


def build_ledger(
    content: OrchestrationContent,
    reward: int,
    value: Value | None,
    encode: Encoder = RAW,
    *,
    choice: Choice = DEFAULT,
) -> Ledger:
    """The ledger of one orchestration.

    Args:
        content: What happened.
        reward: The team's reward, micro-units.
        value: The value model; None before the first version (then baseline 0 and even splits).
        encode: How it reads token states.
        choice: Which estimators.
    """
    cast = cast_of(content)
    return ledger_of(cast, estimate(cast, reward, value, encode, choice=choice), reward)


def ledger_of(cast: Cast, found: Estimates, reward: int) -> Ledger:
    """The ledger of a cast whose estimates are known."""
    total = reward - found.baseline
    return Ledger(reward, found.baseline, found.level, settle(_accounts(cast, found, total), total), found)


def check_ledger(nodes: Sequence[CreditNode], reward: int, baseline: int) -> list[str]:
    """What is wrong with a ledger, in sentences; empty when it is conserved at every node."""
    problems: list[str] = []
    sums: dict[str, int] = {}
    known = {node.id: node for node in nodes}
    if len(known) != len(nodes):
        problems.append(f"{len(nodes) - len(known)} account ids occur twice")
    roots = [node for node in nodes if not node.parent]
    if nodes and len(roots) != 1:
        problems.append(f"there are {len(roots)} roots, expected 1")
    for node in nodes:
        if node.parent:
            sums[node.parent] = sums.get(node.parent, 0) + node.credit
            if node.parent not in known:
                problems.append(f"{node.id}: its parent {node.parent} is not in the ledger")
    problems += [
        f"{key}: its children sum to {total}, it holds {known[key].credit}"
        for key, total in sums.items()
        if key in known and known[key].credit != total
    ]
    leaves = sum(node.credit for node in nodes if node.id not in sums)
    if nodes and leaves + baseline != reward:
        problems.append(f"leaves {leaves} + baseline {baseline} are not the reward {reward}")
    return problems


def account_of(ledger: Ledger, call_id: str, index: int, level: str = "") -> str:
    """Id of the one account that trains the response token ``index`` of a call; ``level`` "team" overrules the ledger's."""
    key = call_key(call_id)
    level = level or ledger.level
    if level == "token":
        values = ledger.estimates.calls.get(call_id)
        level = "token" if values is None or values.tokens else "message"
    return f"token:{key}/{index}" if level == "token" else f"message:{key}" if level == "message" else TEAM


def call_key(call_id: str) -> str:
    """Short key of a call in account ids: the call id, or a digest of it where it is long.

    >>> call_key("chatcmpl-1")
    'chatcmpl-1'
    """
    return call_id if len(call_id) <= 24 else digest("call", call_id)[:16]


# ---------------------------------------------------------------- the tree


def sum_of(estimates: Iterable[Anchored], fallback: Anchored) -> Anchored:
    """The estimate of an account from its children's: unknown as soon as one is."""
    anchor, raw, weight, variance = 0, 0, 0.0, 0.0
    known = False
    for item in estimates:
        if item.anchor is None or fallback.anchor is None:
            return fallback
        known = True
        anchor += item.anchor
        raw += item.raw if item.raw is not None else item.anchor
        weight += item.weight
        variance += item.variance
    return Anchored(anchor, weight, raw, variance, TOTAL) if known else fallback


def _accounts(cast: Cast, found: Estimates, total: int) -> list[Account]:
    unknown = UNKNOWN if found.level == "team" else NULL
    accounts = [team_account(total)]
    below: list[Account] = []
    parts: list[Anchored] = []
    for agent in cast.orchestrators:
        tree, whole = agent_tree(cast, found, agent, "orchestrator", unknown)
        below += tree
        parts.append(whole)
    if cast.orchestrators:
        whole = sum_of(parts, unknown)
        accounts.append(Account("orchestrator", "orchestrator", TEAM, "orchestrator", whole))
    roles: dict[str, list[Agent]] = {}
    for agent in cast.others:
        roles.setdefault(role_of(agent), []).append(agent)
    for role in sorted(roles):
        parts = []
        for agent in roles[role]:
            tree, whole = agent_tree(cast, found, agent, f"role:{role}", unknown)
            below += tree
            parts.append(whole)
        accounts.append(Account(f"role:{role}", "role", TEAM, role, sum_of(parts, unknown)))
    if found.environment is not None or len(accounts) == 1:
        accounts.append(Account(ENVIRONMENT, "role", TEAM, ENVIRONMENT, found.environment or NULL))
    return accounts + below


def agent_tree(
    cast: Cast, found: Estimates, agent: Agent, parent: str, unknown: Anchored
) -> tuple[list[Account], Anchored]:
    """An agent's account and all below it, and the agent's estimate."""
    name = f"agent:{agent.id}"
    inner = unknown if parent == "orchestrator" or agent.id in found.reports else UNKNOWN
    trees = [
        turn_tree(found, call, number, parent=name, tools=cast.tools.get(call.id, ()), unknown=inner)
        for number, call in enumerate(cast.turns.get(agent.id, ()), start=1)
    ]
    top, rest, whole = agent_top(
        cast, found, agent, parent=parent, unknown=unknown, turns=[of_turn for _, of_turn in trees]
    )
    return [top, *(account for tree, _ in trees for account in tree), *rest], whole


def agent_top(
    cast: Cast,
    found: Estimates,
    agent: Agent,
    *,
    parent: str,
    unknown: Anchored,
    turns: Sequence[Anchored],
) -> tuple[Account, list[Account], Anchored]:
    """An agent's account, those right below it that are no turns, and its estimate; ``turns`` are its turns' estimates."""
    name = f"agent:{agent.id}"
    report = found.reports.get(agent.id)
    inner = unknown if parent == "orchestrator" or report is not None else UNKNOWN
    below: list[Account] = []
    parts = list(turns)
    for event in cast.loose_tools.get(agent.id, ()):
        item = found.tools.get(event.id, inner)
        below.append(Account(f"tool:{event.id}", "tool_call", name, event.tool, item, event.id))
        parts.append(item)
    if report is not None and parts:
        label = f"report of {agent.name}"
        below.append(Account(f"report:{agent.id}", "message", name, label, report, agent.id))
    whole = found.agents.get(agent.id)
    if whole is None:
        whole = sum_of(parts, unknown)
    return Account(name, "agent", parent, agent.name or agent.id, whole, agent.id), below, whole


def turn_tree(
    found: Estimates,
    call: ModelCall,
    number: int,
    *,
    parent: str,
    tools: Sequence[OrchestrationEvent],
    unknown: Anchored,
) -> tuple[list[Account], Anchored]:
    """A turn's account and all below it, and its estimate."""
    key = call_key(call.id)
    name, text = f"turn:{key}", f"message:{key}"
    message = found.messages.get(call.id, unknown)
    parts = [message]
    below = [Account(text, "message", name, "decision", message, call.id)]
    values = found.calls.get(call.id)
    shown = [] if call.sealed else [str(token) for token in call.response_token_ids]
    for i in range(len(call.response_token_ids)):
        item = UNKNOWN
        if values is not None and values.tokens:
            step = values.tokens[i]
            item = Anchored(step, 0.0, step, 0.0, message.estimator) if step else NULL
        below.append(
            Account(f"token:{key}/{i}", "token", text, shown[i] if shown else "", item, f"{call.id}/{i}")
        )
    for event in tools:
        item = found.tools.get(event.id, unknown)
        below.append(Account(f"tool:{event.id}", "tool_call", name, event.tool, item, event.id))
        parts.append(item)
    whole = sum_of(parts, unknown)
    return [Account(name, "turn", parent, f"turn {number}", whole, call.id), *below], whole
