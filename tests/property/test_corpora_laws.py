"""Laws over other people's real requests (shared/corpora): how they are delivered and what the agents are called changes nothing.

10,000 deliveries under the ``full`` marker, 300 otherwise; a failing one names its number, which is its seed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest
from forests import NAMES, TOOLS, forests
from hypothesis import HealthCheck, given, settings
from made_spans import SHARED, Desk, hashes

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.report import orchestration_line
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.spans import Span

CORPORA = SHARED / "corpora"
VARIANTS = sorted(p.parent.relative_to(CORPORA).as_posix() for p in CORPORA.glob("live-*/*/spans.otlp.jsonl"))
SOURCE = Path(__file__).resolve().parents[2]
_PARTIES = ("agent", "to", "child", "tool", "guardrail")
NO_NAMES = frozenset({"user", "system", "graph", "crew", "team", "workflow"})
"""Parties of true events that no scenario chose."""

needs_corpora = pytest.mark.skipif(not VARIANTS, reason="no shared/corpora beside this checkout")


@cache
def requests_of(name: str) -> tuple[str, ...]:
    return tuple((CORPORA / name / "spans.otlp.jsonl").read_text().splitlines())


@cache
def truth_of(name: str) -> str:
    return (CORPORA / name / "truth.json").read_text()


def decoded(lines: list[str]) -> list[Span]:
    """The spans of several requests sent as one."""
    parts = [part for line in lines for part in json.loads(line)["resourceSpans"]]
    return list(decode_json(json.dumps({"resourceSpans": parts}).encode()).spans)


@cache
def content_of(name: str) -> dict[str, str]:
    return hashes([span for line in requests_of(name) for span in decoded([line])])


def deliver(number: int) -> None:
    """One delivery: requests in any order, some twice, in any batches, with delays and restarts."""
    rng = random.Random(number)
    name = VARIANTS[number % len(VARIANTS)]
    lines = [*requests_of(name), *rng.choices(requests_of(name), k=rng.randint(0, 5))]
    rng.shuffle(lines)
    desk = Desk(quiet_s=1, timeout_s=60)
    while lines:
        size = rng.randint(1, 8)
        batch, lines = lines[:size], lines[size:]
        desk.send(*decoded(batch))
        if rng.random() < 0.3:
            desk.later(rng.choice([0.5, 2, 100]))
        if rng.random() < 0.1:
            desk.restart()
    desk.later(1000)
    got = {key: event.content_hash for key, event in desk.live().items()}
    assert got == content_of(name), f"delivery {number} of {name}"


@needs_corpora
@pytest.mark.parametrize("block", range(3))
def test_deliveries_of_real_requests(block):
    for number in range(block * 100, block * 100 + 100):
        deliver(number)


@needs_corpora
@pytest.mark.full
@pytest.mark.parametrize("block", range(100))
def test_ten_thousand_deliveries_of_real_requests(block):
    for number in range(block * 100, block * 100 + 100):
        deliver(number)


# ------------------------------------------------------------ names


def names_in(name: str) -> list[str]:
    """What the scenario calls its agents and tools, and the root span: the workflow."""
    found = set()
    for event in json.loads(truth_of(name))["events"]:
        found |= {str(event.get(k) or "") for k in _PARTIES}
    roots = [s.name for line in requests_of(name) for s in decoded([line]) if not s.parent_span_id]
    found |= {root for root in roots if re.fullmatch(r"trip[-_]?planner", root)}
    return sorted(found - NO_NAMES - {""}, key=lambda n: (-len(n), n))


def renamed(text: str, names: list[str], new: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, names)), lambda found: new[found[0]], text) if names else text


def renamed_truth(text: str, names: list[str], new: dict[str, str]) -> str:
    """The parties only: types of events are ours."""
    truth = json.loads(text)
    for event in truth["events"]:
        for key in _PARTIES:
            if key in event:
                event[key] = renamed(str(event[key] or ""), names, new)
    return json.dumps(truth)


def new_names(names: list[str], seed: int) -> dict[str, str]:
    """A name of the same length for each: letters only, no two alike, none a part of another."""
    rng = random.Random(seed)
    taken: dict[str, str] = {}
    for name in names:
        while True:
            word = "".join(rng.choice("bcdfghjklmnpqrstvwxz") for _ in name)
            if not any(word in other or other in word for other in taken.values()):
                break
        taken[name] = word
    return taken


def score(lines: list[str], truth: str) -> tuple[dict, int]:
    path = SHARED / "tools" / "score_events.py"
    spec = importlib.util.spec_from_file_location("score_events", path)
    assert spec is not None
    assert spec.loader is not None
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)
    counts, misses = scorer.score(lines, json.loads(truth))
    return counts, len(misses)


def scored(requests: list[str], truth: str) -> tuple[dict, int]:
    contents = assemble_spans([s for line in requests for s in decoded([line])], "default")
    return score([json.dumps(orchestration_line(c)) for c in contents], truth)


@needs_corpora
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_other_names_score_the_same(name, seed):
    names = names_in(name)
    new = new_names(names, seed)
    again = [renamed(line, names, new) for line in requests_of(name)]
    assert names
    assert again != list(requests_of(name))
    assert scored(again, renamed_truth(truth_of(name), names, new)) == scored(
        list(requests_of(name)), truth_of(name)
    )


@needs_corpora
def test_no_scenario_is_named_in_the_source():
    """Words that frameworks use themselves (a manager, a supervisor) are theirs, not a scenario's."""
    words = {n for name in VARIANTS for n in names_in(name)} - {"manager", "supervisor", "orchestrator"}
    assert {"researcher", "budgeter"} <= words
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(words))) + r")\b", re.IGNORECASE)
    hits = []
    for room in ("dialects", "assembly", "formats"):
        for path in sorted((SOURCE / "pipeline/spanloop/pipeline" / room).glob("*.py")):
            text = re.sub(r"(?:\"\"\"|''').*?(?:\"\"\"|''')", "", path.read_text(), flags=re.DOTALL)
            hits += [f"{path.name}: {found[0]}" for found in pattern.finditer(text)]
    assert hits == []


_NEW_NAMES = {"orchestrator": "Quill-7", "worker": "bramble", "checker": "Ode Tusk"}
_NEW_TOOLS = {"look": "zip", "spawn": "hoist"}


def _word(text: str) -> str:
    """An exact name, or one inside a tool or span name that carries it."""
    if text in _NEW_TOOLS:
        return _NEW_TOOLS[text]
    return re.sub("(?<![a-z])(?:orchestrator|worker|checker)", lambda found: _NEW_NAMES[found[0]], text)


def _walk(value):
    if isinstance(value, str):
        return _word(value)
    if isinstance(value, list | tuple):
        return [_walk(item) for item in value]
    return {k: _walk(v) for k, v in value.items()} if isinstance(value, dict) else value


def _structure(spans: list[Span]) -> list[str]:
    """Contents without the ids that are made of names; each as sorted JSON."""
    told = []
    for content in assemble_spans(spans, "default", "import"):
        events = sorted(
            canonical_json(
                [e.type, e.t_ns, e.agent, e.agent_id, e.to, e.to_id, e.tool, e.rule, e.confidence, list(e.evidence),
                 e.status, e.mode, e.call_id, e.triggered]
            ).decode()
            for e in content.events
        )  # fmt: skip
        agents = sorted(f"{a.id} {a.name} {a.parent_id} {a.virtual}" for a in content.agents)
        told.append(json.dumps([content.trace_ids, events, agents, list(content.flags)]))
    return sorted(told)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(forests)
def test_other_names_give_the_same_events(spans):
    assert set(_NEW_NAMES) == set(NAMES)
    assert set(_NEW_TOOLS) < set(TOOLS)
    again = [msgspec.structs.replace(s, name=_word(s.name), attributes=_walk(s.attributes)) for s in spans]
    expected = []
    for text in _structure(spans):
        trace_ids, events, agents, flags = json.loads(text)
        events = sorted(
            canonical_json([_word(x) if i in (2, 4, 6) else x for i, x in enumerate(json.loads(e))]).decode()
            for e in events
        )
        agents = sorted(
            " ".join([a.split(" ")[0], _word(" ".join(a.split(" ")[1:-2])), *a.split(" ")[-2:]])
            for a in agents
        )
        expected.append(json.dumps([trace_ids, events, agents, flags]))
    assert _structure(again) == sorted(expected)
