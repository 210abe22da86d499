"""Laws of importing: how lines are split, repeated and ordered changes nothing; a run that dies anywhere and is run again is one
run; readers never raise, whatever the values."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from foreign_files import LINES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.collectors.batches import Intake
from spanloop.collectors.importers import importing
from spanloop.collectors.importers.checkpoints import Checkpoints
from spanloop.collectors.importers.importing import Importer
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.formats.detect import read_json
from spanloop.pipeline.formats.opened import Source
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.events import SpansReceived, decode
from spanloop.schemas.settings import Content

SLOW = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ALL = [record for records in LINES.values() for record in records]
TOPICS = (topics.SPANS, topics.FEEDBACK, topics.DEAD_LETTERS)
KEY = b"k" * 32


def import_into(log: Log, paths: list[Path], checkpoints: Path | None = None):
    redactor = Redactor(Content(), KEY)
    importer = Importer(
        log, Intake(redactor, 65_536, keep_content=False), redactor, tenant="t", now_ns=10**19, max_nesting=64,
        checkpoints=None if checkpoints is None else Checkpoints(checkpoints, log, "rules"),
    )  # fmt: skip
    return importer.run([Source(path) for path in paths])


def facts(log: Log) -> dict[str, bytes]:
    return {f"{r.topic}/{r.event_id}": r.value for r in scan(log, TOPICS)}


def orchestrations(log: Log) -> bytes:
    events = [decode(r.value) for r in scan(log, (topics.SPANS,))]
    spans = [s for e in events if isinstance(e, SpansReceived) for s in e.spans]
    return canonical_json(assemble_spans(spans, "t"))


def written(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], bytes]:
    log = MemoryLog(ManualClock())
    path = written(tmp_path_factory.mktemp("whole") / "all", [json.dumps(r).encode() for r in ALL])
    import_into(log, [path])
    return facts(log), orchestrations(log)


@SLOW
@given(data=st.data())
def test_splitting_repeating_and_reordering_lines_changes_nothing(data, whole, tmp_path):
    lines = [json.dumps(r).encode() for r in ALL]
    order = data.draw(st.permutations(range(len(lines))))
    more = data.draw(st.lists(st.sampled_from(range(len(lines))), max_size=10))
    files = data.draw(st.integers(1, 4))
    parts: list[list[bytes]] = [[] for _ in range(files)]
    for number in [*order, *more]:
        parts[data.draw(st.integers(0, files - 1))].append(lines[number])
    log = MemoryLog(ManualClock())
    paths = [written(tmp_path / f"part {n}", part) for n, part in enumerate(parts) if part]
    import_into(log, paths)
    assert (facts(log), orchestrations(log)) == whole


@SLOW
@given(bad=st.lists(st.tuples(st.integers(0, len(ALL)), st.binary(min_size=1, max_size=30)), max_size=6))
def test_bad_lines_cost_only_themselves(bad, whole, tmp_path):
    lines = [json.dumps(r).encode() for r in ALL]
    for place, junk in bad:
        lines.insert(place, b"\x01" + junk.replace(b"\n", b"?").replace(b"\r", b"?"))
    if lines[0][:1] == b"\x01":  # the first byte tells the format
        lines.insert(0, json.dumps(ALL[0]).encode())
    log = MemoryLog(ManualClock())
    found = import_into(log, [written(tmp_path / "x", lines)])
    good = {k: v for k, v in facts(log).items() if not k.startswith(topics.DEAD_LETTERS)}
    assert (good, found.rejected) == (whole[0], len(bad))


class DyingLog(MemoryLog):
    """Dies at one append, before or after it is durable."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.die_at = -1
        self.after = False
        self.appends = 0

    def append(self, records):
        self.appends += 1
        if self.appends == self.die_at and not self.after:
            raise MemoryError
        done = super().append(records)
        if self.appends == self.die_at:
            raise MemoryError
        return done


@SLOW
@given(data=st.data())
def test_a_run_that_dies_anywhere_and_is_run_again_is_one_run(data, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "_GROUP_RECORDS", data.draw(st.integers(1, 9)))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    cut = data.draw(st.integers(0, len(ALL)))
    lines = [json.dumps(r).encode() for r in ALL]
    paths = [written(folder / f"{n}", part) for n, part in enumerate((lines[:cut], lines[cut:])) if part]
    log = DyingLog()
    for _ in range(data.draw(st.integers(1, 4))):
        log.die_at = log.appends + data.draw(st.integers(1, 12))
        log.after = data.draw(st.booleans())
        try:
            import_into(log, paths, folder / "checkpoints")
        except MemoryError:
            continue
    log.die_at = -1
    found = import_into(log, paths, folder / "checkpoints")
    assert (facts(log), orchestrations(log)) == whole
    again = import_into(log, paths, folder / "checkpoints")
    assert (again.events, again.spans, again.continued) == (0, found.spans, len(paths))
    assert again.duplicates == found.events + found.duplicates


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*at, key))
    return found


@settings(SLOW, max_examples=300)
@given(data=st.data())
def test_readers_never_raise_and_lose_nothing_unseen(data):
    """One value of a good record replaced by any other: it is read, or it is refused with its bytes."""
    record = json.loads(json.dumps(data.draw(st.sampled_from(ALL))))
    *above, last = data.draw(st.sampled_from(_paths(record)))
    inner: Any = record
    for key in above:
        inner = inner[key]
    inner[last] = data.draw(JSON)
    body = json.dumps(record).encode()
    found = read_json(body)
    for span in found.spans:
        canonical_json(span)
        assert (len(span.trace_id), len(span.span_id)) == (32, 16)
    assert all(item.data and item.reason for item in found.rejected)
    if found.spans:
        assemble_spans(found.spans, "t")
