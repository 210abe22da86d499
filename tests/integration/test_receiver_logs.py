"""POST /v1/logs: encodings, limits, partial success, credentials; evaluations count with a scorer's key only."""

from __future__ import annotations

import gzip

import pytest
from log_requests import logs_json, logs_protobuf, record
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from otlp_requests import TRACE
from receiver_harness import receiver

from spanloop.schemas.spans import LOG

PB = "application/x-protobuf"
LOGS = "/v1/logs"
KEYS = [
    {"key": f"{role}-key-of-a-team", "tenant": "A", "role": role}
    for role in ("agent", "scorer", "admin", "reader")
]


async def test_both_encodings_and_gzip_give_one_record():
    async with receiver() as running:
        status, body, headers = await running.post(logs_protobuf([record()]), LOGS, Content_Type=PB)
        assert (status, body, headers["Content-Type"]) == (200, b"", PB)
        packed = gzip.compress(logs_json([record()]))
        assert await running.post_json(packed, LOGS, Content_Encoding="gzip") == (200, {})
        (event,) = running.events("spans")
        assert (event.trace_id, event.spans[0].kind) == (TRACE, LOG)


async def test_partial_success_in_the_words_of_logs():
    bad = record(time=0, observed=0)
    async with receiver() as running:
        status, body, _ = await running.post(logs_protobuf([record(), bad]), LOGS, Content_Type=PB)
        answer = ExportLogsServiceResponse.FromString(body)
        assert (status, answer.partial_success.rejected_log_records) == (200, 1)
        status, parsed = await running.post_json(logs_json([record(), bad]), LOGS)
        assert (status, parsed["partialSuccess"]["rejectedLogRecords"]) == (200, "1")
        assert len(running.events("dead_letters")) == 2


async def test_limits_are_those_of_spans():
    async with receiver(collector={"max_spans_per_request": 2}) as running:
        ignored = record("http.access", attributes={})
        status, _ = await running.post_json(logs_json([ignored, ignored, record()]), LOGS)
        assert status == 413
        status, _ = await running.post_json(b'{"resourceSpans": []}', LOGS)
        assert status == 400
        assert running.events("spans") == []


@pytest.mark.parametrize(
    ("role", "status", "scores"),
    [("agent", 200, 0), ("admin", 200, 0), ("scorer", 200, 1), ("reader", 403, 0)],
)
async def test_only_a_scorers_evaluation_is_feedback(role, status, scores):
    async with receiver(credentials=KEYS) as running:
        for _ in range(2):  # a retry is the same score
            got = await running.post_json(
                logs_json([record()]), LOGS, Authorization=f"Bearer {role}-key-of-a-team"
            )
            assert got[0] == status
        found = running.events("feedback")
        assert len(found) == scores
        for event in found:
            assert (event.tenant, event.name, event.value) == ("A", "correct", 0.5)
            assert (event.target_kind, event.target_id, event.trace_id) == ("span", f"{7:016x}", TRACE)
        assert len(running.events("spans")) == (status == 200), "what was said is kept, whoever said it"


async def test_without_keys_nobody_is_a_scorer():
    async with receiver() as running:
        assert (await running.post_json(logs_json([record()]), LOGS))[0] == 200
        assert running.events("feedback") == []


async def test_a_score_by_response_id_and_one_that_is_none():
    values = {"gen_ai.evaluation.name": "is it so?", "gen_ai.response.id": "resp-1"}
    loose = {"trace_id": "", "span_id": ""}
    records = [
        record(attributes=values | {"gen_ai.evaluation.score.value": 1}, **loose),
        record(attributes=values | {"gen_ai.evaluation.score.label": "good"}, **loose),
        record(attributes=values | {"gen_ai.evaluation.score.value": float("nan")}, **loose),
    ]
    async with receiver(credentials=KEYS) as running:
        status, parsed = await running.post_json(
            logs_json(records), LOGS, Authorization="Bearer scorer-key-of-a-team"
        )
        assert (status, parsed["partialSuccess"]["rejectedLogRecords"]) == (200, "1")
        (event,) = running.events("feedback")
        assert (event.target_kind, event.target_id, event.name) == ("response", "resp-1", "is_it_so_")
