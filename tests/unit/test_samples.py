"""Samples: which calls become rows, which account trains a token, and what a held-out orchestration is."""

from __future__ import annotations

import math

import msgspec
import pytest
from synthetic_orchestrations import make_content

from spanloop.pipeline.credit.ledger import build_ledger
from spanloop.pipeline.samples import build_samples, exclusion, group_of, is_holdout
from spanloop.schemas.events import SamplesBuilt
from spanloop.schemas.orchestration import OrchestrationContent

CONTENT = make_content(4)


def built(
    content: OrchestrationContent, *, value=lambda state: 100 * len(state), credit: str = "ledger"
) -> SamplesBuilt:
    ledger = build_ledger(content, 500_000, value)
    return build_samples(content, ledger, revision=1, value_model="value@v1", holdout=0.1, credit=credit)


def test_rows_are_the_policys_calls_with_everything_aligned():
    samples = built(CONTENT)
    trained = [c for c in CONTENT.calls if c.policy_version]
    assert [row.call_id for row in samples.rows] == [c.id for c in trained]
    for row, call in zip(samples.rows, trained, strict=True):
        n = len(call.response_token_ids)
        assert {len(row.advantages), len(row.accounts), len(row.logprobs), len(row.menu_ids)} == {n}
        assert [len(v) for v in row.menu_values] == [len(m) for m in row.menu_ids]
        assert row.role == "orchestrator"
    others = len(CONTENT.calls) - len(trained)
    assert samples.excluded == ({"no_policy_version": others} if others else {})


def test_a_tokens_advantage_is_its_own_account_and_no_account_trains_twice():
    content = CONTENT
    ledger = build_ledger(content, 500_000, lambda state: 100 * len(state))
    nodes = {n.id: n for n in ledger.nodes}
    samples = built(content)
    used = [a for row in samples.rows for a in row.accounts]
    assert len(used) == len(set(used))
    for row in samples.rows:
        assert [nodes[a].credit for a in row.accounts] == list(row.advantages)
        assert {nodes[a].unit for a in row.accounts} == {"token"}


def test_menu_values_are_on_the_scale_of_the_credit():
    """Value of the sampled option minus the behaviour's mean over the menu is the token's account."""
    content = make_content(7)
    ledger = build_ledger(content, 0, lambda state: 1000 * sum(state) % 77_777)
    samples = build_samples(content, ledger, revision=1, value_model="v", holdout=0, credit="ledger")
    for row in samples.rows:
        for i, token in enumerate(row.response_token_ids):
            weights = [math.exp(logprob) for logprob in row.menu_logprobs[i]]
            mean = sum(w * v for w, v in zip(weights, row.menu_values[i], strict=True)) / sum(weights)
            chosen = row.menu_values[i][row.menu_ids[i].index(token)]
            assert row.advantages[i] == pytest.approx(chosen - mean, abs=1)


def test_weights_of_an_orchestration_sum_to_one():
    for seed in range(30):
        samples = built(make_content(seed))
        assert sum(row.weight for row in samples.rows) == pytest.approx(1.0, abs=1e-12)
        per_token = {round(row.weight / len(row.response_token_ids), 12) for row in samples.rows}
        assert len(per_token) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"policy_version": "gpt-5"}, "no_policy_version"),
        ({"prompt_token_ids": ()}, "no_token_ids"),
        ({"response_token_ids": (), "menus": (), "logprobs": ()}, "no_token_ids"),
        ({"logprobs": ()}, "no_logprobs"),
        ({"logprobs": (float("nan"),) * 9}, "no_logprobs"),
        ({"status": "error"}, "error"),
    ],
)
def test_reasons(change: dict[str, object], reason: str):
    call = CONTENT.calls[0]
    assert exclusion(call) == ""
    assert exclusion(msgspec.structs.replace(call, **change)) == reason


def test_nothing_is_imputed_for_a_broken_logprob():
    call = CONTENT.calls[0]
    for bad in (float("nan"), float("-inf"), 0.5):
        broken = msgspec.structs.replace(call, logprobs=(bad,) * len(call.response_token_ids))
        assert exclusion(broken) == "bad_logprobs"


def test_team_credit_trains_every_token_from_the_team():
    samples = built(CONTENT, credit="team")
    assert {a for row in samples.rows for a in row.accounts} == {"team"}
    assert {a for row in samples.rows for a in row.advantages} == {samples.reward - samples.baseline}


def test_without_a_model_the_team_trains():
    samples = built(CONTENT, value=None)
    assert {a for row in samples.rows for a in row.advantages} == {500_000}
    assert all(row.menu_values == () for row in samples.rows)


def test_groups_never_mix_harnesses_or_tenants():
    one = make_content(0)
    same_task = make_content(3)
    assert group_of(one) == group_of(same_task)
    other = msgspec.structs.replace(
        same_task, calls=tuple(msgspec.structs.replace(c, harness="h2") for c in same_task.calls)
    )
    assert group_of(other)[0] != group_of(one)[0]
    assert group_of(msgspec.structs.replace(one, tenant="b"))[0] != group_of(one)[0]


def test_no_task_key_is_a_singleton():
    alone = msgspec.structs.replace(
        CONTENT, calls=tuple(msgspec.structs.replace(c, task_key="") for c in CONTENT.calls)
    )
    assert group_of(alone)[0] == alone.orchestration_id


def test_holdout_is_about_its_share_and_only_of_the_id():
    ids = [make_content(0).orchestration_id + str(i) for i in range(4000)]
    kept = sum(is_holdout(i, 0.1) for i in ids)
    assert 300 < kept < 500
    assert not any(is_holdout(i, 0.0) for i in ids)
    assert all(is_holdout(i, 0.2) for i in ids if is_holdout(i, 0.1))
