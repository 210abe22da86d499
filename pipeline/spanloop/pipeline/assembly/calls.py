"""Model calls of one orchestration: each logical call once, whoever recorded it.

Spans are one call when they share a response id (the framework's span, the gateway's span, a re-export), when a model span
stands directly in another one of a different instrumentation layer, or as ``one_call`` finds the gateway's. The call's place and
times come from the framework's outermost span; tokens, sampling and policy version from the gateway.
Roll-ups on agents never count. Source: DIALECTS 2.5, RELIABILITY cases 10, 21, 23, 25.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import msgspec

from spanloop.pipeline.assembly.one_call import above_call, pairs_by_text
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import CallFacts, GatewayFacts, Operation
from spanloop.schemas.orchestration import MenuOption, ModelCall, TokenUsage, ToolCall

__all__ = ["Calls", "collect_calls", "token_usage"]


class Calls:
    """Model calls with their places in the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.groups: list[list[int]] = []
        """Operations of each call, primary first, in order of the primary's start."""
        self.agent: list[int] = []
        """Agent run of each call, -1 unknown."""
        self.of_agent: dict[int, list[int]] = defaultdict(list)
        """Calls of each agent run in order of start."""
        self.unplaced: set[int] = set()
        """Calls written onto their run's span: it is not known when they began, so that they decide nothing."""
        self._ids: list[str] = []
        self._starts: dict[int, list[int]] = {}
        self._asked: dict[tuple[int, str], list[int]] = defaultdict(list)

    def id(self, call: int) -> str:
        """ModelCall.id."""
        return self._ids[call]

    def response_id(self, call: int) -> str:
        """Response id of a call, empty when unknown."""
        ops = self.tree.ops
        for i in self.groups[call]:
            facts = ops[i].call
            if facts is not None and facts.response_id:
                return facts.response_id
        return ""

    def start(self, call: int) -> int:
        """Start of a call, ns."""
        return self.tree.ops[self.groups[call][0]].start_ns

    def end(self, call: int) -> int:
        """End of a call, ns; never before its start."""
        primary = self.tree.ops[self.groups[call][0]]
        return max(primary.end_ns, primary.start_ns)

    def span_ids(self, call: int) -> tuple[str, ...]:
        """Span ids of a call, sorted."""
        group = self.groups[call]
        if len(group) == 1:
            return (self.tree.ops[group[0]].span_id,)
        return tuple(sorted({self.tree.ops[i].span_id for i in group}))

    def answered(self, call: int) -> set[str]:
        """Tool call ids whose results stood in the call's input."""
        return {a for i in self.groups[call] if (facts := self.tree.ops[i].call) for a in facts.answered}

    def asker(self, agent: int, call_id: str, at_ns: int) -> int:
        """The call of ``agent`` that asked for the tool call ``call_id`` which ran at ``at_ns``; by id,
        else the agent's last call begun before it; -1 without one."""
        asked = self._asked.get((agent, call_id)) if call_id else None
        if not asked:
            return self.before(agent, at_ns)
        if len(asked) == 1:
            return asked[0]
        return asked[max(bisect_right(asked, at_ns, key=self.start) - 1, 0)]

    def before(self, agent: int, at_ns: int) -> int:
        """The agent's last call begun at or before ``at_ns``, -1 without one."""
        calls = self.of_agent.get(agent)
        if not calls:
            return -1
        place = bisect_right(self._starts[agent], at_ns)
        return calls[place - 1] if place else -1

    def after(self, agent: int, at_ns: int) -> int:
        """The agent's first call begun at or after ``at_ns``, -1 without one."""
        calls = self.of_agent.get(agent)
        if not calls:
            return -1
        place = bisect_right(self._starts[agent], at_ns - 1)
        return calls[place] if place < len(calls) else -1

    def last(self, agent: int) -> int:
        """The agent's last call, -1 without one."""
        calls = self.of_agent.get(agent)
        return calls[-1] if calls else -1

    def _index(self) -> None:
        ops, groups = self.tree.ops, self.groups
        self._ids = [self.response_id(call) or ops[group[0]].span_id for call, group in enumerate(groups)]
        for call, agent in enumerate(self.agent):
            if call in self.unplaced:
                continue
            self.of_agent[agent].append(call)
            if agent < 0:
                continue
            for i in groups[call]:
                facts = ops[i].call
                for asked in facts.asked if facts is not None else ():
                    if asked.id:
                        known = self._asked[(agent, asked.id)]
                        if not known or known[-1] != call:
                            known.append(call)
        self._starts = {
            agent: [ops[groups[call][0]].start_ns for call in calls] for agent, calls in self.of_agent.items()
        }


def collect_calls(tree: Tree) -> Calls:
    """Group the model-call operations of ``tree`` into calls; those of a judge are none of the agents'."""
    ops = tree.ops
    judged = _judged(tree)
    leader: dict[int, int] = {}
    by_response: dict[str, int] = {}
    members: dict[int, list[int]] = {}
    gateway = False
    parent, carrying = tree.parent, set(tree.census.calls)
    for i in tree.preorder if carrying else ():
        if i not in carrying:
            continue
        op = ops[i]
        facts = op.call
        if facts is None:
            continue
        if op.kind == "note" and parent[i] in leader:
            members[leader[parent[i]]].append(i)
        if op.kind != "model_call" or i in judged:
            continue
        above = parent[i]
        if facts.gateway is not None:
            gateway, above = True, above_call(tree, i)
        head = by_response.get(facts.response_id, i) if facts.response_id else i
        if head == i and above in leader and _layered(ops[above], op):
            head = leader[above]
        leader[i] = head
        if head == i:
            members[i] = [i]
        else:
            members[head].append(i)
        if facts.response_id:
            by_response.setdefault(facts.response_id, head)
    for head, into in pairs_by_text(tree, members).items() if gateway else ():
        members[into] += members.pop(head)
    calls = Calls(tree)
    groups = [
        sorted(group, key=lambda i: (_is_gateway(ops[i]), tree.agent[i] < 0)) if len(group) > 1 else group
        for group in members.values()
    ]
    groups.sort()
    calls.groups = groups
    calls.agent = [
        tree.agent[group[0]] if len(group) == 1 else next((a for i in group if (a := tree.agent[i]) >= 0), -1)
        for group in groups
    ]
    _add_unplaced(calls)
    calls._index()
    return calls


def _add_unplaced(calls: Calls) -> None:
    """Calls that are told on the runs, or on the messages, of agents without any of their own."""
    tree = calls.tree
    known = set(calls.agent)
    told = [i for i in tree.census.calls if tree.ops[i].kind in ("agent_run", "message")]
    if not told:
        return
    instances = {
        tree.ops[i].instance: i for i in tree.agent_ops() if tree.ops[i].instance and i not in tree.virtual
    }
    for i in told:
        op = tree.ops[i]
        run = tree.same_run.get(i, tree.turn_of.get(i, i))
        if op.kind == "message":
            run = instances.get(op.message.sender, -1) if op.message is not None else -1
        if run not in known:
            calls.unplaced.add(len(calls.groups))
            calls.groups.append([i])
            calls.agent.append(run)


def _judged(tree: Tree) -> set[int]:
    """What stands below an evaluation."""
    found = {i for i in tree.census.kind("evaluation") if tree.ops[i].kind == "evaluation"}
    if found:
        for i in tree.preorder:
            if tree.parent[i] in found:
                found.add(i)
    return found


def _layered(outer: Operation, inner: Operation) -> bool:
    """Whether two nested model spans are two instrumentations' views of one call."""
    if outer.layer == inner.layer or outer.call is None or inner.call is None:
        return False
    return not outer.call.response_id or not inner.call.response_id


def _is_gateway(op: Operation) -> bool:
    return op.call is not None and op.call.gateway is not None


def model_call(calls: Calls, call: int, agent_id: str, tool_status: dict[str, str]) -> ModelCall:
    """The ModelCall of a group; ``tool_status`` says what became of the tool calls it asked for."""
    group = calls.groups[call]
    primary = calls.tree.ops[group[0]]
    facts = primary.call if len(group) == 1 else None
    facts = facts or _together([calls.tree.ops[i] for i in group])
    tool_calls = (
        [ToolCall(a.id, a.name, tool_status.get(a.id, "")) for a in facts.asked] if facts.asked else ()
    )
    told = ModelCall(
        calls.id(call), agent_id, calls.span_ids(call), primary.start_ns, max(primary.end_ns, primary.start_ns),
        facts.model, facts.response_id, facts.input_tokens, facts.output_tokens, facts.finish_reasons, tuple(tool_calls),
        status="error" if primary.status == "error" else "ok",
    )  # fmt: skip
    return told if facts.gateway is None else _served(told, facts.gateway)


def _served(told: ModelCall, gateway: GatewayFacts) -> ModelCall:
    """A call with what only the gateway knows of it."""
    return msgspec.structs.replace(
        told,
        policy_version=gateway.policy_version,
        harness=gateway.harness,
        task_key=gateway.task_key,
        sampling=gateway.sampling,
        prompt_token_ids=gateway.prompt_token_ids,
        response_token_ids=gateway.response_token_ids,
        logprobs=gateway.logprobs,
        menus=tuple(tuple(MenuOption(t, p) for t, p in menu) for menu in gateway.menus),
        sealed=gateway.sealed,
    )


def _together(ops: list[Operation]) -> CallFacts:
    """What the operations of one call tell of it: the gateway where it tells, else the first that does."""
    by_trust = sorted(ops, key=lambda op: not _is_gateway(op))
    facts = [op.call for op in by_trust if op.call is not None]
    return CallFacts(
        model=next((f.model for f in facts if f.model), ""),
        response_id=next((f.response_id for op in ops if (f := op.call) and f.response_id), ""),
        input_tokens=_known(facts, "input_tokens"),
        output_tokens=_known(facts, "output_tokens"),
        finish_reasons=next((f.finish_reasons for f in facts if f.finish_reasons), ()),
        asked=next((f.asked for op in ops if (f := op.call) and f.asked), ()),
        gateway=next((f.gateway for f in facts if f.gateway is not None), None),
    )


def _known(facts: list[CallFacts], name: str) -> int | None:
    return next((value for f in facts if (value := getattr(f, name)) is not None), None)


def token_usage(calls: tuple[ModelCall, ...], tree: Tree) -> tuple[TokenUsage, bool]:
    """Sums over ``calls``, and whether they had to be taken from the agents' roll-ups. A failed attempt
    without usage is neither a call nor unknown: nothing was answered."""
    counted = [
        c for c in calls if c.status != "error" or c.input_tokens is not None or c.output_tokens is not None
    ]
    if not calls:
        tops = [op.run for i, op in enumerate(tree.ops) if op.run is not None and tree.agent[i] < 0]
        known = [run for run in tops if run.input_tokens is not None or run.output_tokens is not None]
        if known:
            return TokenUsage(
                sum(r.input_tokens or 0 for r in known), sum(r.output_tokens or 0 for r in known)
            ), True
    facts = [tree.ops[i].call for i in tree.census.calls]
    lost = sum(call.lost for call in facts if call is not None)
    return TokenUsage(
        input=sum(c.input_tokens or 0 for c in counted),
        output=sum(c.output_tokens or 0 for c in counted),
        calls=len(counted) + lost,
        unknown_calls=lost + sum(c.input_tokens is None or c.output_tokens is None for c in counted),
    ), False
