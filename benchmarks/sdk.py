"""What a block of the SDK costs its host, beside a bare OpenTelemetry span with as many attributes.

Spans go to a BatchSpanProcessor whose exporter counts and forgets them, so that the figures are the host thread's; rounds of each
kind alternate, and the median of the rounds counts. Run: .venv/bin/python benchmarks/sdk.py [calls a round]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from _harness import write
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from spanloop.collectors import sdk

ROUNDS = 9
MENU = {"options": ["a", "b", "c"], "propensities": [0.5, 0.25, 0.25], "chosen": "a", "by_policy": True}
ATTRIBUTES = {"spanloop.sdk.act": "tool", "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "t"}


class Counting(SpanExporter):
    """Counts what it is given."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def main(calls: int) -> None:
    """Measure and write."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Counting(), max_queue_size=65_536))
    tracer = provider.get_tracer("bare")

    def nothing() -> None:
        pass

    @tracer.start_as_current_span("bare", attributes=ATTRIBUTES)
    def bare() -> None:
        pass

    def bare_block() -> None:
        with tracer.start_as_current_span("bare", attributes=ATTRIBUTES):
            pass

    tool, agent = sdk.tool("t")(nothing), sdk.agent("a", model="m", system_prompt="s")(nothing)

    def tool_block() -> None:
        with sdk.tool("t"):
            pass

    def delegate_block() -> None:
        with sdk.delegate("a", **MENU):
            pass

    kinds: dict[str, Callable[[], None]] = {
        "plain_call": nothing,
        "bare_span_decorated": bare,
        "bare_span_block": bare_block,
        "tool_decorated": tool,
        "tool_block": tool_block,
        "agent_decorated_with_harness": agent,
        "delegate_block_with_menu": delegate_block,
    }
    found: dict[str, list[float]] = {}
    for name in ("tool_decorated_inert", "tool_block_inert"):
        found[name] = [_us(tool if "decorated" in name else tool_block, calls) for _ in range(ROUNDS)]
    sdk.instrument(tracer_provider=provider)
    for _ in range(ROUNDS):
        for name, call in kinds.items():
            found.setdefault(name, []).append(_us(call, calls))
    found["tool_decorated_coroutine"] = [asyncio.run(_us_async(calls)) for _ in range(ROUNDS)]
    figures = {f"{name}_us": round(statistics.median(rounds), 2) for name, rounds in found.items()}
    figures["tool_over_bare_span"] = round(figures["tool_decorated_us"] / figures["bare_span_block_us"], 2)
    figures["delegate_with_menu_over_bare_span"] = round(
        figures["delegate_block_with_menu_us"] / figures["bare_span_block_us"], 2
    )
    figures |= {"calls_a_round": calls, "rounds": ROUNDS, "failures": sdk.failures()}
    provider.shutdown()
    write("sdk", "benchmarks/sdk.py", figures)


def _us(call: Callable[[], None], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls * 1e6


async def _us_async(calls: int) -> float:
    @sdk.tool("t")
    async def tool() -> None:
        pass

    started = time.perf_counter()
    for _ in range(calls):
        await tool()
    return (time.perf_counter() - started) / calls * 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000)
