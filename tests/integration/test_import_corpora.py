"""Other people's files (shared/corpora, where it stands beside the checkout) through the readers, and an import that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from foreign_files import native
from made_spans import SHARED

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.formats.reading import read_files
from spanloop.pipeline.formats.survey import document_of, read
from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json

CORPORA = SHARED / "corpora"


def corpus(name: str) -> Path:
    path = CORPORA / name
    if not path.exists():
        pytest.skip(f"no shared/corpora/{name} beside this checkout")
    return path


def whole(path: Path) -> Read:
    found = Read([], [])
    for part in read_files(path):
        found.spans += part.read.spans
        found.rejected += part.read.rejected
        found.feedback += part.read.feedback
    assert found.rejected == []
    return found


def test_the_sdks_own_json_tells_all_that_happened():
    folder = corpus("live-openai-agents/native-ok")
    scorer = SHARED / "tools" / "score_events.py"
    if not scorer.exists():
        pytest.skip("no shared/tools/score_events.py beside this checkout")
    (content,) = assemble_spans(whole(folder / "native_trace.jsonl").spans, "default")
    done = subprocess.run(
        [sys.executable, str(scorer), str(folder / "truth.json"), "--misses"],
        input=json.dumps(orchestration_line(content)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == {"precision": 1.0, "recall": 1.0, "f1": 1.0}, (
        done.stdout
    )
    assert (content.tokens.input, content.tokens.output, content.tokens.unknown_calls) == (185, 60, 0)


def test_langfuse_exports_are_read_in_their_frameworks_dialects():
    files = sorted(corpus("langfuse-exports").glob("*.json"))
    assert files
    for path in files:
        document = json.loads(path.read_text())
        found = whole(path)
        assert len(found.spans) == len(document["observations"]), path.name
        counted = sum(
            raw["usageDetails"].get("input", 0)
            for raw in document["observations"]
            if raw["type"] == "GENERATION"
        )
        tokens = [c.tokens.input for c in assemble_spans(found.spans, "t")]
        assert not counted or sum(tokens) <= counted, path.name
    google = next(path for path in files if path.name.startswith("google-adk"))
    (content,) = assemble_spans(whole(google).spans, "t")
    assert [a.name for a in content.agents] == ["hello_agent"]
    assert content.tokens.unknown_calls == 0


def test_tau_bench_tries_tools_and_rewards():
    (path,) = corpus("tau-bench").glob("*.json")
    tries = json.loads(path.read_text())
    found = whole(path)
    contents = assemble_spans(found.spans, "t")
    events = Counter(e.type for c in contents for e in c.events)
    tools = sum(m["role"] == "tool" for one in tries for m in one["traj"])
    assert (len(contents), events["tool_call"], events["tool_result"]) == (len(tries), tools, tools)
    assert Counter(f["value"] for f in found.feedback) == Counter(one["reward"] for one in tries)
    groups = Counter(next(c.task_key for c in content.calls) for content in contents)
    assert set(groups.values()) == {4}
    assert len(groups) == len({one["task_id"] for one in tries})


@pytest.mark.parametrize("folder", ["Algorithm-Generated", "Hand-Crafted"])
def test_who_and_when_turns_are_events_and_labels_stay_out(folder):
    for path in sorted(corpus(f"who-and-when/{folder}").glob("*.json")):
        log = json.loads(path.read_text())
        found = whole(path)
        (content,) = assemble_spans(found.spans, "t")
        assert len(content.events) == len(log["history"]), path.name
        assert len(found.spans) == len(log["history"]) + 1
        text = canonical_json(found.spans).decode()
        assert canonical_json(log["mistake_reason"]).decode()[1:-1] not in text
        assert found.feedback == []
        other = {k: v if k in ("history", "question_ID", "system_prompt") else "?" for k, v in log.items()}
        from spanloop.pipeline.formats import who_and_when

        assert who_and_when.read(other).spans == found.spans


def test_the_surveys_own_example_survives_the_log():
    path = SHARED / "design" / "survey-example-trace.json"
    if not path.exists():
        pytest.skip("no shared/design/survey-example-trace.json beside this checkout")
    document = json.loads(path.read_text())
    assert document_of(read(document).spans) == (document, 0)


def _ids(workspace: Path) -> set[str]:
    log = SqliteLog(workspace / "spanloop.db", create=False)
    try:
        return {
            f"{r.topic}/{r.event_id}" for r in scan(log, (topics.SPANS, topics.FEEDBACK, topics.DEAD_LETTERS))
        }
    finally:
        log.close()


@pytest.mark.slow
def test_an_import_that_is_killed_at_any_moment_goes_on(tmp_path, monkeypatch):
    """kill -9 at random moments, then once to the end: the same events as of one undisturbed run."""
    path = tmp_path / "many.jsonl"
    rng = random.Random(11)
    with path.open("w") as handle:
        for n in range(700):
            lines = [json.dumps(v) for v in native(f"{n % 251 + 1:02x}")]
            handle.write("\n".join([*lines, "{broken"][: rng.randint(6, len(lines) + 1)]) + "\n")

    def command(workspace: Path) -> list[str]:
        words = ["import", str(path), "--workspace", str(workspace), "--json"]
        return [sys.executable, "-m", "spanloop.schemas.cli", *words]

    monkeypatch.setenv("SPANLOOP_CONTENT__HMAC_KEY", "k" * 32)  # else each workspace hashes with its own
    calm, hard = tmp_path / "calm", tmp_path / "hard"
    once = subprocess.run(command(calm), capture_output=True, text=True, timeout=170, check=False)
    expected = json.loads(once.stdout)
    kills = 0
    for _ in range(6):
        process = subprocess.Popen(command(hard), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (hard / "imports").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.4)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    last = subprocess.run(command(hard), capture_output=True, text=True, timeout=170, check=False)
    found = json.loads(last.stdout)
    assert kills > 0
    assert _ids(hard) == _ids(calm)
    assert (found["spans"], found["rejected"], last.returncode) == (
        expected["spans"],
        expected["rejected"],
        3,
    )
