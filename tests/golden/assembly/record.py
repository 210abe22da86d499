"""Record a small orchestration with pydantic-ai's own instrumentation as OTLP/JSON lines, one span a line.

    python tests/golden/assembly/record.py desk.otlp.jsonl
    python tests/golden/assembly/record.py desk_nocontent.otlp.jsonl --no-content
    python tests/golden/assembly/record.py desk_v2.otlp.jsonl --version 2

An orchestrator makes an invalid tool call, looks, starts a round in which one tool runs a specialist and then a checker, starts
another, and ends through an output function. Ids and times differ on every run; the events do not.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import Agent, InstrumentationSettings
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

TURNS = [("spawn", {"skill": 7}), ("look", {}), ("spawn", {"skill": "a"}), ("spawn", {"skill": "b"})]
"""The orchestrator's tool calls; the first has invalid arguments. Then it ends."""


def orchestrate(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    turn = sum(isinstance(m, ModelResponse) for m in messages)
    name, arguments = TURNS[turn] if turn < len(TURNS) else ("final_result", {"verdict": "repair"})
    part = ToolCallPart(name, arguments, tool_call_id=f"call-{turn}")
    return ModelResponse(parts=[part], provider_response_id=f"resp-{turn}")


def specialist_says(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    return ModelResponse(parts=[TextPart("repair")])


def checker_says(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    return ModelResponse(parts=[TextPart("replace")])


def closing(verdict: str) -> str:
    """End with a verdict."""
    return "closed: " + verdict


async def run_desk() -> None:
    specialist = Agent(FunctionModel(specialist_says, model_name="scripted"), name="specialist")
    checker = Agent(FunctionModel(checker_says, model_name="scripted"), name="checker")
    desk = Agent(FunctionModel(orchestrate, model_name="policy"), name="Orchestrator", output_type=closing)

    @desk.tool_plain(retries=2)
    async def spawn(skill: str) -> str:
        found = await specialist.run("work on skill " + skill)
        checked = await checker.run("check skill " + skill)
        return f"{found.output} {checked.output}"

    @desk.tool_plain
    def look() -> str:
        return "sure"

    await desk.run("board: no maybe yes")


def hex_ids(value: Any) -> Any:
    """OTLP/JSON wants hex where protobuf's JSON gives base64."""
    if isinstance(value, list):
        return [hex_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(item).hex() if key in ("traceId", "spanId", "parentSpanId") else hex_ids(item)
        for key, item in value.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--no-content", action="store_true")
    parser.add_argument("--version", type=int, default=5)
    args = parser.parse_args()
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Agent.instrument_all(
        InstrumentationSettings(
            tracer_provider=provider, include_content=not args.no_content, version=args.version
        )
    )
    asyncio.run(run_desk())
    lines = [json.dumps(hex_ids(MessageToDict(encode_spans([s])))) for s in exporter.get_finished_spans()]
    args.path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
