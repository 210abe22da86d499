"""The demo's parts without its processes: what it reads from the log, its bad candidate's way, its sums and its page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spanloop.pipeline import demo as demo_module
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.demo_cli import commands, summary
from spanloop.pipeline.demo_injection import CALM_MAX_S, Injection
from spanloop.pipeline.demo_report import render_report
from spanloop.pipeline.demo_results import chosen_versions, gating_cost, promotions, returns_by_version
from spanloop.pipeline.demo_screen import Screen, event_line, point_of
from spanloop.pipeline.demo_system import System, find_examples
from spanloop.pipeline.demo_watch import Served, Watch, band
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas.errors import ConfigError, TerminalError
from spanloop.schemas.events import (
    BatchCommitted,
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    Event,
    GateEvaluated,
    PolicyPromoted,
    PolicyRolledBack,
    RoutingChanged,
    Sample,
    SamplesBuilt,
    SpansReceived,
)
from spanloop.schemas.spans import Span

SECOND = 10**9


def candidate(version: int, *, injected: str = "") -> CandidateRegistered:
    return CandidateRegistered(
        version=version, parent=0, batch=version, mlflow_version="1", path=f"policies/policy@v{version}", sha256="s",
        orchestrations=9, injected=injected,
    )  # fmt: skip


def ticket(
    number: int, version: int, reward: int, revision: int = 1, other: int | None = None
) -> SamplesBuilt:
    versions = [version, version if other is None else other]
    rows = tuple(
        Sample("c", "a", "desk", f"policy@v{v}", (1,), (2,), (-0.1,), (0,), ("n",)) for v in versions
    )
    return SamplesBuilt(
        orchestration_id=f"o{number}", revision=revision, group="g", harness="h", reward=reward, baseline=0,
        value_model="none", holdout=False, rows=rows,
    )  # fmt: skip


class Story:
    """A log that grows, and a watch on it."""

    def __init__(self) -> None:
        self.clock = ManualClock(SECOND)
        self.log = MemoryLog(self.clock)
        self.state = MemoryState(self.log)
        self.watch = Watch(self.log, self.state)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.clock.advance(seconds=1)
            self.log.append([new_record(event)])
        self.watch.poll()


class TestWatch:
    def test_a_ticket_counts_for_who_served_it(self) -> None:
        story = Story()
        story.tell(
            candidate(0), PolicyPromoted(epoch=1, version=0, previous=-1, reason="bootstrap"), candidate(1)
        )
        story.tell(
            ticket(1, 0, 200_000), ticket(2, 0, 400_000), ticket(3, 1, 900_000), ticket(4, 0, 0, other=1)
        )
        watch = story.watch
        assert (watch.champion_return.count, watch.champion_return.mean) == (2, pytest.approx(0.3))
        assert (watch.candidate_return.count, watch.candidate_return.mean) == (1, pytest.approx(0.9))
        assert watch.served["o4"].version == -1

    def test_a_revision_replaces_the_value_and_is_no_second_ticket(self) -> None:
        story = Story()
        story.tell(candidate(0), PolicyPromoted(epoch=1, version=0, previous=-1, reason="b"))
        story.tell(
            ticket(1, 0, 100_000), ticket(1, 0, 700_000, revision=2), ticket(1, 0, 100_000, revision=1)
        )
        assert story.watch.served["o1"].value == pytest.approx(0.7)
        assert len(story.watch.served) == 1
        assert story.watch.champion_return.count == 1

    def test_staleness_is_the_number_of_updates_behind(self) -> None:
        story = Story()
        story.tell(candidate(0), PolicyPromoted(epoch=1, version=0, previous=-1, reason="b"), candidate(1))
        story.tell(BatchCommitted(batch=4, from_offset=-1, to_offset=9, parent_version=1), ticket(1, 1, 0))
        assert story.watch.staleness == 3.0

    def test_lag_is_the_age_of_the_oldest_record_that_waits(self) -> None:
        story = Story()
        span = Span(trace_id="a" * 32, span_id="b" * 16, name="n", start_ns=1, end_ns=2)
        story.tell(SpansReceived(trace_id="a" * 32, spans=(span, span)))
        now = story.clock.now_ns() + 3 * SECOND
        assert story.watch.lag_s(now) == pytest.approx(3.0)
        assert story.watch.num_spans == 2
        story.state.load("assembly")
        story.state.commit("assembly", writes={}, offsets={"spans": story.log.end("spans")})
        assert story.watch.lag_s(now) == 0.0

    def test_lines_on_a_plain_screen(self, capsys: pytest.CaptureFixture[str]) -> None:
        story = Story()
        story.tell(
            candidate(0), PolicyPromoted(epoch=1, version=0, previous=-1, reason="b"), ticket(1, 0, 500_000)
        )
        story.tell(RoutingChanged(sequence=1, champion=0, learner=2, learning_share=0.5))
        screen = Screen(plain=True, end_s=10)
        screen.show(point_of(story.watch, 5.0, story.clock.now_ns(), None))
        screen.show(point_of(story.watch, 6.0, story.clock.now_ns(), None))
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert "champion v0 0.500" in out
        assert "challenger v2" in out


class FakeSystem:
    """Helpers that end at once with what the test says."""

    def __init__(self, story: Story) -> None:
        self.workspace = Path("ws")
        self.saboteur = "dispatch_desk.sabotage"
        self.story = story
        self.asked: list[list[str]] = []
        self.phone = 0
        self.fails = ""

    def helper(self, name: str, command: list[str]) -> Any:
        verb = command[3] if "policies" in command else "sabotage"
        self.asked.append([verb, *command])
        if verb == self.fails:

            def output() -> str:
                raise TerminalError(f"{name} failed")
        else:

            def output() -> str:
                return '{"closes_at_once": 0.97}' if verb == "sabotage" else "done"

        return SimpleNamespace(done=True, output=output)

    def open_phone(self) -> None:
        self.phone += 1

    @property
    def verbs(self) -> list[str]:
        return [asked[0] for asked in self.asked]


class TestInjection:
    @pytest.fixture
    def story(self) -> Story:
        story = Story()
        story.tell(candidate(0), PolicyPromoted(epoch=1, version=0, previous=-1, reason="b"))
        story.tell(candidate(3), PolicyPromoted(epoch=2, version=3, previous=0, reason="canary"))
        return story

    def steps(self, injection: Injection, count: int = 8) -> None:
        for number in range(count):
            injection.step(float(number))

    def make(self, story: Story, tmp_path: Path) -> tuple[Injection, FakeSystem]:
        system = FakeSystem(story)
        return Injection(system, story.watch, tmp_path, lambda line: None), system  # type: ignore[arg-type]

    def test_the_phone_opens_with_the_canary_and_the_rollback_is_noticed(
        self, story: Story, tmp_path: Path
    ) -> None:
        injection, system = self.make(story, tmp_path)
        self.steps(injection)
        assert system.verbs == ["sabotage", "freeze", "inject", "unfreeze"]
        story.tell(candidate(4, injected="demo"))
        story.tell(
            GateEvaluated(version=4, against=3, attempt=0, estimate=0, lower=0, ess=50, n=60, passed=True)
        )
        self.steps(injection)
        assert system.phone == 0
        story.tell(CanaryStarted(canary=1, version=4, against=3, share=0.3, from_offset=9))
        self.steps(injection)
        assert system.phone == 1
        story.tell(
            CanaryFinished(canary=1, version=4, against=3, verdict="reject", n_version=90, n_against=80,
                           difference=-200_000, lower=-300_000, upper=-100_000),
            PolicyRolledBack(epoch=3, version=4, to=3, reason="canary 1"),
        )  # fmt: skip
        self.steps(injection)
        report = injection.report()
        assert report["outcome"] == "caught"
        assert report["gate"] == {"estimate": 0.0, "lower": 0.0, "n": 60, "passed": True}
        assert report["canary"]["upper"] == -0.1
        assert system.phone == 1

    def test_a_promotion_in_between_makes_a_new_one_from_the_new_champion(
        self, story: Story, tmp_path: Path
    ) -> None:
        injection, system = self.make(story, tmp_path)
        self.steps(injection, 2)
        assert injection.made_from == 3
        story.tell(candidate(5), PolicyPromoted(epoch=3, version=5, previous=3, reason="canary"))
        self.steps(injection, 9)
        assert injection.made_from == 5
        assert system.verbs == ["sabotage", "sabotage", "freeze", "inject", "unfreeze"]

    def test_a_promotion_while_it_freezes_makes_a_new_one_too(self, story: Story, tmp_path: Path) -> None:
        injection, system = self.make(story, tmp_path)
        self.steps(injection, 3)
        assert system.verbs == ["sabotage", "freeze"]
        story.tell(candidate(5), PolicyPromoted(epoch=3, version=5, previous=3, reason="canary"))
        self.steps(injection, 9)
        assert injection.made_from == 5
        assert system.verbs == ["sabotage", "freeze", "unfreeze", "sabotage", "freeze", "inject", "unfreeze"]

    @pytest.mark.parametrize("ends", [True, False])
    def test_a_running_canary_is_not_broken_off_by_the_freeze(
        self, story: Story, tmp_path: Path, ends: bool
    ) -> None:
        injection, system = self.make(story, tmp_path)
        story.tell(candidate(4), CanaryStarted(canary=1, version=4, against=3, share=0.3, from_offset=9))
        for second in range(60):
            injection.step(float(second))
        assert system.verbs == ["sabotage"]
        if ends:
            story.tell(
                CanaryFinished(canary=1, version=4, against=3, verdict="inconclusive", n_version=9, n_against=9,
                               difference=1, lower=-1, upper=1)
            )  # fmt: skip
        else:  # but not for ever
            injection.step(2.0 + CALM_MAX_S)
        self.steps(injection)
        assert system.verbs == ["sabotage", "freeze", "inject", "unfreeze"]

    def test_a_bad_one_that_is_promoted_or_undecided_is_reported_as_that(
        self, story: Story, tmp_path: Path
    ) -> None:
        injection, _ = self.make(story, tmp_path)
        self.steps(injection)
        story.tell(
            candidate(4, injected="demo"),
            CanaryStarted(canary=1, version=4, against=3, share=0.3, from_offset=9),
        )
        self.steps(injection)
        assert injection.report()["outcome"] == "undecided"
        story.tell(
            CanaryFinished(canary=1, version=4, against=3, verdict="promote", n_version=9, n_against=9,
                           difference=1, lower=1, upper=1)
        )  # fmt: skip
        self.steps(injection)
        assert injection.report()["outcome"] == "promoted"

    @pytest.mark.parametrize("verb", ["sabotage", "freeze", "inject"])
    def test_a_helper_that_fails_ends_it(self, story: Story, tmp_path: Path, verb: str) -> None:
        injection, system = self.make(story, tmp_path)
        system.fails = verb
        self.steps(injection)
        assert injection.report()["outcome"] == "not possible"

    def test_the_gate_may_refuse_it_three_times(self, story: Story, tmp_path: Path) -> None:
        injection, system = self.make(story, tmp_path)
        for version in (4, 5, 6):
            self.steps(injection)
            story.tell(candidate(version, injected="demo"))
            story.tell(
                GateEvaluated(
                    version=version,
                    against=3,
                    attempt=0,
                    estimate=-9,
                    lower=-9,
                    ess=50,
                    n=60,
                    passed=False,
                    reason="low",
                )
            )
        self.steps(injection)
        assert injection.report()["outcome"] == "refused by the gate"
        assert system.phone == 0


class TestSums:
    def test_versions_to_evaluate(self) -> None:
        chosen = chosen_versions([0, 3, 4, 5], list(range(40)), at_most=10)
        assert {0, 3, 4, 5, 39} <= set(chosen)
        assert len(chosen) <= 10
        assert chosen_versions(list(range(12)), list(range(12)), at_most=5) == list(range(12))

    def test_returns_between_evaluated_versions(self) -> None:
        found = returns_by_version({0: 0.0, 4: 0.4}, [0, 1, 3, 4, 5])
        assert found == {0: 0.0, 1: pytest.approx(0.1), 3: pytest.approx(0.3), 4: 0.4}

    def test_gating_costs_what_the_champion_served_while_a_better_one_waited(self) -> None:
        returns = {0: 0.1, 1: 0.3, 2: 0.2}
        registered = [(10, 0), (20, 1), (30, 2)]
        served = [
            Served("a", 0, 0.0, champion=0, known_ns=15),  # nothing better yet
            Served("b", 0, 0.0, champion=0, known_ns=25),  # v1 waits: 0.2 lost
            Served("c", 1, 0.0, champion=0, known_ns=25),  # served by the candidate
            Served("d", 1, 0.0, champion=1, known_ns=35),  # the best serves
            Served("e", 2, 0.0, champion=2, known_ns=35),  # v1 is better: 0.1 lost
        ]
        cost = gating_cost(served, registered, returns)
        assert cost["tickets"] == 2
        assert cost["share"] == 0.4
        assert cost["outcome_lost"] == pytest.approx(0.3)

    def test_promotions_in_seconds(self) -> None:
        events = [
            (PolicyPromoted(epoch=2, version=3, previous=0, reason="r"), 5 * SECOND),
            (PolicyRolledBack(epoch=3, version=4, to=3, reason="c"), 8 * SECOND),
            (candidate(4), 9 * SECOND),
        ]
        found = promotions(events, 2 * SECOND)
        assert [(p["t_s"], p["kind"], p["version"]) for p in found] == [
            (3.0, "promotion", 3),
            (6.0, "rollback", 4),
        ]
        assert all(event_line(event) for event, _ in events[:2])
        assert event_line(candidate(4)) == ""

    def test_band(self) -> None:
        found = band([0.0, 1.0] * 50)
        assert found.mean == 0.5
        assert found.high - found.mean == pytest.approx(1.96 * 0.50252 / 10, rel=1e-3)


def side(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


@pytest.fixture
def results() -> dict[str, Any]:
    value = {"return": side(0.4), "f": side(0.9)}
    point = {
        "t_s": 1.0, "tickets": 1, "spans": 2, "tickets_per_s": 30.0, "spans_per_s": 300.0, "lag_s": 0.1, "champion": 0,
        "champion_return": {"count": 50, **side(0.1)}, "candidate_return": {"count": 0, **side(0.0)}, "challenger": 1,
        "canary": -1, "staleness": 0.5,
    }  # fmt: skip
    decision = {
        "gain": side(0.05),
        "exact_gain": 0.05,
        "rule": {"close look": [0.0, 1.0]},
        "beats_blind": True,
    }
    return {
        "seed": 3,
        "machine": {"cpus": 2, "python": "3.11", "system": "Linux"},
        "champion": {"version": 7, "epoch": 3, **value},
        "last_candidate": {"version": 9, **value},
        "champion_f_exact": 0.9,
        "champion_f_exact_without_exploration": 0.91,
        "decisions": {f"O{i}": decision for i in range(1, 6)},
        "evaluation": {
            "tickets": 5000, "exploration": 0.0, "optimum": 0.448, "random": -0.015,
            "versions": {"0": {"return": side(0.0), "f": side(0.02)}, "7": value, "9": value},
            "phone": {"share": 0.5, **value},
        },
        "promotions": [
            {"t_s": -0.2, "kind": "promotion", "epoch": 1, "version": 0, "before": -1, "reason": "bootstrap"},
            {"t_s": 60.0, "kind": "promotion", "epoch": 2, "version": 7, "before": 0, "reason": "canary <1>"},
            {"t_s": 90.0, "kind": "rollback", "epoch": 3, "version": 8, "to": 7, "reason": "canary 2"},
        ],
        "injection": {
            "outcome": "caught", "version": 8, "made_from": 7, "closes_phone_tickets_at_once": 0.97, "started_s": 70.0,
            "phone_opened_s": 75.0, "ended_s": 90.0, "gate": {"estimate": 0.0, "lower": 0.0, "n": 60, "passed": True},
            "canary": {"difference": -0.2, "lower": -0.3, "upper": -0.1, "verdict": "reject", "n_version": 90, "n_against": 80},
        },
        "gating_cost": {"tickets": 100, "share": 0.1, "outcome_lost": 9.0, "outcome_lost_per_ticket": 0.009},
        "totals": {
            "tickets": 1000, "spans": 12000, "updates": 9, "candidates": 9, "tickets_per_s": 30.0, "spans_per_s": 300.0,
            "client_cpu_ms_per_ticket": [20.0, 21.0], "failed_tickets": 0, "mean_outcome": 0.2,
        },
        "memory_mib": {"learner": 500.0, "sum": 1400.0},
        "durations": {"total_s": 350.0},
        "timeline": [point, {**point, "t_s": 6.0}],
        "example": "ab" * 16,
    }  # fmt: skip


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_is_one_page_that_needs_nothing_else(results: dict[str, Any]) -> None:
    text = render_report(results)
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 4
    assert "script" not in page.tags
    assert not [link for link in page.links if not link.startswith("#")]
    assert "0.900 [0.890, 0.910]" in text
    assert "canary &lt;1&gt;" in text
    assert "caught" in text
    for name in ("O1", "O2", "O3", "O4", "O5"):
        assert re.search(rf"<b>{name}</b>", text)


def test_the_report_without_injection_and_with_one_that_never_reached_its_canary(
    results: dict[str, Any],
) -> None:
    assert "--no-inject" in render_report({**results, "injection": None})
    unfinished = {
        **results["injection"], "outcome": "undecided", "canary": {}, "gate": {}, "ended_s": None, "phone_opened_s": None
    }  # fmt: skip
    assert "undecided" in render_report({**results, "injection": unfinished})


def test_the_summary_ends_with_three_commands(results: dict[str, Any]) -> None:
    lines = summary(results, Path("some out")).splitlines()
    assert lines[-3:] == [f"  {command}" for command in commands(results, Path("some out"))]
    assert lines[-3] == "  spanloop explain credit abababababab --workspace 'some out/workspace'"
    assert "O3 yes (+0.050)" in summary(results, Path("x"))


class TestSystem:
    def test_clients_know_three_addresses_and_no_setting_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        system = System(tmp_path, tmp_path / "ws", 4)
        system._urls = {"gateway": "http://g", "collector": "http://c"}
        seen: list[tuple[str, list[str], dict[str, str]]] = []

        def start(name: str, command: list[str], environment: dict[str, str]) -> Any:
            seen.append((name, command, environment))
            return SimpleNamespace(poll=lambda: 0), tmp_path, tmp_path

        monkeypatch.setattr(system, "_start", start)
        system.start_clients(8)
        assert [name for name, _, _ in seen] == ["client-1", "client-2"]
        firsts = {command[command.index("--first-ticket") + 1] for _, command, _ in seen}
        assert len(firsts) == 2
        for _, _, environment in seen:
            assert environment["FEEDBACK_URL"] == "http://c/v1/feedback"
            assert environment["OPENAI_BASE_URL"] == "http://g/v1"
            assert not [name for name in environment if name.startswith("SPANLOOP_")]

    def test_a_client_that_died_is_named_with_its_last_lines(self, tmp_path: Path) -> None:
        system = System(tmp_path, tmp_path / "ws", 0)
        process, _, _ = system._start(
            "client-1", ["-c", "raise SystemExit('no gateway')"], system.environment()
        )
        process.wait(30)
        system._clients.append(process)
        with pytest.raises(TerminalError, match=r"client 1 ended \(exit code 1\): no gateway"):
            system.check()
        system.close()

    def test_a_helper_that_fails_or_hangs_says_so(self, tmp_path: Path) -> None:
        system = System(tmp_path, tmp_path / "ws", 0)
        with pytest.raises(TerminalError, match=r"evaluate failed .*boom"):
            system.helper("evaluate", ["-c", "raise SystemExit('boom')"]).wait(30)
        with pytest.raises(TerminalError, match="longer than"):
            system.helper("evaluate", ["-c", "import time; time.sleep(60)"]).wait(0.3)
        assert system.helper("evaluate", ["-c", "print(7)"]).wait(30) == "7\n"
        system.close()

    def test_close_leaves_no_process(self, tmp_path: Path) -> None:
        system = System(tmp_path, tmp_path / "ws", 0)
        helper = system.helper("sleeper", ["-c", "import time; time.sleep(600)"])
        system.close()
        assert helper.process.returncode is not None

    def test_the_examples_are_found(self) -> None:
        assert (find_examples() / "dispatch_desk" / "main.py").is_file()


def test_a_workspace_of_an_earlier_demo_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    workspace = demo_module._fresh_workspace(tmp_path)
    (workspace / "spanloop.db").write_text("x")
    assert not list(demo_module._fresh_workspace(tmp_path).iterdir())
    (workspace / "letters.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not a demo's workspace"):
        demo_module._fresh_workspace(tmp_path)
    assert (workspace / "letters.txt").exists()
