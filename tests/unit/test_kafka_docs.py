"""docs/kafka.md says what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from spanloop.schemas import topics
from spanloop.schemas.settings import Settings

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "kafka.md").read_text()


def test_the_table_names_every_topic_with_its_partitions():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", DOCS, re.MULTILINE))
    assert set(rows) == {*topics.ALL_TOPICS, *topics.INTERNAL}
    assert {name for name, count in rows.items() if count == "1"} == set(topics.SINGLE)


def test_the_example_settings_are_valid():
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    settings = Settings(**tomllib.loads(example))
    assert settings.kafka.partitions == 12
    assert settings.kafka.client["sasl.mechanism"] == "SCRAM-SHA-512"


def test_figures_are_the_codes():
    from spanloop.collectors import span_exporter
    from spanloop.pipeline.log import kafka_read

    assert f"last {kafka_read.SEEN_MAX:,}" in DOCS
    assert f"At most {span_exporter.SPANS_MAX:,} spans ({span_exporter.BYTES_MAX // 2**20} MiB)" in DOCS
