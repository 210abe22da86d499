"""``spanloop import``: counts, exit codes, dead letters with their place, going on where it stopped, what is never written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from foreign_files import LINES, langfuse_trace, native, survey_document, tau_try
from made_spans import Desk
from otlp_requests import as_json, span

from spanloop.collectors.batches import Intake
from spanloop.collectors.deadletters_replay import replay
from spanloop.collectors.import_cli import import_
from spanloop.collectors.importers.importing import Importer
from spanloop.collectors.importers.showing import Progress
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.assembly.cli import traces
from spanloop.pipeline.formats.opened import Source, opened
from spanloop.pipeline.formats.survey import document_of
from spanloop.pipeline.letters import read_letters
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys
from spanloop.pipeline.sealing.vault import SEALED
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import Event, SpansReceived, decode
from spanloop.schemas.settings import Content


def run(*words: object, stdin: bytes | None = None):
    return CliRunner().invoke(import_, [str(w) for w in words], input=stdin, catch_exceptions=False)


def counts(*words: object, stdin: bytes | None = None) -> dict[str, int]:
    done = run(*words, "--json", stdin=stdin)
    return {**json.loads(done.stdout), "exit": done.exit_code}


def on_log(workspace: Path, *names: str) -> list[Event]:
    log = SqliteLog(workspace / "spanloop.db", create=False)
    try:
        return [decode(record.value) for record in scan(log, names)]
    finally:
        log.close()


def write(path: Path, values: list) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


@pytest.mark.parametrize("name", LINES)
def test_every_format_once_and_twice(tmp_path, name):
    path = write(tmp_path / "file", LINES[name])
    first = counts(path, "--workspace", tmp_path / "w")
    assert (first["exit"], first["files"], first["rejected"], first["duplicates"]) == (0, 1, 0, 0)
    assert first["events"] > 0
    ids = {e.event_id for e in on_log(tmp_path / "w", topics.SPANS, topics.FEEDBACK)}
    for again in ([], ["--again"]):
        second = counts(path, "--workspace", tmp_path / "w", *again)
        assert (second["events"], second["duplicates"], second["spans"]) == (
            0,
            first["events"],
            first["spans"],
        )
    assert {e.event_id for e in on_log(tmp_path / "w", topics.SPANS, topics.FEEDBACK)} == ids


def test_a_bad_line_is_counted_named_and_dead_lettered(tmp_path):
    path = tmp_path / "mixed.jsonl"
    good = [json.dumps(v) for v in native()]
    path.write_text("\n".join([good[0], "{broken", good[1], '{"some": "object"}', *good[2:]]) + "\n")
    done = run(path, "--workspace", tmp_path / "w")
    assert done.exit_code == 3
    assert "refused: mixed.jsonl line 2: " in done.stderr
    assert "refused: mixed.jsonl line 4: expected a record of a known format" in done.stderr
    assert "11 spans from 1 files" in done.stdout
    assert f"spanloop deadletters list --workspace {tmp_path / 'w'}  " in done.stderr  # as it can be pasted
    letters = on_log(tmp_path / "w", topics.DEAD_LETTERS)
    assert [(e.details["file"], e.details["lines"], e.size) for e in letters] == [
        ("mixed.jsonl", 2, len("{broken\n")),
        ("mixed.jsonl", 4, len('{"some": "object"}\n')),
    ]
    assert len(on_log(tmp_path / "w", topics.SPANS)) == 11


def test_rewards_and_scores_go_the_scorers_way(tmp_path):
    path = write(tmp_path / "tries.json", [tau_try(0), tau_try(1, 0.0), langfuse_trace()])
    assert counts(path, "--workspace", tmp_path / "w")["scores"] == 3
    found = on_log(tmp_path / "w", topics.FEEDBACK)
    assert [(e.name, e.value, e.scorer, e.target_kind) for e in found] == [
        ("outcome", 1.0, "import", "trace"),
        ("outcome", 0.0, "import", "trace"),
        ("tone_of_voice", 0.5, "import", "trace"),
    ]
    assert "scores" not in counts(path, "--workspace", tmp_path / "none", "--no-scores")
    assert on_log(tmp_path / "none", topics.FEEDBACK) == []


def test_a_score_that_is_no_number_costs_only_itself(tmp_path):
    path = write(tmp_path / "tries.json", [tau_try(0, 1e300), tau_try(1)])
    found = counts(path, "--workspace", tmp_path / "w")
    assert (found["rejected"], found["scores"], found["exit"]) == (1, 1, 3)


def test_a_dry_run_writes_nothing(tmp_path):
    path = write(tmp_path / "file", native())
    done = run(path, "--workspace", tmp_path / "w", "--dry-run")
    assert (done.exit_code, done.stdout) == (0, "would import 11 spans from 1 files: 11 events, 0 refused\n")
    assert not (tmp_path / "w").exists()


def test_standard_input_and_archives(tmp_path):
    body = "".join(json.dumps(v) + "\n" for v in native()).encode()
    assert counts("-", "--workspace", tmp_path / "w", stdin=body)["events"] == 11
    assert counts("-", "--workspace", tmp_path / "w", stdin=gzip.compress(body))["duplicates"] == 11
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.jsonl", body)
        archive.writestr("readme.txt", "hello")
    found = run(tmp_path / "a.zip", "--workspace", tmp_path / "w")
    assert found.exit_code == 0
    assert "11 known already" in found.stdout
    assert "1 files in no known format passed over" in found.stdout


def test_files_of_other_kinds(tmp_path):
    other = tmp_path / "notes.json"
    other.write_text('{"truth": [1, 2]}')
    with pytest.raises(ConfigError, match=r"notes\.json is in no format"):
        run(other, "--workspace", tmp_path / "w")
    good = write(tmp_path / "good.jsonl", native())
    done = run(other, good, "--workspace", tmp_path / "w")
    assert (done.exit_code, "11 new events" in done.stdout) == (3, True)
    assert run(tmp_path, "--workspace", tmp_path / "other w").exit_code == 0
    assert counts(good, "--workspace", tmp_path / "v", "--format", "phoenix")["rejected"] == 11


def test_a_file_that_grew_is_read_from_where_it_ended(tmp_path):
    path = write(tmp_path / "file", native())
    first = counts(path, "--workspace", tmp_path / "w")
    with path.open("a") as handle:
        handle.write(json.dumps(native("ef")[0]) + "\n" + json.dumps(native("ef")[1])[:50])
    second = counts(path, "--workspace", tmp_path / "w")
    assert (second["events"], second["duplicates"], second["rejected"]) == (1, first["events"], 1)
    text = path.read_text()
    path.write_text(text[: text.rindex("\n") + 1] + json.dumps(native("ef")[1]) + "\n")
    third = counts(path, "--workspace", tmp_path / "w")
    assert (third["events"], third["duplicates"], third["rejected"], third["exit"]) == (
        1,
        first["events"] + 1,
        0,
        0,
    )


def test_a_checkpoint_is_believed_only_for_the_same_bytes_and_log(tmp_path):
    path = write(tmp_path / "file", native())
    counts(path, "--workspace", tmp_path / "w")
    assert "1 files continued" in run(path, "--workspace", tmp_path / "w").stdout
    text = path.read_text()
    path.write_text(text[:-40] + text[-40:].replace('"error": null', '"error": "x"'))
    assert path.read_text() != text
    changed = run(path, "--workspace", tmp_path / "w")
    assert "continued" not in changed.stdout
    assert "1 new events, 10 known already" in changed.stdout
    for name in ("spanloop.db", "spanloop.db-wal", "spanloop.db-shm"):
        (tmp_path / "w" / name).unlink(missing_ok=True)
    assert counts(path, "--workspace", tmp_path / "w")["events"] == 11
    for name in (tmp_path / "w" / "imports").iterdir():
        name.write_bytes(b"\x00 torn")
    assert counts(path, "--workspace", tmp_path / "w")["duplicates"] == 11


def test_another_tenant_or_rule_is_another_import(tmp_path):
    path = write(tmp_path / "file", native())
    counts(path, "--workspace", tmp_path / "w")
    assert counts(path, "--workspace", tmp_path / "w", "--tenant", "acme")["events"] == 11
    config = tmp_path / "s.toml"
    config.write_text("[content]\ntraining = true\n")
    with_texts = counts(path, "--workspace", tmp_path / "w", "--config", config)
    assert with_texts["events"] > 0


def test_no_text_is_kept_unless_the_deployment_opted_in(tmp_path):
    secret = native()
    secret[2]["span_data"]["input"][0]["content"] = "SECRETTEXT"
    path = write(tmp_path / "file", [*secret, tau_try(), survey_document()])
    counts(path, "--workspace", tmp_path / "w")
    raw = b"".join(p.read_bytes() for p in (tmp_path / "w").iterdir() if p.is_file())
    for word in (b"SECRETTEXT", b"sorry", b"be kind"):
        assert word not in raw
    assert b"openai_agents.from_agent" in raw


def test_a_survey_trace_is_whole_without_content_but_for_what_only_it_has(tmp_path):
    document = survey_document()
    path = write(tmp_path / "survey.json", [document])
    counts(path, "--workspace", tmp_path / "w")
    (event,) = on_log(tmp_path / "w", topics.SPANS)
    back, gone = document_of(event.spans)
    assert gone > 0
    del document["events"][3]["own"]
    back["events"][3].pop("own")
    document["metrics"] = back["metrics"] = {}
    assert back == document


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    path = write(tmp_path / "file", native())

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Importer, "run", stopped)
    done = run(path, "--workspace", tmp_path / "w")
    assert (done.exit_code, "run the same command again" in done.stderr) == (130, True)


def test_progress_tells_rate_share_and_time_left(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    importer = Importer(None, None, None, tenant="t", now_ns=0, max_nesting=1)  # type: ignore[arg-type]
    importer.total.spans = 4000
    line = Progress([Source(path), Source(path)], importer.total).line(1, 0, 20.0)
    assert line == "file (2 of 2): 4,000 spans, 200/s, 50%, 20 s left"


def test_help_has_examples_and_exit_codes():
    text = run("--help").stdout
    assert "spanloop import - --json" in text
    assert "Exit codes" in text


def test_otlp_requests_stay_one_event_a_trace(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(as_json([span(1), span(2)]) + b"\n" + as_json([span(3)]))
    assert counts(path, "--workspace", tmp_path / "w")["events"] == 2


def test_imported_survey_traces_and_others_come_out_of_the_workspace(tmp_path):
    """Import, assemble as the pipeline does, export: the imported document is whole, another orchestration is told."""
    config = tmp_path / "s.toml"
    config.write_text("[content]\ntraining = true\n")
    path = write(tmp_path / "file", [survey_document(), *native()])
    counts(path, "--workspace", tmp_path / "w", "--config", config)
    desk = Desk(quiet_s=1, timeout_s=5)
    for event in on_log(tmp_path / "w", topics.SPANS):
        assert isinstance(event, SpansReceived)
        desk.send(*event.spans, source=event.source)
    desk.later(1000)
    log = SqliteLog(tmp_path / "w" / "spanloop.db")
    log.append([new_record(event) for event in desk.events])
    log.close()
    done = CliRunner().invoke(
        traces, ["--workspace", str(tmp_path / "w"), "--format", "survey"], catch_exceptions=False
    )
    newest, imported = [json.loads(line) for line in done.stdout.splitlines()]
    assert imported == survey_document()
    assert newest["system"] == "spanloop"
    again = write(tmp_path / "again", [newest, imported])
    found = counts(again, "--workspace", tmp_path / "v", "--config", config)
    assert (found["rejected"], found["files"]) == (0, 1)


def test_a_refused_record_of_a_file_is_read_again_from_its_letter(tmp_path):
    config = tmp_path / "s.toml"
    config.write_text("[content]\ntraining = true\n")
    record = native()[2]
    path = write(tmp_path / "file", [record])
    counts(path, "--workspace", tmp_path / "w", "--config", config, "--format", "phoenix")
    log = SqliteLog(tmp_path / "w" / "spanloop.db")
    try:
        redactor = Redactor(Content(training=True), b"k" * 32)
        (letter,) = read_letters(log)
        (done,) = replay(log, [letter], Intake(redactor, 65_536, keep_content=True))
    finally:
        log.close()
    assert done.outcome == "sent"
    (event,) = on_log(tmp_path / "w", topics.SPANS)
    assert [s.attributes["openai_agents.span_type"] for s in event.spans] == ["generation"]


def test_a_damaged_archive_in_a_folder_costs_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(as_json([span(1)]) + b"\n")
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("b.jsonl", as_json([span(2)]))
    whole = (folder / "a.zip").read_bytes()
    (folder / "cut.zip").write_bytes(whole[:-30])
    found = run(folder, "--workspace", tmp_path / "w")
    assert found.exit_code == 3
    assert "cut.zip is a damaged zip archive" in found.output
    assert "2 spans from 2 files" in found.output
    (folder / "cut.zip").write_bytes(whole)
    assert counts(folder, "--workspace", tmp_path / "w")["exit"] == 0


def test_standard_input_that_is_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"), opened(Source(Path("-"))):
        pass


def test_gzip_whose_checksum_is_wrong_is_damage_behind_its_spans(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"".join(as_json([span(n)]) + b"\n" for n in range(1, 1500))))
    packed[-8] ^= 1
    (tmp_path / "a.gz").write_bytes(packed)
    found = counts(tmp_path / "a.gz", "--workspace", tmp_path / "w")
    assert (found["exit"], found["files"]) == (3, 1)
    assert found["spans"] > 500


def test_members_that_cannot_be_unpacked_are_named_and_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for n in (1, 2, 3):
            archive.writestr(f"{n}.jsonl", as_json([span(n)]))
        starts = {i.filename: i.header_offset for i in archive.infolist()}
    whole = bytearray(path.read_bytes())
    directory = whole.find(b"PK\x01\x02")
    whole[directory + 8] |= 1  # the first member's flags say encrypted
    whole[starts["2.jsonl"]] ^= 1  # the second one's own header is damaged
    path.write_bytes(whole)
    found = run(path, "--workspace", tmp_path / "w")
    assert found.exit_code == 3
    assert "cannot read a.zip:1.jsonl" in found.output
    assert "encrypted" in found.output
    assert "cannot read a.zip:2.jsonl: the archive is damaged" in found.output
    assert "1 spans from 1 files" in found.output


def test_keys_of_many_lines_are_made_at_once(tmp_path, monkeypatch):
    """A key that is durable costs a sync of the disk: one for a group of lines, not one for each."""
    config = tmp_path / "config.toml"
    config.write_text("[content]\ntraining = true\nsubject_keys = true\n")
    spans = [span(n, trace_id=f"{n:032x}", attributes={"note": "call Pat"}) for n in range(1, 41)]
    path = write(tmp_path / "file", [json.loads(as_json([one])) for one in spans])
    asked: list[int] = []
    make = SqliteKeys._make

    def counted(self, tenant, traces):
        asked.append(len(traces))
        return make(self, tenant, traces)

    monkeypatch.setattr(SqliteKeys, "_make", counted)
    found = counts(path, "--workspace", tmp_path / "w", "--config", config)
    assert (found["spans"], found["events"], asked) == (40, 40, [40])
    events = on_log(tmp_path / "w", topics.SPANS)
    assert all(SEALED in one.attributes for event in events for one in event.spans)
    again = counts(path, "--workspace", tmp_path / "w", "--config", config, "--again")
    assert (again["events"], again["duplicates"]) == (0, 40)


def test_the_next_step_knows_whether_the_pipeline_runs(tmp_path):
    path = write(tmp_path / "file", next(iter(LINES.values())))
    assert "next: spanloop up" in run(path, "--workspace", tmp_path / "w").stderr
    run_file = tmp_path / "w" / "run.json"
    run_file.write_text(json.dumps({"pids": {"pipeline": os.getpid()}}))
    assert "next: spanloop traces" in run(path, "--workspace", tmp_path / "w").stderr
    run_file.write_text(json.dumps({"pids": {"collector": os.getpid(), "pipeline": 2**22 + 1}}))
    assert "next: spanloop up" in run(path, "--workspace", tmp_path / "w").stderr


INTERRUPTED = """
import importlib.abc, os, signal, sys
WANTED = sys.argv[1]
class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == WANTED:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from spanloop.schemas.cli import main
sys.argv[:2] = ["spanloop"]
main()
"""


@pytest.mark.parametrize(
    "module",
    ["click", "spanloop.schemas.verbs", "spanloop.collectors.import_cli", "spanloop.collectors.redaction", "spanloop.pipeline.log.sqlite"],
)  # fmt: skip
def test_ctrl_c_while_it_starts_ends_it_without_a_traceback(tmp_path, module):
    file = write(tmp_path / "spans.jsonl", [{}])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "import", str(file), "--workspace", str(tmp_path / "w")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert "stopped" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Aborted" not in done.stderr
