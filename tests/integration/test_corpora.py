"""Real spans of other people's frameworks against what really happened (shared/corpora, where it stands
beside the checkout)."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
from made_spans import SHARED, Desk, hashes

from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.otlp.files import read_spans
from spanloop.schemas.settings import Content

CORPORA = SHARED / "corpora"
FIRST = ["live-pydantic-ai/v2", "live-pydantic-ai/v5", "live-pydantic-ai/v6"]
ALSO = [
    "live-pydantic-ai/lostctx",
    "live-pydantic-ai/truncated-160",
    "live-agent-framework/tools",
    "live-strands/tools",
]
OPENINFERENCE = [
    "live-openai-agents/ok",
    "live-openai-agents/guardrail",
    "live-openai-agents/attrlimit-24",
    "live-langgraph/supervisor",
    "live-crewai/hierarchical",
    "live-google-adk/openinference",
]
FRAMEWORKS = ["live-openai-agents/logfire-ok", "live-strands/graph", "live-autogen/native"]
ABSENT = {
    "live-openai-agents/traceloop-ok": ["missing ('safety_event', False) x1"],
    "live-google-adk/native": [
        "extra   ('tool_result', 'budgeter', 'calc_budget', False) x1",
        "missing ('tool_result', 'budgeter', 'calc_budget', True) x1",
    ],
}
"""What no span shows: Traceloop writes none for a guardrail, ADK without content no tool result (docs/dialects.md)."""
TOKENS = {
    "live-openai-agents/traceloop-ok": (0, 0, 8, 8),
    "live-openai-agents/logfire-ok": (185, 60, 8, 0),
    "live-google-adk/native": (165, 56, 8, 0),
    "live-strands/graph": (155, 43, 6, 0),
    "live-strands/tools": (151, 52, 7, 0),
    "live-autogen/native": (100, 24, 4, 0),
    "live-agent-framework/tools": (145, 52, 7, 0),
    "live-openai-agents/ok": (185, 60, 8, 0),
    "live-openai-agents/guardrail": (0, 0, 0, 0),
    "live-openai-agents/attrlimit-24": (185, 60, 8, 0),
    "live-langgraph/supervisor": (176, 48, 8, 0),
    "live-google-adk/openinference": (84, 28, 8, 4),
}
"""Input, output, calls, calls without usage: sums over the model spans; over ADK four of eight calls were overwritten."""


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


@pytest.mark.parametrize("name", FIRST + ALSO + OPENINFERENCE + FRAMEWORKS)
def test_events_are_what_happened(name):
    folder = variant(name)
    lines = [orchestration_line(c) for c in assemble_spans(spans_of(folder), "default")]
    assert score(folder, lines) == (1.0, [])


@pytest.mark.parametrize("name", list(ABSENT))
def test_nothing_is_missed_but_what_no_span_shows(name):
    folder = variant(name)
    lines = [orchestration_line(c) for c in assemble_spans(spans_of(folder), "default")]
    found, misses = score(folder, lines)
    assert (found >= 0.95, misses) == (True, ABSENT[name])


@pytest.mark.parametrize("name", FIRST)
def test_tokens_are_what_the_server_counted(name):
    folder = variant(name)
    (content,) = assemble_spans(spans_of(folder), "default")
    calls = json.loads((folder / "server_log.json").read_text())
    assert content.tokens.calls == len(calls)
    assert content.tokens.unknown_calls == 0


@pytest.mark.parametrize(
    "name", [*OPENINFERENCE, *ALSO[2:], "live-openai-agents/logfire-ok", "live-autogen/native"]
)
def test_what_happened_shows_without_any_content(name):
    """Texts, arguments and results replaced by their hashes, as the collectors store them by default."""
    folder = variant(name)
    redactor = Redactor(Content(), b"k" * 32)
    spans = [redactor.span(span) for span in spans_of(folder)]
    assert score(folder, [orchestration_line(c) for c in assemble_spans(spans, "default")]) == (1.0, [])


@pytest.mark.parametrize("name", list(TOKENS))
def test_tokens_are_what_the_spans_hold(name):
    folder = variant(name)
    (content,) = assemble_spans(spans_of(folder), "default")
    tokens = content.tokens
    assert (tokens.input, tokens.output, tokens.calls, tokens.unknown_calls) == TOKENS[name]
    assert tokens.calls == len(json.loads((folder / "server_log.json").read_text()))


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
