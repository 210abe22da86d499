"""Messages between agents that neither delegate to each other nor return: over an engine's edge or a shared topic.

Rules: nodes of an engine that follow each other with nobody deciding (0.6), a run that names the one before it
(0.9); a link from what consumes a message to what produced it (0.9); a process that names sender and receiver
(0.9); a node of an engine whose input repeats another node's answer (0.8). What a manager sends to choose the next
speaker is no message: a manager is no agent here. Source: DIALECTS 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.assembly.names import folded
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.delegations import Delegations
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["Message", "add_messages", "find_messages", "first_contacts", "tree_end"]

TOPIC = "sender_and_receiver"
_LAST = "~"
"""Behind any span id."""
_STEPS = 8
"""How far below its engine a part of a node is looked for."""
_OVER_EDGES = frozenset({"input_repeats_answer", "node_after_node", "run_names_the_one_before"})
"""Rules of messages that an engine carries: it started the receiver, the sender did not."""


class Message(msgspec.Struct, frozen=True):
    """``sender`` told ``receiver`` something. Agent runs by their index in ``tree.ops``."""

    sender: int
    receiver: int
    t_ns: int
    """When it was on its way: the end of the answer, or the start of its reading."""
    heard_ns: int
    """When the receiver had it."""
    evidence: tuple[str, ...]
    rule: str
    confidence: float


def find_messages(tree: Tree, found: Delegations) -> list[Message]:
    """All messages of an orchestration in order of time; also those of agents that delegate to each other."""
    messages = _by_link(tree, found)
    known = {(m.sender, m.receiver) for m in messages}
    messages += _by_parties(tree, found)
    messages += _by_edge(tree, found)
    messages += [m for m in _by_echo(tree, found) if (m.sender, m.receiver) not in known]
    return sorted(messages, key=lambda m: (m.t_ns, m.sender, m.receiver, m.evidence))


def _agent(tree: Tree, found: Delegations, i: int) -> int:
    """The agent run that operation ``i`` is, or is in."""
    if i < 0:
        return -1
    agent = tree.turn_of.get(i, i if tree.ops[i].kind == "agent_run" else tree.agent[i])
    while agent in found.same_run:
        agent = found.same_run[agent]
    return agent


class _Nodes:
    """The nodes of engines: which agents an operation speaks for, or is read by."""

    def __init__(self, tree: Tree, found: Delegations) -> None:
        self._tree, self._found = tree, found
        self._inside: dict[int, list[int]] = {}
        """Agents in each node of an engine, by the operation right below the engine."""
        self.read_in: dict[int, list[int]] = {}
        """Operations that read messages, in each node."""
        for i in tree.agent_ops():
            if i not in found.same_run and (node := self.of(i)) >= 0:
                self._inside.setdefault(node, []).append(i)
        for i in tree.turn_of:
            if (node := self.of(i)) >= 0:
                self._inside.setdefault(node, []).append(tree.turn_of[i])
        for i in tree.census.linked:
            if tree.ops[i].kind == "message" and (node := self.of(i)) >= 0:
                self.read_in.setdefault(node, []).append(i)

    def of(self, i: int) -> int:
        """The operation right below the nearest engine above ``i``, at most ``_STEPS`` above; -1 without one."""
        for _ in range(_STEPS):
            above = self._tree.parent[i]
            if above < 0:
                return -1
            run = self._tree.ops[above].run
            if run is not None:
                return i if run.engine else -1
            i = above
        return -1

    def agents(self, i: int) -> list[int]:
        """Agents that operation ``i`` belongs to: the one around it, or those of its node."""
        node = self.of(i)
        if node >= 0:
            return self._inside.get(node, [])
        agent = _agent(self._tree, self._found, i)
        return [agent] if agent >= 0 else []


def _by_link(tree: Tree, found: Delegations) -> list[Message]:
    linked = [i for i in tree.census.linked if (op := tree.ops[i]).kind == "message" and op.message is None]
    if not linked:
        return []
    nodes = _Nodes(tree, found)
    where = {(op.trace_id, op.span_id): i for i, op in enumerate(tree.ops)}
    messages: dict[tuple[int, int, int], Message] = {}
    for i in linked:
        receivers = nodes.agents(i)
        for producer in _producers(tree, nodes, where, i) if receivers else ():
            for sender in nodes.agents(producer):
                for receiver in receivers:
                    if sender != receiver and not found.acts.act(producer):
                        messages.setdefault(
                            (sender, receiver, i), _linked(tree, sender, receiver, producer, i)
                        )
    return list(messages.values())


def _producers(tree: Tree, nodes: _Nodes, where: dict[tuple[str, str], int], i: int) -> list[int]:
    """What ``i`` is linked to; through nodes without agents to what those had read."""
    found: list[int] = []
    waiting, seen = [i], {i}
    while waiting:
        for link in tree.ops[waiting.pop()].links:
            producer = where.get(link, -1)
            if producer < 0 or producer in seen:
                continue
            seen.add(producer)
            if nodes.agents(producer):
                found.append(producer)
                continue
            for reader in nodes.read_in.get(nodes.of(producer), ()):
                if reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
    return sorted(found)


def _linked(tree: Tree, sender: int, receiver: int, producer: int, consumer: int) -> Message:
    sent, read = tree.ops[producer], tree.ops[consumer]
    return Message(
        sender,
        receiver,
        sent.start_ns,
        read.start_ns,
        (sent.span_id, read.span_id),
        "link_between_agents",
        0.9,
    )


def _by_parties(tree: Tree, found: Delegations) -> list[Message]:
    if not tree.census.messages:
        return []
    instances = {tree.ops[i].instance: i for i in tree.agent_ops() if tree.ops[i].instance}
    messages = []
    for i in tree.census.messages:
        op = tree.ops[i]
        if op.message is None:
            continue
        sender = instances.get(op.message.sender, -1)
        receiver = instances.get(op.message.receiver, -1)
        if sender >= 0 and receiver >= 0 and sender != receiver:
            messages.append(
                Message(sender, receiver, op.start_ns, max(op.start_ns, op.end_ns), (op.span_id,), TOPIC, 0.9)
            )
    return messages


def _by_edge(tree: Tree, found: Delegations) -> list[Message]:
    """Between nodes that follow each other, and between runs of which the later names the earlier one."""
    pairs = [(before, after, "node_after_node", 0.6) for before, after in tree.follows]
    pairs += [(before, after, "run_names_the_one_before", 0.9) for before, after in _named_before(tree)]
    messages = []
    for before, after, rule, confidence in pairs:
        one, two = tree.ops[before], tree.ops[after]
        sender, receiver = _agent(tree, found, before), _agent(tree, found, after)
        if sender < 0 or receiver < 0 or sender == receiver:
            continue
        sent = one.end_ns if 0 < one.end_ns <= two.start_ns else two.start_ns
        messages.append(
            Message(sender, receiver, sent, two.start_ns, (one.span_id, two.span_id), rule, confidence)
        )
    return messages


def _named_before(tree: Tree) -> list[tuple[int, int]]:
    """(the last run of that name beside, a run that names the one before it)."""
    found = []
    runs: dict[tuple[str, int, str], int] = {}
    if not tree.census.messages:
        return found
    for i in tree.agent_ops():
        op = tree.ops[i]
        if op.message is not None and op.message.sender and not op.message.receiver:
            before = runs.get((op.trace_id, tree.parent[i], folded(op.message.sender)), -1)
            found += [(before, i)] if before >= 0 else []
        runs[(op.trace_id, tree.parent[i], folded(tree.name(i)))] = i
    return found


def _by_echo(tree: Tree, found: Delegations) -> list[Message]:
    """Between the nodes of one engine, from the last answer before the turn that repeats it."""
    messages: list[Message] = []
    for engine, nodes in found.by_source.items():
        if engine < 0 or (run := tree.ops[engine].run) is None or not run.engine:
            continue
        agents = [d.target for d in nodes if d.spawns]
        said = _said(tree, agents)
        for receiver in agents:
            for reading in tree.turns_of(receiver):
                last: dict[int, tuple[int, str]] = {}
                for text in reading.run.heard if reading.run is not None else ():
                    for sender, answers in said.get(text, {}).items():
                        before = bisect_right(answers, (reading.start_ns, _LAST)) - 1
                        if sender != receiver and before >= 0:
                            last[sender] = max(last.get(sender, (0, "")), answers[before])
                for sender, (ended, span_id) in last.items():
                    evidence = (span_id, reading.span_id)
                    messages.append(
                        Message(
                            sender, receiver, ended, reading.start_ns, evidence, "input_repeats_answer", 0.8
                        )
                    )
    return messages


def _said(tree: Tree, agents: list[int]) -> dict[str, dict[int, list[tuple[int, str]]]]:
    """(end, span id) of the turns that said each text, by agent, in order."""
    found: dict[str, dict[int, list[tuple[int, str]]]] = {}
    for agent in agents:
        for turn in tree.turns_of(agent):
            for text in turn.run.said if turn.run is not None and turn.end_ns > 0 else ():
                found.setdefault(text, {}).setdefault(agent, []).append((turn.end_ns, turn.span_id))
    for by_agent in found.values():
        for answers in by_agent.values():
            answers.sort()
    return found


def first_contacts(tree: Tree, found: Delegations) -> list[Message]:
    """For each agent that nobody made run: the first message to it, before it ran, from one that ran before."""
    first: dict[int, Message] = {}
    for message in find_messages(tree, found):
        target = message.receiver
        if target in found.into or target in first or message.rule in _OVER_EDGES:
            continue
        if (
            tree.ops[message.sender].start_ns < tree.ops[target].start_ns
            and message.t_ns <= tree.ops[target].start_ns
        ):
            first[target] = message
    return sorted(first.values(), key=lambda m: (m.t_ns, m.receiver))


def tree_end(found: Delegations, tree: Tree, entry: int) -> Operation:
    """The run with which the job of ``entry`` ends: its own, or the last of those it passed control or spoke to.
    Its end is 0 while one of them is unfinished."""
    last, waiting, seen = entry, [entry], {entry}
    while waiting:
        for d in found.by_source.get(waiting.pop(), ()):
            if d.mode not in ("pass_control", "message") or d.target in seen:
                continue
            seen.add(d.target)
            waiting.append(d.target)
            if tree.ops[last].end_ns > 0 and not 0 < tree.ops[d.target].end_ns <= tree.ops[last].end_ns:
                last = d.target
    return tree.ops[last]


def add_messages(work: Inference) -> None:
    """Events for the messages between agents without a delegation either way, and for the turns that saw several."""
    tree = work.tree
    messages = find_messages(tree, work.found)
    if not messages:
        return
    pairs = {(d.source, d.target) for d in work.found.all if d.delegates}
    engines = {d.source for d in work.found.all if not d.delegates and d.rule == "node_of_engine"}
    heard: dict[int, list[Message]] = {}
    for m in messages:
        if (m.sender, m.receiver) in pairs or (m.receiver, m.sender) in pairs:
            continue
        if m.sender in engines or m.receiver in engines:
            continue
        if m.rule == TOPIC and tree.turns_of(m.receiver)[-1].start_ns < m.t_ns:
            continue  # it was told, and never spoke again
        work.add("message", m.t_ns, m.rule, m.confidence, m.evidence, agent=m.sender, to=m.receiver)
        if m.rule != TOPIC:
            heard.setdefault(m.receiver, []).append(m)
    when: Callable[[Message], int] = attrgetter("heard_ns")
    for receiver, got in heard.items():
        got.sort(key=when)
        before = 0
        for turn in tree.turns_of(receiver):
            until = max(turn.start_ns, turn.end_ns)
            new = got[bisect_right(got, before, key=when) : bisect_right(got, until, key=when)]
            _aggregate(work, receiver, turn.start_ns, new)
            before = until


def _aggregate(work: Inference, receiver: int, began: int, got: list[Message]) -> None:
    """The turn of ``receiver`` that first saw the messages of two or more others."""
    if len({m.sender for m in got}) < 2:
        return
    at = max(began, *(m.heard_ns for m in got))
    call = work.calls.after(receiver, at)
    evidence = sorted({span for m in got for span in m.evidence[:1]})
    if call >= 0:
        work.add("aggregate", work.calls.start(call), "call_sees_messages", min(m.confidence for m in got),
                 (*work.calls.span_ids(call), *evidence), agent=receiver, call=call)  # fmt: skip
    else:
        work.add("aggregate", at, "run_sees_messages", 0.5, evidence, agent=receiver)
