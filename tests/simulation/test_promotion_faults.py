"""Promotion under faults, a few of each kind; all of them: benchmarks/promotion_faults.py. Real SQLite log and MLflow store."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import promotion_faults as faults

from spanloop.pipeline.ports import NewRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def uri(home: Path) -> str:
    return faults.open_store(home)


def some_races(home: Path, uri: str, first: int, count: int = 5) -> list[dict[str, int]]:
    return [faults.race(home, uri, seed) for seed in range(first, first + count)]


def test_two_promoters_cannot_both_win(home: Path, uri: str) -> None:
    told = some_races(home, uri, 0)
    assert sum(t["switches"] for t in told) > 100
    assert sum(t["lost"] for t in told) > 0


def test_killed_before_and_after_every_effect(home: Path, uri: str) -> None:
    told = faults.kills(home, uri, 1, 7)
    assert told["least"] == 1
    assert told["steps"] >= 26, told["by_step"]


def test_sigkill_at_random_moments(home: Path, uri: str) -> None:
    assert faults.sigkills(home, uri, 3, 1)["heal_s_max"] < faults.HEAL_S


# ---------------------------------------------------------------- the checks are strong enough


def test_a_promoter_without_a_fence_is_caught(home: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event id that does not name the epoch lets both win."""
    for event in (faults.PolicyPromoted, faults.PolicyRolledBack):
        monkeypatch.setattr(event, "event_id", property(lambda self: f"{random.random()}"))
    with pytest.raises(AssertionError):
        some_races(home, uri, 900)


def test_aliases_that_nobody_mends_are_caught(home: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.promoters, "RECHECK_S", 1e9)
    with pytest.raises(AssertionError):
        some_races(home, uri, 800, 1)


def test_an_append_that_is_lost_is_caught(home: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = faults.HookedLog.append

    def forgetful(self: faults.HookedLog, records: list[NewRecord]) -> list[faults.Appended]:
        if isinstance(faults.decode(records[0].value), faults.PolicyPromoted) and isinstance(
            self._hook, faults.Turns
        ):
            return [faults.Appended(10**6, duplicate=False)]
        return real(self, records)

    monkeypatch.setattr(faults.HookedLog, "append", forgetful)
    with pytest.raises(AssertionError):
        some_races(home, uri, 700)
