"""LangGraph with OpenInference's LangChain instrumentation."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt
from museum import TASK, appraise, catalogue, perform, team
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from scripted_model import Play, serve


class State(TypedDict):
    """What the graph's nodes share."""

    messages: Annotated[list[Any], add_messages]


def _tools(play: Play) -> tuple[Any, Any]:
    @tool("catalogue")
    def look(item: str) -> str:
        """Look an item up in the catalogue."""
        return play.tool("archivist", "catalogue", catalogue, item)

    @tool("appraise")
    def value(item: str, insurer: str) -> str:
        """Ask an insurer for the value of an item."""
        return play.tool("registrar", "appraise", appraise, item, insurer)

    return look, value


def _model(url: str, tools: list[Any] = ()) -> Any:
    model = ChatOpenAI(model="scripted-1", base_url=url, api_key="none")
    return model.bind_tools(tools) if tools else model


def _worker(name: str, model: Any, own: Any) -> Any:
    """A node that is an agent: model, tool, model, until it has an answer."""

    def work(state: State) -> dict[str, Any]:
        talk: list[Any] = [SystemMessage(f"[role={name}] Work."), HumanMessage(TASK)]
        while True:
            answer: AIMessage = model.invoke(talk)
            talk.append(answer)
            if not answer.tool_calls:
                return {"messages": [HumanMessage(str(answer.content), name=name)]}
            talk += [own.invoke(call) for call in answer.tool_calls]

    return work


def _team(traces: TracerProvider) -> Play:
    """A supervisor that sends the graph to its workers by Command and Send."""
    play = team()
    url = serve(play)
    look, value = _tools(play)

    @tool("ask_archivist")
    def ask_archivist(input: str) -> str:  # noqa: A002
        """Have the archivist work."""
        return input

    @tool("ask_registrar")
    def ask_registrar(input: str) -> str:  # noqa: A002
        """Have the registrar work."""
        return input

    @tool("transfer_to_docent")
    def transfer_to_docent() -> str:
        """Have the docent finish."""
        return ""

    boss = _model(url, [ask_archivist, ask_registrar, transfer_to_docent])
    places = play.asks | play.passes

    def curator(state: State) -> Command[Any]:
        answer = boss.invoke([SystemMessage("[role=curator] Direct."), *state["messages"]])
        return Command(goto=[Send(places[c["name"]], state) for c in answer.tool_calls])

    graph = StateGraph(State)
    graph.add_node("curator", curator, destinations=("archivist", "registrar", "docent"))
    graph.add_node("archivist", _worker("archivist", _model(url, [look]), look))
    graph.add_node("registrar", _worker("registrar", _model(url, [value]), _Caught(value)))
    graph.add_node("docent", _worker("docent", _model(url), None))
    graph.add_edge(START, "curator")
    graph.add_edge("archivist", "curator")
    graph.add_edge("registrar", "curator")
    graph.add_edge("docent", END)
    _instrument(traces)
    graph.compile(name="loan_desk").invoke({"messages": [HumanMessage(TASK)]})
    play.note("stop")
    return play


def _interrupt(traces: TracerProvider) -> Play:
    """A tool asks a person, and when it goes on asks again: three runs of the graph on one thread."""
    play = Play(
        entry="archivist",
        turns={
            "archivist": [
                [("catalogue", {"item": "astrolabe"}), ("release", {"item": "astrolabe"})],
                "It has left the house.",
            ]
        },
    )
    url = serve(play)
    look, _ = _tools(play)

    @tool("release")
    def release(item: str) -> str:
        """Let an item leave the house."""
        signed = interrupt(f"Who signs for the {item}?")
        sealed = interrupt("Is the crate sealed?")
        return play.tool("archivist", "release", lambda: f"{item}: {signed}, {sealed}")

    model = _model(url, [look, release])

    def think(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage("[role=archivist] Work."), *state["messages"]])]}

    graph = StateGraph(State)
    graph.add_node("model", think)
    graph.add_node("tools", ToolNode([look, release]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    _instrument(traces)
    desk = graph.compile(name="archivist", checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "loan-7"}}
    desk.invoke({"messages": [HumanMessage(TASK)]}, thread)
    for answer in ("the docent", "yes"):
        play.note("stop")
        play.note("human_intervention")
        desk.invoke(Command(resume=answer), thread)
    play.note("stop")
    return play


def _instrument(traces: TracerProvider) -> None:
    instrumentor = LangChainInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument(tracer_provider=traces)


class _Caught:
    """Runs a tool, and gives the model an error as the tool's answer."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def invoke(self, call: Any) -> Any:
        try:
            return self.own.invoke(call)
        except ValueError as exc:
            return ToolMessage(str(exc), tool_call_id=call["id"], status="error")


if __name__ == "__main__":
    perform({"team": _team, "interrupt": _interrupt}, "langgraph", "openinference-instrumentation-langchain")
