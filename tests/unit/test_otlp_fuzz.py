"""Ten thousand corrupted requests: no crash, no hang, no valid neighbour lost. A million: make fuzz."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest
from otlp_fuzz import Attempt, attempt, intakes, outcome
from otlp_requests import as_protobuf, span
from receiver_harness import receiver

NUM = 10_000


def test_ten_thousand_corrupted_requests() -> None:
    both = intakes()
    seen: Counter[str] = Counter()
    for seed in range(NUM):
        tried = attempt(seed)
        try:
            seen[f"{tried.kind} {outcome(tried, both[seed % 2])}"] += 1
        except Exception as exc:
            raise AssertionError(f"seed {seed} ({tried.kind}, json={tried.json}): {exc!r}") from exc
    assert seen.total() == NUM
    for kind in ("inside", "item", "anywhere"):
        assert seen[f"{kind} partial"] > 50, "the mutations must hurt"
    assert seen["anywhere refused"] > 500


def test_the_check_can_fail() -> None:
    good = as_protobuf([span(1), span(2)])
    with pytest.raises(AssertionError, match="neighbours were lost"):
        outcome(Attempt("item", False, good, frozenset({f"{3:016x}"})), intakes()[0])
    with pytest.raises(AssertionError, match="frame is sound"):
        outcome(Attempt("item", False, good[:-3], frozenset({f"{1:016x}"})), intakes()[0])


async def test_corrupted_requests_over_the_wire_are_answered_and_never_an_internal_error() -> None:
    async with receiver() as running:
        for seed in range(300):
            tried = attempt(seed)
            kind = "application/json" if tried.json else "application/x-protobuf"
            status, _, _ = await running.post(tried.body, Content_Type=kind)
            assert status in (200, 400), seed
            if not tried.json:
                answer = await running.call(tried.body)
                fine = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
                assert answer.code in fine, seed
        assert (await running.call(as_protobuf([span(1)]))).code is grpc.StatusCode.OK
