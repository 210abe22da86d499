"""openai-agents with OpenInference's instrumentation."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    input_guardrail,
    set_trace_processors,
)
from museum import TASK, appraise, catalogue, perform, team
from openai import AsyncOpenAI
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from scripted_model import Play, serve


def _cast(play: Play, *, trips: bool = False, hands_back: bool = False) -> Agent:
    client = AsyncOpenAI(base_url=serve(play), api_key="none")
    model = OpenAIChatCompletionsModel(model="scripted-1", openai_client=client)

    def agent(name: str, **more: Any) -> Agent:
        return Agent(name=name, instructions=f"[role={name}] Work.", model=model, **more)

    @function_tool(name_override="catalogue")
    async def look(item: str) -> str:
        return play.tool("archivist", "catalogue", catalogue, item)

    @function_tool(name_override="appraise")
    async def value(item: str, insurer: str) -> str:
        return play.tool("registrar", "appraise", appraise, item, insurer)

    @input_guardrail
    async def house_rules(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        play.note("safety_event", agent.name, triggered=trips)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=trips)

    archivist = agent("archivist", tools=[look])
    registrar = agent("registrar", tools=[value])
    docent = agent("docent")
    curator = agent(
        "curator",
        tools=[
            archivist.as_tool("ask_archivist", "shelves"),
            registrar.as_tool("ask_registrar", "insurance"),
        ],
        handoffs=[docent],
        input_guardrails=[house_rules],
    )
    if hands_back:
        docent.handoffs = [curator]
    return curator


def _run(traces: TracerProvider, play: Play, **more: Any) -> Play:
    instrumentor = OpenAIAgentsInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        set_trace_processors([])
        instrumentor.instrument(tracer_provider=traces)
    failed = None
    try:
        asyncio.run(Runner.run(_cast(play, **more), TASK, run_config=RunConfig(workflow_name="loan-desk")))
    except InputGuardrailTripwireTriggered as exc:
        failed = str(exc)
    play.note("stop", error=failed)
    return play


def _team(traces: TracerProvider) -> Play:
    return _run(traces, team())


def _guardrail(traces: TracerProvider) -> Play:
    return _run(traces, Play(entry="curator", turns={"curator": ["never said"]}), trips=True)


def _hand_back(traces: TracerProvider) -> Play:
    play = team()
    play.turns["docent"] = [[("transfer_to_curator", {})]]
    play.turns["curator"].append("All is ready.")
    play.passes["transfer_to_curator"] = "curator"
    return _run(traces, play, hands_back=True)


if __name__ == "__main__":
    perform(
        {"team": _team, "guardrail": _guardrail, "hand_back": _hand_back},
        "openai-agents",
        "openinference-instrumentation-openai-agents",
    )
