"""The recorder as a process: killed, orphaned, without a disk, signalled with its group; what was handed to it arrives once."""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from gateway_process_support import ask, deployment, health, ids_on, locked, wait_for
from gateway_support import spans
from serving_support import settings_of, until

from spanloop.collectors.gateway_finished import Finished
from spanloop.collectors.gateway_recorder_process import events_of
from spanloop.collectors.gateway_sender import MODULE, Sender
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged

pytestmark = pytest.mark.timeout(180)


def finished(number, **more):
    known = {
        "tenant": "default", "shape": "chat", "call_id": str(number), "request": b'{"model": "m"}',
        "answer": b'{"id": "r%d", "choices": []}' % number, "folds": False, "runtime": "", "sticky": "s", "sticky_source": "session",
        "route": "pass", "policy_version": "", "exploration": 0.0, "asked_tokens": False, "start_ns": 1, "end_ns": 2, "status": 200,
        "error": "", "parent": None, "task_key": "", "turn_type": "", "server_address": "", "server_port": 0,
    }  # fmt: skip
    return Finished(**{**known, **more})


def children_of(pid):
    """Recorders that a process has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and MODULE in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def runs(pid):
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


async def test_a_recorder_that_is_killed_again_and_again_loses_nothing(tmp_path):
    sender, log = Sender(settings_of(tmp_path)), SqliteLog(tmp_path / "spanloop.db")
    async with sender.running():
        for number in range(400):
            sender.begin()
            assert sender.put(finished(number))
            await asyncio.sleep(0.002)
            if number in (50, 120, 300):
                os.kill(sender.pid, signal.SIGKILL)
        await until(lambda: sender.waiting == 0 and sender.runs, 60)
        assert (sender.num_lost, sender.num_starts) == (0, 4)
    assert ids_on(log) == [f"r{n}" for n in range(400)]
    assert list((tmp_path / "spool" / "0").glob("*.seg")) == []
    log.close()


async def test_a_killed_gateway_has_handed_over_every_call_that_has_ended(tmp_path):
    """Also while the log is away; the recorder writes what is in the socket and ends, the next one takes its folder."""
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path) as deployed:
        first, url = await deployed.start()
        with locked(tmp_path):
            answered = [await ask(deployed, url, i) for i in range(30)]
            (recorder,) = children_of(first.pid)
            first.kill()
            await asyncio.to_thread(first.wait)
            second, url = await deployed.start()
            told = await health(deployed, url)
            assert (told["lost"], told["queue"]) == (0, 30)
            assert not runs(recorder)
        await until(lambda: len(spans(log)) == 30, 60)
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, 30) == 0
        assert ids_on(log) == answered
        assert [path.name for path in (tmp_path / "spool").glob("[0-9]*")] == ["0"]
    log.close()


async def test_both_killed_at_once_count_what_was_between_them(tmp_path):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path) as deployed:
        first, url = await deployed.start()
        (recorder,) = children_of(first.pid)
        await ask(deployed, url, 0)
        await until(lambda: len(spans(log)) == 1, 30)
        os.kill(recorder, signal.SIGSTOP)  # what ends now stays in the socket
        for i in range(1, 8):
            await ask(deployed, url, i)
        first.kill()
        os.kill(recorder, signal.SIGKILL)
        await asyncio.to_thread(first.wait)
        _, url = await deployed.start()
        told = await health(deployed, url)
        assert (told["lost"], told["lost_by_reason"]) == (7, {"killed": 7})
        assert len(spans(log)) == 1
    log.close()


async def test_a_gateway_answers_while_its_recorder_hangs_or_is_gone(tmp_path):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path) as deployed:
        gateway, url = await deployed.start()
        (recorder,) = children_of(gateway.pid)
        os.kill(recorder, signal.SIGSTOP)
        answered = [await ask(deployed, url, i) for i in range(5)]
        told = await health(deployed, url)
        assert (told["queue"], told["lost"]) == (5, 0)
        os.kill(recorder, signal.SIGKILL)

        async def is_told():
            return "recorder" in await health(deployed, url)

        await wait_for(is_told, 10)
        answered += [await ask(deployed, url, i) for i in range(5, 10)]
        await until(lambda: len(spans(log)) == 10, 60)
        async with deployed.session.get(url + "/metrics") as answer:
            assert "spanloop_gateway_recorder_starts_total 2" in await answer.text()
        gateway.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 30) == 0
    assert ids_on(log) == answered
    log.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_the_group_ends_both_and_loses_nothing(tmp_path, number):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path, stderr=subprocess.PIPE, start_new_session=True) as deployed:
        gateway, url = await deployed.start()
        (recorder,) = children_of(gateway.pid)
        answered = [await ask(deployed, url, i) for i in range(10)]
        os.kill(recorder, number)  # an init system signals every process of a unit
        os.killpg(gateway.pid, number)
        _, said = await asyncio.to_thread(gateway.communicate, timeout=30)
        assert gateway.returncode == 0, said
        assert "Traceback" not in said
        assert not runs(recorder)
    assert ids_on(log) == answered
    log.close()


async def test_without_a_disk_for_the_spool_calls_go_through_memory(tmp_path):
    (tmp_path / "file").write_text("no folder")
    settings = settings_of(tmp_path, gateway={"spool": str(tmp_path / "file" / "spool")})
    sender, log = Sender(settings), SqliteLog(tmp_path / "spanloop.db")
    async with sender.running():
        for number in range(20):
            sender.put(finished(number))
        await until(lambda: sender.num_recorded == 20, 30)
        assert (sender.spooled, sender.num_lost, sender.waiting) == (False, 0, 0)
    assert ids_on(log) == [f"r{n}" for n in range(20)]
    log.close()


async def test_a_call_that_cannot_be_read_costs_only_itself(tmp_path):
    sender, log = Sender(settings_of(tmp_path)), SqliteLog(tmp_path / "spanloop.db")
    async with sender.running():
        for number in range(6):
            sender.put(finished(number, request=b"junk") if number == 2 else finished(number))
        await until(lambda: sender.waiting == 0, 30)
        await until(lambda: sender.num_lost == 1, 5)
        assert sender.lost == {"unreadable": 1}
    assert ids_on(log) == [f"r{n}" for n in range(6) if n != 2]
    log.close()


async def test_an_end_does_not_wait_for_a_recorder_that_hangs(tmp_path):
    sender = Sender(settings_of(tmp_path), close_s=0.3)
    async with sender.running():
        sender.put(finished(0))
        await until(lambda: sender.waiting == 0, 30)
        os.kill(sender.pid, signal.SIGSTOP)
        sender.put(finished(1))
        pid = sender.pid
    assert sender.lost == {"closed": 1}
    assert not runs(pid)


def test_what_the_recorder_gets_of_the_settings_is_what_the_gateway_has(tmp_path):
    from spanloop.collectors.gateway_sender import _in_the_clear
    from spanloop.schemas.settings import load_settings

    settings = settings_of(
        tmp_path, content={"hmac_key": "k" * 32}, gateway={"upstream_key": "secret", "upstreams": [{"models": ["a*"], "url": "http://a/v1"}]}
    )  # fmt: skip
    again = load_settings(flags=_in_the_clear(settings))
    assert again.model_dump() == settings.model_dump()
    assert again.gateway.upstream_key.get_secret_value() == "secret"
    assert events_of(again)(finished(1)).spans == events_of(settings)(finished(1)).spans
