"""Jobs with words in them, carried through the real stages: a lead that looks something up and answers, paid by its answer.

Several jobs have the same question, so that answers to one prompt can be compared. Each job is two model calls: one asks for a
tool, one answers. Spans are the framework's (GenAI conventions); there are no token ids, as with a closed model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from privacy_world import T0, World

from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.spans import Span

ANSWERS = ("four", "five", "I do not know")
VALUE = {"four": 1.0, "five": 0.25, "I do not know": 0.0}
TOOLS = [
    {"type": "function", "name": "lookup", "description": "Looks up.", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
]  # fmt: skip


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def job_spans(number: int, question: str, answer: str) -> list[Span]:
    trace = digest("export", number)
    root, first, tool, second = (digest("export-span", number, n)[:16] for n in range(4))
    start = T0 + number * 10_000_000_000
    call = {"type": "tool_call", "id": "c1", "name": "lookup", "arguments": {"q": question}}
    asked = [{"role": "user", "parts": [part(question)]}]
    history = [
        *asked,
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "it is in the book"}]},
    ]  # fmt: skip

    def chat(span_id: str, at: int, heard: Sequence[Any], said: Sequence[Any], finish: str) -> Span:
        return Span(
            trace, span_id, "chat gpt", start + at, start + at + 5, parent_span_id=root, scope="made",
            resource={"service.name": "desk"},
            attributes={
                "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt", "gen_ai.response.id": f"{number}-{at}",
                "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 2,
                "gen_ai.system_instructions": canonical_json([part("Be brief.")]).decode(),
                "gen_ai.input.messages": canonical_json(heard).decode(),
                "gen_ai.output.messages": canonical_json(said).decode(),
                "gen_ai.tool.definitions": canonical_json(TOOLS).decode(),
                "gen_ai.response.finish_reasons": [finish],
            },
        )  # fmt: skip

    return [
        chat(first, 10, asked, [{"role": "assistant", "parts": [call]}], "tool_calls"),
        Span(trace, tool, "execute_tool lookup", start + 20, start + 25, parent_span_id=root, scope="made",
             attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "lookup", "gen_ai.tool.call.id": "c1"},
             resource={"service.name": "desk"}),
        chat(second, 30, history, [{"role": "assistant", "parts": [part(answer)]}], "stop"),
        Span(trace, root, "invoke_agent lead", start, start + 60, scope="made", resource={"service.name": "desk"},
             attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "lead", "user.id": f"u-{number % 5}"}),
    ]  # fmt: skip


class ExportWorld(World):
    """``World`` with such jobs."""

    def job(self, number: int, *, tenant: str = "default", rewarded: bool = True) -> list[NewRecord]:
        question, answer = f"What is 2 + 2, for the {number % 4}th time?", ANSWERS[(number // 4) % 3]
        found: list[NewRecord] = []
        for span in job_spans(number, question, answer):
            found += self.intake.prepare(DecodedBatch([span], []), tenant=tenant, source="otlp").records
        if rewarded:
            outcome = FeedbackReceived(
                tenant=tenant, feedback_id=f"x-{number}", target_kind="trace", target_id=digest("export", number),
                value=VALUE[answer], scorer="desk", observed_ns=T0,
            )  # fmt: skip
            found.append(new_record(outcome))
        return found

    def play(self, numbers: Sequence[int], **how: Any) -> None:
        self.append([record for number in numbers for record in self.job(number, **how)])
        self.run()
