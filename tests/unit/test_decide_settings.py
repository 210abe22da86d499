"""Choosing a decision policy: what runs, what does not go together, and what doctor says is missing."""

from __future__ import annotations

from typing import Any

import pytest
from decide_support import ASKED, deciding

from spanloop.pipeline.learnable import examine
from spanloop.pipeline.settings_text import example
from spanloop.pipeline.supervisor import child_specs
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import load_settings


def test_up_starts_learner_and_the_server_of_decisions() -> None:
    settings = load_settings(flags={"learner": {"decisions": True}})
    specs = {spec.name: " ".join(spec.command) for spec in child_specs(settings, None, ())}
    assert "spanloop.learner.serving.decisions" in specs["serving"]
    assert {"learner", "gateway", "collector", "pipeline"} <= set(specs)
    assert {spec.name for spec in child_specs(load_settings(), None, ())}.isdisjoint({"serving", "learner"})


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"decisions": True, "vocabulary": ["a"]}},
        {"learner": {"decisions": True, "model": "m"}},
        {"learner": {"decisions": True}, "serving": {"engine": "vllm"}},
    ],
)
def test_one_kind_of_policy_a_workspace(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="decision"):
        load_settings(flags=sections)


def test_the_example_of_settings_explains_it() -> None:
    text = example()
    assert "decisions = false" in text
    assert "decide_timeout_s = 0.5" in text


@pytest.mark.parametrize(
    ("training", "missing"),
    [
        (True, set()),
        (False, {"content.training = true (SPANLOOP_CONTENT__TRAINING=true)"}),
    ],
)
async def test_doctor_says_what_decisions_need(tmp_path, training: bool, missing: set[str]) -> None:
    async with deciding(tmp_path, training=training) as at:
        await at.client.post("/v1/decide", json=ASKED)
    records = at.log.read([topics.SPANS], {}, 100)
    (found,) = examine(records, at.gateway.settings)
    needs = [need for need in found.needs if need.for_ == "decision training"]
    assert {need.setting for need in needs} == missing
    assert found.with_version == 1
