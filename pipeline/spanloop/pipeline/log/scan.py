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
        after: offset by source to start behind; absent: from the start.
        upto: last offset by source to give; absent: the end of the source now.
        batch: records fetched at once.
    """
    position = dict(after or {})
    sources = [source for topic in topic_names for source in log.sources(topic)]
    last = {source: (upto or {}).get(source, log.end(source)) for source in sources}
    live = [source for source in sources if position.get(source, -1) < last[source]]
    while live:
        records = log.read(live, position, batch)
        if not records:
            return
        for record in records:
            position[record.source] = record.offset
            if record.offset <= last[record.source]:
                yield record
        live = [source for source in live if position.get(source, -1) < last[source]]
