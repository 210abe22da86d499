"""The twelve queries that users run first, each in a process of its own, over an archive of so many spans.

Makes the archive (``_archive.py``: recorded orchestrations with the gateway's spans, copied with fresh ids, 2 kB of JSON a span; raw
files and tables), adds one orchestration of 20,000 spans and some policy versions, and runs ``spanloop query`` again and again.
Wall clock from the start of the process to its end, imports included, and the processor time of all its processes.
The first touch of an archive compares every file with its checksum, which is timed apart.
Run: .venv/bin/python benchmarks/queries.py [--spans 10000000] [--runs 12] [--folder DIR] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from _archive import COPIED, Template, number_of, recorded, run, templates, write_topic
from _harness import write

from spanloop.pipeline.archive import ArchiveStore, write_range
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.query.session import Query
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import BatchCommitted, CandidateRegistered, Event, PolicyPromoted
from spanloop.schemas.spans import Span

COMMAND = ".venv/bin/python benchmarks/queries.py"
LARGE_SPANS = 20_000
TEMPLATES = 8
STOPPED = (
    "SELECT count(*) FROM range(1000000000000) t(x) WHERE x % 7 = 3",
    "SELECT * FROM range(1000000000000)",
    "SELECT sleep_ms(60000)",
    "SELECT count(*) FROM spans a, spans b WHERE a.name || b.name LIKE '%x%y%z%'",
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
)


def questions(one: str) -> dict[str, str]:
    """Name -> SQL; ``one`` is an orchestration."""
    return {
        "slowest orchestrations": "SELECT orchestration_id, duration_ms, num_calls, agents FROM orchestrations ORDER BY 2 DESC LIMIT 20",
        "error rate by tool": "SELECT tool, count(*), avg((status = 'error')::INT) FROM events WHERE type = 'tool_result' GROUP BY 1",
        "tokens by model": "SELECT model, count(*), sum(input_tokens), sum(output_tokens) FROM calls GROUP BY 1",
        "reward by policy version": "SELECT version, count(*), avg(value) FROM (SELECT tenant, orchestration_id, unnest(policy_versions) AS "
        "version FROM orchestrations) JOIN rewards USING (tenant, orchestration_id) WHERE name = 'outcome' GROUP BY 1 ORDER BY 1",
        "credit by agent": "SELECT label, count(*), avg(credit) FROM credits WHERE unit = 'agent' GROUP BY 1",
        "who spawned whom": "SELECT agent, to_agent, count(*) FROM events WHERE type = 'spawn' GROUP BY ALL",
        "dead letters by reason": "SELECT source, reason, count(*) FROM deadletters GROUP BY ALL",
        "timeline of one orchestration": f"FROM timeline('{one}')",
        "critical path of one orchestration": f"FROM critical_path('{one}')",
        "staleness of serving versions": "FROM staleness()",
        "what taught a version": "SELECT version, role, count(*), avg(reward) FROM provenance(3) GROUP BY ALL",
        "feedback without orchestration": "SELECT f.feedback_id, f.target_id, f.value FROM feedback f ANTI JOIN (SELECT tenant, "
        "unnest(trace_ids) AS trace_id FROM orchestrations) o ON o.tenant = f.tenant AND o.trace_id = f.target_id "
        "WHERE f.target_kind = 'trace' LIMIT 100",
    }  # fmt: skip


# ---------------------------------------------------------------- the archive


def large() -> Template:
    """One orchestration of LARGE_SPANS spans: the recording again and again in one trace."""
    base = recorded()
    spans: list[Span] = []
    for number in range(-(-LARGE_SPANS // len(base))):
        for span in base:
            attributes = dict(span.attributes)
            if "gen_ai.response.id" in attributes:
                attributes["gen_ai.response.id"] = (
                    f"chatcmpl-{digest(number, attributes['gen_ai.response.id'])}"
                )
            spans.append(
                msgspec.structs.replace(
                    span,
                    trace_id=digest("large"),
                    span_id=digest(number, span.span_id)[:16],
                    parent_span_id=digest(number, span.parent_span_id)[:16] if span.parent_span_id else None,
                    start_ns=span.start_ns + number * 200_000_000,
                    end_ns=span.end_ns + number * 200_000_000,
                    attributes=attributes,
                )
            )
    return run(spans[:LARGE_SPANS], 0.5, "default", batch=50)


def add(store: ArchiveStore, topic: str, records: Sequence[LogRecord]) -> None:
    """Records behind what a topic has, through the real writer."""
    after = store.contained_of(topic, 0) + 1
    if records:
        write_range(
            store, topic, 0, [msgspec.structs.replace(r, offset=after + i) for i, r in enumerate(records)]
        )


def policy_events() -> list[Event]:
    """Four versions, each taught by 2,000 samples."""
    events: list[Event] = []
    for version in range(1, 5):
        events += [
            BatchCommitted(batch=version, from_offset=2_000 * (version - 1) - 1, to_offset=2_000 * version - 1, parent_version=version - 1),
            CandidateRegistered(
                version=version, parent=version - 1, batch=version, mlflow_version=str(version), path="p", sha256="s", orchestrations=2000
            ),
            PolicyPromoted(epoch=version, version=version, previous=version - 1, reason="canary"),
        ]  # fmt: skip
    return events


def make(folder: Path, spans: int) -> dict[str, float]:
    """The workspace with its archive; two processes, spans in one of them."""
    begin = time.perf_counter()
    SqliteLog(folder / "spanloop.db").close()
    store = ArchiveStore(LocalFiles(folder / "archive"))
    made = templates()
    orchestrations = number_of(made, spans)
    child = os.fork()
    for topic in COPIED:
        if (topic == topics.SPANS) == (child == 0):
            write_topic(store, topic, made, orchestrations)
    if child == 0:
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("the archive could not be made")
    extra = large()
    for topic in COPIED:
        add(store, topic, extra.records[topic])
    now = extra.records[topics.SPANS][0].appended_ns
    records = [new_record(event) for event in policy_events()]
    add(store, topics.POLICIES, [LogRecord(r.topic, 0, r.key, r.event_id, r.value, now) for r in records])
    size = sum(path.stat().st_size for path in (folder / "archive").rglob("*") if path.is_file())
    return {
        "orchestrations": orchestrations + 1,
        "spans": orchestrations * made[0].num_spans + LARGE_SPANS,
        "json_bytes_per_span": round(
            sum(len(r.value) for r in made[0].records[topics.SPANS]) / made[0].num_spans
        ),
        "archive_gb": round(size / 1e9, 2),
        "made_s": round(time.perf_counter() - begin, 1),
    }


# ---------------------------------------------------------------- measuring


def once(folder: Path, sql: str, *options: str) -> tuple[float, float, bytes]:
    """Wall and processor seconds of one cold process, and what it wrote."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPANLOOP_")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spanloop")), "query", sql, "--workspace", str(folder), "--ndjson", *options],
        capture_output=True, check=False, env=environment,
    )  # fmt: skip
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{sql}: exit code {done.returncode}: {done.stderr.decode()[:500]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def summary(runs: Sequence[tuple[float, float, bytes]]) -> dict[str, float]:
    """Of one query."""
    walls = [wall for wall, _, _ in runs]
    return {
        "p50_ms": round(median(walls) * 1e3),
        "p95_ms": round(quantile(walls, 0.95) * 1e3),
        "cpu_ms": round(median(cpu for _, cpu, _ in runs) * 1e3),
        "rows": runs[-1][2].count(b"\n"),
    }


def lateness(folder: Path, runs: int) -> list[float]:
    """Seconds from the end of a statement's time until its process is gone."""
    found = []
    for number in range(runs):
        with Query(None, folder / "archive", timeout_s=0.2) as query:
            try:
                for _ in query.chunks(STOPPED[number % len(STOPPED)], "csv"):
                    pass
            except TransientError as exc:
                found.append(float(str(exc.attributes["late_s"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument(
        "--folder", type=Path, help="Where the workspace is made; made anew unless it is there."
    )
    parser.add_argument("--keep", action="store_true", help="Leave the workspace.")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="spanloop-queries-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        known = folder / "made.json"
        if not known.exists():
            known.write_text(json.dumps(make(folder, options.spans)))
        figures: dict[str, object] = json.loads(known.read_text())
        one = json.loads(
            once(
                folder, "SELECT orchestration_id FROM orchestrations ORDER BY md5(orchestration_id) LIMIT 1"
            )[2]
        )
        big = json.loads(
            once(
                folder,
                "SELECT orchestration_id, trace_ids[1] AS t FROM orchestrations ORDER BY num_calls DESC LIMIT 1",
            )[2]
        )
        asked = questions(one["orchestration_id"])
        first = sum(once(folder, sql)[0] for sql in asked.values())
        runs: dict[str, list[tuple[float, float, bytes]]] = {name: [] for name in asked}
        for _ in range(options.runs):
            for name, sql in asked.items():
                runs[name].append(once(folder, sql))
        walls = [wall for own in runs.values() for wall, _, _ in own]
        opened = {
            "timeline": f"FROM timeline('{big['orchestration_id']}')",
            "all spans with attributes": f"SELECT * FROM spans WHERE trace_id = '{big['t']}' ORDER BY start_ns",  # noqa: S608
            "critical path": f"FROM critical_path('{big['orchestration_id']}')",
            "credit flow": f"FROM credit_flow('{big['orchestration_id']}')",
            "nothing (SELECT 1)": "SELECT 1",
        }
        late = lateness(folder, 4 * len(STOPPED))
        figures |= {
            "queries": {name: summary(own) for name, own in runs.items()},
            "p50_ms": round(median(walls) * 1e3),
            "p95_ms": round(quantile(walls, 0.95) * 1e3),
            "first_touch_of_all_s": round(first, 2),
            "open_20000_spans": {name: summary([once(folder, sql) for _ in range(options.runs)]) for name, sql in opened.items()},
            "stop_after_timeout_ms": {"n": len(late), "p50": round(median(late) * 1e3, 1), "p99": round(quantile(late, 0.99) * 1e3, 1)},
            "load_average": [round(value, 1) for value in os.getloadavg()],
        }  # fmt: skip
        write("queries", f"{COMMAND} --spans {options.spans} --runs {options.runs}", figures)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
