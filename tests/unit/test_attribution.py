"""``spanloop explain failure``: hand-made logs, the pool of opinions, the judge's port, and the verb from import to table."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from made_spans import agent, chat, one, tool
from synthetic_orchestrations import make_content

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.attribution.explain import attribute
from spanloop.pipeline.attribution.features import FEATURES, STRUCTURE, Table, table_of
from spanloop.pipeline.attribution.judge import JudgeCase, ask
from spanloop.pipeline.attribution.model import Model, probabilities, shipped, usual_row
from spanloop.pipeline.attribution.pooling import JUDGE_MAX, LEDGER_MAX, Opinion, ledger_opinion, pool
from spanloop.pipeline.attribution.reasons import reasons
from spanloop.pipeline.attribution.steps import Step, steps_of
from spanloop.pipeline.attribution.texts import Words, words_of
from spanloop.pipeline.attribution.training import Labelled, fit
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.credit.ledger import call_key
from spanloop.pipeline.formats import who_and_when
from spanloop.pipeline.log.open import open_log
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas.events import CreditNode
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span
from spanloop.schemas.verbs import _cli

PLAN = "The warehouse keeps crates in rows. We shall count the crates and report how many there are in total today."
CODE = "```python\nprint(count(crates))\n```\nThis reads the register and prints how many crates there are in it."
GUESS = "The register is not at hand, so let us assume a typical row: presumably 4711 crates, an estimate from a simulated sample."
LAST = "All is verified and correct. The warehouse holds 4711 crates, as was found before by the colleague."


def turn(name: str, text: str) -> dict:
    return {"name": name, "role": "assistant", "content": text}


HISTORY = [
    turn("planner", PLAN), turn("counter", CODE), turn("shell", "exitcode: 1 (execution failed)\nCode output: NameError: count"),
    turn("guesser", GUESS), turn("planner", LAST),
]  # fmt: skip


def log_of(history: list[dict], question: str = "q1"):
    spans = who_and_when.read({"history": history, "question_ID": question}).spans
    (content,) = assemble_spans(spans, "t")
    return content, {item.span_id: words_of(item) for item in spans}


def column(table: Table, name: str) -> list[float]:
    return [row[FEATURES.index(name)] for row in table.rows]


def test_features_of_a_chat():
    table = table_of(steps_of(*log_of(HISTORY)))
    assert [step.agent for step in table.steps] == [h["name"] for h in HISTORY]
    assert [step.index for step in table.steps] == [0, 1, 2, 3, 4]
    assert table.has_words
    assert column(table, "executor") == [0, 0, 1, 0, 0]
    assert column(table, "chat_second") == [0, 1, 0, 0, 0]
    assert column(table, "chat_last") == [0, 0, 0, 0, 1]
    assert column(table, "code") == [0, 1, 0, 0, 0]
    assert column(table, "result_failed") == [0, 1, 0, 0, 0]
    assert column(table, "agent_share") == [0.5, 0.25, 0, 0.25, 0.5]
    supposes = column(table, "supposes")
    assert max(supposes) == supposes[3] == 6 / 8
    assert supposes[:3] == [0, 0, 0]
    answer = column(table, "answer")
    assert answer[3] > max(answer[:3])
    assert sum(answer) == pytest.approx(1)
    assert column(table, "confirms")[4] > 0
    assert column(table, "new_numbers")[3] == 0.25


def test_the_guess_is_blamed_with_reasons_and_evidence():
    content, words = log_of(HISTORY)
    model = Model("m", {"supposes": 4.0, "answer": 1.0, "executor": -1.0}, {}, {})
    found = attribute(content, words, model=model)
    assert found.steps[0].step == 3
    assert found.agents[0].agent == "guesser"
    assert any("supposes" in reason for reason in found.steps[0].reasons)
    assert len(found.steps[0].event_ids) == len(found.steps[0].span_ids) == 1
    assert "crates" not in msgspec.json.encode(found).decode()


def test_features_of_an_orchestrator_with_workers():
    history = [
        {"role": "human", "content": "How many crates?"},
        {"role": "lead (thought)", "content": "plan: ask the worker for the crates in the register"},
        *(
            part
            for n in range(4)
            for part in (
                {"role": "lead (-> worker)", "content": f"count row {n} please"},
                {
                    "role": "worker",
                    "content": f"row {n} has {n * 17} crates, unfortunately it could not be read",
                },
            )
        ),
        {"role": "lead (termination condition)", "content": "done"},
    ]
    table = table_of(steps_of(*log_of(history)))
    assert table.steps[0].index == 1, "the person's turn cannot be to blame, and keeps its number"
    work = [i for i, step in enumerate(table.steps) if step.kind == "work"]
    assert len(work) == 4
    for place, name in enumerate(("first", "second", "third")):
        marked = column(table, f"hub_work_{name}")
        assert [i for i, value in enumerate(marked) if value] == [work[place]]
    assert sum(column(table, "hub_instruct")) == 4
    assert column(table, "chat_opening") == [0.0] * len(table.steps)
    assert column(table, "repeats")[work[1]] > 0.5


def test_steps_of_spans_are_model_calls_and_results():
    content = one(
        [
            agent("r", None, 0, 100, "lead"), chat("c1", "r", 1, 10, asks={"t1": "search"}),
            tool("x", "r", 11, 20, "search", call="t1"), chat("c2", "r", 21, 30),
        ]
    )  # fmt: skip
    steps = steps_of(content, {})
    assert [(step.kind, bool(step.call_id)) for step in steps] == [
        ("act", True),
        ("result", False),
        ("end", True),
    ]
    assert {step.agent for step in steps} == {"lead"}
    found = attribute(content, {})
    assert found.confidence == "low"
    assert any("not kept" in note for note in found.notes)
    assert math.fsum(step.probability for step in found.steps) == pytest.approx(1)


def test_words_of_spans():
    def said(**attributes: object) -> Words:
        return words_of(Span("a" * 32, "b" * 16, "x", 0, 1, attributes=attributes))

    parts = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "hello"}]}])
    assert said(**{"gen_ai.output.messages": parts}).text == "hello"
    assert (
        said(
            **{"llm.output_messages.0.message.content": "hi", "llm.output_messages.0.message.role": "x"}
        ).text
        == "hi"
    )
    assert said(**{"output.value": {"$redacted": 12, "$hmac": "00"}}) == Words("", 12, True)
    assert said(**{"output.value": {"$other": "secret"}}) == Words("", 0, True)
    assert said(**{"output.value": '{"broken'}).text == '{"broken'
    bare = [{"type": "text"}, {"type": "tool_call", "id": "c1", "name": "spawn"}]
    hidden = json.dumps([{"role": "assistant", "parts": bare}])
    assert said(**{"gen_ai.output.messages": hidden}) == Words(), "an instrumentation that leaves words out"
    assert said(**{"output.value": '{"type": "invoice", "id": "7"}'}).text == "invoice\n7"
    deep: object = "x"
    for _ in range(50):
        deep = [deep]
    assert said(**{"output.value": deep}) == Words()
    failed = Span("a" * 32, "b" * 16, "x", 0, 1, status="error", status_message="no such file")
    assert words_of(failed).text == "no such file"


def test_fit_finds_the_feature_that_tells():
    rng = np.random.default_rng(3)
    logs = []
    for number in range(40):
        rows = rng.random((6, len(FEATURES)))
        step = int(rows[:, FEATURES.index("answer")].argmax())
        steps = tuple(
            Step(i, f"agent{number}{i % 3}", "", "talk", i, (), (), words=Words("x", 1)) for i in range(6)
        )
        logs.append(Labelled(Table(steps, tuple(map(tuple, rows.tolist())), True), step, steps[step].agent))
    for share in (0.0, 0.5, 1.0):
        weights = fit(logs, FEATURES, penalty=0.01, agent_share=share)
        assert FEATURES[int(weights.argmax())] == "answer"
        assert np.isfinite(weights).all()
    strong = fit(logs, FEATURES, penalty=10.0, agent_share=0.0)
    assert np.abs(strong).max() < 0.1
    # at the optimum of the convex loss its gradient is 0
    weights = fit(logs, FEATURES, penalty=0.05, agent_share=0.0)
    total = 0.05 * len(logs) * weights
    for log in logs:
        rows = np.asarray(log.table.rows)
        chance = np.asarray(probabilities(log.table, dict(zip(FEATURES, weights, strict=True))))
        total += chance @ rows - rows[log.step]
    assert np.abs(total).max() < 1e-4


def node(
    unit: str, name: str, credit: int, raw: int | None, variance: float = 0.0, subject: str = ""
) -> CreditNode:
    return CreditNode(name, unit, "agent:a", name, credit, raw, variance, "e", subject)


def test_the_ledgers_losses_are_heard_by_their_certainty():
    steps = [
        Step(0, "a", "", "act", 0, ("e0",), (), call_id="c0"), Step(1, "a", "", "result", 1, ("e1",), ()),
        Step(2, "a", "", "talk", 2, ("e2",), (), call_id="c2"),
    ]  # fmt: skip
    nodes = [node("turn", "turn:c0", -600_000, -500_000), node("turn", "turn:c2", 100_000, 100_000),
             node("tool_call", "tool:e1", -200_000, -200_000, subject="e1")]  # fmt: skip
    sure = ledger_opinion(steps, nodes)
    assert sure is not None
    assert sure.chances == pytest.approx((0.75, 0.25, 0))
    assert sure.weight == pytest.approx(LEDGER_MAX)
    unsure = ledger_opinion(steps, [node("turn", "turn:c0", -600_000, -500_000, 0.36), *nodes[1:]])
    assert unsure is not None
    assert unsure.weight == pytest.approx(LEDGER_MAX * 0.64 / (0.64 + 0.36))
    assert ledger_opinion(steps, [node("turn", "turn:c0", -600_000, None)]) is None, (
        "an even spread blames nobody"
    )
    assert ledger_opinion(steps, [node("turn", "turn:c0", 5, 5)]) is None
    assert pool((0.2, 0.3, 0.5), [sure]) == pytest.approx((0.475, 0.275, 0.25))
    assert pool((0.2, 0.3, 0.5), [Opinion("x", 0.0, (1.0, 0.0, 0.0))]) == pytest.approx((0.2, 0.3, 0.5))


def test_a_loss_in_the_ledger_moves_the_blame():
    content = make_content(1)
    steps = steps_of(content, {})
    plain = attribute(content, {})
    assert any("no credit" in note for note in plain.notes)
    chosen = next(step for step in steps if step.call_id)
    nodes = [
        node("turn", f"turn:{call_key(step.call_id)}", -900_000 if step == chosen else 0, 0)
        for step in steps
        if step.call_id
    ]
    moved = attribute(content, {}, nodes=nodes)
    before, after = (
        next(step.probability for step in found.steps if step.step == chosen.index)
        for found in (plain, moved)
    )
    assert after > before
    assert moved.opinions[0][0] == "ledger"
    blamed = next(step for step in moved.steps if step.step == chosen.index)
    assert blamed.reasons[0] == "ledger puts 100% of the loss on it"
    assert math.fsum(step.probability for step in moved.steps) == pytest.approx(1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b'{"step":3,"agent":"guesser","confidence":1,"judge":"j@1"}', ""),
        (b'{"step":3,"agent":"planner","confidence":1,"judge":"j@1"}', "not in this log"),
        (b'{"step":99,"agent":"guesser","confidence":1,"judge":"j@1"}', "not in this log"),
        (b'{"step":3,"agent":"guesser","confidence":1.5,"judge":"j@1"}', "no verdict"),
        (b'{"step":3,"agent":"guesser","confidence":1,"judge":"j@1","promote":true}', "no verdict"),
        (b"the guesser did it", "no verdict"),
        (None, "no verdict"),
        (RuntimeError("boom"), "the judge: failed: RuntimeError"),
    ],
)
def test_a_judge_is_checked(answer: object, problem: str):
    steps = table_of(steps_of(*log_of(HISTORY))).steps

    def judge(case: JudgeCase) -> bytes:
        assert case.steps == steps
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    said = ask(judge, JudgeCase("o", steps), 5.0)
    if problem:
        assert isinstance(said, str)
        assert problem in said
    else:
        assert said == Opinion("judge j@1", JUDGE_MAX, (0.0, 0.0, 0.0, 1.0, 0.0))


def test_a_slow_judge_is_not_waited_for():
    content, words = log_of(HISTORY)
    began = time.monotonic()
    found = attribute(content, words, judge=lambda case: time.sleep(20) or b"", timeout_s=0.05)
    assert time.monotonic() - began < 10
    assert any("no answer within 0.05 s" in note for note in found.notes)
    assert found.opinions == ()
    assert [s.probability for s in found.steps] == [s.probability for s in attribute(content, words).steps]


def test_the_shipped_weights_are_numbers_with_their_provenance():
    model = shipped()
    assert set(model.words) == set(FEATURES)
    assert set(model.structure) == set(STRUCTURE)
    assert all(math.isfinite(w) and abs(w) < 10 for w in (*model.words.values(), *model.structure.values()))
    assert model.provenance["logs"] == {"Algorithm-Generated": 63, "Hand-Crafted": 29}
    texts = [value for value in _leaves(model.provenance) if isinstance(value, str)]
    assert all(len(text) < 100 for text in texts), "provenance is no place for text of a log"


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def test_reasons_name_what_counts_against_a_step():
    table = table_of(steps_of(*log_of(HISTORY)))
    assert reasons(table.rows[3], usual_row(table), {"supposes": 2.0}) == (
        "it supposes, estimates or simulates instead of finding out (+1.20)",
    )
    assert reasons(table.rows[0], usual_row(table), {"supposes": 2.0}) == ()
    assert reasons(table.rows[0], usual_row(table), {"executor": -1.0}) == (
        "it decides; others only report what ran (+0.20)",
    )


def test_a_log_of_one_person_has_nobody_to_blame():
    with pytest.raises(Exception, match="nobody to blame"):
        attribute(*log_of([{"role": "human", "content": "hello"}]))


def test_unknown_weights_are_ignored():
    model = Model("m", {"no_such": 3.0}, {}, {})
    content, words = log_of(HISTORY)
    found = attribute(content, words, model=model)
    assert {step.probability for step in found.steps} == {0.2}
    assert found.confidence == "low"


class TestTheVerb:
    @pytest.fixture
    def workspace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "log.json").write_text(json.dumps({"history": HISTORY, "question_ID": "q1"}))
        return tmp_path / "w"

    def take_in(self, workspace: Path, *, texts: bool) -> str:
        config = workspace.parent / "spanloop.toml"
        config.write_text(f'workspace = "{workspace}"\n[content]\ntraining = {str(texts).lower()}\n')
        done = CliRunner().invoke(
            _cli, ["import", "log.json", "--workspace", str(workspace), "--config", str(config), "--quiet"]
        )
        assert done.exit_code == 0, done.output
        settings = load_settings(None, {"workspace": workspace})
        with closing(open_log(settings)) as log:
            state = MemoryState(log)
            run_to_end(build_stages(settings.pipeline)[:1], log, state, ManualClock(0))
        rows = CliRunner().invoke(_cli, ["traces", "--ndjson", "--workspace", str(workspace)]).output
        return json.loads(rows.splitlines()[0])["orchestration_id"]

    def run(self, workspace: Path, *arguments: str):
        return CliRunner().invoke(_cli, ["explain", "failure", *arguments, "--workspace", str(workspace)])

    def test_from_an_imported_log_to_a_name(self, workspace: Path):
        name = self.take_in(workspace, texts=True)
        shown = self.run(workspace, name[:10], "--top", "2")
        assert shown.exit_code == 0, f"{shown.output}{shown.exception!r}"
        assert "no model was called" in shown.output
        assert "supposes that it did" in shown.output, "there is no outcome, and it says so"
        assert "3 more steps hold" in shown.output
        assert "95 % interval" in shown.output
        assert "crates" not in shown.output
        told = json.loads(self.run(workspace, name, "--json").output)
        same = attribute(*log_of(HISTORY))
        assert [(s["step"], s["agent"], s["probability"]) for s in told["steps"]] == [
            (s.step, s.agent, s.probability) for s in same.steps
        ]
        assert math.fsum(agent["probability"] for agent in told["agents"]) == pytest.approx(1)
        assert [step["step"] for step in sorted(told["steps"], key=lambda s: s["step"])] == [0, 1, 2, 3, 4]
        assert told["confidence"] == same.confidence

    def test_without_texts_there_is_an_answer_of_low_confidence(self, workspace: Path):
        told = json.loads(self.run(workspace, self.take_in(workspace, texts=False), "--json").output)
        assert told["confidence"] == "low"
        assert len(told["steps"]) == 5

    def test_an_id_that_names_nothing(self, workspace: Path):
        self.take_in(workspace, texts=True)
        for prefix in ("zzz", ""):
            assert "no orchestration" in str(self.run(workspace, prefix).exception)

    def test_help_has_examples(self):
        shown = CliRunner().invoke(_cli, ["explain", "failure", "--help"]).output
        assert "spanloop explain failure 3fa9" in shown
        assert "wrong often" in shown
