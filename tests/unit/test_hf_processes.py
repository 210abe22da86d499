"""What a Hugging Face model changes elsewhere: which processes run, and which tokens count as forced."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spanloop.pipeline.credit.states import has_menus, is_forced
from spanloop.pipeline.supervisor import child_specs
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.orchestration import MenuOption, ModelCall
from spanloop.schemas.settings import load_settings


def names(**sections: Any) -> list[str]:
    return [spec.name for spec in child_specs(load_settings(flags=sections), None, ())]


def test_no_policy_no_learner() -> None:
    assert names() == ["collector", "pipeline", "gateway"]


@pytest.mark.parametrize(
    "elsewhere",
    [{"gateway": {"upstream": "http://127.0.0.1:8000/v1"}}, {"serving": {"engine": "vllm", "urls": ["http://127.0.0.1:8000"]}}],
)  # fmt: skip
def test_a_model_served_elsewhere_is_trained_here(elsewhere: dict[str, Any]) -> None:
    found = names(learner={"model": "base"}, **elsewhere)
    assert "learner" in found
    assert "serving" not in found


def test_a_model_needs_vllm() -> None:
    with pytest.raises(ConfigError, match=r"serving\.engine = 'vllm'"):
        names(learner={"model": "base"})
    assert {"learner", "serving"} <= set(names(learner={"model": "base"}, serving={"engine": "vllm"}))
    assert "learner" not in names(learner={"model": "base", "enabled": False}, serving={"enabled": False})


def call(*menus: tuple[MenuOption, ...]) -> ModelCall:
    return ModelCall(
        "c", "a", ("s",), 0, 1, prompt_token_ids=(1,), response_token_ids=(5, 6), logprobs=(-0.7, 0.0), menus=menus
    )  # fmt: skip


def test_a_menu_that_was_cut_is_unknown_not_forced() -> None:
    """Over a whole vocabulary the gateway records the sampled token alone, with its probability."""
    open_ = (MenuOption(5, math.log(0.5)), MenuOption(6, math.log(0.5)))
    grammar = call(open_, (MenuOption(6, 0.0),))
    assert has_menus(grammar)
    assert [is_forced(grammar, i) for i in (0, 1)] == [False, True]
    cut = call((MenuOption(5, -0.7),), (MenuOption(6, 0.0),))
    assert not has_menus(cut)
    assert not any(is_forced(cut, i) for i in (0, 1))
