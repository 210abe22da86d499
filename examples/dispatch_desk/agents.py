"""The desk's agents, written with pydantic-ai: an orchestrator that decides by tool calls, a specialist and a checker.

The orchestrator's model is whatever answers behind ``OPENAI_BASE_URL``. At each turn it sees the board and the tools that the
game offers at that turn, with enums narrowed to what is allowed. ``spawn`` and ``again`` run the two other agents inside the
tool, as an application would; both are scripted and sometimes wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from dispatch_desk import game
from openai import AsyncOpenAI
from opentelemetry import trace
from pydantic_ai import Agent, AgentRun, ModelRequestNode, RunContext, ToolDefinition
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets.abstract import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

__all__ = ["Desk", "Work"]

_PURPOSE = {
    "close": "Close the ticket as it is.",
    "look": "Look at the ticket once more, which settles every maybe.",
    "spawn": "Give a skill to a specialist and have the checker judge the result.",
    "again": "Work another skill.",
    "stop": "End the ticket.",
}


@dataclass
class Work:
    """One ticket in progress, and the trace that tells of it."""

    ticket: game.Ticket
    key: str
    """Names the job in each model call."""
    trace_id: str = ""


def _say(verdict: str, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    return ModelResponse(parts=[TextPart(verdict)])


_SCRIPTS = {verdict: FunctionModel(partial(_say, verdict), model_name="script") for verdict in game.VERDICTS}
_specialist = Agent(name="specialist")
_checker = Agent(name="checker")


class _Menu(AbstractToolset[Work]):
    """The tools of the turn, and what calling one does to the ticket."""

    @property
    def id(self) -> str:
        return "desk"

    async def get_tools(self, ctx: RunContext[Work]) -> dict[str, ToolsetTool[Work]]:
        return _tools(self, game.menu(ctx.deps.ticket.desk))

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Work], tool: ToolsetTool[Work]
    ) -> str:
        work = ctx.deps
        work.trace_id = f"{trace.get_current_span().get_span_context().trace_id:032x}"
        names = tool.tool_def.parameters_json_schema["properties"]
        ticket = game.act(work.ticket, [name, *(tool_args[argument] for argument in names)])
        if ticket.desk.pending and not ticket.closed:
            brief = f"{tool_args['skill']} {tool_args['brief']}"
            found = await _specialist.run(brief, model=_SCRIPTS[game.specialist_verdict(ticket)])
            judged = await _checker.run(brief, model=_SCRIPTS[game.checker_verdict(ticket)])
            ticket = game.merge(ticket, found.output, judged.output)
        work.ticket = ticket
        return "closed" if ticket.closed else " ".join(game.board(ticket.desk))


@cache
def _tools(toolset: _Menu, menu: tuple[game.Tool, ...]) -> dict[str, ToolsetTool[Work]]:
    return {tool.name: _toolset_tool(toolset, tool) for tool in menu}


def _toolset_tool(toolset: _Menu, tool: game.Tool) -> ToolsetTool[Work]:
    properties = {name: {"type": "string", "enum": list(choices)} for name, choices in tool.arguments}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    fields = {
        name: core_schema.typed_dict_field(core_schema.literal_schema(list(choices)))
        for name, choices in tool.arguments
    }
    validator = SchemaValidator(core_schema.typed_dict_schema(fields, extra_behavior="forbid"))
    definition = ToolDefinition(
        name=tool.name, parameters_json_schema=schema, description=_PURPOSE[tool.name]
    )
    return ToolsetTool(toolset=toolset, tool_def=definition, max_retries=0, args_validator=validator)


def _settings(ctx: RunContext[Work]) -> OpenAIChatModelSettings:
    return OpenAIChatModelSettings(
        parallel_tool_calls=False, tool_choice="required", extra_headers={"X-Session-Id": ctx.deps.key}
    )


class Desk:
    """The orchestrator, ready to work tickets at the same time."""

    def __init__(self, model: str = "policy", client: AsyncOpenAI | None = None) -> None:
        provider = OpenAIProvider(openai_client=client) if client is not None else OpenAIProvider()
        policy = OpenAIChatModel(model, provider=provider)
        self._agent = Agent(policy, name="desk", deps_type=Work, toolsets=[_Menu()], model_settings=_settings)

    async def work(self, ticket: game.Ticket, key: str) -> Work:
        """Work a ticket until no decision is left.

        Args:
            ticket: A new ticket.
            key: Names the job in each model call (``X-Session-Id``), so that a router keeps it on one model.

        Returns:
            The closed ticket and its trace id.
        """
        work = Work(ticket, key)
        board = " ".join(game.board(ticket.desk))
        async with self._agent.iter(board, deps=work) as run:
            await _until_closed(run, work)
        return work


async def _until_closed(run: AgentRun[Work, str], work: Work) -> None:
    async for node in run:
        if isinstance(node, ModelRequestNode) and work.ticket.closed:
            return
