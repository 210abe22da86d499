"""Canonical JSON, digests, ids, errors and settings: the small things that everything rests on."""

from __future__ import annotations

import copy
import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.schemas import canonical, errors, ids, jsonschema, spans
from spanloop.schemas.canonical import canonical_json, content_hash, decode_json, digest, micro, unmicro
from spanloop.schemas.errors import (
    ConfigError,
    SchemaError,
    SpanloopError,
    StaleError,
    TerminalError,
    TransientError,
)
from spanloop.schemas.settings import Settings, load_settings, origins

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(
        st.characters(exclude_categories=["Cs"])
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def _shuffled(value):
    """The same content with every dict built in the opposite order."""
    if isinstance(value, dict):
        return {key: _shuffled(value[key]) for key in reversed(list(value))}
    return [_shuffled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("module", [canonical, ids, jsonschema])
def test_the_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


@given(_json)
@settings(max_examples=100, deadline=None)
def test_equal_content_is_equal_bytes_and_reading_undoes_writing(value):
    assert canonical_json(_shuffled(value)) == canonical_json(value)
    assert decode_json(canonical_json(value)) == value
    assert canonical_json(decode_json(canonical_json(value))) == canonical_json(value)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4), st.lists(st.text(), max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_different_parts_have_different_digests(left, right):
    assert (digest(*left) == digest(*right)) == (left == right)


def test_digests_and_hashes_are_what_they_were():
    """Ids on somebody's log depend on them."""
    assert digest("spans", "default", 1, b"x") == "8a2a2b120fd692d2b3810239044c220c"
    assert content_hash({"b": 1, "a": [1.5, None, "ü"]}) == "6ec99d6c1f4855bf673163ed822b0bb5"
    assert ids.orchestration_id("default", ["b" * 32, "a" * 32]) == "6e0a8ef06941e777a0e7ea61324eab06"
    assert spans.span_hash(spans.Span("a" * 32, "b" * 16, "n", 1, 2)) == "5a1600a058ff1e79ea5e5e2b3dc7c2ed"


def test_orchestration_ids_do_not_depend_on_order_and_tell_tenants_apart():
    traces = ["b" * 32, "a" * 32, "c" * 32]
    assert ids.orchestration_id("t", traces) == ids.orchestration_id("t", reversed(traces))
    assert ids.orchestration_id("t", traces) != ids.orchestration_id("u", traces)
    assert ids.orchestration_id("t", traces) == ids.orchestration_id("t", ["a" * 32])


def test_gateway_ids_are_valid_and_never_name_an_orchestration_that_agents_traced():
    trace, span = ids.gateway_trace_id("resp-1"), ids.gateway_span_id("resp-1")
    assert ids.is_hex_id(trace, 32)
    assert ids.is_hex_id(span, 16)
    assert min(trace, "ffffff" + "0" * 26) != trace
    assert ids.gateway_trace_id("resp-2") != trace


@pytest.mark.parametrize(
    ("value", "length", "valid"),
    [("ab" * 8, 16, True), ("0" * 16, 16, False), ("AB" * 8, 16, False), ("ab" * 7, 16, False), ("", 0, False), ("zz" * 8, 16, False)],
)  # fmt: skip
def test_hex_ids(value, length, valid):
    assert ids.is_hex_id(value, length) is valid


@given(st.integers(-(10**12), 10**12))
@settings(max_examples=50, deadline=None)
def test_micro_units_round_trip(value):
    assert micro(unmicro(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(value):
    with pytest.raises(SchemaError, match="not a finite number"):
        micro(value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":1}x'])
def test_bytes_that_are_no_json_are_a_schema_error(data):
    with pytest.raises(SchemaError, match="not a valid"):
        decode_json(data, dict)


def test_errors_survive_copying_between_workers_with_their_attributes():
    error = copy.deepcopy(TransientError("disk full", path="x", offset=3))
    assert type(error) is TransientError
    assert (error.message, str(error), error.attributes) == (
        "disk full",
        "disk full",
        {"path": "x", "offset": 3},
    )


def test_exit_codes_tell_families_apart():
    codes = {
        cls: cls("x").exit_code
        for cls in (SpanloopError, TerminalError, ConfigError, SchemaError, TransientError)
    }
    assert codes == {SpanloopError: 1, TerminalError: 1, ConfigError: 2, SchemaError: 3, TransientError: 4}
    assert all(issubclass(getattr(errors, name), SpanloopError) for name in errors.__all__)
    assert StaleError("late").exit_code == 1


@pytest.fixture
def clean(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("SPANLOOP_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "spanloop.toml"
        path.write_text(text)
        return path

    return write


def test_order_is_default_file_environment_flags(clean, toml):
    path = toml("[collector]\nport = 1111\nqueue_max = 7\n[gateway]\nport = 2222\n")
    clean.setenv("SPANLOOP_GATEWAY__PORT", "3333")
    clean.setenv("SPANLOOP_SERVING__PORT", "4444")
    loaded = load_settings(path, {"serving": {"port": 5555}})
    assert (loaded.collector.port, loaded.collector.queue_max) == (1111, 7)
    assert (loaded.gateway.port, loaded.serving.port) == (3333, 5555)
    assert loaded.gateway.policy == "policy"
    assert loaded.database == loaded.workspace / "spanloop.db"
    where = origins(path)
    assert where["collector.port"] == "file"
    assert where["gateway.port"] == "environment SPANLOOP_GATEWAY__PORT"
    assert where["learner.seed"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colector = 1\n", "colector"),
        ("[collector]\nprot = 1\n", "collector.prot"),
        ("[collector]\nport = 70000\n", "collector.port"),
        ("[collector]\nport = 'many'\n", "collector.port"),
        ("[learner]\nadvantage = 'magic'\n", "learner.advantage"),
        ("[collector\n", "not valid TOML"),
        ("[collector]\nhost = '0.0.0.0'\n", "reachable from outside"),
        ("[serving]\nhost = '0.0.0.0'\n", "no authentication"),
        ("[gateway]\nupstream = 'nonsense'\n", r"gateway\.upstream.*https://HOST/v1"),
        ("[gateway]\nupstream = 'ftp://models/v1'\n", r"gateway\.upstream.*https://HOST/v1"),
        ("[gateway]\nupstream = 'http:///v1'\n", r"gateway\.upstream"),
        ("bootstrap_servers = 'nohost'\n", r"bootstrap_servers.*'nohost' is no broker: write host:port"),
        ("bootstrap_servers = 'a:9092,b:0'\n", "'b:0' is no broker"),
        ("bootstrap_servers = 'a:9092,'\n", "'' is no broker"),
        ('tenant = "a/b"', "tenant"),
        ('tenant = ""', "tenant"),
        ('[[credentials]]\nkey = "k"\ntenant = "a/b"\nrole = "agent"', "credentials.0.tenant"),
    ],
)
def test_wrong_settings_name_the_key(clean, toml, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_settings(toml(text))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "brokers", ["", "a:9092", "a.b-c:1, 10.0.0.7:65535", "[::1]:9092", "SASL_SSL://a:9093"]
)
def test_brokers_are_host_and_port(clean, toml, brokers):
    assert load_settings(toml(f"bootstrap_servers = '{brokers}'\n")).bootstrap_servers == brokers


def test_wrong_environment_and_missing_file_are_errors(clean, tmp_path):
    clean.setenv("SPANLOOP_COLLECTOR__PORT", "abc")
    with pytest.raises(ConfigError, match=r"collector\.port"):
        load_settings()
    with pytest.raises(ConfigError, match="config example"):
        load_settings(tmp_path / "none.toml")


def test_a_public_address_is_allowed_with_credentials(clean, toml):
    loaded = load_settings(
        toml("[collector]\nhost = '0.0.0.0'\n[[credentials]]\nkey = 's3cret'\nrole = 'agent'\n")
    )
    assert loaded.credentials[0].key.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(loaded)


def test_settings_are_frozen(clean):
    with pytest.raises(Exception, match="frozen"):
        Settings().tenant = "other"  # type: ignore[misc]
