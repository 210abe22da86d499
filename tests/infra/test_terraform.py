"""terraform/ is formatted, valid, and passes its own tests against mocked providers; its topics are the code's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spanloop.schemas import topics

FOLDER = Path(__file__).resolve().parents[2] / "terraform"
TERRAFORM = shutil.which("terraform")
needs_terraform = pytest.mark.skipif(TERRAFORM is None, reason="terraform is not installed")


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TF_CLI_CONFIG_FILE"}
    environment |= {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    return subprocess.run(
        [str(TERRAFORM), *arguments, "-no-color"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


def _mirrors() -> list[Path]:
    """Folders of provider plugins that this machine may keep, as `terraform init -plugin-dir` takes them."""
    roots = [Path("/opt"), Path("/usr/share/terraform"), Path.home() / ".terraform.d"]
    return [p.parent for root in roots if root.is_dir() for p in root.glob("*/registry.terraform.io")]


@pytest.fixture(scope="module")
def initialised(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("terraform") / "t"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(".terraform*"))
    attempts = [["init", "-backend=false", "-input=false", f"-plugin-dir={m}"] for m in _mirrors()]
    attempts.append(["init", "-backend=false", "-input=false"])
    for arguments in attempts:
        last = _run(folder, *arguments)
        if last.returncode == 0:
            return folder
    if "could not connect" in last.stderr.lower() or "no such host" in last.stderr:
        pytest.skip("the AWS provider cannot be had here: no registry and no local mirror")
    pytest.fail(last.stderr)


@needs_terraform
def test_formatted():
    found = _run(FOLDER, "fmt", "-check", "-recursive", "-diff")
    assert found.returncode == 0, found.stdout


@needs_terraform
def test_valid(initialised):
    found = _run(initialised, "validate")
    assert found.returncode == 0, found.stderr


@needs_terraform
def test_its_own_tests_pass(initialised):
    found = _run(initialised, "test")
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"Success! [1-9]\d* passed, 0 failed", found.stdout)


def test_roles_name_topics_that_exist():
    text = (FOLDER / "modules" / "access" / "main.tf").read_text()
    lists = re.findall(r"^\s+(?:collector|worker|learner|reader)\s+=\s+\[([^\]]*)\]", text, re.MULTILINE)
    named = {name for part in lists for name in re.findall(r'"([a-z_]+)"', part)}
    assert named == {*topics.ALL_TOPICS, *topics.INTERNAL}
