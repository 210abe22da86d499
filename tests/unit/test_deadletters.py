"""``spanloop deadletters``: what was refused is listed, shown with its bytes, and sent again on the path that refused it."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from click.testing import CliRunner

from spanloop.collectors.batches import Intake
from spanloop.collectors.deadletters_cli import deadletters
from spanloop.collectors.deadletters_replay import counted, replay
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.letters import Filter, Originals, find_letters, read_letters
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import (
    DeadLettered,
    FeedbackReceived,
    OrchestrationRevised,
    SpansReceived,
    decode,
    encode,
)
from spanloop.schemas.settings import Content, Pipeline
from spanloop.schemas.spans import Span

TRACE = "a" * 31 + "1"


class World:
    """A workspace whose log holds what a test puts there."""

    def __init__(self, folder):
        self.folder = folder
        self.clock = ManualClock(1_790_000_000_000_000_000)
        self.log = SqliteLog(folder / "spanloop.db", self.clock)
        self.state = SqliteState(folder / "spanloop.db", self.clock)
        self.intake = Intake(Redactor(Content(training=True), b"0" * 16), 65_536, keep_content=True)

    def run(self, *, timers=False):
        run_to_end(build_stages(Pipeline()), self.log, self.state, self.clock, fire_timers=timers)

    def put(self, topic, event_id, value, key="default/x"):
        self.log.append([NewRecord(topic, key, event_id, value)])

    def letters(self, **wanted):
        return list(read_letters(self.log, Filter(**wanted)))

    def cli(self, *arguments):
        self.log.close()
        result = CliRunner().invoke(deadletters, [*arguments, "--workspace", str(self.folder)])
        self.log = SqliteLog(self.folder / "spanloop.db", self.clock)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result


@pytest.fixture
def world(tmp_path):
    found = World(tmp_path)
    yield found
    found.log.close()
    found.state.close()


def _spans(trace_id=TRACE, span_id="b" * 16):
    span = Span(trace_id, span_id, "run", 1, 2, attributes={"gen_ai.operation.name": "invoke_agent"})
    return SpansReceived(trace_id=trace_id, spans=(span,))


def test_a_refused_record_is_sent_again_once_and_takes_effect(world, monkeypatch):
    """A stage with a bug refuses a good record; after the fix the record is folded."""
    from spanloop.pipeline.assembly import stage

    monkeypatch.setattr(stage.AssemblyStage, "_take", lambda *_: 1 // 0)
    world.log.append([new_record(_spans())])
    world.run(timers=True)
    (letter,) = world.letters()
    assert letter.event.source == "stage:assembly"
    assert letter.origin is not None
    assert letter.origin[0] == "spans"
    monkeypatch.undo()
    done = replay(world.log, [letter], world.intake, dry_run=True)
    assert counted(done)["sent"] == 1
    world.run(timers=True)
    assert world.log.read([topics.ORCHESTRATIONS], {}, 10) == []
    for outcome in ("sent", "there"):
        assert [r.outcome for r in replay(world.log, [letter], world.intake)] == [outcome]
    assert [r.outcome for r in replay(world.log, [letter], world.intake, attempt=2)] == ["sent"]
    world.run(timers=True)
    (record,) = world.log.read([topics.ORCHESTRATIONS], {}, 10)
    event = decode(record.value)
    assert isinstance(event, OrchestrationRevised)
    assert event.content.trace_ids == (TRACE,)


def test_what_would_be_refused_again_is_left_alone(world):
    world.put("spans", "poison", b'{"type":"spans_received","schema_version":99,"spans":[]}')
    world.run()
    (letter,) = world.letters()
    assert letter.event.details["topic"] == "spans"
    (done,) = replay(world.log, [letter], world.intake)
    assert (done.outcome, "version" in done.why) == ("refused", True)


def test_bytes_come_from_the_letter_or_from_the_log_and_only_the_right_ones(world):
    world.put("spans", "one", b"\x80\x80\x82")
    world.run()
    (letter,) = world.letters()
    bare = DeadLettered(
        **{f: getattr(letter.event, f) for f in ("tenant", "source", "reason", "sha256", "size", "details")}
    )
    without = type(letter)(letter.letter_id, letter.recorded_ns, bare)
    assert without.kept() is None
    assert Originals(world.log, [without]).content(without) == b"\x80\x80\x82"
    wrong = type(letter)(
        "x" * 32,
        0,
        DeadLettered(
            **{**{f: getattr(bare, f) for f in ("source", "reason", "size", "details")}, "sha256": "00"}
        ),
    )
    assert Originals(world.log, [wrong]).content(wrong) is None
    assert replay(world.log, [wrong], world.intake)[0].outcome == "gone"


def test_a_refused_span_is_decoded_again_with_todays_rules(world):
    """The collector refused it for a zero id; its bytes are mended on the way (here: the test does it) and taken."""
    raw = {
        "traceId": TRACE,
        "spanId": "0" * 16,
        "name": "n",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
    }
    batch = decode_json(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [raw]}]}]}).encode())
    world.log.append(world.intake.prepare(batch, tenant="default", source="otlp").records)
    (letter,) = world.letters(source="otlp")
    assert [r.outcome for r in replay(world.log, [letter], world.intake)] == ["refused"]
    good = json.dumps({**raw, "spanId": "b" * 16}).encode()
    event = DeadLettered(
        source="otlp", reason="bad span: id", sha256=hashlib.sha256(good).hexdigest(), size=len(good),
        data=base64.b64encode(good).decode(),
    )  # fmt: skip
    world.log.append([new_record(event)])
    letters = world.letters()
    assert [r.outcome for r in replay(world.log, letters, world.intake)] == ["refused", "sent"]
    (record,) = world.log.read(["spans"], {}, 10)
    assert decode(record.value).spans[0].span_id == "b" * 16


def test_protobuf_spans_are_read_again():
    pb2 = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    from spanloop.collectors.deadletters_replay import _readings

    span = pb2.Span(
        trace_id=bytes.fromhex(TRACE),
        span_id=b"\x01" * 8,
        name="n" * 300,
        start_time_unix_nano=1,
        end_time_unix_nano=2,
    )
    scope = pb2.ScopeSpans(spans=[span])
    group = pb2.ResourceSpans(scope_spans=[scope])
    for message in (span, scope, group):
        found = [b for b in _readings(message.SerializeToString()) if b.spans and not b.rejected]
        assert [s.name for b in found for s in b.spans] == ["n" * 300]


def test_expired_feedback_is_found_by_its_id(world):
    item = FeedbackReceived(feedback_id="f1", target_kind="trace", target_id=TRACE, value=1.0)
    world.log.append([new_record(item)])
    world.run(timers=True)
    (letter,) = world.letters(reason="never arrived")
    assert letter.origin is None
    assert [r.outcome for r in replay(world.log, [letter], world.intake)] == ["sent"]
    first, second = world.log.read(["feedback"], {}, 10)
    assert first.value == second.value == encode(item)


def test_ids_may_be_shortened_but_not_guessed(world):
    world.put("spans", "a", b"{")
    world.put("spans", "b", b"[")
    world.run()
    one, two = world.letters()
    assert find_letters(world.log, [one.letter_id[:8], two.letter_id]) == [one, two]
    for wrong, why in (("abc", "too short"), ("zzzzzzzz", "there is no"), ("", "too short")):
        with pytest.raises(ConfigError, match=why):
            find_letters(world.log, [wrong])


def test_the_verb_lists_shows_and_replays(world):
    world.put("spans", "a", b"\x80\x80\x82")
    world.put("spans", "b", b"\x1b[31mnot json", key="acme/x")
    world.run()
    listed = world.cli("list")
    assert listed.output.count("spans@") == 2
    rows = [json.loads(line) for line in world.cli("list", "--json", "--tenant", "acme").stdout.splitlines()]
    assert [row["tenant"] for row in rows] == ["acme"]
    assert world.cli("list", "--since", "2020-01-01", "--source", "nothing").stdout == ""
    shown = world.cli("show", rows[0]["id"][:10])
    assert "\x1b" not in shown.output
    assert "not json" in shown.output
    target = world.folder / "refused.bin"
    world.cli("show", rows[0]["id"], "--bytes", str(target))
    assert target.read_bytes() == b"\x1b[31mnot json"
    shown = json.loads(world.cli("show", rows[0]["id"], "--json").stdout)
    assert base64.b64decode(shown["data"]) == b"\x1b[31mnot json"
    dry = world.cli("replay", "--all", "--dry-run", "--json")
    assert dry.exit_code == 3
    assert json.loads(dry.stdout)["refused"] == 2
    assert world.cli("replay").exit_code == 2
    assert world.cli("replay", "abcdefgh", "--all").exit_code == 2
    assert world.cli("list", "--since", "yesterday").exit_code == 2


def test_the_default_workspace_says_that_there_is_nothing(tmp_path):
    result = CliRunner().invoke(deadletters, ["list", "--workspace", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)
