"""Recordings of pydantic-ai (record.py) against what they are to give: SPANLOOP_UPDATE_GOLDEN=1 writes them anew.

Read such a change as a change of the product's answer on real spans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.otlp.files import read_spans
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span

HERE = Path(__file__).parent
RECORDINGS = ["desk", "desk_nocontent", "desk_v2"]


def assembled(name: str, treat: Callable[[Span], Span] = lambda span: span) -> dict:
    spans = [treat(s) for batch in read_spans(HERE / f"{name}.otlp.jsonl") for s in batch.spans]
    (content,) = assemble_spans(spans, "default")
    return orchestration_line(content)


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_gives_what_it_gave(name):
    path = HERE / f"{name}.expected.json"
    line = json.loads(json.dumps(assembled(name)))
    if os.environ.get("SPANLOOP_UPDATE_GOLDEN"):
        path.write_text(json.dumps(line, indent=1) + "\n")
    assert line == json.loads(path.read_text())


def story(line: dict) -> tuple:
    parties = ("type", "agent", "to", "tool", "status", "call_id")
    return [tuple(e.get(key) for key in parties) for e in line["events"]], line["tokens"], line["flags"]


def test_all_recordings_tell_one_story_whatever_the_version_and_without_content():
    assert story(assembled("desk")) == story(assembled("desk_nocontent")) == story(assembled("desk_v2"))
    events, tokens, flags = story(assembled("desk"))
    kinds = [e[0] for e in events]
    assert (kinds.count("spawn"), kinds.count("aggregate"), kinds.count("orchestrator_decision")) == (4, 2, 2)
    assert [e[3] for e in events if e[0] == "tool_call"] == ["look"]
    assert (tokens["calls"], flags) == (9, [])


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_redaction_of_the_default_settings_changes_no_event(name):
    redactor = Redactor(Content(), b"k" * 32)
    assert story(assembled(name, redactor.span)) == story(assembled(name))
