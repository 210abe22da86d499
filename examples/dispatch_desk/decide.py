"""The desk as a team whose LLM is closed: its program asks ``/v1/decide`` for every decision of the orchestrator.

The desk's rounds are those of ``agents``, without a model that could be trained: specialist and checker call a *scripted* model that
stands for the closed one (it answers what the game says, right or wrong), and what is left to learn is what the desk decides around
them. A decision is asked over plain HTTP with a state of named facts and a menu whose skills carry what is known of each; spans are our
SDK's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
from dispatch_desk import game
from dispatch_desk.agents import Work
from opentelemetry.sdk.trace import TracerProvider

from spanloop.collectors import sdk

__all__ = ["CLOSED", "DecisionDesk", "instrument", "request_of"]

CLOSED = "closed-llm"
"""Name of the model that nobody can train; here a script answers for it."""


def instrument(provider: TracerProvider) -> None:
    """Let our SDK write its spans with the desk's provider."""
    sdk.instrument(tracer_provider=provider)


def request_of(board: Sequence[str], prefix: Sequence[str], allowed: Sequence[str]) -> dict[str, Any]:
    """What is asked at a board after the words so far: kind, state and menu.

    >>> board = game.board(game.Desk(queue="mail", depth="deep", checker="junior", hints=("no", "maybe", "yes")))
    >>> asked = request_of(board, ["spawn"], ["b", "c"])
    >>> asked["kind"], asked["menu"][0], asked["state"]["open_yes"]
    ('O2', {'name': 'b', 'features': {'hint': 'maybe'}}, 1)
    """
    queue, depth, checker, round_number, looked = board[:5]
    hints = dict(word.split("-") for word in board[5:8])
    briefs = dict(word.split("-") for word in board[8:11])
    report, _, worked = board[11].partition("-")
    opened = [hints[skill] for skill in game.SKILLS if briefs[skill] == "open"]
    state: dict[str, Any] = {
        "queue": queue,
        "depth": depth,
        "checker": checker,
        "round": round_number,
        "looked": looked == "looked",
        "report": report,
        "adopted": board[12].partition("-")[2],
        **{f"open_{hint}": opened.count(hint) for hint in ("no", "maybe", "yes", "sure", "out")},
    }
    if report != "no":
        state |= {"worked_hint": hints[worked], "worked_brief": briefs[worked]}
    if prefix:
        state["so_far"] = prefix[0]
    for word in prefix:
        if word in game.SKILLS:
            state["skill_hint"] = hints[word]
    menu: list[Any] = [
        {"name": word, "features": {"hint": hints[word]}} if word in game.SKILLS else word for word in allowed
    ]
    return {"kind": game.decision_of(allowed), "state": state, "menu": menu}


class DecisionDesk:
    """The orchestrator, ready to work tickets at the same time.

    Args:
        session: Where requests go out; the caller closes it.
        url: The gateway, up to and with /v1.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/decide"
        self.num_fallbacks = 0

    async def work(self, ticket: game.Ticket, key: str) -> Work:
        """Work a ticket until no decision is left; as ``agents.Desk.work``."""
        work = Work(ticket, key)
        with sdk.agent("desk") as run:
            work.trace_id = run.trace_id
            while not work.ticket.closed:
                words = await self._words(work, run.carrier)
                ticket = game.act(work.ticket, words)
                if ticket.desk.pending and not ticket.closed:
                    found = _answer("specialist", game.specialist_verdict(ticket), key)
                    judged = _answer("checker", game.checker_verdict(ticket), key)
                    ticket = game.merge(ticket, found, judged)
                work.ticket = ticket
        return work

    async def _words(self, work: Work, carrier: dict[str, str]) -> list[str]:
        """A complete response, one decision a word; a word without another is no decision."""
        desk, words = work.ticket.desk, []
        board, tools = game.board(desk), game.menu(desk)
        while allowed := game.allowed(tools, words):
            words.append(
                allowed[0] if len(allowed) == 1 else await self._ask(board, words, allowed, work.key, carrier)
            )
        return words

    async def _ask(
        self, board: list[str], words: list[str], allowed: Sequence[str], key: str, carrier: dict[str, str]
    ) -> str:
        asked = request_of(board, words, allowed)
        headers = {**carrier, "X-Session-Id": key}
        async with self._session.post(self._url, json=asked, headers=headers) as response:
            response.raise_for_status()
            got = await response.json()
        self.num_fallbacks += got["fallback"]
        return got["chosen"]


def _answer(name: str, verdict: str, key: str) -> str:
    """An agent that asks the closed model; a script answers."""
    with sdk.agent(name) as run, sdk.model_call(CLOSED, provider="scripted") as call:
        call.response(
            id=f"{CLOSED}-{run.span_id or key}", input_tokens=24, output_tokens=1, finish_reasons=["stop"]
        )
    return verdict
