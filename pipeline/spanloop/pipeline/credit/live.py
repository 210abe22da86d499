"""The ledger of a large orchestration, kept from one revision to the next: one more span costs what it touches.

Three things are kept: the cast, the estimates by gap (``structural.Kept``) and the settled accounts by agent. A revision is compared with
the one before it; where only calls and tools of sub-agents came or went, their places are found anew and nothing else, else the
cast is made anew and what it shares with the old one is still used. The event that is written is whole all the same.
Invariant: the ledger equals ``build_ledger`` of the same inputs, account by account; this is a cache and holds no state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from spanloop.pipeline.credit.anchors import ENVIRONMENT, NULL, Anchored, Choice, Estimates, Value
from spanloop.pipeline.credit.cast import Cast, cast_of, renewed, role_of
from spanloop.pipeline.credit.estimates import estimate
from spanloop.pipeline.credit.ledger import (
    TEAM,
    Account,
    Ledger,
    agent_top,
    agent_tree,
    ledger_of,
    node_of,
    settle,
    sum_of,
    team_account,
    turn_tree,
)
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.pipeline.credit.states import RAW, Encoder
from spanloop.pipeline.credit.structural import Gap, Kept
from spanloop.schemas.events import CreditNode
from spanloop.schemas.orchestration import Agent, OrchestrationContent

__all__ = ["LIVE_FROM", "LiveLedger"]

LIVE_FROM = 400
"""Model calls from which a ledger is worth keeping."""


class _Block(msgspec.Struct, eq=False):
    """Accounts of one agent or turn, and as they were last settled."""

    made_of: tuple[object, ...]
    """The objects that they were made of: the same ones make the same accounts."""
    whole: Anchored
    accounts: list[Account]
    credit: int | None = None
    nodes: tuple[CreditNode, ...] = ()

    def settled(self, credit: int) -> tuple[CreditNode, ...]:
        """The accounts under ``credit``."""
        if credit != self.credit:
            self.nodes, self.credit = settle(self.accounts, credit), credit
        return self.nodes


class _Role(msgspec.Struct, eq=False):
    """A role's agents."""

    blocks: list[_Block]
    whole: Anchored
    credit: int | None = None
    nodes: Sequence[CreditNode] = ()


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class LiveLedger:
    """One orchestration's ledger, from revision to revision: ``cast``, then ``estimate`` until no value is missing, then
    ``ledger``."""

    def __init__(self) -> None:
        self._content: OrchestrationContent | None = None
        self._cast: Cast | None = None
        self._kept = Kept()
        self._under: tuple[object, ...] = ()
        self._touched: AbstractSet[str] | None = None
        """Sub-agents touched since the ledger was last settled; None: anything may be."""
        self._gaps: list[Gap] | None = None
        """Gaps found anew since then; None: any may be."""
        self._blocks: dict[str, _Block] = {}
        self._turns: dict[str, _Block] = {}
        self._roles: dict[str, _Role] = {}
        self._role_of: dict[str, tuple[str, int]] = {}
        """Role and place in it of each sub-agent."""

    @property
    def size(self) -> int:
        """Model calls of the last revision."""
        return len(self._content.calls) if self._content is not None else 0

    def cast(self, content: OrchestrationContent) -> Cast:
        """The cast of the next revision."""
        touched = None
        if self._content is not None and self._cast is not None:
            touched = renewed(self._cast, self._content, content)
        if touched is None or self._cast is None:
            self._cast, self._touched = cast_of(content), None
        elif self._touched is not None:
            self._touched |= touched
        self._content = content
        return self._cast

    def estimate(
        self, reward: int, value: Value | None, encode: Encoder = RAW, *, choice: Choice
    ) -> Estimates:
        """Estimates for the cast. Where values were missing it is called again once they are there."""
        assert self._cast is not None  # noqa: S101
        under = (value, encode, choice)
        if not _same(under[:2], self._under[:2]) or under[2:] != self._under[2:]:
            self._under, self._kept, self._touched = under, Kept(), None
        found = estimate(
            self._cast, reward, value, encode, choice=choice, kept=self._kept, touched=self._touched
        )
        renewed_gaps = self._kept.renewed
        if renewed_gaps is None or self._gaps is None:
            self._gaps = None
        else:
            self._gaps += renewed_gaps
        return found

    def ledger(self, found: Estimates, reward: int) -> Ledger:
        """The settled ledger of the estimates."""
        assert self._cast is not None  # noqa: S101
        if found is not self._kept.found:
            return ledger_of(self._cast, found, reward)
        nodes = self._settled(self._cast, found, reward - found.baseline)
        self._touched, self._gaps = frozenset(), []
        return Ledger(reward, found.baseline, found.level, nodes, found)

    # ------------------------------------------------------------ accounts

    def _settled(self, cast: Cast, found: Estimates, total: int) -> tuple[CreditNode, ...]:
        tops = [team_account(total)]
        parts: list[Anchored] = []
        leaders: list[_Block] = []
        for agent in cast.orchestrators:
            block = self._leader(cast, found, agent)
            leaders.append(block)
            parts.append(block.whole)
        if leaders:
            whole = sum_of(parts, NULL)
            tops.append(Account("orchestrator", "orchestrator", TEAM, "orchestrator", whole))
        self._renew_blocks(cast, found)
        names = sorted(self._roles)
        for name in names:
            tops.append(Account(f"role:{name}", "role", TEAM, name, self._roles[name].whole))
        if found.environment is not None or len(tops) == 1:
            tops.append(Account(ENVIRONMENT, "role", TEAM, ENVIRONMENT, found.environment or NULL))
        shares = _shares(total, tops[1:])
        nodes = [node_of(tops[0], total)]
        nodes += [node_of(account, share) for account, share in zip(tops[1:], shares, strict=True)]
        at = 0
        if leaders:
            nodes += self._settled_blocks(leaders, shares[0])
            at = 1
        for name, share in zip(names, shares[at:], strict=False):
            role = self._roles[name]
            if role.credit != share:
                role.nodes, role.credit = self._settled_blocks(role.blocks, share), share
            nodes += role.nodes
        return tuple(nodes)

    def _settled_blocks(self, blocks: list[_Block], credit: int) -> list[CreditNode]:
        shares = _shares(credit, [block.accounts[0] for block in blocks])
        nodes: list[CreditNode] = []
        for block, share in zip(blocks, shares, strict=True):
            nodes += block.settled(share) if block.made_of else self._settled_leader(block, share)
        return nodes

    def _renew_blocks(self, cast: Cast, found: Estimates) -> None:
        """Accounts of sub-agents of which anything may have changed, and their roles."""
        if self._gaps is None or self._touched is None or not self._role_of:
            old, self._roles, self._role_of = self._blocks, {}, {}
            self._blocks = {}
            by_role: dict[str, list[Agent]] = {}
            for agent in cast.others:
                by_role.setdefault(role_of(agent), []).append(agent)
            for name, agents in by_role.items():
                blocks = [self._block(cast, found, agent, old.get(agent.id)) for agent in agents]
                self._roles[name] = _Role(blocks, sum_of([block.whole for block in blocks], NULL))
                for place, agent in enumerate(agents):
                    self._role_of[agent.id] = (name, place)
            return
        changed = {unit for gap in self._gaps for unit in gap.units} | set(self._touched)
        agents = {agent.id: agent for agent in cast.others}
        for unit in changed & self._role_of.keys():
            name, place = self._role_of[unit]
            role = self._roles[name]
            block = self._block(cast, found, agents[unit], self._blocks.get(unit))
            if block is not role.blocks[place]:
                role.blocks[place] = block
                role.credit = None
        for role in self._roles.values():
            if role.credit is None:
                role.whole = sum_of([block.whole for block in role.blocks], NULL)

    def _block(self, cast: Cast, found: Estimates, agent: Agent, old: _Block | None) -> _Block:
        row = self._kept.rows[cast.gap_of[agent.id]]
        gap = row.gap
        assert gap is not None  # noqa: S101
        made_of = (agent, self._kept.works[agent.id][1], gap.inside.get(agent.id), gap.units[agent.id])
        if old is not None and _same(old.made_of[:3], made_of[:3]) and old.made_of[3] == made_of[3]:
            self._blocks[agent.id] = old
            return old
        accounts, whole = agent_tree(cast, found, agent, f"role:{role_of(agent)}", NULL)
        block = self._blocks[agent.id] = _Block(made_of, whole, accounts)
        return block

    # ------------------------------------------------------------ the orchestrator, by turns

    def _leader(self, cast: Cast, found: Estimates, agent: Agent) -> _Block:
        """An entry agent's account and those right below it; its turns are blocks of their own."""
        name = f"agent:{agent.id}"
        turns: list[_Block] = []
        kept: dict[str, _Block] = {}
        for number, call in enumerate(cast.turns.get(agent.id, ()), start=1):
            tools = cast.tools.get(call.id, ())
            items = [found.tools.get(event.id) for event in tools]
            made_of = (call, number, found.messages.get(call.id), *tools, *items)
            block = self._turns.get(call.id)
            if block is None or block.made_of != made_of:
                accounts, whole = turn_tree(found, call, number, parent=name, tools=tools, unknown=NULL)
                block = _Block(made_of, whole, accounts)
            kept[call.id] = block
            turns.append(block)
        self._turns = {
            **{key: block for key, block in self._turns.items() if block.accounts[0].parent != name},
            **kept,
        }
        wholes = [block.whole for block in turns]
        top, rest, whole = agent_top(cast, found, agent, parent="orchestrator", unknown=NULL, turns=wholes)
        return _Block((), whole, [top, *(block.accounts[0] for block in turns), *rest])

    def _settled_leader(self, block: _Block, credit: int) -> list[CreditNode]:
        top, *below = block.accounts
        nodes = [node_of(top, credit)]
        shares = _shares(credit, below)
        for account, share in zip(below, shares, strict=True):
            turn = self._turns.get(account.subject) if account.unit == "turn" else None
            if turn is not None:
                nodes += turn.settled(share)
            else:
                nodes.append(node_of(account, share))
        return nodes


def _shares(credit: int, accounts: Sequence[Account]) -> list[int]:
    """Credit of the children of an account, as ``settle`` gives it."""
    if len(accounts) < 2:
        return [credit] * len(accounts)
    return reconcile(
        credit,
        [account.estimate.anchor for account in accounts],
        [account.estimate.weight for account in accounts],
        [account.id for account in accounts],
    )
