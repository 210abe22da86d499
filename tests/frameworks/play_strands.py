"""strands-agents with its own spans; a python that holds it is named by SPANLOOP_STRANDS_PYTHON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from museum import TASK, appraise, catalogue, perform, team
from opentelemetry.sdk.trace import TracerProvider
from scripted_model import Play, serve
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.multiagent import GraphBuilder, Swarm


def _agents(play: Play) -> Any:
    url = serve(play)

    def agent(name: str, tools: Sequence[Any] = ()) -> Agent:
        model = OpenAIModel(client_args={"base_url": url, "api_key": "none"}, model_id="scripted-1")
        return Agent(
            name=name, system_prompt=f"[role={name}] Work.", model=model, tools=list(tools), callback_handler=None
        )  # fmt: skip

    return agent


def _tools(play: Play) -> tuple[Any, Any]:
    @tool(name="catalogue")
    def look(item: str) -> str:
        """Look an item up in the catalogue."""
        return play.tool("archivist", "catalogue", catalogue, item)

    @tool(name="appraise")
    def value(item: str, insurer: str) -> str:
        """Ask an insurer for the value of an item."""
        return play.tool("registrar", "appraise", appraise, item, insurer)

    return look, value


def _team(traces: TracerProvider) -> Play:
    """Agents as tools; the curator writes the end itself."""
    play = team()
    play.turns["curator"][1] = "Label: shelf 12, insured for 900."
    agent, (look, value) = _agents(play), _tools(play)

    @tool
    def ask_archivist(input: str) -> str:  # noqa: A002
        """Have the archivist work."""
        return str(agent("archivist", [look])(input))

    @tool
    def ask_registrar(input: str) -> str:  # noqa: A002
        """Have the registrar work."""
        return str(agent("registrar", [value])(input))

    agent("curator", [ask_archivist, ask_registrar])(TASK)
    play.note("stop")
    return play


def _swarm(traces: TracerProvider) -> Play:
    play = Play(
        entry="archivist",
        user="swarm",
        passes={"handoff_to_agent": "docent"},
        turns={
            "archivist": [
                [("catalogue", {"item": "astrolabe"})],
                [
                    (
                        "handoff_to_agent",
                        {"agent_name": "docent", "message": "it is on shelf 12, write a label"},
                    )
                ],
                "I have handed it on.",
            ],
            "docent": ["Label: bronze astrolabe, shelf 12."],
        },
    )
    play.note("spawn", "swarm", child="archivist")
    agent, (look, _) = _agents(play), _tools(play)
    Swarm([agent("archivist", [look]), agent("docent")])(TASK)
    play.note("stop")
    return play


def _graph(traces: TracerProvider) -> Play:
    """Two nodes at once, then one that gets what both said."""
    play = Play(
        entry="",
        user="graph",
        turns={**team().turns, "docent": ["Label: bronze astrolabe, shelf 12, insured for 900."]},
    )
    agent, (look, value) = _agents(play), _tools(play)
    nodes = {"archivist": [look], "registrar": [value], "docent": []}
    graph = GraphBuilder()
    for name, tools in nodes.items():
        graph.add_node(agent(name, tools), name)
        play.note("spawn", "graph", child=name)
    for name in ("archivist", "registrar"):
        graph.set_entry_point(name)
        graph.add_edge(name, "docent", condition=_both_done)
        play.note("message", name, to="docent")
    graph.build()(TASK)
    play.note("aggregate", "docent")
    play.note("stop")
    return play


def _both_done(state: Any) -> bool:
    return {"archivist", "registrar"} <= {node.node_id for node in state.completed_nodes}


if __name__ == "__main__":
    perform({"team": _team, "swarm": _swarm, "graph": _graph}, "strands-agents")
