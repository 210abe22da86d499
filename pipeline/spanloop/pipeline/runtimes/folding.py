"""Fold records into a stage whatever they are: one on which the stage raises is cornered and becomes a dead letter."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spanloop.pipeline.ports import LogRecord, Stage, StageOutput
from spanloop.schemas.errors import SchemaError, TerminalError, TransientError
from spanloop.schemas.events import DeadLettered, Event

__all__ = ["dead_letter_of", "fold", "is_cornered", "where"]

DATA_MAX = 64 * 1024
"""Bytes of a record that its dead letter keeps; the rest stays on the log, at the offset named."""

_log = logging.getLogger("spanloop.pipeline")


def fold(
    stage: Stage, records: Sequence[LogRecord], now_ns: int, restore: Callable[[], None]
) -> Iterator[tuple[Sequence[LogRecord], StageOutput]]:
    """Process records in order; yields parts with their outputs, to be committed before the next is asked for.

    Args:
        stage: folds; after an exception it is restored.
        records: in order.
        now_ns: processing time.
        restore: brings the stage back to what was committed.

    Raises:
        TransientError, TerminalError: as the stage raises them.
    """
    try:
        output = stage.process(records, now_ns)
        for event in output.events:
            _ = event.event_id  # an output that cannot be written fails here, where it can be cornered
    except (TransientError, TerminalError):
        raise
    except Exception as exc:
        restore()
        if len(records) > 1:
            middle = len(records) // 2
            yield from fold(stage, records[:middle], now_ns, restore)
            yield from fold(stage, records[middle:], now_ns, restore)
            return
        _log.warning(
            "dead-lettered a record on which %s raised %s at %s",
            stage.name, type(exc).__name__, where(exc),
            extra={"topic": records[0].topic, "offset": records[0].offset},
        )  # fmt: skip
        output = StageOutput(events=[dead_letter_of(stage.name, records[0], exc)])
    yield records, output


def is_cornered(event: Event) -> bool:
    """Whether an event is the dead letter of a record on which a stage raised."""
    return isinstance(event, DeadLettered) and event.source.startswith("stage:")


def where(exc: BaseException) -> str:
    """File, line and function that raised. The message stays out: it may quote content."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown"
    code = trace.tb_frame.f_code
    return f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"


def dead_letter_of(stage: str, record: LogRecord, exc: Exception) -> DeadLettered:
    """The dead letter of a record, with where it stands and its bytes."""
    reason = exc.message if isinstance(exc, SchemaError) else f"{type(exc).__name__} at {where(exc)}"
    return DeadLettered(
        tenant=record.key.partition("/")[0] or "default",
        source=f"stage:{stage}",
        reason=reason[:500],
        sha256=hashlib.sha256(record.value).hexdigest(),
        size=len(record.value),
        data=base64.b64encode(record.value[:DATA_MAX]).decode(),
        details={
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "event_id": record.event_id,
        },
    )
