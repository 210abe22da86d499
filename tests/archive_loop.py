"""A process that appends spans and archives them in a loop, to be killed (case 39): argv is the workspace and the seed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from archive_support import spans

from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive import archiver as module
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.settings import load_settings


def main() -> None:
    workspace, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    module.COMPACT_EVERY_S = 0.3
    log = SqliteLog(workspace / "spanloop.db")
    options = load_settings(
        None, {"workspace": workspace, "archive": {"records": 50, "every_s": 0.05, "compact_below_mb": 64}}
    )
    archiver = Archiver(log, ArchiveStore.open(options), options)

    def stop(_: float) -> bool:
        log.append([new_record(spans(rng.getrandbits(60), range(rng.randrange(1, 4)))) for _ in range(20)])
        return False

    with archiver.writing():
        print("ready", flush=True)
        archiver.follow(stop)


if __name__ == "__main__":
    main()
