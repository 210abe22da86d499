"""All tables of a topic from its records.

Invariants: columns are a pure function of the records (the log is the truth, a table can always be rebuilt); a record that
cannot be read gives no row and is counted, it never fails a query.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from spanloop.pipeline.columns.cells import Columns, Decoded, array
from spanloop.pipeline.columns.facts import (
    dead_letter_columns,
    feedback_columns,
    model_columns,
    policy_columns,
)
from spanloop.pipeline.columns.ledgers import credit_columns, reward_columns, sample_columns
from spanloop.pipeline.columns.orchestrations import orchestration_columns
from spanloop.pipeline.columns.spans import span_columns
from spanloop.pipeline.ports import LogRecord
from spanloop.pipeline.tables import TABLES, TABLES_OF_TOPIC
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    DecisionModelPublished,
    FeedbackReceived,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
    decode,
)

__all__ = ["build"]

_LARGE: dict[str, Callable[[Sequence[LogRecord]], tuple[dict[str, Columns], int]]] = {
    topics.SPANS: span_columns,
    topics.ORCHESTRATIONS: orchestration_columns,
}
"""These decode only what becomes a column."""
_SMALL: dict[str, tuple[Any, Callable[[Decoded], dict[str, Columns]]]] = {
    topics.REWARDS: (RewardsComputed, reward_columns),
    topics.CREDITS: (CreditAssigned, credit_columns),
    topics.SAMPLES: (SamplesBuilt, sample_columns),
    topics.POLICIES: (None, policy_columns),
    topics.FEEDBACK: (FeedbackReceived, feedback_columns),
    topics.MODELS: (ValueModelPublished | DecisionModelPublished, model_columns),
    topics.DEAD_LETTERS: (DeadLettered, dead_letter_columns),
}


def build(topic: str, records: Sequence[LogRecord]) -> tuple[dict[str, pa.Table], int]:
    """All tables that ``topic`` feeds, from its records.

    Args:
        topic: One of ``topics.ALL_TOPICS``.
        records: Records of that topic, in offset order.

    Returns:
        Table name -> Arrow table with exactly the table's schema, and the number of records that could not be read.
    """
    with _no_collection():
        if topic in _LARGE:
            columns, bad = _LARGE[topic](records)
        else:
            expected, builder = _SMALL[topic]
            rows, bad = _decoded(records, expected)
            columns = builder(rows)
        tables = {}
        for name in TABLES_OF_TOPIC[topic]:
            schema = TABLES[name].schema
            arrays = [array(columns[name][field.name], field.type) for field in schema]
            tables[name] = pa.Table.from_arrays(arrays, schema=schema)
        return tables, bad


def _decoded(records: Sequence[LogRecord], expected: type | None) -> tuple[Decoded, int]:
    rows, bad = [], 0
    for record in records:
        try:
            event = decode(record.value)
        except SchemaError:
            bad += 1
            continue
        if expected is None or isinstance(event, expected):
            rows.append((record, event))
        else:
            bad += 1
    return rows, bad


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of small objects without cycles are made and dropped here: looking for cycles among them costs
    a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
