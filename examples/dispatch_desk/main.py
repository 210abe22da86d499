"""Work tickets of the dispatch desk: ``python -m dispatch_desk.main --tickets 100``.

The process knows three addresses, from the environment: ``OPENAI_BASE_URL`` (whatever serves the model ``policy``),
``OTEL_EXPORTER_OTLP_ENDPOINT`` (where spans go) and ``FEEDBACK_URL`` (where outcomes go, later and by trace id). Its spans are
pydantic-ai's own, without message contents.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import aiohttp
from dispatch_desk import game
from dispatch_desk.agents import Desk
from dispatch_desk.client import ShortPathClient
from openai import AsyncOpenAI
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic_ai import Agent, InstrumentationSettings

if TYPE_CHECKING:
    from dispatch_desk.decide import DecisionDesk

__all__ = ["main"]

LATE = 0.1
"""Share of tickets whose outcome is known only 5 to 20 s later."""
YIELD = 10
"""Niceness of a desk that asks for decisions: it costs little itself, and would outrun the system that it shares two cores with."""
GC_THRESHOLD = (200_000, 50, 1_000)
"""Each run leaves cycles; collecting them at Python's default rate takes a fifth of the time."""


def instrument() -> TracerProvider:
    """Send pydantic-ai's spans to ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": "dispatch-desk"}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(compression=Compression.NoCompression)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=20_000, schedule_delay_millis=250, max_export_batch_size=2_000
        )
    )
    Agent.instrument_all(
        InstrumentationSettings(
            tracer_provider=provider,
            meter_provider=NoOpMeterProvider(),
            include_content=False,
            include_model_request_parameters=False,
        )
    )
    return provider


class Outcomes:
    """Sends outcomes to ``FEEDBACK_URL`` in batches; a batch that fails is sent again, with the same ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
        self._session = session
        self._url = url
        self._rng = rng
        self._due: list[tuple[float, dict[str, object]]] = []
        self.num_sent = 0

    def add(self, trace_id: str, value: float) -> None:
        """Queue the outcome of a trace; some are known late."""
        delay = self._rng.uniform(5.0, 20.0) if self._rng.random() < LATE else 0.0
        body = {
            "feedback_id": f"desk-{trace_id}",
            "trace_id": trace_id,
            "name": "outcome",
            "value": round(value, 6),
        }
        self._due.append((time.monotonic() + delay, body))

    async def send_forever(self) -> None:
        """Send what is due, four times a second."""
        while True:
            await asyncio.sleep(0.25)
            await self.send(time.monotonic())

    async def send(self, now: float) -> None:
        """Send what is due at ``now``; what is refused for the moment stays queued."""
        due = [item for item in self._due if item[0] <= now]
        self._due = [item for item in self._due if item[0] > now]
        for start in range(0, len(due), 500):
            batch = due[start : start + 500]
            try:
                async with self._session.post(self._url, json=[body for _, body in batch]) as response:
                    if response.status in (429, 503):
                        self._due += batch
                        continue
                    response.raise_for_status()
                    self.num_sent += len(batch)
            except (aiohttp.ClientConnectionError, TimeoutError):
                self._due += batch

    async def flush(self) -> None:
        """Send everything now, late or not; gives up after ten seconds without a receiver."""
        give_up = time.monotonic() + 10.0
        while self._due and time.monotonic() < give_up:
            await self.send(float("inf"))
            if self._due:
                await asyncio.sleep(0.25)


class Shift:
    """A run of the desk: tickets worked at the same time until there is no more to do."""

    def __init__(self, options: argparse.Namespace, desk: Desk | DecisionDesk, outcomes: Outcomes) -> None:
        self._options = options
        self._desk = desk
        self._outcomes = outcomes
        self._numbers = self._tickets()
        self._started = time.monotonic()
        self._failed_in_a_row = 0
        self.stopping = False
        self.phone_open = False
        self.num_done = 0
        self.num_failed = 0
        self.total = 0.0
        self.error = ""

    def _tickets(self) -> Iterator[int]:
        first, count = self._options.first_ticket, self._options.tickets
        number = first
        while (count is None or number < first + count) and not self.stopping:
            if self._options.seconds is not None and self._elapsed() >= self._options.seconds:
                return
            yield number
            number += 1

    def _phone_is_open(self) -> bool:
        after = self._options.phone_from
        return self.phone_open or (after is not None and self._elapsed() >= after)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    async def worker(self) -> None:
        """Work tickets one after the other."""
        options = self._options
        for number in self._numbers:
            phone = options.phone if self._phone_is_open() else 0.0
            ticket = game.new_ticket(random.Random(f"{options.seed}/{number}"), phone=phone)
            try:
                work = await self._desk.work(ticket, f"ticket-{options.seed}-{number}")
            except Exception as exc:
                self._failed(exc)
                await asyncio.sleep(0.5)
                continue
            value = game.outcome(work.ticket)
            self._outcomes.add(work.trace_id, value)
            self.num_done += 1
            self.total += value
            self._failed_in_a_row = 0

    def _failed(self, exc: Exception) -> None:
        self.num_failed += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row == 1:
            print(f"a ticket failed: {type(exc).__name__}: {str(exc)[:300]}", file=sys.stderr, flush=True)
        if self._failed_in_a_row >= 10 * self._options.concurrency:
            self.error = (
                f"{self._failed_in_a_row} tickets in a row failed, the last with {type(exc).__name__}: {exc}"
            )
            self.stopping = True

    def report(self) -> dict[str, float]:
        """What the shift did and what it cost."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        elapsed, done = self._elapsed(), max(self.num_done, 1)
        return {
            "tickets": self.num_done,
            "failed": self.num_failed,
            "outcomes_sent": self._outcomes.num_sent,
            "seconds": round(elapsed, 2),
            "tickets_per_s": round(self.num_done / elapsed, 2),
            "cpu_ms_per_ticket": round((used.ru_utime + used.ru_stime) * 1e3 / done, 2),
            "mean_outcome": round(self.total / done, 4),
        }


async def run(options: argparse.Namespace) -> Shift:
    """Work tickets until told to stop; then wait for those in flight and send what is left."""
    url = os.environ["FEEDBACK_URL"]
    provider = instrument()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        desk = _desk(options, session, provider)
        outcomes = Outcomes(session, url, random.Random(f"outcomes/{options.seed}/{options.first_ticket}"))
        shift = Shift(options, desk, outcomes)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, shift, "stopping", True)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, shift, "phone_open", True)
        sender = asyncio.create_task(outcomes.send_forever())
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        await asyncio.gather(*(shift.worker() for _ in range(options.concurrency)))
        sender.cancel()
        await asyncio.to_thread(provider.shutdown)
        await outcomes.flush()
    return shift


def _desk(
    options: argparse.Namespace, session: aiohttp.ClientSession, provider: TracerProvider
) -> Desk | DecisionDesk:
    if options.decisions:
        from dispatch_desk.decide import DecisionDesk, instrument

        instrument(provider)
        os.nice(YIELD)
        return DecisionDesk(session, os.environ["OPENAI_BASE_URL"])
    api_key = os.environ.get("OPENAI_API_KEY", "none")
    client = AsyncOpenAI(api_key=api_key) if options.sdk else ShortPathClient(session, api_key=api_key)
    return Desk(options.model, client)


def main() -> None:
    """Parse the command line, run, print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--tickets", type=int, help="stop after so many tickets")
    end.add_argument("--seconds", type=float, help="take no new ticket after so many seconds")
    parser.add_argument("--concurrency", type=int, default=32, help="tickets in work at the same time")
    parser.add_argument("--seed", type=int, default=0, help="together with the number it makes the ticket")
    parser.add_argument("--first-ticket", type=int, default=0, help="number of the first ticket")
    parser.add_argument(
        "--phone-from", type=float, help="seconds until the phone queue opens; SIGUSR1 opens it too"
    )
    parser.add_argument("--phone", type=float, default=0.5, help="share of tickets by phone once it is open")
    parser.add_argument("--sdk", action="store_true", help="use the openai SDK's own client (slower)")
    parser.add_argument(
        "--decisions",
        action="store_true",
        help="a team whose LLM is closed: ask /v1/decide for each decision",
    )
    parser.add_argument("--model", default="policy", help="model name to ask for")
    options = parser.parse_args()
    missing = [
        n for n in ("OPENAI_BASE_URL", "OTEL_EXPORTER_OTLP_ENDPOINT", "FEEDBACK_URL") if not os.environ.get(n)
    ]
    if missing:
        parser.error(f"set {', '.join(missing)} in the environment")
    shift = asyncio.run(run(options))
    print(json.dumps(shift.report()), flush=True)
    if shift.error:
        sys.exit(f"error: {shift.error}")


if __name__ == "__main__":
    main()
