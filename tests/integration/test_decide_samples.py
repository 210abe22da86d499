"""From /v1/decide to training rows: the decisions of a session and their outcome, through assembly, rewards, the ledger and samples."""

from __future__ import annotations

import msgspec
from decide_support import ASKED, deciding
from gateway_support import recorded
from sdk_support import received, recording
from synthetic_orchestrations import make_revision

from spanloop.collectors import sdk
from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.decision_policy import DecisionConfig
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import lessons
from spanloop.pipeline.credit.ledger import build_ledger, check_ledger
from spanloop.pipeline.credit.states import RAW, State
from spanloop.pipeline.decisions.objects import decisions_of
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.samples import build_samples
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.events import FeedbackReceived, SamplesBuilt
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Pipeline


def rollout_of(built: SamplesBuilt) -> Rollout:
    config = DecisionConfig()
    found = to_rollout(built, vocabulary_size=config.vocabulary_size, context=config.context)
    assert isinstance(found, Rollout), found
    return found


def liked(content: OrchestrationContent, option: str):
    """A value model that likes one option: what is chosen is worth 1, everything else nothing."""
    wanted: set[State] = set()
    for call in content.calls:
        for menu in call.menus:
            told = next((e.decision for e in content.events if e.call_id == call.id and e.decision), None)
            if told is None or option not in told.options:
                continue
            ids = sorted(o.token_id for o in menu)
            chosen = call.response_token_ids[0]
            if told.chosen == option:
                wanted.add(RAW(call.prompt_token_ids, (chosen,)))
            assert chosen in ids
    return lambda state: MICRO if state in wanted else 0


async def test_a_session_over_plain_http_becomes_one_training_row_a_decision(tmp_path):
    got = {}
    async with deciding(tmp_path) as at:
        for n in range(3):
            body = {**ASKED, "state": {"round": n}}
            async with at.client.post("/sessions/job-7/v1/decide", json=body) as answer:
                got = await answer.json()
        spans = await recorded(at.log, 3)
    (content,) = assemble_spans(spans, "default", "gateway")
    assert [(d.kind, d.menu) for d in decisions_of(content)] == [("delegate", "told")] * 3
    outcome = FeedbackReceived(
        feedback_id="f", target_kind="response", target_id=got["id"], value=1.0, scorer="s", observed_ns=1
    )
    stage = SignalStage(Pipeline(holdout=0.0))  # type: ignore[call-arg]
    stage.restore({})
    records = [new_record(event) for event in (make_revision(content), outcome)]
    output = stage.process(
        [LogRecord(r.topic, n, r.key, r.event_id, r.value, 0) for n, r in enumerate(records)], 0
    )
    (built,) = [event for event in output.events if isinstance(event, SamplesBuilt)]
    assert (built.reward, built.excluded) == (MICRO, {})
    found = rollout_of(built)
    assert found.versions == (1,)
    assert [len(call.decisions) for call in found.calls] == [1, 1, 1]
    for call in found.calls:
        (decision,) = call.decisions
        assert len(decision.menu) == 3
        assert decision.advantage == 1.0  # no value model yet: the team's account


async def test_a_closed_models_calls_between_decisions_do_not_hide_their_credit(tmp_path):
    async with deciding(tmp_path) as at:
        with recording() as exporter:
            with sdk.agent("desk"):
                for n in range(2):
                    await sdk.decide_async("delegate", ASKED["menu"], state={"round": n}, endpoint=at.url)
                    with sdk.model_call("closed-llm") as call:
                        call.response(id=f"closed-{n}", input_tokens=9, output_tokens=3)
            mine = received(exporter)
        gateways = await recorded(at.log, 2)
    (content,) = assemble_spans([*mine, *gateways], "default", "import")
    assert len(content.calls) == 4
    assert (content.tokens.input, content.tokens.output, content.tokens.unknown_calls) == (18, 6, 0)
    assert len(lessons(cast_of(content))) == 2
    told = [event.decision for event in content.events if event.decision is not None]
    ledger = build_ledger(content, MICRO, liked(content, told[0].chosen))
    assert check_ledger(ledger.nodes, MICRO, ledger.baseline) == []
    assert ledger.level == "token"
    built = build_samples(content, ledger, revision=1, value_model="v", holdout=0.0, credit="ledger")
    assert built.excluded == {"no_policy_version": 2}
    first, second = built.rows
    assert all(len(row.menu_values[0]) == 3 for row in built.rows)
    share = dict(zip(told[0].options, told[0].propensities, strict=True))[told[0].chosen]
    assert abs(first.advantages[0] / MICRO - (1.0 - share)) < 1e-5
    assert rollout_of(built).num_decisions == 2
    again = msgspec.json.decode(msgspec.json.encode(built), type=SamplesBuilt)
    assert rollout_of(again) == rollout_of(built)
    assert second.call_id != first.call_id


async def test_acts_of_a_kind_that_is_asked_for_are_no_further_decisions(tmp_path):
    """The desk asks over plain HTTP and its acts are inferred: each decision is there once."""
    async with deciding(tmp_path) as at:
        with recording() as exporter:
            with sdk.agent("desk") as desk:
                for kind in ("spawn", "delegate", "stop"):
                    body = {**ASKED, "kind": kind}
                    async with at.client.post("/v1/decide", json=body, headers=desk.carrier) as answer:
                        assert answer.status == 200
                with sdk.agent("writer"), sdk.model_call("closed-llm") as call:
                    call.response(id="closed", input_tokens=9, output_tokens=3)
            mine = received(exporter)
        gateways = await recorded(at.log, 3)
    (content,) = assemble_spans([*mine, *gateways], "default", "import")
    assert {"spawn", "delegate"} <= {event.type for event in content.events}
    found = [d for d in decisions_of(content) if d.kind in ("spawn", "delegate", "stop")]
    assert sorted((d.kind, d.menu) for d in found) == [
        ("delegate", "told"),
        ("spawn", "told"),
        ("stop", "told"),
    ]
    assert len({d.call_id for d in found}) == 3
