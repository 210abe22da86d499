"""The decision policy: features, scores, artifacts. Laws before examples."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from spanloop.learner.arrays import collate
from spanloop.learner.batches import Call, Decision, Rollout
from spanloop.learner.decision_features import MENU_MAX, DecisionRequest, MenuItem, decision_ids
from spanloop.learner.decision_policy import DecisionConfig, DecisionNet, Scorer, load_artifact
from spanloop.learner.model import TensorBatch, read_manifest
from spanloop.learner.model import load_artifact as load_any
from spanloop.learner.serving.decisions import Asked, answer
from spanloop.schemas.decision_tokens import MARK, VOCABULARY_SIZE, is_decision, read_decision, written
from spanloop.schemas.errors import SchemaError, TerminalError

CONFIG = DecisionConfig(width=8, buckets=256, pairs=1024)

values = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**6), 10**6),
    st.text(max_size=6),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(st.text(max_size=3), st.integers(0, 9)), max_size=4),
)
names = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), min_size=1, max_size=6)
states = st.dictionaries(names, values, max_size=6)
menus = st.lists(
    st.builds(MenuItem, names, st.dictionaries(names, values, max_size=3)),
    min_size=1,
    max_size=5,
    unique_by=lambda item: item.name,
)
requests = st.builds(DecisionRequest, st.sampled_from(["spawn", "stop"]), menus, states, st.text(max_size=12))


def trained(seed: int = 1) -> DecisionNet:
    """A network that is far from uniform."""
    net = DecisionNet.initial(CONFIG, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        net.pairs.weight.normal_(0.0, 0.5, generator=generator)
        net.head.weight.mul_(20.0)
    return net.eval()


def asked(request: DecisionRequest, seed: str = "s") -> Asked:
    return Asked(request.kind, request.menu, request.state, request.text, model="policy@v1", seed=seed)


@settings(max_examples=60, deadline=None)
@given(requests, st.randoms(use_true_random=False))
def test_the_order_of_features_and_options_changes_nothing(request, rng):
    def shuffled(given):
        pairs = list(given.items())
        rng.shuffle(pairs)
        return dict(pairs)

    items = [MenuItem(item.name, shuffled(item.features)) for item in request.menu]
    rng.shuffle(items)
    other = DecisionRequest(request.kind, items, shuffled(request.state), request.text)
    assert decision_ids(other)[0] == decision_ids(request)[0]
    scorer = Scorer(trained())
    one, two = (answer(asked(each), scorer, 0.1) for each in (request, other))
    assert one["chosen"] == two["chosen"]
    assert dict(zip(one["options"], one["propensities"], strict=True)) == dict(
        zip(two["options"], two["propensities"], strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(requests)
def test_ids_are_read_back_and_stay_in_their_ranges(request):
    decision, places = decision_ids(request)
    ids = written(decision)
    assert is_decision(ids)
    assert read_decision(ids) == decision
    assert all(0 < i < VOCABULARY_SIZE for i in ids)
    assert list(ids).count(MARK) == 1
    assert sorted(places) == list(range(len(request.menu)))


def rollout(request: DecisionRequest, chosen: int = 0, name: str = "o") -> Rollout:
    decision, _ = decision_ids(request)
    prompt = written(decision)
    ids = (*prompt, decision.options[chosen])
    made = Decision(len(prompt) - 1, decision.options, chosen, -0.5, 0.3)
    return Rollout(name, 1, "g", 1.0, 0.0, (1,), (Call(ids, (made,)),))


@settings(max_examples=40, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5))
def test_served_and_trained_numbers_agree_whatever_is_in_the_batch(given_):
    net, scorer = trained(), Scorer(trained())
    batch = TensorBatch.of(collate([rollout(r, name=str(n)) for n, r in enumerate(given_)]))
    logp_NK, _ = net.decide(batch)
    for n, request in enumerate(given_):
        scores = scorer.scores(decision_ids(request)[0]).astype(np.float64)
        wanted = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
        assert np.allclose(logp_NK[n, : len(wanted)].detach().numpy(), wanted, atol=2e-4)
        assert bool((logp_NK[n, len(wanted) :] < -1e3).all())


@settings(max_examples=40, deadline=None)
@given(requests, st.text(min_size=1, max_size=8), st.floats(0.0, 0.9))
def test_an_answer_is_a_distribution_with_its_floor_and_repeats_bit_for_bit(request, seed, floor):
    scorer = Scorer(trained())
    got = answer(asked(request, seed), scorer, floor)
    assert math.isclose(sum(got["propensities"]), 1.0, abs_tol=1e-9)
    assert min(got["propensities"]) >= floor / len(request.menu) - 1e-12
    assert got["propensity"] > 0.0
    assert answer(asked(request, seed), Scorer(trained()), floor) == got


def test_the_seed_draws_with_the_propensities():
    request = DecisionRequest("stop", ["stop", "again", "ask"], {"margin": 0.4})
    scorer = Scorer(trained(3))
    drawn = [answer(asked(request, str(n)), scorer, 0.0) for n in range(3000)]
    for place, name in enumerate(("stop", "again", "ask")):
        share = sum(one["chosen"] == name for one in drawn) / len(drawn)
        assert abs(share - drawn[0]["propensities"][place]) < 0.035


def test_the_first_version_is_near_uniform_also_over_menus_that_nobody_saw():
    scorer = Scorer(DecisionNet.initial(DecisionConfig(), 0))
    for n in range(20):
        items = [MenuItem(f"option {n}/{k}", {"x": k, "kind": "new"}) for k in range(5)]
        got = answer(asked(DecisionRequest("spawn", items, {"a": n, "b": "text"})), scorer, 0.0)
        assert max(got["propensities"]) < 0.3


@pytest.mark.parametrize(
    "request_",
    [
        DecisionRequest("stop", []),
        DecisionRequest("stop", ["a", "a"]),
        DecisionRequest("", ["a"]),
        DecisionRequest("stop", [""]),
        DecisionRequest("stop", ["x" * 129]),
        DecisionRequest("stop", [f"o{n}" for n in range(MENU_MAX + 1)]),
        DecisionRequest("stop", ["a"], {"x": math.nan}),
        DecisionRequest("stop", ["a"], {"x": math.inf}),
        DecisionRequest("stop", ["a"], {"x": 10**400}),
        DecisionRequest("stop", ["a"], {"x": list(range(65))}),
        DecisionRequest("stop", ["a"], {str(n): n for n in range(65)}),
        DecisionRequest("stop", ["a"], text="x" * 20_000),
        DecisionRequest("stop", ["a"], text=" ".join(map(str, range(600)))),
        DecisionRequest("stop", [MenuItem("a", {str(n): n for n in range(33)})]),
    ],
)
def test_what_is_beyond_a_limit_is_refused(request_):
    with pytest.raises(SchemaError):
        decision_ids(request_)


def test_gradients_are_those_of_finite_differences():
    rng = random.Random(4)
    given_ = [
        DecisionRequest("stop", ["a", MenuItem("b", {"x": rng.random()})], {"y": rng.random()})
        for _ in range(3)
    ]
    net = trained().double()
    batch = TensorBatch.of(collate([rollout(r, k % 2, str(k)) for k, r in enumerate(given_)]))
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

    def loss() -> torch.Tensor:
        logp_NK, _ = net.decide(batch)
        return (logp_NK.gather(1, batch.chosen_N[:, None])[:, 0] * weight).sum()

    loss().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        for at in torch.argsort(grad.abs(), descending=True)[:4].tolist():
            before = float(flat[at])
            ends = []
            for step in (1e-6, -1e-6):
                flat[at] = before + step
                ends.append(float(loss().detach()))
            flat[at] = before
            assert math.isclose((ends[0] - ends[1]) / 2e-6, float(grad[at]), rel_tol=1e-4, abs_tol=1e-7)


# ---------------------------------------------------------------- artifacts


def test_an_artifact_comes_back_bit_for_bit_and_is_never_rewritten(tmp_path: Path):
    folder = tmp_path / "policy@v1"
    sha256 = trained().save(folder, None, {"version": 1})
    assert trained().save(folder, None, {"version": 1}) == sha256
    found = load_any(folder, sha256=sha256)
    assert found.tokenizer is None
    assert read_manifest(folder).config == CONFIG
    for name, tensor in trained().tensors().items():
        assert torch.equal(tensor, found.net.tensors()[name])
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]
    with pytest.raises(TerminalError, match="never rewritten"):
        trained(2).save(folder, None, {})


def _flipped(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _replaced(folder: Path, change) -> None:
    """Weights that match the manifest's hash and are still wrong."""
    import hashlib

    tensors = load((folder / "model.safetensors").read_bytes())
    change(tensors)
    data = save(tensors)
    (folder / "model.safetensors").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = manifest["files"]["model.safetensors"]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest["files"]["model.safetensors"]["size"] = len(data)
    (folder / "manifest.json").write_text(json.dumps(manifest))


TAMPERED = {
    "a flipped bit": _flipped,
    "not a number": lambda folder: _replaced(folder, lambda t: t["pairs.weight"].fill_(math.nan)),
    "a missing tensor": lambda folder: _replaced(folder, lambda t: t.pop("hidden.bias")),
    "another shape": lambda folder: _replaced(folder, lambda t: t.update({"hidden.bias": torch.zeros(3)})),
    "a pickle": lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04N."),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "another kind": lambda folder: (folder / "manifest.json").write_text('{"kind": "decision", "format": 9}'),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_tampering_is_refused(how: str, tmp_path: Path):
    folder = tmp_path / "policy@v1"
    trained().save(folder, None, {})
    TAMPERED[how](folder)
    with pytest.raises(SchemaError):
        load_artifact(folder)
