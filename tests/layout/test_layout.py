"""The rules between rooms, and what an agent process has to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("schemas", "collectors", "pipeline", "learner")


def test_namespace_has_no_init():
    strays = list(ROOT.glob("*/spanloop/__init__.py"))
    assert strays == [], (
        "spanloop is a PEP 420 namespace over four folders; an __init__.py hides the other three"
    )


def test_rooms_keep_their_distance():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_folder_is_in_the_wheel():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(f"{room}/spanloop" for room in ROOMS)


def test_every_verb_has_help_with_an_example():
    from click.testing import CliRunner

    from spanloop.schemas.verbs import _cli

    runner = CliRunner()
    verbs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["spanloop.cli"]
    for verb in verbs:
        result = runner.invoke(_cli, [verb, "--help"])
        assert result.exit_code == 0, f"{verb}: {result.output}{result.exception!r}"
        assert re.search(rf"spanloop {verb}\b", result.output), f"spanloop {verb} --help shows no example"


def test_no_pickle_and_no_unsafe_load():
    pattern = re.compile(
        r"\b(import pickle|from pickle|pickle\.loads?|torch\.load|torch\.save|yaml\.load|eval\(|exec\()"
    )
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line.replace(".eval(", ""))
    ]
    assert hits == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_smallest_extra_installs_nothing_heavy(tmp_path):
    """An agent process installs spanloop[agent]; importing what it needs loads no torch, Kafka, Beam or MLflow."""
    env = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    python = env / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", f"{ROOT}[agent]"],
        check=True, timeout=300,
    )  # fmt: skip
    script = (
        "import sys, importlib.metadata as m\n"
        "import spanloop.schemas.events, spanloop.schemas.settings, spanloop.schemas.cli, spanloop.pipeline.ports\n"
        "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http, spanloop.collectors.sdk as sdk\n"
        "import os; os.environ['OTEL_TRACES_EXPORTER'] = 'none'\n"
        "sdk.instrument(); sdk.agent('a').now(); assert not sdk.failures()\n"
        "heavy = {'torch', 'mlflow', 'apache_beam', 'confluent_kafka', 'faust', 'vllm', 'duckdb', 'numpy', 'pyarrow', 'aiohttp'}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(heavy & {d.metadata['Name'].lower() for d in m.distributions()}))\n"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
    helped = subprocess.run([env / "bin" / "spanloop", "--help"], capture_output=True, text=True, check=True)
    assert "Run the whole loop" in helped.stdout
    refused = subprocess.run(
        [env / "bin" / "spanloop", "query", "SELECT 1"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "spanloop[pipeline]" in refused.stderr
