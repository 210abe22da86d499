"""Replay of an archive: the stream's hashes for every orchestration, however the archive is cut, shuffled, spread or resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from made_spans import SHARED, agent, chat, gateway, tool
from replay_support import T0, archive_of, batches, expected, hashes, published, run, settings_of
from simulation.small_system import job, outcome

from spanloop.pipeline.archive import ArchiveStore, write_range
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import LogRecord, NewRecord
from spanloop.pipeline.replay import driver, passes
from spanloop.pipeline.replay.driver import replay
from spanloop.pipeline.replay.plan import make_plan
from spanloop.pipeline.replay.results import ResultSet
from spanloop.pipeline.replay.whole import replay_whole
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, TerminalError, TransientError
from spanloop.schemas.events import FeedbackReceived, SpansReceived, decode, encode
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.spans import SpanLink

DESK = Path(__file__).resolve().parents[1] / "golden" / "assembly"


def joined_events(number: int) -> list:
    """A root run that calls the gateway without context, links a second trace, and loses a third by task text."""
    at, r = number * 100.0, f"chatcmpl-{number:032x}"
    one, two, three = 1000 * number + 1, 1000 * number + 2, 1000 * number + 3
    conversation = {"gen_ai.conversation.id": f"c{number}"}
    asked = conversation | {"gen_ai.tool.call.arguments": json.dumps({"task": f"find the {number}th"})}
    task = [{"role": "user", "parts": [{"type": "text", "content": f"find the {number}th"}]}]
    told = conversation | {"gen_ai.input.messages": json.dumps(task)}
    spans = [
        agent(one, None, at, at + 9, "lead", trace=one, attributes=conversation),
        chat(one + 10**6, one, at + 1, at + 2, trace=one, response=r),
        tool(one + 2 * 10**6, one, at + 3, at + 6, "ask", trace=one, attributes=asked),
        agent(three, None, at + 4, at + 5, "helper", trace=three, attributes=told),
        msgspec.structs.replace(
            agent(two, None, at + 7, at + 8, "linked", trace=two),
            links=(SpanLink(f"{one:032x}", f"{one:016x}"),),
        ),
    ]
    return [*batches(spans, size=2, source="otlp"), *batches([gateway(r, at + 1, at + 2)], source="gateway")]


def deployment() -> tuple[list, list, list]:
    """A run that is published alone and joined later; spans in any order and feedback of all kinds, before and after, late."""
    rng = random.Random(3)
    events = [batch for n in range(24) for batch in job(n, helpers=1 + n % 3, complete=n % 5 != 0)]
    events += [event for n in range(1, 9) for event in joined_events(n)]
    events += [event for n in range(2) for event in job(n)[:1]]  # sent again
    events += [outcome(n, (n % 7) / 7) for n in range(0, 24, 2)]
    rng.shuffle(events)
    alone = [event for event in joined_events(2) if event.key.endswith(f"{2003:032x}")]
    later = [outcome(n, (n % 5) / 5) for n in range(1, 24, 2)]
    later += [outcome(4, 0.75, feedback_id="corrected"), outcome(6, 1.0, kind="response", target="r-6-lead")]
    later += [FeedbackReceived(feedback_id=f"j{n}", target_kind="response", target_id=f"chatcmpl-{n:032x}", value=0.5, scorer="x")
              for n in range(1, 9, 2)]  # fmt: skip
    lost = orchestration_id("default", (f"{2003:032x}",))
    later += [
        FeedbackReceived(
            feedback_id="lost", target_kind="orchestration", target_id=lost, value=0.25, scorer="y"
        )
    ]
    later += [
        FeedbackReceived(
            feedback_id="odd", target_kind="span", target_id="no such span", value=1.0, scorer="x"
        )
    ]
    return alone, events, later


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Settings, the log that the embedded runtime left, and its archive in many ranges."""
    settings = settings_of(tmp_path_factory.mktemp("stream"), value_every=8)
    log = published(settings, *deployment())
    return settings, log, archive_of(settings, log, records=60)


@pytest.fixture(scope="module")
def truth(stream):
    found = expected(stream[1])
    assert len(found) == 32
    assert sum(bool(credit) for _, _, credit in found.values()) > 20
    return found


def elsewhere(settings, tmp_path):
    """The same deployment with results of its own."""
    url = settings.archive.url or str(settings.workspace / "archive")
    return settings.model_copy(
        update={"workspace": tmp_path, "archive": settings.archive.model_copy(update={"url": url})}
    )


def test_a_replay_has_the_streams_hashes(stream, truth, tmp_path):
    settings, _, store = stream
    found = run(elsewhere(settings, tmp_path), store)
    assert hashes(found) == truth
    counts = found.manifest.counts
    assert (counts.orchestrations, counts.bad, counts.problems, counts.outside) == (32, 0, 0, 0)
    assert counts.feedback_unmatched == 1, "the feedback on no known span"
    versions = {row["version"] for row in found.rows(["version"])}
    assert len(versions) > 1, (
        "credit must have used several versions, else the recorded version proves nothing"
    )
    assert not (found.folder / "work").exists()


@pytest.mark.parametrize("bucket_bytes", [40_000, 9_000])
def test_buckets_and_chunks_do_not_matter(stream, truth, tmp_path, bucket_bytes):
    settings, _, store = stream
    found = run(elsewhere(settings, tmp_path), store, bucket_bytes=bucket_bytes, chunk_bytes=20_000)
    assert found.manifest.buckets >= 2
    assert hashes(found) == truth


def test_workers_do_not_matter(stream, truth, tmp_path):
    settings, _, store = stream
    told = []
    plan = make_plan(elsewhere(settings, tmp_path), store, name="two", bucket_bytes=20_000)
    replay(plan, store, tmp_path / "replays", workers=2, tell=told.append)
    assert hashes(ResultSet(tmp_path / "replays" / "two")) == truth
    last = [now for now in told if now.phase == "replaying"][-1]
    assert last.orchestrations == 32
    assert last.spans > 100


def test_one_pipeline_makes_the_same(stream, truth, tmp_path):
    settings, _, store = stream
    plan = make_plan(elsewhere(settings, tmp_path), store, name="whole", chunk_bytes=20_000)
    manifest = replay_whole(plan, store, str(tmp_path / "replays"), "", runner="DirectRunner")
    found = ResultSet(tmp_path / "replays" / "whole")
    assert hashes(found) == truth
    local = run(elsewhere(settings, tmp_path), store, "local").manifest.counts
    assert manifest.counts == local


def test_the_order_of_files_and_records_does_not_matter(stream, truth, tmp_path):
    """The same records under other offsets, in other partitions, some twice, as another log would have them."""
    settings, log, _ = stream
    rng = random.Random(11)
    store = ArchiveStore(LocalFiles(tmp_path / "archive"), ManualClock(T0))
    for topic in topics.ALL_TOPICS:
        records = log.read([topic], {}, 10**6)
        if topic == topics.SPANS:
            records = [*records, *rng.sample(records, 20)]
            rng.shuffle(records)
        parts: dict[int, list[LogRecord]] = {0: [], 1: [], 2: []}
        for record in records:
            partition = rng.randrange(3) if topic in (topics.SPANS, topics.FEEDBACK) else 0
            mine = parts[partition]
            mine.append(msgspec.structs.replace(record, offset=len(mine), partition=partition))
        for partition, mine in parts.items():
            for at in range(0, len(mine), 25):
                write_range(store, topic, partition, mine[at : at + 25])
    settings = settings.model_copy(update={"workspace": tmp_path})
    assert hashes(run(settings, store, bucket_bytes=9_000, chunk_bytes=9_000)) == truth


@pytest.mark.parametrize("name", sorted(path.name for path in DESK.glob("*.otlp.jsonl")))
def test_golden_recordings(name, tmp_path):
    spans = [span for batch in read_spans(DESK / name) for span in batch.spans]
    settings = settings_of(tmp_path)
    log = published(settings, batches(spans))
    assert hashes(run(settings, archive_of(settings, log))) == expected(log)


def test_corpora(tmp_path):
    files = sorted((SHARED / "corpora").glob("live-*/*/spans.otlp.jsonl"))
    if not files:
        pytest.skip("no shared/corpora beside this checkout")
    spans = [span for path in files for batch in read_spans(path) for span in batch.spans]
    settings = settings_of(tmp_path)
    log = published(settings, batches(spans, size=30))
    found = run(settings, archive_of(settings, log, records=50), bucket_bytes=300_000)
    assert len(expected(log)) > 10
    assert hashes(found) == expected(log)


# ---------------------------------------------------------------- ranges, other definitions


def days_log(settings, tmp_path):
    """One job a day for five days, its outcome a day later."""
    log = MemoryLog(ManualClock(T0))
    records: dict[str, list[LogRecord]] = {topics.SPANS: [], topics.FEEDBACK: []}
    day_ns = 86_400 * 10**9
    start = T0 // day_ns * day_ns
    for day in range(5):
        for event in [*job(day), outcome(day, 0.5)]:
            own = records[event.TOPIC]
            at = start + (day + (event.TOPIC == topics.FEEDBACK)) * day_ns + 3600 * 10**9
            own.append(LogRecord(event.TOPIC, len(own), event.key, event.event_id, encode(event), at))
    store = ArchiveStore(LocalFiles(tmp_path / "archive"), ManualClock(T0))
    for topic, own in records.items():
        write_range(store, topic, 0, own)
    assert log is not None
    return store, start // day_ns


def test_a_range_takes_the_orchestrations_that_began_in_it_whole(tmp_path):
    import datetime as dt

    settings = settings_of(tmp_path)
    store, first = days_log(settings, tmp_path)
    day = [(dt.date(1970, 1, 1) + dt.timedelta(days=first + n)).isoformat() for n in range(6)]
    whole = hashes(run(settings, store, "whole"))
    assert len(whole) == 5
    two = run(settings, store, "two", since=day[1], until=day[2])
    assert len(hashes(two)) == 2
    assert hashes(two).items() <= whole.items(), "with its later feedback, so the same hashes"
    hour = run(settings, store, "hour", since=f"{day[1]}T02:00", until=f"{day[2]}T02:00")
    assert len(hashes(hour)) == 1
    with pytest.raises(ConfigError, match="has no spans in this range"):
        run(settings, store, "none", since="2001-01-01", until="2001-01-02")
    with pytest.raises(ConfigError, match="is no time"):
        run(settings, store, "bad", since="yesterday")
    with pytest.raises(ConfigError, match="is not before"):
        run(settings, store, "turned", since=day[3], until=day[1])


def test_an_empty_archive_says_what_to_do(tmp_path):
    settings = settings_of(tmp_path)
    with pytest.raises(ConfigError, match="spanloop archive once"):
        run(settings, ArchiveStore(LocalFiles(tmp_path / "archive")))


def test_another_reward_definition_changes_rewards_and_not_content(stream, truth, tmp_path):
    settings, _, store = stream
    other = tmp_path / "tools.toml"
    other.write_text("[pipeline]\nfinish_weight = 0.25\noutcome_floor = -1.0\n")
    settings = elsewhere(settings, tmp_path)
    found = run(settings, store, rewards=other)
    assert {name: h[0] for name, h in hashes(found).items()} == {name: h[0] for name, h in truth.items()}
    assert found.manifest.rewards_file == other.read_text()
    assert found.manifest.settings["finish_weight"] == 0.25
    changed = [name for name, h in hashes(found).items() if h[1] != truth[name][1]]
    assert len(changed) > 10


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("finish_weight = 1", "one section, \\[pipeline\\]"),
        (
            "[pipeline]\nfinish_wieght = 1",
            "pipeline.finish_wieght, which defines no reward; known: parallel_weight",
        ),
        ("[pipeline]\nquiet_s = 1", "pipeline.quiet_s, which defines no reward"),
        ("[pipeline]\nholdout = 2", "pipeline.holdout: Input should be less than 1"),
        ("[pipeline", "not valid TOML"),
    ],
)
def test_a_wrong_rewards_file_says_what_is_wrong(stream, tmp_path, text, told):
    settings, _, store = stream
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        run(elsewhere(settings, tmp_path), store, rewards=path)
    with pytest.raises(ConfigError, match="no rewards file"):
        run(elsewhere(settings, tmp_path), store, rewards=tmp_path / "none.toml")


def test_newest_models_credit_everything_with_the_last_version(stream, tmp_path):
    settings, log, store = stream
    found = run(elsewhere(settings, tmp_path), store, models="newest")
    newest = decode(log.read([topics.MODELS], {}, 100)[-1].value)
    assert {row["version"] for row in found.rows(["version"])} == {newest.version}


# ---------------------------------------------------------------- what goes wrong


def test_bad_records_are_noted_and_the_rest_goes_on(tmp_path):
    settings = settings_of(tmp_path)
    log = published(settings, [*job(1), *job(2), outcome(1, 0.5)])
    good = expected(log)
    unknown = encode(outcome(3, 1.0)).replace(b"feedback_received", b"from_tomorrow")
    log.append(
        [
            NewRecord(topics.SPANS, "default/x", "bad-1", b"{not json"),
            NewRecord(topics.SPANS, "default/y", "bad-2", encode(outcome(9, 0.1))),
            NewRecord(topics.FEEDBACK, "default/z", "bad-3", unknown),
            NewRecord(topics.CREDITS, "default/z", "bad-4", b"[]"),
        ]
    )
    found = run(settings, archive_of(settings, log))
    assert hashes(found) == good
    assert found.manifest.counts.bad == 4
    notes = [json.loads(line) for line in (found.folder / "bad.jsonl").read_text().splitlines()]
    assert {(note["topic"], note["key"]) for note in notes} == {
        ("spans", "default/x"), ("spans", "default/y"), ("feedback", "default/z"), ("credits", "default/z"),
    }  # fmt: skip
    assert all(note["sha256"] and note["reason"] for note in notes)


def test_a_span_that_no_dialect_can_read_is_noted(tmp_path, monkeypatch):
    from spanloop.pipeline.replay import reading

    settings = settings_of(tmp_path)
    log = published(settings, [*job(1), *job(2)])
    real, poison = reading.operation_of, job(1)[0].spans[0].span_id

    def picky(span, source):
        if span.span_id == poison:
            raise ValueError(span.span_id)
        return real(span, source)

    monkeypatch.setattr(reading, "operation_of", picky)
    found = run(settings, archive_of(settings, log))
    (note,) = [json.loads(line) for line in (found.folder / "bad.jsonl").read_text().splitlines()]
    assert (note["span_id"], note["reason"]) == (poison, "a span cannot be read: ValueError")
    assert found.manifest.counts.orchestrations == 2


def test_an_orchestration_that_cannot_be_made_does_not_stop_the_others(stream, truth, tmp_path, monkeypatch):
    from spanloop.pipeline.replay import assembling

    settings, _, store = stream
    real, poison = assembling.build_content, sorted(truth)[0]

    def picky(component):
        if component.orchestration_id == poison:
            raise ZeroDivisionError
        return real(component)

    monkeypatch.setattr(assembling, "build_content", picky)
    found = run(elsewhere(settings, tmp_path), store)
    assert hashes(found).keys() == truth.keys() - {poison}
    assert found.manifest.counts.problems == 1
    assert "ZeroDivisionError" in (found.folder / "bad.jsonl").read_text()


def test_a_missing_value_model_is_a_problem_and_no_other_credit(tmp_path):
    settings = settings_of(tmp_path, value_every=4)
    log = published(
        settings, *([*job(n), *job(n + 50), outcome(n, 0.5), outcome(n + 50, n / 12)] for n in range(12))
    )
    used = set(expected(log).values())
    log._topics[topics.MODELS].clear()
    found = run(settings, archive_of(settings, log))
    rows = list(found.rows(["version", "problem", "credit", "content_hash", "rewards_hash"]))
    lost = [row for row in rows if row["version"] != "none"]
    assert lost
    assert all("is not in the archive" in row["problem"] and not row["credit"] for row in lost)
    assert found.manifest.counts.problems == len(lost)
    assert {(row["content_hash"], row["rewards_hash"]) for row in rows} == {h[:2] for h in used}


def test_a_damaged_file_is_named_and_nothing_is_left_out_in_silence(tmp_path):
    settings = settings_of(tmp_path)
    log = published(settings, [*job(1), *job(2)])
    store = archive_of(settings, log)
    (path,) = (tmp_path / "archive" / "raw" / "topic=spans").glob("*/*/*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(TerminalError, match=r"spanloop archive verify --deep"):
        run(settings, store)


def test_files_merged_meanwhile_are_found_again(stream, truth, tmp_path, monkeypatch):
    from spanloop.pipeline.archive.compaction import compact

    settings, log, _ = stream
    settings = settings.model_copy(update={"workspace": tmp_path})
    store = archive_of(settings, log, records=30)
    plan = make_plan(settings, store, name="one", chunk_bytes=20_000)
    clock = ManualClock(T0 + 3 * 86_400 * 10**9)
    later = ArchiveStore(LocalFiles(tmp_path / "archive"), clock)
    assert compact(later, below_bytes=1 << 30) > 0
    live = {file.path for topic in topics.ALL_TOPICS for file in later.raw_files(topic)}
    planned = {path for chunks in plan.chunks.values() for chunk in chunks for path in chunk.paths}
    assert len(planned - live) > 5
    for path in planned - live:
        Path(path).unlink()
    replay(plan, later, tmp_path / "replays")
    assert hashes(ResultSet(tmp_path / "replays" / "one")) == truth


# ---------------------------------------------------------------- resuming


class Stopped(Exception):
    """Stands for a kill: nothing after it runs."""


def test_a_replay_goes_on_where_it_was_stopped(stream, truth, tmp_path, monkeypatch):
    settings, _, store = stream
    settings = elsewhere(settings, tmp_path)
    real, ran, budget = driver.run_step, [], [3]

    def limited(work, kind, *arguments):
        if len(ran) >= budget[0]:
            raise Stopped
        real(work, kind, *arguments)
        ran.append((kind, *arguments))

    monkeypatch.setattr(driver, "run_step", limited)
    tries = 0
    while True:
        tries += 1
        try:
            found = run(settings, store, bucket_bytes=20_000, chunk_bytes=20_000)
            break
        except Stopped:
            budget[0] += 3
    assert tries > 3
    assert len(ran) == len(set(ran)), "no step is done twice"
    assert hashes(found) == truth
    assert found.manifest.seconds > 0
    with pytest.raises(ConfigError, match="is there already"):
        run(settings, store)


def test_a_kill_in_the_middle_of_a_bucket_leaves_no_double_rows(stream, truth, tmp_path, monkeypatch):
    from spanloop.pipeline.replay import transforms

    settings, _, store = stream
    settings = elsewhere(settings, tmp_path)
    real = transforms.WriteReport.process

    def stopped(self, element):
        raise Stopped

    monkeypatch.setattr(transforms.WriteReport, "process", stopped)
    with pytest.raises(Exception, match="Stopped"):
        run(settings, store)
    assert list((tmp_path / "replays" / "one" / "parts").glob("*.parquet")), "parts that no report names"
    monkeypatch.setattr(transforms.WriteReport, "process", real)
    found = run(settings, store)
    assert hashes(found) == truth
    assert len(list(found.rows(["orchestration_id"]))) == len(truth)
    assert {path.name for path in (found.folder / "parts").iterdir()} == {path.name for path in found.paths}


def test_an_unfinished_replay_is_not_mixed_with_another(stream, tmp_path, monkeypatch):
    settings, _, store = stream
    settings = elsewhere(settings, tmp_path)

    def stopped(*_):
        raise Stopped

    monkeypatch.setattr(passes, "join", stopped)
    with pytest.raises(Stopped):
        run(settings, store)
    with pytest.raises(ConfigError, match="is not finished: run the same"):
        ResultSet(tmp_path / "replays" / "one")
    with pytest.raises(ConfigError, match="begun with other models"):
        run(settings, store, models="newest")
    monkeypatch.undo()
    with driver.alone(tmp_path / "replays", "one"), pytest.raises(TransientError, match="another process"):
        run(settings, store)
    plan = make_plan(settings, store, name="one", models="newest")
    assert replay(plan, store, tmp_path / "replays", restart=True).models == "newest"


def spanloop(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "spanloop.schemas.cli", *map(str, arguments)]


def test_kill_9_of_the_driver_ends_its_workers_and_the_command_goes_on(tmp_path):
    settings = settings_of(tmp_path)
    events = [event for n in range(400) for event in job(n, helpers=3)]
    log = MemoryLog(ManualClock(T0))
    log.append(
        [NewRecord(e.TOPIC, e.key, e.event_id, encode(e)) for e in events if isinstance(e, SpansReceived)]
    )
    archive_of(settings, log, records=100)
    command = spanloop("replay", "--workspace", tmp_path, "--workers", 2, "--name", "k", "--bucket-mb", 0.5)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    work = tmp_path / "replays" / "k" / "work"
    deadline = time.monotonic() + 60
    while not list(work.glob("spans-*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert children
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children), "workers outlive their driver"
    again = subprocess.run(
        spanloop("replay", "--workspace", tmp_path, "--workers", 1, "--name", "k", "--bucket-mb", 0.5), env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "400 orchestrations" in again.stdout
