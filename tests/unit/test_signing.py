"""Signed versions: whatever is changed in a folder is refused; who is trusted, and what may stay unsigned."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import CONFIG, WORDS, World, drive, learner

from spanloop.learner import signing
from spanloop.learner.artifact import code_version, origin_of, signed_by
from spanloop.learner.cli import policies
from spanloop.learner.model import load_artifact, read_manifest, save_artifact
from spanloop.learner.policy import PolicyNet
from spanloop.learner.provenance import provenance
from spanloop.learner.serving.adapters import Adapters
from spanloop.learner.signing import NOBODY, Trust, open_signer, trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.errors import ConfigError, SchemaError

NET = PolicyNet.initial(CONFIG, 1)
TOKENIZER = Tokenizer(WORDS)


def version(workspace: Path, number: int = 1, *, net: PolicyNet = NET, signed: bool = True) -> Path:
    folder = workspace / "policies" / f"policy@v{number}"
    save_artifact(folder, net, TOKENIZER, signer=open_signer(workspace) if signed else None)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one signed version."""
    workspace = tmp_path_factory.mktemp("signed")
    version(workspace)
    return workspace


# ---------------------------------------------------------------- laws


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["manifest.json", "manifest.sig", "model.safetensors"]), st.integers(0), st.integers(0, 7)
)
def test_any_changed_bit_is_refused(made: Path, name: str, place: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(shutil.copytree(made / "policies" / "policy@v1", Path(home) / "policy@v1"))
        data = bytearray((folder / name).read_bytes())
        data[place % len(data)] ^= 1 << bit
        (folder / name).write_bytes(data)
        with pytest.raises(SchemaError):
            load_artifact(folder, trust=trust_of(made))
        with pytest.raises(SchemaError):  # right without any key: an altered folder is no folder of anybody
            load_artifact(folder)


def test_sizes_that_no_network_has_are_refused(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "policies" / "policy@v1", tmp_path / "policy@v1"))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["config"]["heads"] = 3
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SchemaError):
        load_artifact(folder)
    (folder / "manifest.sig").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"signer": ""}))
    with pytest.raises(SchemaError, match=r"manifest\.json: learner\.width = 16 is not a multiple"):
        load_artifact(folder)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["manifest.json", "manifest.sig", "model.safetensors"]), st.integers(1, 40))
def test_any_cut_file_is_refused(made: Path, name: str, cut: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(shutil.copytree(made / "policies" / "policy@v1", Path(home) / "policy@v1"))
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-cut])
        with pytest.raises(SchemaError):
            load_artifact(folder, trust=trust_of(made))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "policy.pt", "optimizer.pkl", "notes.txt"])
def test_nothing_pickled_is_loaded_or_even_there(made: Path, tmp_path: Path, name: str) -> None:
    class Boom:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    folder = Path(shutil.copytree(made / "policies" / "policy@v1", tmp_path / "policy@v1"))
    (folder / name).write_bytes(pickle.dumps(Boom()))
    with pytest.raises(SchemaError, match=f"do not belong to it: {name}"):
        load_artifact(folder, trust=trust_of(made))
    (folder / name).rename(folder / "model.safetensors")  # in place of the weights
    with pytest.raises(SchemaError):
        load_artifact(folder)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- trust


def test_a_signed_version_loads_and_says_by_whom(made: Path) -> None:
    folder, trust = made / "policies" / "policy@v1", trust_of(made)
    signer = open_signer(made)
    assert read_manifest(folder, trust).signer == signer.name
    assert trust.keys == {signer.name: "workspace"}
    assert signed_by(folder, trust) == f"workspace ({signer.name})"
    assert load_artifact(folder, trust=trust).net.state_dict().keys() == NET.state_dict().keys()
    with pytest.raises(SchemaError, match="does not trust"):
        load_artifact(folder, trust=NOBODY)


def test_another_workspaces_version_needs_its_public_key(made: Path, tmp_path: Path) -> None:
    other = version(tmp_path)
    with pytest.raises(SchemaError, match="whom this workspace does not trust"):
        load_artifact(other, trust=trust_of(made))
    here = tmp_path / "here"
    open_signer(here)
    shutil.copy(made / "signing/trusted/workspace.pub.pem", here / "signing/trusted/made.pub.pem")
    trust = trust_of(here)
    assert signed_by(made / "policies" / "policy@v1", trust).startswith("made (ed25519:")
    with pytest.raises(SchemaError, match="does not trust"):
        load_artifact(other, trust=trust)


def test_a_removed_signature_is_no_older_version(made: Path, tmp_path: Path) -> None:
    """Neither the file alone nor signer, file and format together turn a signed version into one from before."""
    folder = Path(shutil.copytree(made / "policies" / "policy@v1", tmp_path / "policy@v1"))
    signature = (folder / "manifest.sig").read_bytes()
    (folder / "manifest.sig").unlink()
    with pytest.raises(SchemaError, match=r"signature of ed25519:.* is missing"):
        load_artifact(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["signer"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(SchemaError, match="is not signed; versions of this workspace are"):
        load_artifact(folder, trust=trust_of(made))
    (folder / "manifest.sig").write_bytes(signature)
    with pytest.raises(SchemaError, match="names no signer"):
        load_artifact(folder)


def test_versions_from_before_the_key_load_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = version(tmp_path, 0, signed=False)
    manifest = json.loads((old / "manifest.json").read_bytes())
    first = {k: manifest[k] for k in ("sha256", "size", "config", "vocabulary", "about")}  # as format 1 was
    (old / "manifest.json").write_text(json.dumps({**first, "format": 1}))
    assert trust_of(tmp_path) == Trust({}, None)
    load_artifact(old, trust=trust_of(tmp_path))  # a reader that is there before the learner
    open_signer(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_artifact(old, trust=trust_of(tmp_path))
    assert "made before versions were" in caplog.text
    assert signed_by(old, trust_of(tmp_path)) == "nobody (made before versions were signed)"
    late = version(tmp_path, 1, signed=False)
    with pytest.raises(SchemaError, match="is not signed"):
        load_artifact(late, trust=trust_of(tmp_path))
    moved = json.loads((old / "manifest.json").read_bytes())
    (old / "manifest.json").write_text(json.dumps({**moved, "about": {"version": 7}}))
    with pytest.raises(SchemaError, match="is not signed"):
        load_artifact(old, trust=trust_of(tmp_path))


def test_the_embedded_server_refuses_it_too(made: Path, tmp_path: Path) -> None:
    adapters = Adapters(
        tmp_path, limit=2, now_s=lambda: 0.0, wall_s=lambda: 0.0, trust=lambda: trust_of(made)
    )
    adapters.read(made / "policies" / "policy@v1")
    with pytest.raises(SchemaError, match="not signed"):
        adapters.read(version(tmp_path, signed=False))


# ---------------------------------------------------------------- keys


def test_the_key_is_made_once_and_kept_to_its_owner(tmp_path: Path) -> None:
    signer = open_signer(tmp_path)
    private = tmp_path / "signing" / "private.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert open_signer(tmp_path).name == signer.name
    assert signer.sign(b"x") == open_signer(tmp_path).sign(b"x")
    public = tmp_path / "signing" / "trusted" / "workspace.pub.pem"
    public.unlink()
    assert open_signer(tmp_path).name == signer.name
    assert public.exists()
    private.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_signer(tmp_path)
    private.chmod(0o600)
    private.write_text("none")
    with pytest.raises(ConfigError, match="is no private key"):
        open_signer(tmp_path)


def test_a_lost_private_key_does_not_orphan_its_versions(tmp_path: Path) -> None:
    folder = version(tmp_path)
    (tmp_path / "signing" / "private.pem").unlink()
    with pytest.raises(ConfigError, match="another name, so that its versions stay trusted"):
        open_signer(tmp_path)
    trusted = tmp_path / "signing" / "trusted"
    (trusted / "workspace.pub.pem").rename(trusted / "before.pub.pem")
    open_signer(tmp_path)
    assert signed_by(folder, trust_of(tmp_path)).startswith("before (")


def test_killed_while_the_key_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the three writes, before and after: the next start has one key and trusts what was there before."""
    write = signing._replace
    for at in range(3):
        for after in (False, True):
            workspace = tmp_path / f"{at}{after}"
            old = version(workspace, 0, signed=False)
            count = 0

            def fragile(path: Path, data: bytes, mode: int, at: int = at, after: bool = after) -> None:
                nonlocal count
                count += 1
                if count != at + 1:
                    return write(path, data, mode)
                if after:
                    write(path, data, mode)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(signing, "_replace", fragile)
                with pytest.raises(KeyboardInterrupt):
                    open_signer(workspace)
            signer = open_signer(workspace)
            assert list(trust_of(workspace).keys) == [signer.name]
            load_artifact(old, trust=trust_of(workspace))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_anybody_can_verify_with_openssl(made: Path) -> None:
    folder = made / "policies" / "policy@v1"
    command = [
        "openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(made / "signing/trusted/workspace.pub.pem"), "-rawin",
        "-in", "manifest.json", "-sigfile", "manifest.sig",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the learner


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory):
    workspace = tmp_path_factory.mktemp("worked")
    log = SqliteLog(workspace / "spanloop.db")
    system = learner(log, workspace, gate=False)
    drive(system, log, World(), 4, per_round=30)
    yield workspace, log, system
    log.close()


def test_every_version_is_signed_and_its_manifest_agrees_with_the_log(worked) -> None:
    workspace, log, system = worked
    trust, known = trust_of(workspace), system.promoter.state.versions
    assert len(known) > 2
    for number, candidate in known.items():
        manifest = read_manifest(workspace / candidate.path, trust)
        origin = origin_of(manifest.about)
        assert (origin.version, origin.parent, origin.batch) == (number, candidate.parent, candidate.batch)
        assert origin.code == code_version()
        assert origin.parent_sha256 == (known[candidate.parent].sha256 if candidate.parent >= 0 else "")
        assert {e.dtype for e in manifest.tensors.values()} == {"float32"}
        if number == 0:
            continue
        taught = provenance(log, CONFIG, number).batches[-1]
        lines = sorted(f"{lesson.orchestration_id}@{lesson.revision}\n" for lesson in taught.lessons)
        assert origin.samples == len(lines) == candidate.orchestrations
        assert origin.samples_sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()
        assert (origin.from_offset, origin.to_offset) == (taught.from_offset, taught.to_offset)


def test_show_says_who_signed(worked) -> None:
    workspace, _, system = worked
    place = ["--workspace", str(workspace), "show", "1"]
    assert (
        f"signed_by       workspace ({open_signer(workspace).name})"
        in CliRunner().invoke(policies, place).output
    )
    folder = workspace / system.promoter.state.versions[1].path
    whole = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(whole.replace(b'"samples":', b'"Samples":'))
    try:
        assert "refused: " in CliRunner().invoke(policies, place).output
        system.promoter._nets.clear()
        with pytest.raises(SchemaError, match="changed after it was signed"):
            system.promoter.net(1)
    finally:
        (folder / "manifest.json").write_bytes(whole)


def test_an_unsigned_folder_is_injected_by_a_flag_only(worked, tmp_path: Path) -> None:
    workspace, _, system = worked
    folder = tmp_path / "other"
    save_artifact(folder, PolicyNet.initial(CONFIG, 9), TOKENIZER)
    place = ["--workspace", str(workspace), "inject", str(folder), "--wait", "0"]
    assert "give --unsigned" in str(CliRunner().invoke(policies, place).exception)
    CliRunner().invoke(policies, [*place, "--unsigned", "--reason", "a test"])
    number = system.promoter.state.next_version
    system.step()
    made = signed_by(workspace / system.promoter.state.versions[number].path, trust_of(workspace))
    assert made.endswith("as injected; what was put there was signed by nobody")
    assert (
        origin_of(read_manifest(workspace / system.promoter.state.versions[number].path).about).injected
        == "a test"
    )


def test_a_wrong_signature_is_not_injected_even_by_the_flag(worked, made: Path, tmp_path: Path) -> None:
    workspace, _, _ = worked
    folder = Path(shutil.copytree(made / "policies" / "policy@v1", tmp_path / "policy@v1"))
    (folder / "manifest.sig").write_bytes(bytes(64))
    words = ["--workspace", str(workspace), "inject", str(folder), "--unsigned", "--wait", "0"]
    assert "changed after it was signed" in str(CliRunner().invoke(policies, words).exception)
