"""Laws of assembly: order, repetition, batching, delay and crashes of the same spans change no content.

Forests are random on purpose: cycles, missing parents, unfinished spans, links, shared response ids, lost
contexts, versions of one span that differ.
"""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
from forests import forests, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_spans import Desk, hashes, hex16, hex32

from spanloop.pipeline.assembly.batch import assemble_spans, join_spans
from spanloop.pipeline.assembly.calls import collect_calls
from spanloop.pipeline.assembly.delegations import find_delegations
from spanloop.pipeline.assembly.edges import build_edges
from spanloop.pipeline.assembly.infer import infer_events
from spanloop.pipeline.assembly.survey import from_survey, survey_of, to_survey
from spanloop.pipeline.assembly.tree import build_tree
from spanloop.pipeline.dialects import decode_operation, encode_operation, operation_of
from spanloop.schemas.canonical import canonical_json, decode_json, digest
from spanloop.schemas.events import OrchestrationRevised, decode, encode
from spanloop.schemas.orchestration import EDGE_TYPES, EVENT_TYPES
from spanloop.schemas.spans import Span

LAW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@LAW
@given(forests, seeds)
def test_order_and_repetition_change_nothing(spans, seed):
    rng = random.Random(seed)
    again = [*spans, *rng.choices(spans, k=5)]
    rng.shuffle(again)
    assert hashes(again, "import") == hashes(spans, "import")


def _drive(spans: list[Span], rng: random.Random, crash: float) -> Desk:
    """Send ``spans`` in random batches with random delays, crashing with the given chance after each."""
    desk = Desk(quiet_s=1, timeout_s=50, retention_s=1e6)
    queue = spans[:]
    while queue:
        size = rng.randint(1, 5)
        batch, queue = queue[:size], queue[size:]
        desk.send(*batch, source="import")
        desk.later(rng.choice([0, 0, 0.5, 2, 100]))
        if rng.random() < crash:
            desk.restart()
    desk.later(200)
    return desk


@LAW
@given(forests, seeds)
def test_stream_equals_batch_over_any_batching_delay_and_crash(spans, seed):
    rng = random.Random(seed)
    shuffled = [*spans, *rng.choices(spans, k=4)]
    rng.shuffle(shuffled)
    desk = _drive(shuffled, rng, crash=0.4)
    assert {k: e.content_hash for k, e in desk.live().items()} == hashes(spans, "import")


@LAW
@given(forests, seeds, st.integers(0, 20))
def test_a_restored_stage_goes_on_as_the_old_one_would_have(spans, seed, prefix):
    rng = random.Random(seed)
    delays = [rng.choice([0, 0.5, 2, 100]) for _ in spans]
    outcomes = []
    for crashes in (False, True):
        desk = Desk(quiet_s=1, timeout_s=50, retention_s=400, orchestrations_max=3)
        for number, (item, delay) in enumerate(zip(spans, delays, strict=True)):
            if crashes and (number == prefix or prefix > 18):
                desk.restart()
            desk.send(item, source="import")
            desk.later(delay)
        desk.later(1000)
        outcomes.append(([encode(e) for e in desk.events], desk.state, desk.stage.next_timer_ns()))
    assert outcomes[0] == outcomes[1]


@LAW
@given(forests, seeds)
def test_revisions_rise_by_one_and_lost_ids_lead_to_live_ones(spans, seed):
    desk = _drive(spans, random.Random(seed), crash=0.0)
    last: dict[str, OrchestrationRevised] = {}
    for event in desk.events:
        assert isinstance(event, OrchestrationRevised)
        before = last.get(event.orchestration_id)
        assert event.revision == (before.revision + 1 if before else 1)
        assert before is None or not before.merged_into
        last[event.orchestration_id] = event
        assert decode(encode(event)) == event
    live = desk.live()
    for event in last.values():
        end, steps = event, 0
        while end.merged_into in last:
            end, steps = last[end.merged_into], steps + 1
            assert steps <= len(last)
        assert not end.merged_into or end.merged_into not in live


@LAW
@given(forests)
def test_content_is_well_formed(spans):
    for content in assemble_spans(spans, "default"):
        ids = [event.id for event in content.events]
        assert len(ids) == len(set(ids))
        assert all(
            e.type in EVENT_TYPES and 0 < e.confidence <= 1 and e.rule and e.evidence for e in content.events
        )
        assert all(edge.type in EDGE_TYPES and {edge.src, edge.dst} <= set(ids) for edge in content.edges)
        assert list(content.edges) == sorted(content.edges, key=lambda e: (e.src, e.dst, e.type))
        agents = {agent.id for agent in content.agents}
        assert len(agents) == len(content.agents)
        assert all(a.parent_id in agents | {""} for a in content.agents)
        assert all({e.agent_id, e.to_id} <= agents | {""} for e in content.events)
        calls = {call.id for call in content.calls}
        assert len(calls) == len(content.calls)
        assert all(e.call_id in calls | {""} for e in content.events)
        assert all(call.agent_id in agents | {""} for call in content.calls)
        assert content.started_ns <= content.ended_ns
        assert decode_json(canonical_json(content), type(content)) == content


@LAW
@given(forests)
def test_the_survey_format_round_trips(spans):
    for content in assemble_spans(spans, "default"):
        if content.events:
            document = to_survey(survey_of(content))
            assert to_survey(from_survey(document)) == document


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "id", "name", "role", "parts", "content", "tool_calls", "function", "$hmac"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KEYS = [
    "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.tool.name", "gen_ai.tool.call.id", "gen_ai.tool.call.arguments",
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.usage.input_tokens", "gen_ai.response.id",
    "gen_ai.response.finish_reasons", "gen_ai.conversation.id", "pydantic_ai.all_messages", "logfire.msg", "spanloop.flags",
    "spanloop.menus", "spanloop.response_token_ids", "spanloop.response_logprobs", "gen_ai.request.temperature",
    "gen_ai.completion.0.tool_calls.0.name", "gen_ai.handoff.to_agent",
]  # fmt: skip


@settings(LAW, max_examples=150)
@given(
    st.sampled_from(["chat", "invoke_agent", "execute_tool", "agent_handoff", "apply_guardrail", ""]),
    st.sampled_from(["pydantic-ai", "spanloop.gateway", "x"]),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=8),
)
def test_no_value_of_any_type_makes_a_dialect_raise(kind, scope, attributes):
    if kind:
        attributes["gen_ai.operation.name"] = kind
    item = Span(
        trace_id=hex32(1),
        span_id=hex16(1),
        name="n",
        start_ns=1,
        end_ns=2,
        scope=scope,
        attributes=attributes,
    )
    operation = operation_of(item, "gateway")
    data = encode_operation(operation)
    assert decode_operation(data) == operation
    reordered = msgspec.structs.replace(item, attributes=dict(reversed(attributes.items())))
    assert encode_operation(operation_of(reordered, "gateway")) == data
    assemble_spans([item], "default", "gateway")


@LAW
@given(forests)
def test_what_is_looked_up_is_what_a_search_finds(spans):
    for component in join_spans(spans, "default"):
        tree = build_tree(component.operations())
        assert tree.runs == [
            i for i, op in enumerate(tree.ops) if op.kind == "agent_run" or i in tree.virtual
        ]
        found = find_delegations(tree, collect_calls(tree))
        work = infer_events(tree, collect_calls(tree), found)
        for event in work.events:
            parts = (event.type, event.agent, event.agent_id, event.to, event.to_id, event.tool)
            first = digest("event", *parts, *event.evidence)[:20]
            assert event.id == first or event.id in {digest(first, n)[:20] for n in range(2, 99)}
        temporal = {(e.src, e.dst) for e in build_edges(work) if e.type == "temporal"}
        lines: dict[str, list[str]] = {}
        for event in work.events:
            lines.setdefault(event.agent_id or event.agent, []).append(event.id)
        assert temporal == {pair for ids in lines.values() for pair in pairwise(ids)}
