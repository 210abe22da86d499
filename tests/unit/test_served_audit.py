"""The served-version audit: a version that answers with other numbers than its weights' freezes, and is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from learner_world import World, drive, learner

from spanloop.learner.audit import read_audit
from spanloop.learner.cli import policies
from spanloop.learner.history import read_policies
from spanloop.learner.promotion import fold
from spanloop.learner.registry import MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.doctor import diagnose
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import PolicyCommand, PolicyPromoted, SentinelRaised


class Serving(MemoryServing):
    """Answers for some names with another version's weights, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[str, str] = {}
        self.away = False

    def probe(self, name: str, prompts: Any) -> list[list[float]]:
        if self.away:
            raise TransientError("not reached")
        return super().probe(self.instead.get(name, name), prompts)


class Place:
    """A learner whose clock stands until it is moved."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.log = SqliteLog(workspace / "spanloop.db")
        self.clock, self.serving, self.registry = ManualClock(10**18), Serving(), MemoryRegistry()
        self.made = self.start()
        drive(self.made, self.log, World(), 3, per_round=30)
        while self.made.step():  # nothing is left to learn
            pass

    def start(self) -> Learner:
        return learner(
            self.log,
            self.workspace,
            registry=self.registry,
            serving=self.serving,
            clock=self.clock,
            gate=False,
        )

    def later(self, seconds: float = 61.0) -> None:
        self.clock.advance(seconds=seconds)
        self.made.step()

    def command(self, kind: str) -> None:
        number = sum(isinstance(e, PolicyCommand) for e, _ in self.events())
        self.log.append([new_record(PolicyCommand(command_id=f"{kind}{number}", kind=kind))])
        self.made.step()

    def events(self) -> list[tuple[Any, int]]:
        return read_policies(self.log, "default", "policy")

    def alarms(self) -> list[SentinelRaised]:
        return [e for e, _ in self.events() if isinstance(e, SentinelRaised)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.log.close()


def test_what_serves_its_own_weights_is_measured_and_nothing_is_raised(place: Place) -> None:
    for _ in range(3):
        place.later()
    champion = place.made.promoter.state.champion
    assert champion > 0
    assert place.alarms() == []
    found = read_audit(place.workspace)
    assert set(found) == {champion}
    assert found[champion].fits
    assert found[champion].mean == 0.0
    assert place.registry.measured[-1][1] == {"served.difference": 0.0, "served.mismatches": 0.0}
    shown = CliRunner().invoke(policies, ["show", str(champion), "--workspace", str(place.workspace)]).output
    assert "serves its own weights (mean difference 0 nats" in shown
    assert any(c.name == "served version" and c.status == "ok" for c in diagnose(place.made.settings).checks)


def test_another_versions_weights_under_its_name_freeze_promotion_end_to_end(place: Place) -> None:
    place.later()
    state = place.made.promoter.state
    champion, epoch = state.champion, state.epoch
    place.serving.load("policy@v0", place.workspace / "policies" / "policy@v0")
    place.serving.instead[f"policy@v{champion}"] = "policy@v0"
    place.made.step()  # it is not time yet
    assert not place.made.promoter.state.frozen
    place.later()
    (alarm,) = place.alarms()
    assert (alarm.sentinel, alarm.version, alarm.epoch) == ("served_version", champion, epoch)
    assert alarm.value > alarm.limit
    assert f"what serves as policy@v{champion} answers as policy@v0 does" in alarm.reason
    assert place.made.promoter.state.frozen

    # Frozen: samples come, nothing is trained or promoted; by hand neither; the alarm is not repeated.
    batches = place.made.training.state.batch
    drive(place.made, place.log, World(1), 2, per_round=40)
    place.later()
    assert place.made.training.state.batch == batches
    assert len([e for e, _ in place.events() if isinstance(e, PolicyPromoted)]) == epoch
    assert len(place.alarms()) == 1
    listed = CliRunner().invoke(policies, ["list", "--workspace", str(place.workspace)]).output
    assert "frozen by served_version: what serves as" in listed
    assert "such as" not in listed
    shown = CliRunner().invoke(policies, ["show", str(champion), "--workspace", str(place.workspace)]).output
    assert "mismatch, answers as policy@v0: mean difference" in shown
    (check,) = [c for c in diagnose(place.made.settings).checks if c.name == "served version"]
    assert check.status == "fail"
    assert f"policy@v{champion}" in check.message

    # Unfrozen while it is still so: frozen again, also by a learner that knows nothing of the first alarm.
    place.command("unfreeze")
    assert not place.made.promoter.state.frozen
    while place.made.step():  # it learns what waited; without a gate each version serves at once
        pass
    champion = place.made.promoter.state.champion
    place.serving.instead[f"policy@v{champion}"] = "policy@v0"
    place.later()
    assert place.made.promoter.state.frozen
    place.command("unfreeze")
    place.later()
    place.command("unfreeze")
    place.made = place.start()
    place.made.promoter.deployment._verified.add(champion)
    place.later()
    assert place.made.promoter.state.champion == champion
    assert [a.attempt for a in place.alarms() if a.version == champion] == [0, 1, 2]

    place.serving.instead.clear()
    place.command("unfreeze")
    place.later()
    state = place.made.promoter.state
    assert not state.frozen
    assert fold(place.events()) == state
    assert read_audit(place.workspace)[champion].fits


def test_a_server_away_is_no_mismatch(place: Place) -> None:
    place.serving.away = True
    place.later()
    place.serving.away = False
    assert place.alarms() == []
    place.serving.unload(f"policy@v{place.made.promoter.state.champion}")  # restarted: it has forgotten
    place.later()
    assert place.alarms() == []
    assert read_audit(place.workspace)[place.made.promoter.state.champion].fits


def test_a_registry_that_lost_everything_is_told_again(place: Place) -> None:
    champion = place.made.promoter.state.champion
    place.registry.versions.clear()
    place.registry.aliases.clear()
    place.later()
    assert place.registry.aliases["champion"] == champion
    assert (
        place.registry.versions[champion]["tags"]["spanloop.sha256"]
        == place.made.promoter.state.versions[champion].sha256
    )


def test_audits_can_be_switched_off(tmp_path: Path) -> None:
    with_none = SqliteLog(tmp_path / "spanloop.db")
    clock = ManualClock(10**18)
    made = learner(with_none, tmp_path, clock=clock, gate=False, audit_s=0)
    drive(made, with_none, World(), 2, per_round=30)
    clock.advance(seconds=1e6)
    made.step()
    assert not (tmp_path / "audit.json").exists()
    with_none.close()


def test_a_broken_audit_file_is_said(place: Place) -> None:
    place.later()
    (place.workspace / "audit.json").write_text(json.dumps([1]))
    assert read_audit(place.workspace) == {}
    (check,) = [c for c in diagnose(place.made.settings).checks if c.name == "served version"]
    assert check.status == "warn"
