"""Network and artifacts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_support import TOKENIZER, net

from spanloop.learner.policy import PolicyConfig, PolicyNet, load_artifact, save_artifact
from spanloop.schemas.errors import ConfigError, SchemaError, TerminalError


def test_no_position_sees_its_future_or_the_padding():
    made = net(1)
    ids = torch.tensor([[1, 5, 6, 7, 3], [1, 8, 3, 0, 0]])
    whole = made(ids, torch.tensor([5, 3]))
    assert torch.equal(whole[1, 3:], torch.zeros(2, TOKENIZER.size))
    changed = made(torch.tensor([[1, 5, 6, 9, 9]]))
    torch.testing.assert_close(whole[0, :3], changed[0, :3])
    assert not torch.allclose(whole[0, 3], changed[0, 3])
    torch.testing.assert_close(whole[1, :3], made(torch.tensor([[1, 8, 3]]))[0])
    torch.testing.assert_close(
        made.last_logits(ids, torch.tensor([5, 3])), torch.stack([whole[0, 4], whole[1, 2]])
    )


def test_the_first_policy_follows_its_seed_only():
    config = PolicyConfig(TOKENIZER.size)
    before = torch.random.get_rng_state()
    one, same, other = (
        PolicyNet.initial(config, 1),
        PolicyNet.initial(config, 1),
        PolicyNet.initial(config, 2),
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)
    spread = torch.softmax(one(torch.tensor([[1, 5, 3]]))[0, -1], -1)
    assert spread.max() < 2 / TOKENIZER.size  # near uniform


def test_sizes_must_fit():
    with pytest.raises(ConfigError, match="multiple"):
        PolicyConfig(10, width=10, heads=4)
    with pytest.raises(ConfigError, match="positive"):
        PolicyConfig(10, layers=0)


def test_an_artifact_comes_back_bit_for_bit(tmp_path):
    folder = tmp_path / "policies" / "policy@v1"
    sha256 = save_artifact(folder, net(1), TOKENIZER, about={"version": 1})
    loaded = load_artifact(folder, sha256=sha256)
    ids = torch.tensor([[1, 5, 3]])
    assert torch.equal(loaded.net(ids), net(1)(ids))
    assert loaded.tokenizer.vocabulary == TOKENIZER.vocabulary
    assert loaded.manifest.about == {"version": 1}
    assert not any(p.requires_grad for p in loaded.net.parameters())
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "model.safetensors"]


def test_a_version_is_never_rewritten(tmp_path):
    folder = tmp_path / "policy@v1"
    sha256 = save_artifact(folder, net(1), TOKENIZER)
    assert save_artifact(folder, net(1), TOKENIZER) == sha256
    with pytest.raises(TerminalError, match="never rewritten"):
        save_artifact(folder, net(2), TOKENIZER)
    assert load_artifact(folder).manifest.sha256 == sha256


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def disk_full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spanloop.learner.durable.sync_folder", disk_full)
        with pytest.raises(OSError, match="No space"):
            save_artifact(tmp_path / "policy@v1", net(1), TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def flip(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])


def edit_manifest(folder, **values):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **values}))


def reweigh(folder, change):
    """Other weights under a manifest that agrees with them."""
    import hashlib

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    edit_manifest(folder, sha256=sha256, files={"model.safetensors": {"sha256": sha256, "size": len(data)}})


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (flip, "corrupt: its sha256"),
        (cut, "corrupt: its sha256"),
        (lambda f: (f / "manifest.json").unlink(), "no policy artifact"),
        (lambda f: (f / "model.safetensors").unlink(), "no policy artifact"),
        (lambda f: (f / "manifest.json").write_text("{"), "not a valid Manifest"),
        (lambda f: edit_manifest(f, format=9), "format 9"),
        (lambda f: edit_manifest(f, vocabulary=["a"]), "tokens in the vocabulary"),
        (
            lambda f: reweigh(f, lambda w: w["head.bias"].fill_(float("nan"))),
            "head.bias has values that are not finite",
        ),
        (lambda f: reweigh(f, lambda w: w.pop("head.bias")), "do not fit the network: head.bias"),
        (lambda f: reweigh(f, lambda w: w.update({"head.bias": torch.zeros(3)})), "do not fit"),
        (lambda f: reweigh(f, lambda w: w.update({"head.bias": w["head.bias"].half()})), "do not fit"),
    ],
)
def test_what_loading_refuses(tmp_path, harm, says):
    folder = tmp_path / "policy@v1"
    save_artifact(folder, net(1), TOKENIZER)
    load_artifact(folder)
    harm(folder)
    with pytest.raises(SchemaError, match=says):
        load_artifact(folder)


def test_the_logs_hash_is_checked_too(tmp_path):
    save_artifact(tmp_path / "policy@v1", net(1), TOKENIZER)
    with pytest.raises(SchemaError, match="the log says"):
        load_artifact(tmp_path / "policy@v1", sha256="0" * 64)
