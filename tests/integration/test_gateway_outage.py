"""The gateway as a process while the log is away, and killed: it goes on answering, and what it spooled arrives once and in order."""

import asyncio
import signal
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestServer
from gateway_process_support import ask, deployment, health, ids_on, locked, wait_for
from gateway_support import URL, gateway, spans
from serving_support import chat, until

from spanloop.collectors.gateway_spools import open_spools
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import RoutingChanged, decode

pytestmark = pytest.mark.timeout(180)


async def test_killed_while_the_log_is_away_it_loses_nothing_that_it_spooled(tmp_path):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path) as deployed:
        first, url = await deployed.start()
        answered = [await ask(deployed, url, i) for i in range(5)]
        await until(lambda: len(spans(log)) == 5, 30)
        with locked(tmp_path):
            answered += [await ask(deployed, url, i) for i in range(5, 40)]
            await asyncio.sleep(0.5)  # spooled
            assert (await health(deployed, url))["queue"] >= 30
            first.kill()
            await asyncio.to_thread(first.wait)
            second, url = await deployed.start()  # the log is still away
            answered += [await ask(deployed, url, i) for i in range(40, 50)]
            told = await health(deployed, url)
            assert (told["status"], told["champion"], told["lost"]) == ("ok", "policy@v1", 0)
            assert len(spans(log)) == 5
        await until(lambda: len(spans(log)) == 50, 60)

        async def empty():
            return (await health(deployed, url))["queue"] == 0

        await wait_for(empty)
        with locked(tmp_path):
            answered += [await ask(deployed, url, i) for i in range(50, 55)]
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 25) == 0  # a log that hangs does not keep it
        third, url = await deployed.start()
        await until(lambda: len(spans(log)) == 55, 60)
        third.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(third.wait, 30) == 0
    assert ids_on(log) == answered  # once, in order
    assert list((tmp_path / "spool" / "0").glob("*.seg")) == []
    log.close()


async def test_it_starts_and_answers_when_there_is_no_log_at_all(tmp_path):
    """The database is a folder: opening fails. Routing is what the last process knew."""
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with deployment(tmp_path) as deployed:
        first, url = await deployed.start()
        await ask(deployed, url, 0)
        await until(lambda: len(spans(log)) == 1, 30)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 30) == 0
        log.close()
        for name in ("spanloop.db", "spanloop.db-wal", "spanloop.db-shm"):
            if (tmp_path / name).exists():
                (tmp_path / name).rename(tmp_path / ("away-" + name))
        (tmp_path / "spanloop.db").mkdir()
        _, url = await deployed.start()
        answered = [await ask(deployed, url, i) for i in range(1, 6)]
        told = await health(deployed, url)
        assert (told["champion"], told["log"]) == ("policy@v1", "away: calls wait on the spool")
        (tmp_path / "spanloop.db").rmdir()
        for path in tmp_path.glob("away-*"):
            path.rename(tmp_path / path.name.removeprefix("away-"))
        log = SqliteLog(tmp_path / "spanloop.db")
        await until(lambda: len(spans(log)) == 6, 60)
        assert ids_on(log)[1:] == answered

        async def log_is_there():
            return "log" not in await health(deployed, url)

        await wait_for(log_is_there, 5)
    log.close()


async def test_calls_in_flight_when_it_is_killed_are_counted(tmp_path):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])

    async def hangs(_):
        await asyncio.sleep(60)

    async with deployment(tmp_path) as deployed, slow_upstream(hangs) as slow:
        text = deployed.config.read_text().splitlines()
        deployed.config.write_text(
            "\n".join(f'upstream = "{slow}"' if t.startswith("upstream") else t for t in text)
        )
        first, url = await deployed.start()
        asking = [asyncio.create_task(ask(deployed, url, i)) for i in range(3)]
        await asyncio.sleep(1.0)
        first.kill()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(first.wait)
        _, url = await deployed.start()
        told = await health(deployed, url)
        assert (told["lost"], told["lost_by_reason"]) == (3, {"in_flight": 3})
        async with deployed.session.get(url + "/metrics") as answer:
            assert 'spanloop_gateway_lost_calls_total{reason="in_flight"} 3' in await answer.text()
    log.close()


@asynccontextmanager
async def slow_upstream(handler):
    from gateway_support import upstream_of

    async with TestServer(upstream_of(handler)) as server:
        yield server.make_url("/v1")


async def test_a_full_spool_drops_the_oldest_and_says_so(tmp_path):
    spools = open_spools(tmp_path / "spool", max_bytes=60_000, fsync_s=1)
    async with gateway(tmp_path, spools=spools) as g:
        append = g.log.append

        def away(_):
            raise TransientError("the log is away")

        g.log.append = away
        ids = []
        for i in range(120):
            async with g.client.post(URL, json=chat(user=str(i))) as answer:
                ids.append((await answer.json())["id"])
        await until(lambda: g.gateway.recorder.depth == 0)
        async with g.client.get("/healthz") as answer:
            told = await answer.json()
        lost = told["lost"]
        assert (told["lost_by_reason"], told["queue"] + lost) == ({"spool_full": lost}, 120)
        assert lost > 0
        g.log.append = append
        await until(lambda: len(spans(g.log)) == 120 - lost, 30)
        assert ids_on(g.log) == ids[lost:]
        async with g.client.get("/metrics") as answer:
            text = await answer.text()
        assert f'spanloop_gateway_lost_calls_total{{reason="spool_full"}} {lost}' in text
        assert f"spanloop_gateway_recorded_total {120 - lost}" in text


async def test_a_log_that_hangs_keeps_nothing_in_memory(tmp_path):
    spools = open_spools(tmp_path / "spool", max_bytes=10**7, fsync_s=1)
    async with gateway(tmp_path, spools=spools) as g:
        append, released = g.log.append, []

        def hangs(records):
            while not released:
                time.sleep(0.01)
            return append(records)

        g.log.append = hangs
        for i in range(20):
            async with g.client.post(URL, json=chat(user=str(i))) as answer:
                assert answer.status == 200
        await until(lambda: g.gateway.recorder.depth == 0)
        assert g.gateway.recorder.waiting == 20
        released.append(True)
        await until(lambda: len(spans(g.log)) == 20)
        assert decode(g.log.read(["spans"], {}, 1)[0].value).spans
