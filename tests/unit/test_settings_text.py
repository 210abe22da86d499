"""The example file and the resolved view of settings."""

from __future__ import annotations

import json
import os
import re
import tomllib

import pytest
from click.testing import CliRunner

from spanloop.pipeline.cli import config
from spanloop.pipeline.settings_text import MASK, example, resolved
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import Settings, load_settings, origins


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SPANLOOP_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_example_is_toml_that_changes_nothing(tmp_path):
    path = tmp_path / "spanloop.toml"
    path.write_text(example())
    assert load_settings(path) == Settings()
    assert set(tomllib.loads(example())) == set(Settings.model_fields) - {
        "workspace",
        "tenant",
        "bootstrap_servers",
        "credentials",
        "judges",
    }


def test_the_example_of_a_judge_can_be_taken_in(tmp_path):
    path = tmp_path / "spanloop.toml"
    judge = re.sub(r"^#(?=[a-z\[])", "", example(), flags=re.M).partition("\n[[judges]]")[2]
    path.write_text(f"[[judges]]{judge}")
    (found,) = load_settings(path).judges
    assert (found.name, found.share) == ("clarity/1", 1.0)


def test_every_line_of_the_example_can_be_taken_in(tmp_path):
    path = tmp_path / "spanloop.toml"
    text, _, credentials = re.sub(r"^#(?=[a-z\[])", "", example(), flags=re.M).partition("\n[[credentials]]")
    path.write_text(text)
    assert load_settings(path) == Settings()
    assert origins(path)["credentials"] == "default"
    assert all(
        where == "file" for name, where in origins(path).items() if name not in ("credentials", "judges")
    )
    path.write_text(text + "\n[[credentials]]" + credentials)
    assert load_settings(path).credentials[0].role == "agent"


def test_meanings_and_limits_stand_beside_the_settings():
    text = example()
    assert "# Compressed body limit; more is answered 413.\n# at least 1024\n#max_body_bytes = " in text
    assert '# One of ledger, team.\n#credit = "ledger"' in text


def test_show_tells_value_and_origin_and_masks_secrets(tmp_path, clean):
    path = tmp_path / "spanloop.toml"
    path.write_text(
        "[content]\nhmac_key = 'h1dden'\n[[credentials]]\nkey = 's3cret'\nrole = 'scorer'\n[gateway]\nport = 1\n"
    )
    clean.setenv("SPANLOOP_COLLECTOR__PORT", "2")
    rows = {row["setting"]: (row["value"], row["origin"]) for row in resolved(load_settings(path), path)}
    assert rows["gateway.port"] == (1, "file")
    assert rows["collector.port"] == (2, "environment SPANLOOP_COLLECTOR__PORT")
    assert rows["content.hmac_key"] == (MASK, "file")
    assert rows["credentials"][0][0]["key"] == MASK
    assert rows["workspace"] == (".spanloop", "default")
    for arguments in (["show", "--config", str(path)], ["show", "--config", str(path), "--json"]):
        result = CliRunner().invoke(config, arguments)
        assert result.exit_code == 0, result.output
        assert "s3cret" not in result.output
        assert "h1dden" not in result.output
    assert {row["setting"] for row in json.loads(result.output)} == set(rows)


def test_schema_and_example_are_printed():
    schema = json.loads(CliRunner().invoke(config, ["schema"]).output)
    assert schema["properties"]["collector"]["$ref"].endswith("Collector")
    assert schema["$defs"]["Collector"]["properties"]["port"]["maximum"] == 65535
    assert CliRunner().invoke(config, ["example"]).output == example()


@pytest.mark.parametrize("value", ["{bad", "["])
def test_a_variable_that_is_no_json_is_named(clean, value):
    clean.setenv("SPANLOOP_COLLECTOR", value)
    with pytest.raises(ConfigError, match="collector"):
        load_settings()


def test_a_settings_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(tmp_path)


def test_secrets_of_kafka_clients_are_masked(clean):
    client = {"sasl.username": "spanloop", "sasl.password": "hunter2", "ssl.key.pem": "x", "ssl.key.password": "y",
              "sasl.jaas.config": "z", "security.protocol": "SASL_SSL"}  # fmt: skip
    settings = load_settings(None, {"kafka": {"client": client}})
    rows = {row["setting"]: row["value"] for row in resolved(settings, None)}
    assert rows["kafka.client"] == {
        "sasl.username": "spanloop", "sasl.password": MASK, "ssl.key.pem": MASK, "ssl.key.password": MASK,
        "sasl.jaas.config": MASK, "security.protocol": "SASL_SSL",
    }  # fmt: skip
