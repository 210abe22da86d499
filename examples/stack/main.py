"""Work tickets of the help desk: ``python -m stack.main --tickets 600``.

The process knows three addresses, from the environment: ``OPENAI_BASE_URL`` (whatever serves the model ``policy``), where spans go
(``OTEL_EXPORTER_OTLP_ENDPOINT``, or ``SPANLOOP_BOOTSTRAP_SERVERS`` with ``--spans kafka``) and ``FEEDBACK_URL`` (where outcomes go, by
trace id). Spans are pydantic-ai's own, without message contents. Every hundred tickets it prints how they went.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import aiohttp
from openai import AsyncOpenAI
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from pydantic_ai import Agent, InstrumentationSettings
from stack.team import Desk, Work
from stack.tickets import BEST, CHANCE, new_ticket, outcome

__all__ = ["main"]

REPORT_EVERY = 100
PATIENCE_S = 120.0
"""A ticket that fails is tried again; the run ends when none has been worked for so long. A killed vLLM is back in about 30 s."""


def exporter(spans: str) -> SpanExporter:
    """Spans to the receiver by OTLP, or straight to Kafka."""
    if spans == "kafka":
        from spanloop.collectors.span_exporter import KafkaSpanExporter

        return KafkaSpanExporter(os.environ["SPANLOOP_BOOTSTRAP_SERVERS"])
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def instrument(spans: str) -> TracerProvider:
    """Send pydantic-ai's spans."""
    resource = Resource.create({"service.name": "stack-example"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter(spans), schedule_delay_millis=250))
    Agent.instrument_all(
        InstrumentationSettings(
            tracer_provider=provider, meter_provider=NoOpMeterProvider(), include_content=False
        )
    )
    return provider


class Outcomes:
    """Sends outcomes to ``FEEDBACK_URL`` in batches; a batch that fails is sent again, with the same ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._due: list[dict[str, object]] = []

    def add(self, work: Work, value: float) -> None:
        """Queue the outcome of a ticket."""
        self._due.append(
            {
                "feedback_id": f"stack-{work.trace_id}",
                "trace_id": work.trace_id,
                "name": "outcome",
                "value": value,
            }
        )

    async def send_forever(self) -> None:
        """Send what is due, four times a second."""
        while True:
            await asyncio.sleep(0.25)
            await self.send()

    async def send(self) -> bool:
        """Send what is due; what is refused for the moment stays queued. True when nothing is left."""
        batch, self._due = self._due[:500], self._due[500:]
        try:
            if batch:
                async with self._session.post(self._url, json=batch) as response:
                    if response.status in (429, 503):
                        self._due += batch
                    else:
                        response.raise_for_status()
        except (aiohttp.ClientConnectionError, TimeoutError):
            self._due += batch
        return not self._due

    async def flush(self, give_up_s: float = 30.0) -> None:
        """Send everything; gives up after a while without a receiver."""
        for _ in range(round(give_up_s / 0.25)):
            if await self.send():
                return
            await asyncio.sleep(0.25)
        print(f"{len(self._due)} outcomes could not be sent to {self._url}", file=sys.stderr)


class Shift:
    """Tickets worked at the same time until there is no more to do."""

    def __init__(self, options: argparse.Namespace, desk: Desk, outcomes: Outcomes) -> None:
        self._options = options
        self._desk = desk
        self._outcomes = outcomes
        self._numbers = self._tickets()
        self._started = time.monotonic()
        self._last_s = 0.0
        self._recent: list[float] = []
        self.error = ""
        self.stopping = False
        self.values: list[float] = []
        self.num_failed = 0

    def _tickets(self) -> Iterator[int]:
        first, count = self._options.first_ticket, self._options.tickets
        number = first
        while (count is None or number < first + count) and not self.stopping:
            if self._options.seconds is not None and self.elapsed_s() >= self._options.seconds:
                return
            yield number
            number += 1

    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    async def worker(self) -> None:
        """Work tickets one after the other; one that fails is tried again."""
        for number in self._numbers:
            pause_s = 0.5
            while not await self._worked(number) and not self.stopping:
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)

    async def _worked(self, number: int) -> bool:
        seed = self._options.seed
        ticket = new_ticket(seed, number)
        try:
            work = await self._desk.work(ticket, f"ticket-{seed}-{number}")
        except Exception as exc:
            self._failed(exc)
            return False
        value = outcome(ticket, work.team, work.remedy)
        self._outcomes.add(work, value)
        self._count(value)
        return True

    def _count(self, value: float) -> None:
        self._last_s = self.elapsed_s()
        self.values.append(value)
        self._recent.append(value)
        if len(self._recent) == REPORT_EVERY:
            print(json.dumps(self.report(self._recent)), flush=True)
            self._recent = []

    def _failed(self, exc: Exception) -> None:
        self.num_failed += 1
        if self.num_failed <= 3 or self.num_failed % 100 == 0:
            told = f"a ticket failed ({self.num_failed} so far), it is tried again: {type(exc).__name__}: {str(exc)[:300]}"
            print(told, file=sys.stderr, flush=True)
        if self.elapsed_s() - self._last_s > PATIENCE_S:
            self.error = f"no ticket was worked for {PATIENCE_S:.0f} s; is the system running?"
            self.stopping = True

    def report(self, values: list[float]) -> dict[str, float]:
        """How these tickets went."""
        return {
            "tickets": len(self.values),
            "failed": self.num_failed,
            "seconds": round(self.elapsed_s(), 1),
            "tickets_per_second": round(len(self.values) / self.elapsed_s(), 1),
            "outcome": round(sum(values) / len(values), 3) if values else 0.0,
        }


async def run(options: argparse.Namespace) -> int:
    """Work the shift; 0 when tickets were worked."""
    provider = instrument(options.spans)
    async with aiohttp.ClientSession() as session:
        outcomes = Outcomes(session, os.environ["FEEDBACK_URL"])
        key = os.environ.get("OPENAI_API_KEY", "unused")
        shift = Shift(options, Desk(AsyncOpenAI(api_key=key, max_retries=2)), outcomes)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, shift, "stopping", True)
        sender = asyncio.create_task(outcomes.send_forever())
        await asyncio.gather(*(shift.worker() for _ in range(options.concurrency)))
        await asyncio.to_thread(provider.force_flush)
        sender.cancel()
        await outcomes.flush()
    await asyncio.to_thread(provider.shutdown)
    print(json.dumps({**shift.report(shift.values), "chance": round(CHANCE, 3), "best": BEST}), flush=True)
    if shift.error:
        print(shift.error, file=sys.stderr)
    return 1 if shift.error or not shift.values else 0


def main() -> None:
    """Parse flags and work."""
    parser = argparse.ArgumentParser(prog="python -m stack.main", description=__doc__)
    parser.add_argument("--tickets", type=int, default=None, help="stop after so many; default: no limit")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long; default: no limit")
    parser.add_argument("--first-ticket", type=int, default=0, help="number of the first ticket")
    parser.add_argument("--concurrency", type=int, default=12, help="tickets at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the tickets")
    parser.add_argument("--spans", choices=("otlp", "kafka"), default="otlp", help="where spans go")
    options = parser.parse_args()
    missing = [name for name in ("OPENAI_BASE_URL", "FEEDBACK_URL") if name not in os.environ]
    if options.spans == "kafka" and "SPANLOOP_BOOTSTRAP_SERVERS" not in os.environ:
        missing.append("SPANLOOP_BOOTSTRAP_SERVERS")
    if missing:
        parser.error(f"set {', '.join(missing)} (see README.md)")
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
