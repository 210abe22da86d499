"""Agent frameworks run here and now, each in a process of its own, over OTLP through two real receivers (one that keeps no
content, one that keeps it), and the assembled events against what the scenes' own tools and scripted model did."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from receiver_harness import process, read_all

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.spans import Span

HERE = Path(__file__).parent
ELSEWHERE = {"strands": "SPANLOOP_STRANDS_PYTHON"}
"""Frameworks that cannot be installed beside this project's pins: variables that name the python of an environment that has
the framework and opentelemetry-exporter-otlp-proto-http."""
SCENES = {
    "openai_agents": ["team", "guardrail", "hand_back"],
    "pydantic_ai": ["team", "approval"],
    "langgraph": ["team", "interrupt"],
    "smolagents": ["team"],
    "strands": ["team", "swarm", "graph"],
}
ABSENT = {
    ("strands", "graph", "dropped"): [
        "missing ('aggregate', 'docent') x1",
        "missing ('message', 'archivist', 'docent') x1",
        "missing ('message', 'registrar', 'docent') x1",
    ],
}
"""A node's input repeats other nodes' answers inside a frame; where texts are dropped, frame and answer are one hash
(docs/dialects.md)."""
KEPT = {"dropped": {}, "kept": {"SPANLOOP_CONTENT__TRAINING": "true"}}


def key(event: dict) -> tuple:
    """What of an event is compared: as shared/tools/score_events.py does."""
    kind = event["type"]
    agent, to = (str(event.get(f) or "").lower() for f in ("agent", "to"))
    failed = bool(event.get("error")) or event.get("status") == "error"
    return {
        "delegate": (kind, agent, to), "return": (kind, agent, to), "message": (kind, agent, to),
        "spawn": (kind, agent, str(event.get("child") or "").lower() or to),
        "tool_call": (kind, agent, event.get("tool")), "tool_result": (kind, agent, event.get("tool"), failed),
        "safety_event": (kind, bool(event.get("triggered"))), "stop": (kind, failed), "human_intervention": (kind,),
    }.get(kind, (kind, agent))  # fmt: skip


def score(truth: list[dict], lines: list[dict]) -> tuple[float, list[str]]:
    """F1 and the misses; a second orchestration is one extra event."""
    found = Counter(key(e) for line in lines for e in line["events"] if e["type"] != "despawn")
    found.update(("another orchestration",) for _ in lines[1:])
    true = Counter(key(e) for e in truth)
    matched = (found & true).total()
    misses = [f"missing {k} x{n}" for k, n in (true - found).items()]
    misses += [f"extra {k} x{n}" for k, n in (found - true).items()]
    return round(2 * matched / (found.total() + true.total()), 4), sorted(misses)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Has a framework play its scenes, once; the receivers stay up for all of them."""
    folder = tmp_path_factory.mktemp("frameworks")
    played: dict[str, dict] = {}
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(process(folder / k, **env))[1] for k, env in KEPT.items()]

        def told(framework: str, scene: str, content: str) -> tuple[dict, list[OrchestrationContent]]:
            if framework not in played:
                played[framework] = play_scenes(framework, urls)
            truth = played[framework]["scenes"][scene]
            spans = stored(folder / content, truth["traces"])
            return truth, assemble_spans(spans, "default", "otlp")

        yield told


def play_scenes(framework: str, urls: list[str]) -> dict:
    """What really happened in the scenes that a process of its own played."""
    python = sys.executable
    if variable := ELSEWHERE.get(framework):
        python = os.environ.get(variable, "")
        if not python:
            pytest.skip(
                f"{framework} does not install beside constraints.txt; {variable} names no python that has it"
            )
    quiet = {
        "NO_PROXY": "127.0.0.1", "OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE),
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANG", "OPENAI_"))}
    environment |= quiet | {"MUSEUM_RECEIVERS": ",".join(urls)}
    done = subprocess.run(
        [python, HERE / f"play_{framework}.py"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def stored(workspace: Path, traces: list[str]) -> list[Span]:
    """What a receiver stored of some traces."""
    with contextlib.closing(SqliteLog(workspace / "spanloop.db")) as log:
        spans = [span for event in read_all(log, "spans") for span in event.spans]
    return [span for span in spans if span.trace_id in traces]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]
ALL = [(f, s) for f, scenes in SCENES.items() for s in scenes]


@pytest.mark.parametrize("content", list(KEPT))
@pytest.mark.parametrize(("framework", "scene"), ALL)
def test_events_are_what_the_scene_did(stage, framework, scene, content):
    truth, contents = stage(framework, scene, content)
    found, misses = score(truth["events"], [orchestration_line(c) for c in contents])
    absent = ABSENT.get((framework, scene, content), [])
    assert misses == absent
    assert found >= 0.95 or absent


@pytest.mark.parametrize(("framework", "scene"), ALL)
def test_tokens_are_what_the_model_counted(stage, framework, scene):
    truth, contents = stage(framework, scene, "dropped")
    tokens = [c.tokens for c in contents]
    assert sum(t.calls for t in tokens) == truth["calls"]
    assert sum(t.unknown_calls for t in tokens) == 0
    assert sum(t.input for t in tokens) == truth["input_tokens"]
    assert sum(t.output for t in tokens) == truth["output_tokens"]
