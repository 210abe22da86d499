"""Walk a log in append order, a bounded batch at a time: for verbs and stages that start from the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spanloop.pipeline.ports import Log, LogRecord

__all__ = ["scan"]


def scan(
    log: Log,
    topic_names: Sequence[str],
    *,
    after: Mapping[str, int] | None = None,
    upto: Mapping[str, int] | None = None,
    batch: int = 500,
) -> Iterator[LogRecord]:
    """Records of the topics, merged in append order, up to where the log ended when the scan began.

    Args:
        log: any Log.
        topic_names: topics to merge.
        after: offset by topic to start behind; absent: from the start.
        upto: last offset by topic to give; absent: the end of the topic now.
        batch: records fetched at once.
    """
    position = dict(after or {})
    last = {topic: (upto or {}).get(topic, log.end(topic)) for topic in topic_names}
    live = [topic for topic in topic_names if position.get(topic, -1) < last[topic]]
    while live:
        records = log.read(live, position, batch)
        if not records:
            return
        for record in records:
            position[record.topic] = record.offset
            if record.offset <= last[record.topic]:
                yield record
        live = [topic for topic in live if position.get(topic, -1) < last[topic]]
