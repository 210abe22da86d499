"""smolagents with OpenInference's instrumentation: a manager calls managed agents, and answers end by a tool call."""

from __future__ import annotations

from typing import Any

from museum import TASK, appraise, catalogue, perform, team
from openinference.instrumentation.smolagents import SmolagentsInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from scripted_model import Play, serve
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


def _team(traces: TracerProvider) -> Play:
    """The curator writes the end itself."""
    play = team()
    play.turns["curator"][1] = "Label: shelf 12, insured for 900."
    play.turns["curator"][0] = [
        ("archivist", {"task": "where is the astrolabe kept"}),
        ("registrar", {"task": "what does insuring the astrolabe cost"}),
    ]
    play.asks = {"archivist": "archivist", "registrar": "registrar"}
    play.final_tool = "final_answer"
    SmolagentsInstrumentor().instrument(tracer_provider=traces)
    model = OpenAIModel(model_id="scripted-1", api_base=serve(play), api_key="none")

    def agent(name: str, tools: list[Any], managed: tuple[Any, ...] = ()) -> ToolCallingAgent:
        return ToolCallingAgent(
            tools, model, name=name, description=f"The {name}.", instructions=f"[role={name}] Work.",
            managed_agents=list(managed), verbosity_level=LogLevel.OFF,
        )  # fmt: skip

    @tool
    def catalogue_of(item: str) -> str:
        """Look an item up in the catalogue.

        Args:
            item: Its name.
        """
        return play.tool("archivist", "catalogue_of", catalogue, item)

    @tool
    def appraisal(item: str, insurer: str) -> str:
        """Ask an insurer for the value of an item.

        Args:
            item: Its name.
            insurer: Whom to ask.
        """
        return play.tool("registrar", "appraisal", appraise, item, insurer)

    play.turns["archivist"][0] = [("catalogue_of", {"item": "astrolabe"})]
    play.turns["registrar"][0] = [("appraisal", {"item": "astrolabe", "insurer": "closed"})]
    play.turns["registrar"][1] = [("appraisal", {"item": "astrolabe", "insurer": "harbour"})]
    workers = (agent("archivist", [catalogue_of]), agent("registrar", [appraisal]))
    agent("curator", [], workers).run(TASK)
    play.note("stop")
    return play


if __name__ == "__main__":
    perform({"team": _team}, "smolagents", "openinference-instrumentation-smolagents")
