"""Taking a stage out of the pipeline takes its product away: each stage is needed."""

from __future__ import annotations

from contextlib import closing

import pytest
from simulation.small_system import append, job, outcome, run

from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.schemas import topics
from spanloop.schemas.settings import load_settings

SETTINGS = load_settings(flags={"pipeline": {"value_every": 4}}).pipeline
PRODUCTS = {
    "assembly": {topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES, topics.MODELS},
    "signal": {topics.REWARDS, topics.CREDITS, topics.SAMPLES, topics.MODELS},
    "value": {topics.MODELS},
}


def _products(tmp_path, without):
    path = tmp_path / "spanloop.db"
    append(path, [event for number in range(12) for event in (*job(number), outcome(number, number / 12))])
    run(path, SETTINGS, stages=[stage for stage in build_stages(SETTINGS) if stage.name != without])
    with closing(SqliteLog(path)) as log:
        return {topic for topic, count in log.counts().items() if count} - {
            topics.SPANS,
            topics.FEEDBACK,
            topics.DEAD_LETTERS,
        }


@pytest.mark.parametrize("without", PRODUCTS)
def test_without_a_stage_its_product_is_missing(tmp_path, without):
    assert _products(tmp_path, None) == PRODUCTS["assembly"]
    (tmp_path / "again").mkdir()
    assert _products(tmp_path / "again", without) == PRODUCTS["assembly"] - PRODUCTS[without]
