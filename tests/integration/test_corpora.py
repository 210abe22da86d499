"""Real spans of other people's frameworks against what really happened (shared/corpora, where it stands
beside the checkout)."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
from made_spans import SHARED, Desk, hashes

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.otlp.files import read_spans

CORPORA = SHARED / "corpora"
FIRST = ["live-pydantic-ai/v2", "live-pydantic-ai/v5", "live-pydantic-ai/v6"]
ALSO = [
    "live-pydantic-ai/lostctx",
    "live-pydantic-ai/truncated-160",
    "live-agent-framework/tools",
    "live-strands/tools",
]


def variant(name: str) -> Path:
    folder = CORPORA / name
    if not folder.is_dir():
        pytest.skip(f"no shared/corpora/{name} beside this checkout")
    return folder


def spans_of(folder: Path, file: str = "spans.otlp.jsonl"):
    batches = list(read_spans(folder / file))
    assert not any(batch.rejected for batch in batches)
    return [s for batch in batches for s in batch.spans]


def score(folder: Path, lines: list[dict]) -> tuple[float, list[str]]:
    """F1 by the shared scorer, and the misses in words."""
    path = SHARED / "tools" / "score_events.py"
    if not path.exists():
        pytest.skip("no shared/tools/score_events.py beside this checkout")
    spec = importlib.util.spec_from_file_location("score_events", path)
    assert spec is not None
    assert spec.loader is not None
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)
    counts, misses = scorer.score(
        [json.dumps(line) for line in lines], json.loads((folder / "truth.json").read_text())
    )
    return scorer.ratios(*[sum(row[i] for row in counts.values()) for i in range(3)])["f1"], misses


@pytest.mark.parametrize("name", FIRST + ALSO)
def test_events_are_what_happened(name):
    folder = variant(name)
    lines = [orchestration_line(c) for c in assemble_spans(spans_of(folder), "default")]
    assert score(folder, lines) == (1.0, [])


@pytest.mark.parametrize("name", FIRST)
def test_tokens_are_what_the_server_counted(name):
    folder = variant(name)
    (content,) = assemble_spans(spans_of(folder), "default")
    calls = json.loads((folder / "server_log.json").read_text())
    assert content.tokens.calls == len(calls)
    assert content.tokens.unknown_calls == 0


@pytest.mark.parametrize("name", FIRST)
def test_both_wire_formats_give_one_content(name):
    folder = variant(name)
    assert hashes(spans_of(folder)) == hashes(spans_of(folder, "spans.otlp.pb.len"))


def test_all_corpora_in_one_log_stay_apart_and_equal_the_batch_run():
    """Scripted models repeat their response ids in every recording; that must join nothing."""
    folders = sorted(path.parent for path in CORPORA.glob("live-*/*/spans.otlp.jsonl"))
    if not folders:
        pytest.skip("no shared/corpora beside this checkout")
    alone: dict[str, str] = {}
    spans = []
    for folder in folders:
        own = spans_of(folder)
        alone |= hashes(own)
        spans += own
    rng = random.Random(5)
    rng.shuffle(spans)
    desk = Desk(quiet_s=1, timeout_s=60)
    for number, item in enumerate(spans):
        desk.send(item)
        if number % 40 == 0:
            desk.later(rng.choice([0.1, 2, 100]))
        if number % 101 == 0:
            desk.restart()
    desk.later(1000)
    assert {key: event.content_hash for key, event in desk.live().items()} == alone
