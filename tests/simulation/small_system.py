"""A small deployment by hand: jobs as spans, feedback, the real stages over a workspace."""

from __future__ import annotations

from contextlib import closing

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived, SpansReceived
from spanloop.schemas.spans import Span

T0 = 1_790_000_000_000_000_000
RESOURCE = {"service.name": "desk"}


def job(number, *, helpers=2, complete=True):
    """A job of a lead that delegates to helpers by tool: batches of spans of one trace, children first."""
    trace, t0 = digest("job", number), T0 + number * 10_000_000_000
    batches, ids = [], iter(digest("span", number, n)[:16] for n in range(100))
    root, spans = next(ids), []
    for n in range(helpers):
        tool, agent, chat = next(ids), next(ids), next(ids)
        start = t0 + 1_000_000 + n * 100_000_000
        spans += [
            _span(trace, chat, agent, "chat m", start + 20, {**_chat(f"r-{number}-{n}"), **_by("helper")}),
            _span(trace, agent, tool, "invoke_agent helper", start + 10, {"gen_ai.operation.name": "invoke_agent", **_by("helper")}),
            _span(trace, tool, root, "execute_tool ask", start, {
                "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ask", "gen_ai.tool.call.id": f"c{n}"}),
        ]  # fmt: skip
    spans.append(
        _span(trace, next(ids), root, "chat m", t0 + 500, {**_chat(f"r-{number}-lead"), **_by("lead")})
    )
    if complete:
        spans.append(
            _span(trace, root, None, "invoke_agent lead", t0, {"gen_ai.operation.name": "invoke_agent", **_by("lead")}, length=900_000_000)
        )  # fmt: skip
    for n in range(0, len(spans), 3):
        batches.append(SpansReceived(trace_id=trace, spans=tuple(spans[n : n + 3])))
    return batches


def _by(name):
    return {"gen_ai.agent.name": name}


def _chat(response):
    return {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": response,
        "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 3, "gen_ai.response.finish_reasons": ["stop"],
    }  # fmt: skip


def _span(trace, span, parent, name, start, attributes, length=5_000_000):
    return Span(trace, span, name, start, start + length, parent_span_id=parent, kind=3, attributes=attributes,
                scope="test", resource=RESOURCE)  # fmt: skip


def outcome(number, value, *, kind="trace", feedback_id=None, target=None):
    target = target or digest("job", number)
    return FeedbackReceived(feedback_id=feedback_id or f"f-{number}-{value}", target_kind=kind, target_id=target, value=value,
                            scorer="desk", observed_ns=T0 + number)  # fmt: skip


def append(path, events, clock=None):
    with closing(SqliteLog(path, clock or ManualClock(T0))) as log:
        return log.append([new_record(event) for event in events])


def run(path, pipeline, *, clock=None, stages=None, **options):
    """Carry everything on the log through the real stages, as ``spanloop up`` would."""
    clock = clock or ManualClock(T0)
    with closing(SqliteLog(path, clock)) as log, closing(SqliteState(path, clock)) as state:
        return run_to_end(stages or build_stages(pipeline), log, state, clock, **options)
