"""``spanloop verify`` over the archive: replay it and compare each orchestration with what the stream published.

Place in the flow: for deployments whose stages keep their state elsewhere (Kafka), and for archives without their log. What the
state would tell, what is still open, is told by time here: an orchestration that was touched so lately that the stream, or the
archiver behind it, need not be there yet is not compared unless it is equal.

Invariants: nothing is written but the replay's own folder, and that is removed.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.replay.driver import Tell, replay
from spanloop.pipeline.replay.plan import make_plan
from spanloop.pipeline.replay.reading import VersionRow
from spanloop.pipeline.replay.results import ResultSet
from spanloop.pipeline.verify import Difference, Verified
from spanloop.schemas import topics
from spanloop.schemas.settings import Settings

__all__ = ["NAME", "verify_archive"]

NAME = "verify"
"""Of the replay, so that a stopped one goes on."""
_COLUMNS = (
    "tenant", "orchestration_id", "complete", "touched_ns", "late", "erased", "version", "problem", "content_hash", "rewards_hash",
    "credit_hash", "recorded",
)  # fmt: skip
_LAG_NS = 5_000_000_000
"""The stream may be so far behind besides."""
_recorded = msgspec.json.Decoder(dict[str, VersionRow])


def verify_archive(
    settings: Settings,
    store: ArchiveStore,
    root: Path,
    now_ns: int,
    *,
    workers: int = 1,
    tell: Tell | None = None,
    **options: Any,
) -> Verified:
    """Replay an archive and compare.

    Args:
        settings: Those that the stages run with.
        store: The archive.
        root: Folder of result sets.
        now_ns: When the archive was read.
        workers, tell: As for ``replay``.
        options: As for ``make_plan``: since, until, ...

    Raises:
        What ``make_plan`` and ``replay`` raise.
    """
    started = time.monotonic()
    shutil.rmtree(root / NAME / "parts", ignore_errors=True) if (
        root / NAME / "manifest.json"
    ).exists() else None
    (root / NAME / "manifest.json").unlink(missing_ok=True)
    plan = make_plan(settings, store, name=NAME, compare=True, **options)
    manifest = replay(plan, store, root, workers=workers, tell=tell)
    pipeline, slack_ns = settings.pipeline, int(3e9 * settings.archive.every_s) + _LAG_NS
    found = Verified(span_records=manifest.counts.span_records)
    versions: set[tuple[str, str]] = set()
    for row in ResultSet(root / NAME).rows(_COLUMNS):
        wait_s = pipeline.quiet_s if row["complete"] else pipeline.timeout_s
        recent = row["touched_ns"] + int(wait_s * 1e9) + slack_ns > now_ns
        _compare(row, recent, found)
        if row["credit_hash"]:
            versions.add((row["tenant"], row["version"]))
    found.models = sum(version != "none" for _, version in versions)
    found.seconds = round(time.monotonic() - started, 3)
    shutil.rmtree(root / NAME, ignore_errors=True)
    return found


def _compare(row: dict[str, Any], recent: bool, found: Verified) -> None:
    """One orchestration: equal, different, or not to be compared yet."""
    key = (row["tenant"], row["orchestration_id"])
    recorded = _recorded.decode(row["recorded"]) if row["recorded"] else {}
    there = recorded.get(topics.ORCHESTRATIONS)
    hashes = there.hash if there is not None and not there.merged else "", row["content_hash"]
    if hashes[0] != hashes[1] or (there is not None and there.told != there.hash):
        if row["late"]:
            found.late += 1
        elif recent:
            found.open += 1
        else:
            what = "extra" if not hashes[0] else "missing" if not hashes[1] else "orchestration"
            found.orchestrations += 1
            found.differences.append(Difference(*key, what, *hashes))
        return
    differences = []
    if row["problem"] and not row["erased"]:
        differences.append(Difference(*key, "credit", row["problem"]))
    for what, topic in (("rewards", topics.REWARDS), ("credit", topics.CREDITS)):
        if what == "credit" and row["erased"]:
            continue
        published = recorded.get(topic)
        pair = published.hash if published is not None else "", row[f"{what}_hash"]
        if pair[0] != pair[1] and not (what == "credit" and row["problem"]):
            differences.append(Difference(*key, what, *pair))
    if differences and recent:
        found.behind += 1
        return
    found.orchestrations += 1
    found.rewards += 1
    if row["erased"]:
        found.erased += 1
    else:
        found.credits += topics.CREDITS in recorded or bool(row["credit_hash"])
    found.equal += not differences
    found.differences += differences
