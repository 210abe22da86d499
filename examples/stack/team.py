"""The help desk's agents, written with pydantic-ai and plain chat completions: triage names a team, that team's agent a remedy.

Both answer with one word out of a list (``structured_outputs`` of vLLM), by the model ``policy`` behind ``OPENAI_BASE_URL``. The team's
agent runs inside triage's answer, so that one trace tells of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from openai import AsyncOpenAI
from opentelemetry import trace
from pydantic_ai import Agent, RunContext, TextOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from stack.tickets import REMEDIES, TEAMS, Ticket

__all__ = ["Desk", "Work"]


@dataclass
class Work:
    """One ticket in progress, and the trace that tells of it."""

    ticket: Ticket
    key: str
    """Names the job in each model call, so that a router keeps it on one version."""
    team: str = ""
    remedy: str = ""
    trace_id: str = ""


def _one_of(words: tuple[str, ...], key: str) -> OpenAIChatModelSettings:
    """One word out of these: the server masks all others, so a single token is the answer."""
    return OpenAIChatModelSettings(
        max_tokens=1,
        extra_body={"structured_outputs": {"choice": list(words)}},
        extra_headers={"X-Session-Id": key, "X-Harness-Runtime": "stack-example"},
    )


class Desk:
    """Triage and the four teams, ready to work tickets at the same time."""

    def __init__(self, client: AsyncOpenAI | None = None, model: str = "policy") -> None:
        provider = OpenAIProvider(openai_client=client) if client is not None else OpenAIProvider()
        policy = OpenAIChatModel(model, provider=provider)
        self._teams = {name: Agent(policy, name=name) for name in TEAMS}
        self._triage = Agent(policy, name="triage", deps_type=Work, output_type=TextOutput(self._delegate))

    async def _delegate(self, ctx: RunContext[Work], text: str) -> str:
        """Triage's answer names the team: ask its agent for a remedy."""
        work = ctx.deps
        work.trace_id = f"{trace.get_current_span().get_span_context().trace_id:032x}"
        work.team = text.strip()
        asked = f"{work.team} {work.ticket.text}"
        answer = await self._teams[work.team].run(asked, model_settings=_one_of(REMEDIES, work.key))
        work.remedy = answer.output.strip()
        return work.remedy

    async def work(self, ticket: Ticket, key: str) -> Work:
        """Work a ticket: who, and what to do.

        Args:
            ticket: A new ticket.
            key: Names the job.
        """
        work = Work(ticket, key)
        await self._triage.run(ticket.text, deps=work, model_settings=_one_of(TEAMS, key))
        return work
