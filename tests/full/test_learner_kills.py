"""kill -9 of the learner at random points: the weights are those of a run that nobody disturbed, and each sample is used once.

Ten here; ``make kills`` runs a hundred (SPANLOOP_KILLS) and writes benchmarks/results/learner_kills.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from learner_kills import Killing

from spanloop.learner.update import exact_numerics

KILLS = int(os.environ.get("SPANLOOP_KILLS", "10"))
SEED = int(os.environ.get("SPANLOOP_TEST_SEED", "20261201"))


@pytest.mark.full
@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_at_random_points(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    killing = Killing(tmp_path / "killed", SEED)
    for _ in range(KILLS):
        killing.kill()
    killing.finish()
    with exact_numerics():
        figures = killing.check(tmp_path / "calm")
    killing.log.close()
    assert figures["kills"] == KILLS
    assert figures["batches"] >= KILLS
    print(json.dumps(figures | {"seed": SEED}))
    if target := os.environ.get("SPANLOOP_RESULTS"):
        Path(target).write_text(json.dumps(figures | {"seed": SEED}, indent=1) + "\n")
