"""Cases 39 (queries while the archiver writes and is killed) and 41 (bad files, full disk), short; see tests/full."""

from __future__ import annotations

from pathlib import Path

from archive_cases import bad_files_and_a_full_volume, queries_while_the_archiver_is_killed, small_volume


def test_case_39_queries_never_fail_while_the_archiver_writes_and_is_killed(tmp_path: Path) -> None:
    assert (
        queries_while_the_archiver_is_killed(tmp_path / "ws", kills=2, readers=2, seconds=3.0, queries=6) > 5
    )


def test_case_41_bad_files_and_a_full_volume_lose_and_double_nothing(tmp_path: Path) -> None:
    with small_volume() as volume:
        bad_files_and_a_full_volume(volume, tmp_path / "ws", full_s=1.5)
