"""The key stores' contract, the vault, and where the settings lead."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.collectors.gateway_record import CallRecord, call_event
from spanloop.collectors.limits import cut_span
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import open_sealer
from spanloop.pipeline.dialects import operation_of
from spanloop.pipeline.sealing.keys import KEY_BYTES, MemoryKeys
from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys
from spanloop.pipeline.sealing.opening import open_vault
from spanloop.pipeline.sealing.vault import SEALED, TOO_LARGE, Place, Tokens, Vault
from spanloop.schemas.errors import ConfigError, TransientError
from spanloop.schemas.events import encode
from spanloop.schemas.settings import Content, load_settings
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

T1, T2 = "a" * 32, "b" * 32
KEY = b"k" * 32


@pytest.fixture(params=["memory", "sqlite"])
def keys(request: pytest.FixtureRequest, tmp_path: Path):
    store = MemoryKeys() if request.param == "memory" else SqliteKeys(tmp_path / "keys" / "subjects.db")
    yield store
    store.close()


def test_a_key_is_made_once_and_stays(keys) -> None:
    first = keys.ensure("t", {T1: [], T2: []})
    assert all(len(key or b"") == KEY_BYTES for key in first.values())
    assert first[T1] != first[T2]
    assert keys.ensure("t", {T1: [], T2: []}) == first
    assert keys.find("t", T1) == first[T1]
    assert keys.find("t", "c" * 32) is None
    assert keys.known("t", [T1, "c" * 32]) == {T1}


def test_tenants_never_share_a_key_or_a_subject(keys) -> None:
    one, two = keys.subject("a", "user.id", "u"), keys.subject("b", "user.id", "u")
    assert one != two
    assert one != keys.subject("a", "session.id", "u")
    assert keys.ensure("a", {T1: [one]})[T1] != keys.ensure("b", {T1: [two]})[T1]
    keys.destroy("a", [T1], [one], 1)
    assert keys.find("a", T1) is None
    assert keys.find("b", T1) is not None
    assert keys.traces_of("b", [one]) == set()


def test_what_is_destroyed_never_comes_back(keys) -> None:
    name = keys.subject("t", "user.id", "u-1")
    keys.ensure("t", {T1: [name], T2: []})
    assert keys.traces_of("t", [name]) == {T1}
    assert keys.destroy("t", [T1], [name], 5) == 1
    assert keys.destroy("t", [T1], [name], 6) == 0
    assert keys.ensure("t", {T1: []}) == {T1: None}
    assert keys.ensure("t", {"c" * 32: [name]}) == {"c" * 32: None}, (
        "the subject was erased: a new trace gets no key"
    )
    assert keys.find("t", T2) is not None
    keys.readmit("t", [name])
    assert keys.ensure("t", {T1: [name]}) == {T1: None}
    assert keys.ensure("t", {"d" * 32: [name]})["d" * 32] is not None


def test_a_trace_that_turns_out_to_be_about_somebody_erased_loses_its_key(keys) -> None:
    name = keys.subject("t", "user.id", "u-1")
    keys.destroy("t", [], [name], 1)
    assert keys.ensure("t", {T1: []})[T1] is not None, "the child spans come first and name nobody"
    assert keys.ensure("t", {T1: [name]}) == {T1: None}
    assert keys.find("t", T1) is None


def test_processes_see_each_others_erasures_at_once(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    one, two = SqliteKeys(path), SqliteKeys(path)
    key = one.ensure("t", {T1: []})[T1]
    assert two.ensure("t", {T1: []}) == {T1: key}
    assert two.find("t", T1) == key
    code = f"import sys; from pathlib import Path; from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys; print(SqliteKeys(Path({str(path)!r})).destroy('t', [{T1!r}], [], 1))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "1"
    assert one.find("t", T1) is None
    assert two.ensure("t", {T1: []}) == {T1: None}


def test_a_foreign_database_and_a_missing_store_are_refused(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE x (y)")
    with pytest.raises(ConfigError, match="something else"):
        SqliteKeys(path)
    with pytest.raises(ConfigError, match="never on here"):
        SqliteKeys(tmp_path / "none.db", create=False)


def test_a_store_that_cannot_be_written_is_a_reason_to_try_again(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    keys = SqliteKeys(path)
    blocker = SqliteKeys(path)
    blocker._db.execute("BEGIN EXCLUSIVE")
    keys._db.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(TransientError):
        keys.ensure("t", {T1: []})
    blocker._db.execute("ROLLBACK")
    assert keys.ensure("t", {T1: []})[T1] is not None


# ---------------------------------------------------------------- the vault

_texts = st.text(max_size=40)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_attributes = st.dictionaries(
    st.sampled_from(["gen_ai.input.messages", "user.id", "gen_ai.agent.name", "note", "input.value"])
    | _texts.filter(lambda k: not k.startswith("spanloop.")),
    _values,
    max_size=5,
)
_spans = st.builds(
    lambda name, message, attributes, resource, scope, event, link: Span(
        T1, "c" * 16, name, 1, 2, status_message=message, attributes=attributes, resource=resource, scope=scope,
        events=(SpanEvent(name, 1, event),) if event else (), links=(SpanLink(T2, "d" * 16, link),) if link else (),
    ),
    _texts, _texts, _attributes, _attributes, _texts, _attributes, _attributes,
)  # fmt: skip


def _vault() -> Vault:
    return Vault(MemoryKeys(b"s" * 32))


@settings(max_examples=200, deadline=None)
@given(span=_spans)
def test_sealing_loses_nothing_and_hides_what_the_allow_list_hides(span: Span) -> None:
    vault = _vault()
    key = vault.keys.ensure("t", {T1: []})[T1]
    shown = Redactor(Content(), KEY).span(span)
    sealed = vault.seal_span(key, "t", span, shown)
    assert {k: v for k, v in sealed.attributes.items() if k != SEALED} == shown.attributes
    assert sealed == vault.seal_span(key, "t", span, shown), "a retry is the same event"
    assert vault.open_span("t", sealed) == span
    assert vault.open_span("other", sealed) in (None, sealed)
    vault.keys.destroy("t", [T1], [], 1)
    assert vault.open_span("t", sealed) is None or SEALED not in sealed.attributes


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=2_000), flip=st.integers(min_value=0), bit=st.integers(0, 7))
def test_what_was_changed_or_moved_does_not_open(data: bytes, flip: int, bit: int) -> None:
    vault = _vault()
    key = secrets.token_bytes(KEY_BYTES)
    sealed = bytearray(vault.seal_bytes(key, b"here", data))
    assert vault.open_bytes(key, b"here", bytes(sealed)) == data
    assert vault.open_bytes(key, b"there", bytes(sealed)) is None
    assert vault.open_bytes(os.urandom(KEY_BYTES), b"here", bytes(sealed)) is None
    sealed[flip % len(sealed)] ^= 1 << bit
    assert vault.open_bytes(key, b"here", bytes(sealed)) is None
    assert vault.open_bytes(key, b"here", b"") is None


def test_nonsense_does_not_open() -> None:
    vault = _vault()
    key = vault.keys.ensure("t", {T1: []})[T1]
    good = vault.seal_text(key, Place("t", T1, "c" * 16, SEALED), b"{}")
    assert vault.open_text("t", good, SEALED) == b"{}"
    for text in (
        "",
        "x",
        f"{T1}/",
        f"{T1}/{'c' * 16}/",
        f"{T1}/{'c' * 16}/%%%",
        good[:-4],
        good.replace("c" * 16, "e" * 16),
    ):
        assert vault.open_text("t", text, SEALED) is None
    assert vault.open_text("t", good, "spanloop.sealed.tokens") is None


def test_content_that_is_too_large_is_left_out_and_said() -> None:
    vault = _vault()
    key = vault.keys.ensure("t", {T1: []})[T1]
    raw = Span(T1, "c" * 16, "n", 1, 2, attributes={"note": os.urandom(400_000).hex()})
    sealed = vault.seal_span(key, "t", raw, Redactor(Content(), KEY).span(raw))
    assert sealed.attributes[TOO_LARGE] is True
    assert SEALED not in sealed.attributes


def test_sealed_content_is_never_cut() -> None:
    vault = _vault()
    key = vault.keys.ensure("t", {T1: []})[T1]
    raw = Span(T1, "c" * 16, "n", 1, 2, attributes={"note": os.urandom(50_000).hex()})
    sealed = vault.seal_span(key, "t", raw, Redactor(Content(), KEY).span(raw), Tokens((1,), (2,), (-0.5,)))
    assert len(sealed.attributes[SEALED]) > 1_000
    assert cut_span(sealed, 256).attributes[SEALED] == sealed.attributes[SEALED]


def test_entries_of_states_close_with_the_key() -> None:
    vault = _vault()
    assert vault.open_entry("t", vault.seal_entry("t", T1, b"\x92plain")) == b"\x92plain"
    vault.keys.ensure("t", {T1: []})
    entry = vault.seal_entry("t", T1, b"\x92lesson")
    assert b"lesson" not in entry
    assert vault.open_entry("t", entry) == b"\x92lesson"
    vault.keys.destroy("t", [T1], [], 1)
    assert vault.open_entry("t", entry) is None
    assert b"lesson" not in vault.seal_entry("t", T1, b"\x92lesson")


# ---------------------------------------------------------------- settings


def test_keys_without_content_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps none: set both"):
        load_settings(None, {"workspace": str(tmp_path), "content": {"subject_keys": True}})
    both = load_settings(
        None, {"workspace": str(tmp_path), "content": {"subject_keys": True, "training": True}}
    )
    assert not both.content.clear
    assert open_vault(load_settings(None, {"workspace": str(tmp_path)})) is None
    assert open_vault(both) is not None


def test_a_redactor_alone_keeps_nothing_where_content_is_to_be_sealed() -> None:
    redactor = Redactor(Content(training=True, subject_keys=True), KEY)
    assert redactor.text("call pat") != "call pat"
    assert (
        "$redacted" in redactor.span(Span(T1, "c" * 16, "n", 1, 2, attributes={"x": "pat"})).attributes["x"]
    )


# ---------------------------------------------------------------- the gateway


def test_a_call_of_the_gateway_is_recorded_with_its_tokens_sealed(tmp_path: Path) -> None:
    given = load_settings(
        None, {"workspace": str(tmp_path), "content": {"training": True, "subject_keys": True}}
    )
    sealer = open_sealer(given)
    assert sealer is not None
    redact = partial(Redactor(given.content, KEY).span, trusted=True)
    entries = [{"token": "token_id:77350001", "logprob": -0.5, "top_logprobs": []}]
    record = CallRecord(
        tenant="t", call_id="c", route="champion", policy_version="policy@v3", conversation="", conversation_source="",
        harness="h", start_ns=1, end_ns=2, status=200,
        request={"model": "policy", "messages": [{"role": "user", "content": "call pat@example.invalid"}]},
        response={"id": "r-1", "model": "policy@v3", "prompt_token_ids": [1, 77350009], "choices": [
            {"finish_reason": "stop", "message": {"role": "assistant", "content": "yes, Pat"}, "token_ids": [77350001],
             "logprobs": {"content": entries}}]},
    )  # fmt: skip

    def event():
        return call_event(
            record, content=True, seal=lambda span, tenant: sealer.call(span, redact(span), tenant)
        )

    written = encode(event())
    assert written == encode(event())
    for text in (b"pat@example", b"Pat", b"77350001", b"77350009"):
        assert text not in written
    (span,) = event().spans
    facts = operation_of(span, "gateway").call.gateway
    assert (facts.policy_version, facts.prompt_token_ids, facts.response_token_ids) == ("policy@v3", (), ())
    opened = sealer.vault.open_tokens("t", facts.sealed)
    assert opened is not None
    assert (opened.prompt, opened.response, opened.logprobs) == ((1, 77350009), (77350001,), (-0.5,))
    whole = sealer.vault.open_span("t", span)
    assert "pat@example.invalid" in whole.attributes["gen_ai.input.messages"]
    sealer.vault.keys.destroy("t", [span.trace_id], [], 1)
    assert sealer.vault.open_tokens("t", facts.sealed) is None
    again = encode(event())
    assert b"spanloop.sealed" not in again
    assert b"77350001" not in again
