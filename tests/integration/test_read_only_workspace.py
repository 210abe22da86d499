"""Reading verbs on a workspace that cannot be written: a read-only mount of one that is at rest, in use, or was killed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged

SPANLOOP = Path(sysconfig.get_path("scripts")) / "spanloop"
MOUNTED = 'mount --bind "$1" "$2" && mount -o remount,ro,bind "$2" && shift 2 && exec "$@"'
COUNT = """
import sys
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TerminalError
from spanloop.schemas.events import RoutingChanged
log = SqliteLog(sys.argv[1] + "/spanloop.db", create=False)
print(log.counts().get("policies", 0))
try:
    log.append([new_record(RoutingChanged(sequence=99, champion=1))])
except TerminalError as exc:
    print("opened for reading" in exc.message)
log.close()
"""


def read_only(workspace, at, *command):
    """What a command says that sees ``workspace`` at ``at``, where it cannot be written."""
    at.mkdir(exist_ok=True)
    space = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    can = subprocess.run(
        [*space, "sh", "-c", MOUNTED, "sh", workspace, at, "true"], capture_output=True, check=False
    )
    if can.returncode:
        pytest.skip(f"nothing can be mounted here: {can.stderr.decode()}")
    done = subprocess.run(
        [*space, "sh", "-c", MOUNTED, "sh", workspace, at, *map(str, command)], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def appended(log, first, last):
    for n in range(first, last + 1):
        log.append([new_record(RoutingChanged(sequence=n, champion=n))])


def test_a_log_at_rest_in_use_and_killed_is_read_whole(tmp_path):
    workspace, at = tmp_path / "w", tmp_path / "m"
    log = SqliteLog(workspace / "spanloop.db")
    appended(log, 1, 3)
    assert read_only(workspace, at, sys.executable, "-c", COUNT, at).split() == ["3", "True"]  # in use
    appended(log, 4, 5)
    assert read_only(workspace, at, sys.executable, "-c", COUNT, at).split() == ["5", "True"]
    killed = tmp_path / "killed"
    shutil.copytree(workspace, killed)  # with the write-ahead log and its index, as kill -9 leaves them
    assert (killed / "spanloop.db-wal").stat().st_size
    assert read_only(killed, at, sys.executable, "-c", COUNT, at).split() == ["5", "True"]
    log.close()
    assert read_only(workspace, at, sys.executable, "-c", COUNT, at).split() == ["5", "True"]  # at rest
    assert not (workspace / "spanloop.db-wal").exists()


def test_the_reading_verbs_work(tmp_path):
    workspace, at, file = tmp_path / "w", tmp_path / "m", tmp_path / "spans.jsonl"
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}
    span = {
        "traceId": "1" * 32, "spanId": "2" * 16, "name": "invoke_agent planner", "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000001000000000",
        "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in attributes.items()],
    }  # fmt: skip
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    subprocess.run([SPANLOOP, "import", file, "--workspace", workspace], check=True, capture_output=True)
    assert "(0 of 0" in read_only(workspace, at, SPANLOOP, "traces", "--workspace", at, "--table")
    for words in (
        ["query", "select count(*) as n from spans", "--workspace", at],
        ["deadletters", "list", "--workspace", at],
        ["policies", "--workspace", at],
    ):
        read_only(workspace, at, SPANLOOP, *words)
