"""pydantic-ai with its own instrumentation."""

from __future__ import annotations

import asyncio
from typing import Any

from museum import TASK, appraise, catalogue, perform, team
from opentelemetry.sdk.trace import TracerProvider
from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, ModelRetry
from pydantic_ai.models.instrumented import InstrumentationSettings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scripted_model import Play, serve


def _agents(traces: TracerProvider, play: Play) -> Any:
    Agent.instrument_all(InstrumentationSettings(tracer_provider=traces))
    model = OpenAIChatModel("scripted-1", provider=OpenAIProvider(base_url=serve(play), api_key="none"))

    def agent(name: str, **more: Any) -> Any:
        return Agent(model, name=name, instructions=f"[role={name}] Work.", **more)

    return agent


def _team(traces: TracerProvider) -> Play:
    """The docent is run by an output function."""
    play = team()
    agent = _agents(traces, play)
    archivist, registrar, docent = agent("archivist"), agent("registrar"), agent("docent")

    async def transfer_to_docent() -> str:
        return (await docent.run("write the label")).output

    curator = agent("curator", output_type=transfer_to_docent)

    @archivist.tool_plain(name="catalogue")
    async def look(item: str) -> str:
        return play.tool("archivist", "catalogue", catalogue, item)

    @registrar.tool_plain(name="appraise", retries=3)
    async def value(item: str, insurer: str) -> str:
        try:
            return play.tool("registrar", "appraise", appraise, item, insurer)
        except ValueError as exc:
            raise ModelRetry(str(exc)) from exc

    @curator.tool_plain
    async def ask_archivist(input: str) -> str:  # noqa: A002
        return (await archivist.run(input)).output

    @curator.tool_plain
    async def ask_registrar(input: str) -> str:  # noqa: A002
        return (await registrar.run(input)).output

    play.turns["curator"][1] = [("final_result", {})]
    play.passes = {"final_result": "docent"}
    asyncio.run(curator.run(TASK))
    play.note("stop")
    return play


def _approval(traces: TracerProvider) -> Play:
    """A run ends to have a tool call approved, and a second one goes on with it."""
    play = Play(
        entry="archivist",
        turns={
            "archivist": [
                [("catalogue", {"item": "astrolabe"}), ("release", {"item": "astrolabe"})],
                "It has left the house.",
            ]
        },
    )
    archivist = _agents(traces, play)("archivist", output_type=[str, DeferredToolRequests])

    @archivist.tool_plain(name="catalogue")
    async def look(item: str) -> str:
        return play.tool("archivist", "catalogue", catalogue, item)

    @archivist.tool_plain(requires_approval=True)
    async def release(item: str) -> str:
        return play.tool("archivist", "release", str, item)

    async def both() -> None:
        paused = await archivist.run(TASK, conversation_id="loan-7")
        play.note("stop")
        play.note("human_intervention")
        answers = DeferredToolResults(approvals={c.tool_call_id: True for c in paused.output.approvals})
        await archivist.run(
            message_history=paused.all_messages(), deferred_tool_results=answers, conversation_id="loan-7"
        )
        play.note("stop")

    asyncio.run(both())
    return play


if __name__ == "__main__":
    perform({"team": _team, "approval": _approval}, "pydantic-ai-slim")
