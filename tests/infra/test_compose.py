"""infra/ says what the code says: commands, settings, ports, topics and metric names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from spanloop.schemas.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OURS = {name: s for name, s in SERVICES.items() if str(s.get("image", "")).startswith("spanloop:")}
CODE = "\n".join(
    path.read_text()
    for room in ("schemas", "collectors", "pipeline", "learner")
    for path in (ROOT / room).rglob("*.py")
)


def _environment(service: dict) -> dict[str, str]:
    filled = {}
    for name, value in service.get("environment", {}).items():
        text = re.sub(r"\$\{[A-Z_]+(:\?[^}]*)?\}", "long-random-text", str(value))
        filled[name] = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    return filled


def test_every_process_of_the_stack_is_there():
    assert set(OURS) == {"ingest", "receiver", "gateway", "process", "archiver", "learner"}
    assert {"kafka", "otel-collector", "mlflow", "vllm", "vllm-cpu", "prometheus", "grafana"} <= set(SERVICES)


@pytest.mark.parametrize("name", sorted(OURS))
def test_commands_exist(name):
    service = OURS[name]
    entry = service.get("entrypoint")
    if entry:
        assert entry[:2] == ["python", "-m"]
        assert importlib.util.find_spec(entry[2]) is not None
    else:
        verbs = {e.name for e in importlib.metadata.entry_points(group="spanloop.cli")}
        assert service["command"][0] in verbs


@pytest.mark.parametrize("name", sorted(OURS))
def test_settings_are_settings(name, monkeypatch):
    for key, value in _environment(OURS[name]).items():
        monkeypatch.setenv(key, value)
    settings = load_settings()  # an unknown or malformed one raises
    assert settings.bootstrap_servers == "kafka:9092"
    assert {c.role for c in settings.credentials} == {"agent", "scorer", "reader"}
    known = {"SPANLOOP_" + name.upper() for name in Settings.model_fields}
    for key in OURS[name]["environment"]:
        assert key.split("__")[0] in known, key


def test_ports_are_published_on_loopback_only_and_agree():
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), f"{name} publishes {port}"
    assert OURS["receiver"]["environment"]["SPANLOOP_COLLECTOR__PORT"] == "4319"
    assert OURS["gateway"]["environment"]["SPANLOOP_GATEWAY__PORT"] == "8787"
    upstream = OURS["gateway"]["environment"]["SPANLOOP_GATEWAY__UPSTREAM"]
    assert upstream == "http://vllm:8000/v1"
    assert "--port=8000" in SERVICES["vllm"]["command"]
    assert "ports" not in SERVICES["vllm"]
    assert "ports" not in SERVICES["kafka"]


def test_images_are_pinned_and_files_exist():
    for name, service in SERVICES.items():
        image, _, tag = service["image"].rpartition(":")
        assert image, f"{name} has no tag"
        assert tag != "latest", name
        for mount in service.get("volumes", []):
            source = str(mount).split(":")[0]
            if source.startswith("./"):
                assert (INFRA / source).exists(), mount
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], mount
    assert (INFRA / "Dockerfile").exists()


def test_versions_are_the_ones_the_code_is_tested_with():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert SERVICES["mlflow"]["image"].endswith(":v" + pinned["mlflow"])
    docker = (INFRA / "Dockerfile").read_text()
    assert f"torch=={pinned['torch']}" in docker
    extras = importlib.metadata.metadata("spanloop").get_all("Provides-Extra") or []
    installed = re.search(r"'\.\[([a-z,]+)\]'", docker)
    assert installed is not None
    assert set(installed.group(1).split(",")) <= set(extras)


def test_the_collector_writes_where_ingest_reads():
    config = yaml.safe_load((INFRA / "collector" / "config.yaml").read_text())
    topic = config["exporters"]["kafka"]["traces"]["topic"]
    assert topic in json.loads(OURS["ingest"]["environment"]["SPANLOOP_KAFKA__OTLP_TOPICS"])
    assert f"--topic={topic}" in SERVICES["otlp-topics"]["command"]
    assert config["exporters"]["kafka"]["traces"]["encoding"] in {"otlp_proto", "otlp_json"}
    assert set(config["service"]["pipelines"]["traces"]["exporters"]) <= set(config["exporters"])


def _names(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bspanloop_[a-z_]+", text)}


def test_metric_names_exist_in_the_code():
    used = _names((INFRA / "prometheus" / "rules.yaml").read_text())
    for path in (INFRA / "grafana" / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            used |= {n for t in panel["targets"] for n in _names(t["expr"])}
    assert used
    known = _names(CODE)
    missing = {name for name in used if name not in known and name.removesuffix("_total") not in known}
    assert not missing


def test_scraped_targets_are_services_with_that_port():
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yaml").read_text())
    ports = {"receiver": 4319, "gateway": 8787, "vllm": 8000}
    for job in config["scrape_configs"]:
        for target in (t for s in job.get("static_configs", []) for t in s["targets"]):
            host, _, port = target.partition(":")
            assert ports[host] == int(port)
    metrics = OURS["process"]["environment"]
    dns = next(j for j in config["scrape_configs"] if "dns_sd_configs" in j)["dns_sd_configs"][0]
    assert str(dns["port"]) == metrics["SPANLOOP_PROCESS__METRICS_PORT"]
    assert dns["names"] == ["process"]
