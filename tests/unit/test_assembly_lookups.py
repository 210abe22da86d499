"""What assembly looks up finds what a search would: runs that wait for a tool call, starters, replaced versions of a span."""

from __future__ import annotations

import json
import random

from made_spans import agent, hex32, span

from spanloop.pipeline.assembly.candidates import Waiting
from spanloop.pipeline.assembly.clocks import within
from spanloop.pipeline.assembly.join import Joiner, TraceBuffer
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.dialects.fields import (
    Heard,
    answer_hash,
    answered_calls,
    asked_calls,
    first_user_hash,
    fresh_answers,
    heard,
    messages,
    says_error,
)
from spanloop.pipeline.dialects.histories import _said, answer_in, heard_in, task_in
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


def part(rng: random.Random, more: tuple[str, ...] = ()) -> object:
    keys = ("role", "type", "content", "id", "tool_call_id", *more)
    made = {key: rng.choice(VALUES) for key in keys if rng.random() < 0.6}
    return made if rng.random() < 0.9 else rng.choice(VALUES)


def conversation(rng: random.Random, keys: tuple[str, ...] = ()) -> object:
    made: list[object] = []
    for _ in range(rng.randrange(6)):
        message = part(rng, keys)
        if isinstance(message, dict) and rng.random() < 0.6:
            message = {**message, "parts": [part(rng, keys) for _ in range(rng.randrange(4))]}
        made.append(message)
    return made if rng.random() < 0.9 else made[:1] and made[0]


def test_an_input_read_once_tells_what_three_readings_do():
    for seed in range(3000):
        rng = random.Random(seed)
        given = conversation(rng)
        assert heard(given) == Heard(answered_calls(given), fresh_answers(given), first_user_hash(given))


def usual(rng: random.Random, role: str) -> dict[str, object]:
    """A message as most write them."""
    kind = rng.choice(["text", "tool_call", "tool_call_response", "function_call", "other"])
    made: dict[str, object] = {
        "type": kind,
        "id": rng.choice(["c1", "c2", "", None]),
        "result": [1.5, {"a": None}],
    }
    if rng.random() < 0.5:
        made |= {"content": rng.choice(["hello", " ", {"$hmac": "h"}]), "name": rng.choice(["look", None])}
    if rng.random() < 0.2:
        made["tool_call_id"] = rng.choice(["c3", None])
    return {"role": role, "parts": [made]} if rng.random() < 0.7 else {"role": role, **made}


def test_what_is_skipped_in_a_text_changes_nothing():
    shortcuts = 0
    for seed in range(4000):
        rng = random.Random(seed)
        given = conversation(rng, ("name", "tool_calls"))
        if seed % 2:
            roles = ["user", "assistant", "tool", "model"]
            given = [usual(rng, rng.choice(roles)) for _ in range(rng.randrange(6))]
        text = json.dumps(given)
        read, readable = messages(text)
        assert heard_in(text) == (heard(read), readable)
        assert task_in(text) == first_user_hash(read)
        answer, ok = answer_in(text)
        assert (answer.asked, answer.text_hash, ok) == (asked_calls(read), answer_hash(read), readable)
        assert answer.is_empty == (not read)
        assert heard_in(given) == (heard(messages(given)[0]), messages(given)[1])
        shortcuts += _said(text) is not None
    assert shortcuts > 1000, "the short way was hardly taken"


def test_texts_that_are_no_messages_are_read_as_before():
    for text in (
        "",
        "[",
        "[1",
        "{}",
        "[]",
        "[{}]",
        "null",
        "x",
        '[{"role":1}]',
        '[{"parts":{}}]',
        '{"$redacted":3}',
        None,
        7,
    ):
        read, readable = messages(text)
        assert heard_in(text) == (heard(read), readable), text
        assert answer_in(text)[1] == readable
        assert task_in(text) == first_user_hash(read)


def failed_by_whole(text: str) -> bool:
    """``says_error`` of what the text decodes to."""
    return says_error(messages(text)[0])


def test_a_result_that_says_error_in_a_text_does_so_as_an_object():
    values = [
        True,
        False,
        None,
        "error",
        "Failed",
        "ok",
        1,
        {"isError": True},
        {"result": {"isError": True}},
        [1],
    ]
    for seed in range(2000):
        rng = random.Random(seed)
        made = {
            key: rng.choice(values)
            for key in ("isError", "is_error", "status", "result", "x")
            if rng.random() < 0.4
        }
        for value in (made, {"result": made}, [made]):
            assert says_error(json.dumps(value)) == failed_by_whole(json.dumps(value)), value
