"""A model that plays a script, behind OpenAI's chat completions on 127.0.0.1, and the record of what then really happened.

Standard library only, because it also runs in environments that hold nothing but a framework. A role is named by
``[role=NAME]`` in a system message (or, where a framework has none, anywhere in the first messages). What a role says next
depends on the role, and on how often it was asked; the truth is told by the script's turns and the tools' own bodies, never by
an instrumentation. What counts as each event: the corpora's README.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = str | list[tuple[str, dict[str, Any]]]
"""A text, or tool calls: (tool, arguments)."""
_ROLE = re.compile(r"\[role=([a-z_]+)\]")


@dataclass
class Play:
    """A script, and everything that happened while it was played."""

    turns: dict[str, list[Turn]]
    entry: str
    asks: dict[str, str] = field(default_factory=dict)
    """Tool -> role that works and gives its result back."""
    passes: dict[str, str] = field(default_factory=dict)
    """Tool -> role that goes on instead of the caller."""
    user: str = "user"
    """Who gets the result where control was passed on."""
    final_tool: str = ""
    """Tool by whose argument ``answer`` the framework has a text said."""
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    _said: dict[str, int] = field(default_factory=dict)
    _back: dict[str, list[str]] = field(default_factory=dict)
    _waiting: dict[str, str] = field(default_factory=dict)
    _runs: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)

    def note(self, kind: str, agent: str = "", **more: Any) -> None:
        """Something happened."""
        self.events.append({"type": kind, "agent": agent, **more})

    def next_turn(self, role: str) -> tuple[Turn, int]:
        """What ``role`` says now, and the number of the model call."""
        with self._lock:
            said = self._said[role] = self._said.get(role, 0) + 1
            self.calls += 1
            turn = self.turns[role][said - 1]
            self._runs.add(role)
            if len(self._back.pop(role, ())) > 1:
                self.note("aggregate", role)
            if isinstance(turn, str):
                self._ends(role)
            else:
                self._acts(role, [tool for tool, _ in turn])
            return turn, self.calls

    def _acts(self, role: str, tools: list[str]) -> None:
        asked = [self.asks[t] for t in tools if t in self.asks]
        passed = [self.passes[t] for t in tools if t in self.passes]
        if asked or (passed and role == self.entry):
            self.note("orchestrator_decision", role)
        for target in asked + passed:
            self.note("delegate", role, to=target)
            if target in asked or target not in self._runs:
                self.note("spawn", role, child=target)
        for target in asked:
            self._waiting[target] = role
        for target in passed:
            if role in self._waiting:
                self._waiting[target] = self._waiting.pop(role)
            self._runs.add(target)

    def _ends(self, role: str) -> None:
        caller = self._waiting.pop(role, None)
        if caller:
            self.note("return", role, to=caller)
            self._back.setdefault(caller, []).append(role)
        elif role != self.entry:
            self.note("return", role, to=self.user)

    def tool(self, role: str, name: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run the body of ``role``'s tool and note what came of it; its exception goes on to the framework."""
        self.note("tool_call", role, tool=name)
        try:
            result = body(*args)
        except Exception as exc:
            self.note("tool_result", role, tool=name, error=str(exc))
            raise
        self.note("tool_result", role, tool=name)
        return result

    def truth(self) -> dict[str, Any]:
        """As the corpora's truth.json, with the server's own counts."""
        return {
            "events": self.events, "calls": self.calls,
            "input_tokens": self.input_tokens, "output_tokens": self.output_tokens,
        }  # fmt: skip


def _role_of(messages: list[dict[str, Any]]) -> str:
    for message in messages:
        if found := _ROLE.search(json.dumps(message.get("content"))):
            return found[1]
    raise KeyError("no [role=NAME] in the messages")


def _answer(turn: Turn, number: int, final_tool: str) -> tuple[dict[str, Any], str]:
    if isinstance(turn, str) and final_tool:
        turn = [(final_tool, {"answer": turn})]
    if isinstance(turn, str):
        return {"role": "assistant", "content": turn}, "stop"
    calls = [
        {"id": f"call_{number}_{i}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        for i, (tool, arguments) in enumerate(turn)
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"


def serve(play: Play) -> str:
    """Start the server on a free port; its base URL. It ends with the process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn, number = play.next_turn(_role_of(body["messages"]))
            message, finish = _answer(turn, number, play.final_tool)
            usage = {"prompt_tokens": 20 + number, "completion_tokens": 7, "total_tokens": 27 + number}
            play.input_tokens += usage["prompt_tokens"]
            play.output_tokens += usage["completion_tokens"]
            head = {"id": f"chatcmpl-museum-{number}", "created": int(time.time()), "model": "scripted-1"}
            time.sleep(0.01)
            if body.get("stream"):
                self._send("text/event-stream", b"".join(_chunks(head, message, finish, usage)))
            else:
                choice = {"index": 0, "message": message, "finish_reason": finish}
                whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
                self._send("application/json", json.dumps(whole).encode())

        def _send(self, kind: str, data: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def _chunks(head: dict[str, Any], message: dict[str, Any], finish: str, usage: dict[str, int]) -> list[bytes]:
    head = {**head, "object": "chat.completion.chunk"}
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish}],
        [],
    ]
    lines = [{**head, "choices": c} | ({} if c else {"usage": usage}) for c in choices]
    return [b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines] + [b"data: [DONE]\n\n"]
