"""Laws of the gateway's spool: killed at any byte, in any batching, each record that was written comes out once and in order, and
every other one is counted."""

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.collectors.gateway_frames import frame, frames
from spanloop.collectors.gateway_spool import Spool
from spanloop.collectors.gateway_spools import open_spools
from spanloop.schemas.errors import TransientError

MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a loaded machine


class Killed(BaseException):
    """kill -9 in the middle of a write."""


class Disk:
    """os.write that takes so many bytes, then does what ``end`` says."""

    def __init__(self, budget: int | None = None, end: Callable[[], BaseException] = Killed):
        self.budget, self.end = budget, end

    def write(self, fd, data):
        if self.budget is None:
            return os.write(fd, data)
        part = bytes(data[: self.budget])
        self.budget -= len(part)
        written = os.write(fd, part) if part else 0
        if written < len(data):
            raise self.end()
        return written


def full():
    return OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "0"


def drain(spool, found, limit=1000, most=None):
    """Move up to ``most`` records out of the spool."""
    while (most is None or most > 0) and (batch := spool.read(limit)) is not None:
        count = len(batch.payloads) if most is None else min(most, len(batch.payloads))
        found += batch.payloads[:count]
        spool.done(batch, count)
        most = None if most is None else most - count


def payloads(sizes, start=0):
    return [b"%d:" % (start + i) + b"x" * size for i, size in enumerate(sizes)]


groups = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), min_size=1, max_size=8)


@given(groups, st.data())
@MANY
def test_killed_at_any_byte_each_written_record_comes_out_once_in_order(sizes, data):
    total = sum(len(frame(0, p)) for group in sizes for p in payloads(group))
    disk = Disk(data.draw(st.integers(0, total)))
    records = payloads([size for group in sizes for size in group])
    parts, at = [], 0
    for group in sizes:
        parts.append(records[at : at + len(group)])
        at += len(group)
    found, written = [], 0
    with folder() as where:
        spool = Spool(where, max_bytes=10**6, segment_bytes=data.draw(st.integers(1, 600)), write=disk.write)
        try:
            for part in parts:
                for _ in part:
                    spool.counters.begun += 1
                    spool.counters.put += 1
                spool.append(part)
                written += len(part)
                drain(spool, found, limit=data.draw(st.integers(1, 4)), most=data.draw(st.integers(0, 6)))
        except Killed:
            pass
        put = spool.counters.put
        spool.abandon()
        moved = len(found)
        again = Spool(where, max_bytes=10**6, segment_bytes=300)
        replayed = []
        drain(again, replayed, limit=data.draw(st.integers(1, 9)))
        # a process starts again at the oldest segment that is not all done: what was moved of it comes again, first
        whole = found + [r for r in replayed if r not in found]
        assert whole == records[: len(whole)]
        assert replayed == records[len(whole) - len(replayed) : len(whole)]
        assert len(whole) >= max(written, moved)
        assert sum(again.lost.values()) == put - len(whole)
        more = payloads([5, 5], start=1000)
        again.append(more)
        after = []
        drain(again, after)
        assert after == more
        again.close()
        assert list(where.glob("*.seg")) == []


@given(groups, st.data())
@MANY
def test_a_disk_that_refuses_keeps_all_or_none_of_a_group(sizes, data):
    disk = Disk(end=full)
    with folder() as where:
        spool = Spool(where, max_bytes=10**6, segment_bytes=data.draw(st.integers(1, 600)), write=disk.write)
        accepted, found, number = [], [], 0
        for group in sizes:
            part = payloads(group, start=number)
            number += len(part)
            disk.budget = data.draw(st.one_of(st.none(), st.integers(0, 200)))
            try:
                spool.append(part)
            except TransientError:
                continue
            else:
                accepted += part
            disk.budget = None
            if data.draw(st.booleans()):
                drain(spool, found, most=data.draw(st.integers(0, 5)))
        drain(spool, found)
        dropped = spool.lost["spool_full"]
        assert found == [r for r in accepted if r in set(found)]
        assert len(found) == len(accepted) - dropped
        spool.close()


@given(groups, st.integers(200, 2000), st.data())
@MANY
def test_when_it_is_full_the_oldest_go_first_and_are_counted(sizes, max_bytes, data):
    records = payloads([size for group in sizes for size in group])
    with folder() as where:
        spool = Spool(where, max_bytes=max_bytes, segment_bytes=data.draw(st.integers(1, 500)))
        for record in records:
            spool.append([record])
            assert spool.num_bytes <= max(max_bytes, len(frame(0, record)))
        found = []
        drain(spool, found)
        assert found == records[len(records) - len(found) :]
        assert found
        assert spool.lost["spool_full"] == len(records) - len(found)
        spool.close()


def test_what_was_dropped_under_way_and_yet_arrived_is_not_lost():
    with folder() as where:
        spool = Spool(where, max_bytes=400, segment_bytes=1)
        records = payloads([100] * 6)
        spool.append(records[:1])
        batch = spool.read(10)
        assert batch is not None
        for record in records[1:]:
            spool.append([record])
        assert spool.lost["spool_full"] > 0
        before = spool.lost["spool_full"]
        spool.done(batch, 1)
        assert spool.lost["spool_full"] == before - 1
        spool.close()


@given(groups, st.data())
@MANY
def test_damage_costs_only_the_damaged_records(sizes, data):
    records = payloads([size for group in sizes for size in group])
    with folder() as where:
        spool = Spool(where, max_bytes=10**6, segment_bytes=data.draw(st.integers(1, 900)))
        for record in records:
            spool.counters.put += 1
            spool.append([record])
        spool.abandon()
        paths = sorted(where.glob("*.seg"))
        path = paths[data.draw(st.integers(0, len(paths) - 1))]
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        hit = next(i for i, (_, _, end) in enumerate(frames(bytes(raw))) if at < end)
        victim = list(frames(bytes(raw)))[hit][1]
        raw[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        again = Spool(where, max_bytes=10**6)
        found = []
        drain(again, found)
        assert found == [r for r in records if r != victim]
        if victim != records[0]:  # before the first one nothing is known to be missing
            assert sum(again.lost.values()) == 1
        again.close()


@given(st.binary(max_size=400))
@MANY
def test_any_bytes_are_read_without_an_error(junk):
    with folder() as where:
        where.mkdir(parents=True)
        (where / "0000000000000001.seg").write_bytes(junk)
        (where / "counters").write_bytes(junk)
        (where / "other.seg").write_bytes(junk)
        spool = Spool(where, max_bytes=10**6)
        assert spool.read(10) is None
        spool.append([b"a"])
        found = []
        drain(spool, found)
        assert found == [b"a"]
        spool.close()


def test_what_is_damaged_while_it_waits_is_counted():
    with folder() as where:
        spool = Spool(where, max_bytes=10**6, segment_bytes=1)
        spool.append([b"a"])
        spool.append([b"b"])
        min(where.glob("*.seg")).unlink()
        found = []
        drain(spool, found)
        assert found == [b"b"]
        assert spool.lost == {"damaged": 1}
        spool.close()


@settings(parent=MANY, max_examples=60)
@given(groups, st.data())
def test_a_folder_that_is_removed_while_it_is_used_is_made_again(sizes, data):
    """Nothing is lost of the segment that is written, whether it was read before the next write or not; and what is written after
    the removal survives a kill."""
    with folder() as path:
        spool = Spool(path, max_bytes=10**6, segment_bytes=10**6)
        written, found = [], []
        for group in sizes:
            spool.append(payloads(group, len(written)))
            written += payloads(group, len(written))
            if data.draw(st.booleans()):
                what = data.draw(st.sampled_from(["folder", "segments"]))
                for file in path.iterdir() if what == "folder" else path.glob("*.seg"):
                    file.unlink()
                if what == "folder":
                    path.rmdir()
            drain(spool, found, most=data.draw(st.integers(0, 3)))
        spool.append([b"last"])
        spool.abandon()
        after = Spool(path, max_bytes=10**6)
        rest = []
        drain(after, rest)
        after.close()
        assert found == written[: len(found)]
        assert rest[-(len(written) + 1 - len(found)) :] == [*written[len(found) :], b"last"]
        assert not after.lost
        assert not spool.lost


def test_two_processes_have_two_folders_and_what_is_left_is_found(tmp_path):
    one = open_spools(tmp_path, max_bytes=10**6, fsync_s=1)
    two = open_spools(tmp_path, max_bytes=10**6, fsync_s=1)
    assert [len(one), len(two)] == [1, 1]
    assert one[0].folder != two[0].folder
    two[0].append([b"left"])
    for spool in (*one, *two):
        spool.abandon()
    own, left = open_spools(tmp_path, max_bytes=10**6, fsync_s=1)
    assert (own.waiting, left.waiting) == (0, 1)
    found = []
    drain(left, found)
    assert found == [b"left"]
    for spool in (own, left):
        spool.abandon()


@pytest.mark.parametrize("fsync_s", [0, 1.0])
def test_what_waits_is_put_on_the_disk_in_time(monkeypatch, fsync_s):
    synced, now = [], [0.0]
    monkeypatch.setattr(os, "fsync", synced.append)
    with folder() as where:
        spool = Spool(where, max_bytes=10**6, fsync_s=fsync_s, now_s=lambda: now[0])
        spool.append([b"a"])
        assert len(synced) == (1 if fsync_s == 0 else 0)
        spool.sync()
        now[0] = 1.5
        spool.sync()
        spool.sync()
        assert len(synced) == 1
        spool.close()
