"""Laws of failure attribution, over logs that hypothesis writes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_spans import SHARED

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.attribution.explain import Failure, attribute
from spanloop.pipeline.attribution.features import FEATURES, table_of
from spanloop.pipeline.attribution.steps import steps_of
from spanloop.pipeline.attribution.texts import Words, words_of
from spanloop.pipeline.formats import who_and_when
from spanloop.pipeline.formats.reading import read_files
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.orchestration import (
    Agent,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)
from spanloop.schemas.spans import Span

NAMES = ("ada", "bob", "cyd")
RENAMED = {"ada": "zoe", "bob": "Yan_Expert", "cyd": "42"}
PIECES = (
    "we assume 12 crates", "exitcode: 0 (execution succeeded)", "exitcode: 1\nValueError: no", "```python\nx = 1\n```", "verified, thus 97",
    "unfortunately it cannot be found", "TERMINATE", "", "the same words again and again in every turn", "été 3.5 \x1b[2J",
)  # fmt: skip

texts = st.lists(st.sampled_from(PIECES), max_size=4).map(" ".join) | st.text(max_size=60)
chats = st.lists(st.tuples(st.sampled_from(NAMES), texts), min_size=1, max_size=12)
hubs = st.lists(
    st.tuples(st.sampled_from(("ada", "ada (thought)", "ada (-> bob)", "bob", "human", "cyd")), texts), min_size=1, max_size=12
)  # fmt: skip


def spans_of(turns: list[tuple[str, str]], names: dict[str, str], *, chat: bool) -> list[Span]:
    def renamed(role: str) -> str:
        for old, new in names.items():
            role = role.replace(old, new)
        return role

    history = [
        {"name": renamed(who), "role": "assistant", "content": text} if chat else {"role": renamed(who), "content": text}
        for who, text in turns
    ]  # fmt: skip
    return who_and_when.read({"history": history, "question_ID": "q"}).spans


def found_in(spans: list[Span], *, keep: bool = True) -> Failure | None:
    (content,) = assemble_spans(spans, "t")
    try:
        return attribute(content, {item.span_id: words_of(item) for item in spans} if keep else {})
    except SchemaError:
        return None


def check_sums(found: Failure) -> None:
    assert math.fsum(step.probability for step in found.steps) == pytest.approx(1)
    assert math.fsum(agent.probability for agent in found.agents) == pytest.approx(1)
    for agent in found.agents:
        own = math.fsum(step.probability for step in found.steps if step.agent == agent.agent)
        assert own == pytest.approx(agent.probability)
    assert all(0 <= step.probability <= 1 for step in found.steps)


@given(st.booleans().flatmap(lambda chat: st.tuples(st.just(chat), chats if chat else hubs)))
@settings(max_examples=60, deadline=None)
def test_a_renaming_changes_nothing_but_the_names(case):
    chat, turns = case
    plain = found_in(spans_of(turns, {}, chat=chat))
    other = found_in(spans_of(turns, RENAMED, chat=chat))
    assert (plain is None) == (other is None)
    if plain is None or other is None:
        return
    check_sums(plain)
    chances = [{step.step: step.probability for step in found.steps} for found in (plain, other)]
    assert chances[0] == chances[1]
    assert [step.reasons for step in plain.steps] == [step.reasons for step in other.steps]
    assert {RENAMED.get(a.agent, a.agent): a.probability for a in plain.agents} == {
        a.agent: a.probability for a in other.agents
    }


@given(chats, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_in_which_spans_come_changes_nothing(turns, rng: random.Random):
    spans = spans_of(turns, {}, chat=True)
    mixed = list(spans)
    rng.shuffle(mixed)
    assert found_in(spans) == found_in(mixed)


@given(hubs)
@settings(max_examples=40, deadline=None)
def test_without_texts_there_is_an_answer_of_low_confidence(turns):
    found = found_in(spans_of(turns, {}, chat=False), keep=False)
    if found is not None:
        check_sums(found)
        assert found.confidence == "low"


def same_time(order: list[int], names: tuple[str, ...]) -> OrchestrationContent:
    """Events of one nanosecond, given in some order, with ids that depend on the names as real ones do."""
    events = [
        OrchestrationEvent(f"{names[i % 3]}-{i}", "message", names[i % 3], 5, 1.0, "r", (f"{i:016x}",), agent_id=f"id-{names[i % 3]}")
        for i in order
    ]  # fmt: skip
    agents = tuple(Agent(f"id-{name}", name) for name in names)
    return OrchestrationContent("o", "t", ("a" * 32,), tuple(events), (), agents, (), TokenUsage(), 5, 5)


@given(st.permutations(range(6)), st.permutations(NAMES))
@settings(max_examples=40, deadline=None)
def test_the_order_of_what_happened_at_one_time_changes_nothing(order, names):
    words = {f"{i:016x}": Words(f"turn {i} assume {i * 7}", 20) for i in range(6)}
    plain = attribute(same_time(list(range(6)), NAMES), words)
    other = attribute(same_time(list(order), tuple(names)), words)
    assert [(s.step, s.probability, s.span_ids) for s in plain.steps] == [
        (s.step, s.probability, s.span_ids) for s in other.steps
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just('{"text": "x"}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("text", "content", "$redacted", "id", "parts")), inner),
    max_leaves=10,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(("output.value", "gen_ai.output.messages", "llm.output_messages.0.message.content")), json_values)
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_words_are_found_in_anything(attributes):
    said = words_of(Span("a" * 32, "b" * 16, "x", 0, 1, attributes=attributes))
    assert said.length >= 0 or said.dropped
    assert isinstance(said.text, str)


def test_features_are_of_about_one_whatever_the_log():
    steps = steps_of(
        OrchestrationContent(
            "o", "t", ("a" * 32,), (), (), (), tuple(ModelCall(f"c{i}", "", (f"{i:016x}",), i, i) for i in range(300)),
            TokenUsage(), 0, 300,
        ),
        {f"{i:016x}": Words("assume error verified 12 " * (i % 50), 25 * (i % 50)) for i in range(300)},
    )  # fmt: skip
    table = table_of(steps)
    assert len(table.rows) == 300
    for row in table.rows:
        assert len(row) == len(FEATURES)
        assert all(0 <= value <= 1.001 for value in row)


def test_labels_and_answers_of_a_benchmark_change_nothing():
    folder = SHARED / "corpora" / "who-and-when" / "Algorithm-Generated"
    if not folder.exists():
        pytest.skip("no shared/corpora/who-and-when beside this checkout")
    path = min(folder.glob("*.json"), key=lambda p: int(p.stem))
    value = msgspec.json.decode(Path(path).read_bytes())
    told = found_in([s for part in read_files(path) for s in part.read.spans])
    assert told is not None
    assert len(told.steps) == len(value["history"])
    for key in ("mistake_agent", "mistake_step", "mistake_reason", "ground_truth", "question"):
        value[key] = "7"
    assert found_in(who_and_when.read(value).spans) == told
