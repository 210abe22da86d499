"""Results of tau-bench: one try of a task, as the chat of a tool-using agent with a user, and its reward. Each assistant message
is a model call, each tool message a tool's execution; there are no times, only the order, and no usage.

The reward is the outcome, from whoever ran the benchmark (``feedback``), never an attribute of the agent's spans. Tries of one
task share a task key. Nothing of ``info`` is kept: it holds the right actions. Source: sierra-research/tau-bench at 59a200c6.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.event_log import CHAT_SCOPE
from spanloop.pipeline.formats.event_spans import STEP_NS
from spanloop.pipeline.formats.values import Read, flagged, json_text, parsed, plain, words
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "tau-bench"
_AGENT = "assistant"


def matches(value: dict[str, Any]) -> bool:
    """A trajectory of a task."""
    return isinstance(value.get("traj"), list) and "task_id" in value


def read(value: dict[str, Any]) -> Read:
    """Spans of one try and its reward. Raises SchemaError."""
    if not value["traj"] or not all(isinstance(message, dict) for message in value["traj"]):
        raise SchemaError("traj is empty or holds something that is no message")
    flags: list[str] = []
    messages = plain(value["traj"], flags, "traj")
    task, trial = words(value.get("task_id")), words(value.get("trial"))
    trace = digest("tau_bench", task, trial, canonical_json(messages))
    chat = _Chat(trace, f"{NAME}/{task}/{_domain(value, messages)}", messages)
    spans = chat.spans(flags)
    feedback = []
    reward = value.get("reward")
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        feedback.append(
            {"trace_id": trace, "value": float(reward), "name": "outcome", "feedback_id": f"{NAME}:{trace}",
             "observed_at": spans[0].end_ns}
        )  # fmt: skip
    return Read(spans, [], feedback=feedback)


def _domain(value: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """What tells task 7 of one environment from task 7 of another: the task's words, or the agent's instructions."""
    info = value.get("info")
    task = info.get("task") if isinstance(info, dict) else None
    words_of = words(task.get("instruction")) if isinstance(task, dict) else ""
    return digest(words_of or words(messages[0].get("content")))[:12]


class _Chat:
    """One conversation on its way to spans."""

    def __init__(self, trace: str, task_key: str, messages: list[dict[str, Any]]) -> None:
        self._trace = trace
        self._messages = messages
        self._key = task_key
        system = messages[0] if messages[0].get("role") == "system" else {}
        self._instructions = words(system.get("content"))

    def spans(self, flags: list[str]) -> list[Span]:
        """The agent's run, its model calls and its tools."""
        end = (len(self._messages) + 2) * STEP_NS
        attributes: dict[str, Any] = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": _AGENT}
        attributes["spanloop.task.key"] = self._key
        first = next((m for m in self._messages if m.get("role") == "user"), None)
        if first is not None:
            attributes["gen_ai.input.messages"] = json_text([first], [], "messages")
        if self._instructions:
            attributes["gen_ai.system_instructions"] = self._instructions
        found = [
            self._span(
                "run", None, "invoke_agent", start=STEP_NS, end=end, attributes=flagged(attributes, flags)
            )
        ]
        heard: list[dict[str, Any]] = []
        asked: dict[str, tuple[str, Any]] = {}
        began = STEP_NS
        for number, message in enumerate(self._messages):
            at = (number + 2) * STEP_NS
            if message.get("role") == _AGENT:
                found.append(self._call(number, at, heard, message))
                heard = []
                began = at + STEP_NS // 2
                asked |= _asked(message)
                continue
            if message.get("role") == "tool":
                found.append(self._tool(number, began, at, message, asked))
            heard.append(message)
        return found

    def _call(self, number: int, at: int, heard: list[dict[str, Any]], message: dict[str, Any]) -> Span:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.agent.name": _AGENT,
            "gen_ai.input.messages": json_text(heard, [], "messages"),
            "gen_ai.output.messages": json_text([message], [], "messages"),
            "spanloop.task.key": self._key,
        }
        if self._instructions:
            attributes["event_log.harness"] = digest(self._instructions)
        return self._span(number, "run", "chat", start=at, end=at + STEP_NS // 4, attributes=attributes)

    def _tool(
        self, number: int, began: int, at: int, message: dict[str, Any], asked: dict[str, tuple[str, Any]]
    ) -> Span:
        call = words(message.get("tool_call_id"))
        name, arguments = asked.get(call, ("", None))
        result = words(message.get("content"))
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.agent.name": _AGENT,
            "gen_ai.tool.name": words(message.get("name")) or name,
            "gen_ai.tool.call.result": result,
        }
        if call:
            attributes["gen_ai.tool.call.id"] = call
        if arguments is not None:
            attributes["gen_ai.tool.call.arguments"] = json_text(arguments, [], "arguments")
        status = "error" if result.startswith("Error") else "unset"
        return self._span(
            number, "run", "execute_tool", start=began, end=at, attributes=attributes, status=status
        )

    def _span(
        self, key: str | int, parent: str | None, name: str, *, start: int, end: int, attributes: dict[str, Any],
        status: str = "unset",
    ) -> Span:  # fmt: skip
        return Span(
            trace_id=self._trace,
            span_id=digest("chat_span", self._trace, key)[:16],
            parent_span_id=None if parent is None else digest("chat_span", self._trace, parent)[:16],
            name=name,
            start_ns=start,
            end_ns=end,
            status=status,
            attributes=attributes,
            scope=CHAT_SCOPE,
        )


def _asked(message: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Tool calls of a message: id -> name and arguments."""
    found = {}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found[words(call.get("id"))] = (words(function.get("name")), parsed(function.get("arguments")))
    return found
