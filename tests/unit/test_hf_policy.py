"""LoRA policies: the same numbers as transformers, gradients on LoRA only, artifacts that prove what they are."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_world import VOCABULARY, batch_of, first_policy, settings, tiny
from safetensors.torch import load_file, save_file

from spanloop.learner import hf_artifact, hf_policy
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.model import chosen_log_probs, load_artifact, read_manifest, save_artifact
from spanloop.learner.trainer import initial_policy
from spanloop.schemas.errors import ConfigError, SchemaError, TerminalError

ROWS = ((1, 12, 5, 3, 8, 2), (1, 12, 6, 7, 5, 9, 3, 10), (1, 12, 3, 9))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def trained(model: Path) -> HfPolicy:
    """A version whose LoRA changes the answers."""
    net = first_policy(model).twin()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return net


def padded() -> tuple[torch.Tensor, list[int]]:
    lengths = [len(row) for row in ROWS]
    return torch.tensor([list(row) + [0] * (max(lengths) - len(row)) for row in ROWS]), lengths


def plain_log_probs(folder: Path, adapter: Path | None) -> list[torch.Tensor]:
    """(T, V) of each row by transformers and peft as a user would call them, one row at a time, without padding."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return [model.eval()(torch.tensor([row])).logits[0].log_softmax(-1) for row in ROWS]


def test_the_first_version_is_the_base(model: Path) -> None:
    wanted = plain_log_probs(model, None)
    got = first_policy(model).probe(ROWS)
    for row, logp_TV, scores in zip(ROWS, wanted, got, strict=True):
        assert np.allclose(scores, [float(logp_TV[t, row[t + 1]]) for t in range(len(row) - 1)], atol=1e-5)


def test_log_probs_are_those_of_peft(model: Path, trained: HfPolicy, tmp_path: Path) -> None:
    """Padded rows, decisions anywhere, menus and whole vocabulary, against unpadded rows of the saved adapter in peft."""
    save_artifact(tmp_path / "policy@v1", trained, None)
    wanted = plain_log_probs(model, tmp_path / "policy@v1")
    assert np.abs(wanted[0].numpy() - plain_log_probs(model, None)[0].numpy()).max() > 0.1
    ids_BT, lengths = padded()
    rows = [r for r, row in enumerate(ROWS) for _ in row[1:]]
    positions = [t for row in ROWS for t in range(len(row) - 1)]
    expected_NV = torch.stack([wanted[r][t] for r, t in zip(rows, positions, strict=True)])
    taken = torch.tensor([ROWS[r][t + 1] for r, t in zip(rows, positions, strict=True)])

    whole = batch_of(ids_BT, lengths, rows, positions, taken[:, None], full=True)
    logp_NK, entropy_N = trained.decide(whole)
    assert torch.allclose(logp_NK[:, 0], expected_NV.gather(1, taken[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy_N, -(expected_NV.exp() * expected_NV).sum(1), atol=1e-5)

    menus = torch.tensor([[8, 9, 2]] * len(rows))
    logp_NK, entropy_N = trained.decide(batch_of(ids_BT, lengths, rows, positions, menus))
    assert torch.allclose(logp_NK, expected_NV[:, [8, 9, 2]].log_softmax(-1), atol=1e-5)
    assert not entropy_N.any()

    one_by_one = chosen_log_probs(trained, whole, 0.0, tokens=1)
    assert torch.allclose(one_by_one, expected_NV.gather(1, taken[:, None])[:, 0], atol=1e-5)
    floored = chosen_log_probs(trained, whole, 0.1, tokens=4096).exp()
    assert torch.allclose(floored, 0.9 * one_by_one.exp() + 0.1 / VOCABULARY, atol=1e-5)


def test_logits_a_few_at_a_time_and_indirect_heads_give_the_same(
    trained: HfPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_BT, lengths = padded()
    batch = batch_of(ids_BT, lengths, [0, 1, 2], [1, 3, 2], torch.tensor([[5], [7], [3]]), full=True)
    expected, entropy = trained.decide(batch)
    monkeypatch.setattr(hf_policy, "LOGITS_MAX", VOCABULARY)
    got, few_entropy = trained.decide(batch)
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.allclose(few_entropy, entropy, atol=1e-6)
    monkeypatch.setattr(trained._base, "direct", False)
    assert torch.allclose(trained.decide(batch)[0], expected, atol=1e-6)


def test_only_lora_has_gradients(trained: HfPolicy) -> None:
    ids_BT, lengths = padded()
    batch = batch_of(ids_BT, lengths, [0, 1], [1, 3], torch.tensor([[5], [7]]), full=True)
    logp_NK, entropy_N = trained.decide(batch)
    (logp_NK.sum() + entropy_N.sum()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained.trainable().values())
    others = [p for n, p in trained._base._model.named_parameters() if ".lora_" not in n]
    assert others
    assert not any(p.requires_grad or p.grad is not None for p in others)


def test_gradient_is_that_of_finite_differences(trained: HfPolicy) -> None:
    ids_BT, lengths = padded()
    batch = batch_of(ids_BT, lengths, [0, 1], [1, 3], torch.tensor([[5], [7]]), full=True)

    def value() -> torch.Tensor:
        logp_NK, entropy_N = trained.decide(batch)
        return logp_NK.sum() + 0.5 * entropy_N.sum()

    value().backward()
    for name in list(trained.trainable())[::5]:
        parameter = trained.trainable()[name]
        assert parameter.grad is not None
        at = int(parameter.grad.abs().argmax())
        with torch.no_grad():
            flat = parameter.view(-1)
            flat[at] += 1e-2
            above = float(value())
            flat[at] -= 2e-2
            below = float(value())
            flat[at] += 1e-2
        slope = (above - below) / 2e-2
        assert slope == pytest.approx(float(parameter.grad.view(-1)[at]), rel=0.05, abs=2e-3)


def test_versions_share_a_base_and_keep_apart(model: Path, trained: HfPolicy) -> None:
    first = first_policy(model)
    before = first.probe(ROWS)
    twin = trained.twin()
    with torch.no_grad():
        for parameter in twin.trainable().values():
            parameter.zero_()
    assert first.probe(ROWS) == before
    assert trained.probe(ROWS) != before
    assert np.allclose(np.concatenate(twin.probe(ROWS)), np.concatenate(before), atol=1e-6)


def test_the_seed_decides_the_first_version(model: Path) -> None:
    base = first_policy(model)._base
    one, again, other = base.initial(0), base.initial(0), base.initial(1)
    assert all(torch.equal(one[k], again[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)
    assert all(bool(t.any()) == (".lora_A." in name) for name, t in one.items())


def test_targets_and_folder_are_checked(model: Path, tmp_path: Path) -> None:
    net = first_policy(model, lora_targets=("v_proj", "q_proj"), lora_rank=4)
    assert net.config.targets == ("q_proj", "v_proj")
    assert {name.split(".")[-3] for name in net.tensors()} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"lm_head.*the output head stays"):
        first_policy(model, lora_targets=("lm_head",))
    with pytest.raises(ConfigError, match="nothing is downloaded"):
        first_policy(tmp_path / "org" / "model")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        first_policy(broken)


def test_bfloat16_base_keeps_lora_in_float32(model: Path) -> None:
    exact, rough = first_policy(model), first_policy(model, dtype="bfloat16")
    assert rough.config.dtype == "bfloat16"
    assert all(t.dtype == torch.float32 for t in rough.tensors().values())
    gaps = np.abs(np.concatenate(exact.probe(ROWS)) - np.concatenate(rough.probe(ROWS)))
    assert 0 < gaps.mean() < rough.tolerance.mean
    assert gaps.max() < rough.tolerance.largest


# ---------------------------------------------------------------- artifacts


def test_artifact_round_trip(model: Path, trained: HfPolicy, tmp_path: Path) -> None:
    folder = tmp_path / "policy@v3"
    sha256 = save_artifact(folder, trained, None, about={"version": 3, "parent": 2})
    assert save_artifact(folder, trained, None) == sha256
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    ]  # fmt: skip
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    assert hashlib.sha256(lines.encode()).hexdigest() == sha256
    assert json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"] == str(model)
    manifest = read_manifest(folder)
    assert manifest.config == trained.config
    assert manifest.about == {"version": 3, "parent": 2}
    loaded = load_artifact(folder, sha256=sha256).net
    assert all(torch.equal(loaded.tensors()[k], v) for k, v in trained.tensors().items())
    assert not any(p.requires_grad for p in loaded.trainable().values())
    assert loaded.probe(ROWS) == trained.probe(ROWS)
    with pytest.raises(TerminalError, match="never rewritten"):
        save_artifact(folder, first_policy(model), None)
    with pytest.raises(SchemaError, match="the log says"):
        load_artifact(folder, sha256="0" * 64)


def _flip(folder: Path) -> None:
    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(data)


def _louder(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1600}))


def _louder_everywhere(folder: Path) -> None:
    """Config and manifest agree; only the log's hash can tell."""
    _louder(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    data = (folder / "adapter_config.json").read_bytes()
    manifest["config"]["alpha"] = 1600
    manifest["files"]["adapter_config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


def _link(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "adapter_model.safetensors").rename(outside)
    (folder / "adapter_model.safetensors").symlink_to(outside)


def _escape(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["../outside"] = manifest["files"].pop("adapter_model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _fifo(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def _missing(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    "tamper", [_flip, _louder, _louder_everywhere, _pickle, _link, _escape, _fifo, _missing]
)
def test_tampering_is_refused(tamper, trained: HfPolicy, tmp_path: Path) -> None:
    folder = tmp_path / "policy@v1"
    sha256 = save_artifact(folder, trained, None)
    tamper(folder)
    with pytest.raises(SchemaError):
        load_artifact(folder, sha256=sha256)


@pytest.mark.parametrize("what", ["shape", "name", "nan"])
def test_other_tensors_are_refused(what: str, trained: HfPolicy, tmp_path: Path) -> None:
    """A well-formed folder whose hashes all agree, with tensors that do not fit or are no numbers."""
    tensors = dict(trained.tensors())
    name = next(iter(tensors))
    if what == "shape":
        tensors[name] = tensors[name][:-1]
    elif what == "name":
        tensors[name + "x"] = tensors.pop(name)
    hf_artifact.save(tmp_path / "policy@v1", tensors, trained.config, {})
    if what == "nan":
        tensors[name] = tensors[name].clone().fill_(float("nan"))
        with pytest.raises(TerminalError, match="not finite"):
            hf_artifact.save(tmp_path / "policy@v2", tensors, trained.config, {})
        _forge(tmp_path / "policy@v1", {name: tensors[name]})
    with pytest.raises(SchemaError, match=r"do not fit|not finite"):
        load_artifact(tmp_path / "policy@v1")


def _forge(folder: Path, changed: dict[str, torch.Tensor]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), **changed}, path)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    data = path.read_bytes()
    manifest["files"][path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    lines = "".join(f"{manifest['files'][n]['sha256']}  {n}\n" for n in sorted(manifest["files"]))
    manifest["sha256"] = hashlib.sha256(lines.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_another_base_is_refused(model: Path, trained: HfPolicy, tmp_path: Path) -> None:
    from spanloop.learner import hf_base

    folder = tmp_path / "policies" / "policy@v0"
    save_artifact(folder, trained, None)
    assert initial_policy(settings(tmp_path, model))[2].probe(ROWS) == trained.probe(ROWS)
    with pytest.raises(ConfigError, match="another workspace"):
        initial_policy(settings(tmp_path, model, lora_rank=4))
    moved = json.loads((folder / "manifest.json").read_bytes())
    moved["config"]["base_hash"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(moved))
    with pytest.raises(SchemaError, match="another model"):
        load_artifact(folder)
    assert trained.config in hf_base._BASES


def test_transformers_is_imported_only_for_a_model() -> None:
    code = (
        "import sys, spanloop.learner.trainer, spanloop.learner.promoter, spanloop.learner.hf_artifact; "
        "print([m for m in ('transformers', 'peft', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
