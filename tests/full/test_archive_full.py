"""Cases 39 and 41 at the size that they give: a minute of writing with 20 kills and 1,000 queries, a minute of a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from archive_cases import bad_files_and_a_full_volume, queries_while_the_archiver_is_killed, small_volume


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_case_39_in_full(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    assert (
        queries_while_the_archiver_is_killed(workspace, kills=20, readers=10, seconds=60.0, queries=1000)
        >= 1000
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_case_41_in_full(tmp_path: Path) -> None:
    with small_volume() as volume:
        bad_files_and_a_full_volume(volume, tmp_path / "ws", full_s=60.0)
