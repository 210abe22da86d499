"""What followed a decision: its trace, which trains a token beside its own account (``[pipeline] credit_trace``).

An account is a difference of the value model's: it says what the model thought of a choice, and what then happened is in it only
as far as the model learned it. The trace carries that back, lambda^d of what lay d steps behind the decision:

    advantage = account_t + sum over d = 1, 2, ... of lambda^d gap_(t+d-1)

``gap_k`` is what happened between decision k and the next one: V before the next less V after this; after the last, the reward less
V. It flows to what caused it only, along the orchestration's partial order: a decision of the orchestrator's has all later gaps; one
of a trained sub-agent what its report brought (its own share of the gap in which it worked, not that of those who worked beside it)
and the gaps from the next turn on. A later decision's own account is left out where its menu is known: as the behaviour weighted
the menu its mean is exactly 0, so it would add the luck of a draw and no information. Without a menu it counts, and the sum is GAE.

Invariants: pure; 0 gives nothing; with lambda 1 on a line without menus account + trace = reward - V before the decision, with
menus that less what later choices added; the ledger is not touched, its accounts sum as before.

Source: Schulman et al. 1506.02438, equation 16, over decisions; the choice of what to leave out is the doubly robust return of Jiang
and Li 1511.03722, equation 10, where logged and evaluated policy are the same; METHODS 3.2 (h), (i).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from spanloop.pipeline.credit.anchors import CallValues
from spanloop.pipeline.credit.cast import Cast
from spanloop.pipeline.credit.ledger import Ledger
from spanloop.pipeline.credit.states import by_token, is_forced
from spanloop.schemas.orchestration import ModelCall

__all__ = ["traces_of"]


class _Decision(msgspec.Struct, frozen=True):
    """A choice of the policy's; micro-units."""

    call: ModelCall
    index: int
    """Token of the response; -1: the whole response."""
    start: int
    """V before it."""
    account: int
    luck: bool
    """Its account is 0 on average whatever the value model says."""

    @property
    def end(self) -> int:
        return self.start + self.account

    @property
    def carried(self) -> int:
        """What earlier decisions are told of it."""
        return 0 if self.luck else self.account


def traces_of(ledger: Ledger, cast: Cast, smoothing: float) -> Mapping[str, tuple[int, ...]]:
    """Traces of the response tokens of each valued call by call id, micro-units; nothing without token states.

    Args:
        ledger: Settled.
        cast: Who took part.
        smoothing: lambda in [0, 1]: 0 trusts the value model, 1 what happened.
    """
    if ledger.level != "token" or smoothing <= 0.0:
        return {}
    calls = ledger.estimates.calls
    traces: dict[str, list[int]] = {}
    line = [d for call in cast.line if call.id in calls for d in _decisions(call, calls[call.id])]
    ahead, following, carried = 0.0, ledger.reward, 0
    behind: dict[str, float] = {}
    """What a turn's first decision tells those before it, by call."""
    for decision in reversed(line):
        ahead = smoothing * (following - decision.end + carried + ahead)
        _note(traces, decision, ahead)
        following, carried = decision.start, decision.carried
        behind[decision.call.id] = carried + ahead
    reports = {node.subject: node.credit for node in ledger.nodes if node.id.startswith("report:")}
    for agent in cast.others:
        own = [
            d
            for call in cast.turns.get(agent.id, ())
            if call.id in calls
            for d in _decisions(call, calls[call.id])
        ]
        if not own:
            continue
        later = (call.id for call in cast.line[cast.gap_of[agent.id] + 1 :] if call.id in behind)
        ahead = behind.get(next(later, ""), 0.0) + reports.get(agent.id, 0)
        for decision in reversed(own):
            ahead *= smoothing
            _note(traces, decision, ahead)
            ahead += decision.carried
    return {key: tuple(amounts) for key, amounts in traces.items()}


def _decisions(call: ModelCall, values: CallValues) -> Iterable[_Decision]:
    if not by_token(call):
        yield _Decision(call, -1, values.start, values.decided, luck=False)
        return
    for i, (start, account) in enumerate(zip(values.starts, values.tokens, strict=True)):
        if not is_forced(call, i):
            yield _Decision(call, i, start, account, luck=bool(values.menus))


def _note(traces: dict[str, list[int]], decision: _Decision, amount: float) -> None:
    count = len(decision.call.response_token_ids)
    of_call = traces.setdefault(decision.call.id, [0] * count)
    for i in range(count) if decision.index < 0 else (decision.index,):
        of_call[i] = round(amount)
