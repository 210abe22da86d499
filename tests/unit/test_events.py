"""Events on the log: round trip, golden bytes of each version, identity, schemas.

A golden file is written once and never changed: what is on somebody's log stays readable. To add the file of
a new event type or version, add its example and run ``python tests/unit/test_events.py``; files that exist stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "events"
sys.path.insert(0, str(Path(__file__).parents[1]))

from unit.event_examples import EXAMPLES

from spanloop.schemas import events, topics, upcast
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import EVENTS, Event, PolicyPromoted, decode, encode
from spanloop.schemas.jsonschema import event_schema, event_schemas, main, write_schemas
from spanloop.schemas.upcast import UPCASTERS


def _tag(event):
    return str(type(event).__struct_config__.tag)


def _golden(event):
    return {
        "topic": event.TOPIC,
        "key": event.key,
        "event_id": event.event_id,
        "event": json.loads(encode(event)),
    }


examples = pytest.mark.parametrize("event", EXAMPLES, ids=_tag)


def test_every_event_type_has_an_example_a_golden_file_and_a_topic():
    assert {type(event) for event in EXAMPLES} == set(EVENTS)
    for cls in EVENTS:
        assert cls.TOPIC in topics.ALL_TOPICS
        for version in range(1, cls.VERSION + 1):
            assert (GOLDEN / f"{cls.__struct_config__.tag}.v{version}.json").exists()


@examples
def test_decode_undoes_encode(event):
    assert decode(encode(event)) == event
    assert encode(decode(encode(event))) == encode(event)


def _at_default(value, path=""):
    """Paths of fields that stand at their default, here and in the structs inside."""
    if isinstance(value, tuple):
        return [name for n, item in enumerate(value) for name in _at_default(item, f"{path}[{n}]")]
    if not isinstance(value, msgspec.Struct):
        return []
    found = []
    for field in msgspec.structs.fields(value):
        own, name = getattr(value, field.name), f"{path}.{field.name}"
        found += (
            [name]
            if field.default is not msgspec.NODEFAULT and own == field.default
            else _at_default(own, name)
        )
    return found


@examples
def test_the_example_leaves_no_field_at_its_default(event):
    assert not _at_default(event), "give them a value in the example"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_records_of_each_version_still_read_as_they_did(path):
    golden = json.loads(path.read_text())
    event = decode(canonical_json(golden["event"]))
    assert (event.TOPIC, event.key, event.event_id) == (golden["topic"], golden["key"], golden["event_id"])
    if path.stem.endswith(f".v{event.VERSION}"):
        again = json.loads(encode(event))
        assert {key: again[key] for key in golden["event"]} == golden["event"]


@examples
def test_the_schema_accepts_what_is_written_and_refuses_what_lacks_a_field(event):
    schema = event_schema(type(event))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    written = json.loads(encode(event))
    validator.validate(written)
    for name in schema["required"]:
        broken = {key: value for key, value in written.items() if key != name}
        assert not validator.is_valid(broken), name
    assert not validator.is_valid({**written, "type": "other"})


def test_schemas_are_exported_one_file_a_type(tmp_path, capsysbinary):
    paths = write_schemas(tmp_path / "schemas")
    assert len(paths) == len(EVENTS)
    assert (
        json.loads((tmp_path / "schemas" / "policy_promoted.v1.schema.json").read_text())["x-topic"]
        == "policies"
    )
    main([])
    assert json.loads(capsysbinary.readouterr().out) == json.loads(canonical_json(event_schemas()))


def test_event_ids_tell_tenants_and_facts_apart():
    ids = [event.event_id for event in EXAMPLES]
    other = [msgspec.structs.replace(event, tenant="other").event_id for event in EXAMPLES]
    assert len({*ids, *other}) == 2 * len(EXAMPLES)
    first = PolicyPromoted(epoch=1, version=2, previous=1, reason="a")
    assert first.event_id == msgspec.structs.replace(first, reason="b", version=9).event_id
    assert first.event_id != msgspec.structs.replace(first, epoch=2).event_id


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not an event"),
        (b"[]", "not an event"),
        (b"\xff\xfe", "not an event"),
        (b"[" * 100_000, "not an event"),
        (b"{}", "unknown event type ''"),
        (b'{"type":"from_the_future"}', "newer spanloop"),
        (b'{"type":"policy_promoted","schema_version":2}', "upgrade spanloop"),
        (b'{"type":"policy_promoted","schema_version":0}', "no upcaster"),
        (b'{"type":"policy_promoted"}', "missing required field `epoch`"),
        (b'{"type":"policy_promoted","epoch":"one"}', r"\$.epoch"),
    ],
)
def test_bytes_that_are_no_event_are_refused_with_a_reason(data, says):
    with pytest.raises(SchemaError, match=says):
        decode(data)


def test_unknown_fields_of_a_later_minor_change_are_ignored():
    event = PolicyPromoted(epoch=1, version=2, previous=1, reason="a")
    assert decode(canonical_json({**json.loads(encode(event)), "added_later": 1})) == event


def test_an_old_version_is_upcast_step_by_step(monkeypatch):
    class Moved(Event, frozen=True, omit_defaults=True, tag="policy_promoted", kw_only=True):
        VERSION = 3
        epoch: int
        to: int

    monkeypatch.setitem(events._BY_TYPE, "policy_promoted", Moved)
    monkeypatch.setitem(events._decoders, "policy_promoted", msgspec.json.Decoder(Moved))
    monkeypatch.setitem(
        UPCASTERS, ("policy_promoted", 1), lambda fields: {**fields, "to": fields.pop("version")}
    )
    with pytest.raises(SchemaError, match="from version 2 to 3"):
        decode(b'{"type":"policy_promoted","epoch":4,"version":7}')
    monkeypatch.setitem(
        UPCASTERS, ("policy_promoted", 2), lambda fields: {**fields, "epoch": fields["epoch"] + 1}
    )
    event = decode(b'{"type":"policy_promoted","epoch":4,"version":7}')
    assert (event.epoch, event.to) == (5, 7)
    assert json.loads(encode(event))["schema_version"] == 3
    assert decode(encode(event)) == event
    with pytest.raises(SchemaError, match="cannot be upcast"):
        decode(b'{"type":"policy_promoted","epoch":4,"version":"seven"}')
    assert upcast.upcast("policy_promoted", 3, 3, {"a": 1, "schema_version": 3}) == {"a": 1}


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        target = GOLDEN / f"{_tag(example)}.v{example.VERSION}.json"
        if not target.exists():
            target.write_bytes(msgspec.json.format(canonical_json(_golden(example)), indent=1) + b"\n")
