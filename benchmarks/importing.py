"""Speed and memory of ``spanloop import`` over one large file.

    python benchmarks/importing.py [MIB] [lines|list]

Makes a file of Phoenix spans of about 1.7 kB (twenty a trace), one a line or as one JSON list on a single line, imports it into a
new workspace and once more, and prints one JSON line: spans/s, CPU seconds per 1,000 spans, peak memory, seconds of the second run.
Expected: peak memory under 300 MiB whatever the size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ATTRIBUTES = {
    "llm": {
        "model_name": "tiny",
        "token_count": {"prompt": 400, "completion": 10},
        "input_messages": [{"message": {"role": "user", "content": "words " * 100}}],
    },
    "input": {"value": "words " * 100},
    "session": {"id": "s-1"},
}


def make(path: Path, size: int, form: str) -> int:
    """Write the file; the number of its spans."""
    count = written = 0
    with path.open("wb") as out:
        out.write(b"[" if form == "list" else b"")
        while written < size:
            count += 1
            span = {
                "name": "call", "span_kind": "LLM", "parent_id": None, "status_code": "OK", "status_message": "",
                "context": {"trace_id": f"{count // 20 + 1:032x}", "span_id": f"{count:016x}"},
                "start_time": "2026-03-01T10:00:01+00:00", "end_time": "2026-03-01T10:00:02+00:00",
                "attributes": ATTRIBUTES, "events": [],
            }  # fmt: skip
            body = json.dumps(span).encode()
            body = body + b"\n" if form == "lines" else (b"," if count > 1 else b"") + body
            written += out.write(body)
        out.write(b"]" if form == "list" else b"")
    return count


def run(path: Path, workspace: Path) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, peak MiB) of one import."""
    command = [
        sys.executable,
        "-m",
        "spanloop.schemas.cli",
        "import",
        str(path),
        "--workspace",
        str(workspace),
        "--quiet",
    ]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the import ended with {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    form = sys.argv[2] if len(sys.argv) > 2 else "lines"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.json"
        spans = make(path, mib * 2**20, form)
        wall, cpu, peak = run(path, Path(folder) / "workspace")
        again, _, _ = run(path, Path(folder) / "workspace")
        print(
            json.dumps(
                {"mib": mib, "form": form, "spans": spans, "spans_per_s": round(spans / wall), "wall_s": round(wall, 1),
                 "cpu_s_per_1000": round(1000 * cpu / spans, 4), "peak_mib": round(peak), "again_s": round(again, 1)}
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
