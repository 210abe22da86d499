"""What assembly looks up finds what a search would: runs that wait for a tool call, starters, replaced versions of a span."""

from __future__ import annotations

import random

from made_spans import agent, hex32, span

from spanloop.pipeline.assembly.candidates import Waiting
from spanloop.pipeline.assembly.clocks import within
from spanloop.pipeline.assembly.join import Joiner, TraceBuffer
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.dialects.fields import answered_calls, first_user_hash, fresh_answers, heard
from spanloop.pipeline.dialects.operation import Operation

KEY = ("t", "task")


def operations(rng: random.Random, count: int) -> list[Operation]:
    made = []
    for n in range(count):
        start = rng.randrange(0, 900) * 10**9
        end = start + rng.choice([-5, 0, 1, 40, 400]) * 10**9
        made.append(
            Operation(
                "t",
                f"{n:016x}",
                "",
                "agent_run",
                start,
                max(end, 0),
                resource=rng.choice(["", "a", "a", "b"]),
            )
        )
    return sorted(made, key=lambda op: op.start_ns)


def test_runs_around_a_tool_are_those_that_lie_within_it():
    for seed in range(200):
        rng = random.Random(seed)
        ops = operations(rng, 30)
        waiting = Waiting(Tree(ops))
        for i in range(len(ops)):
            waiting.add(KEY, i)
        for i in rng.sample(range(len(ops)), 5):
            waiting.take(KEY, i)
            ops[i] = ops[i].__class__("t", "gone", "", "agent_run", -1, 10**15)
        for tool in operations(rng, 10):
            inside = [i for i in waiting.around(KEY, tool) if within(tool, ops[i])]
            assert inside == [i for i, op in enumerate(ops) if op.span_id != "gone" and within(tool, op)]


def test_an_unknown_key_has_no_runs():
    waiting = Waiting(Tree([]))
    assert not waiting
    assert list(waiting.around(KEY, operations(random.Random(0), 1)[0])) == []


def counted(buffer: TraceBuffer) -> tuple[set[str], set[str], bool]:
    return set(buffer.missing), set(buffer.unfinished), buffer.rooted


def test_a_replaced_version_counts_as_if_all_were_counted_anew():
    for seed in range(200):
        rng = random.Random(seed)
        buffer = TraceBuffer()
        for _ in range(25):
            key = rng.randrange(5)
            parent = rng.choice([None, None, *range(6)])
            operation = operation_of(
                span(key, parent, 1, rng.choice([0, 2, 3, 4]), name=str(rng.randrange(3)))
            )
            buffer.add(operation, encode_operation(operation))
            before = counted(buffer)
            buffer._recount()
            assert counted(buffer) == before


def test_a_component_knows_its_size_over_versions_and_joins():
    joiner = Joiner()
    for n in range(4):
        for end in (0, 2):
            operation = operation_of(agent("a", None, 1, end, trace=n + 1))
            joiner.add("x", operation, encode_operation(operation))
    for n in range(3):
        joiner.join("x", hex32(n + 1), hex32(n + 2))
    (component,) = joiner.components()
    assert component.size == sum(len(buffer.spans) for buffer in component.traces.values()) == 4


VALUES = [
    None,
    "",
    "user",
    "assistant",
    "model",
    "tool",
    "text",
    "tool_result",
    "tool_call_response",
    "c1",
    "c2",
    7,
    ["x"],
    {"$hmac": "h"},
]


def part(rng: random.Random) -> object:
    keys = ("role", "type", "content", "id", "tool_call_id")
    made = {key: rng.choice(VALUES) for key in keys if rng.random() < 0.6}
    return made if rng.random() < 0.9 else rng.choice(VALUES)


def test_an_input_read_once_tells_what_three_readings_do():
    for seed in range(3000):
        rng = random.Random(seed)
        messages: list[object] = []
        for _ in range(rng.randrange(6)):
            message = part(rng)
            if isinstance(message, dict) and rng.random() < 0.6:
                message["parts"] = [part(rng) for _ in range(rng.randrange(4))]
            messages.append(message)
        given = messages if rng.random() < 0.9 else messages[:1] and messages[0]
        assert heard(given) == (answered_calls(given), fresh_answers(given), first_user_hash(given))
