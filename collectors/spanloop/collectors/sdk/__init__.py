"""The SDK for agents that say outright what they do: who runs, spawns, delegates, messages, aggregates, stops, and among what options.

It records into the host's OpenTelemetry and raises nothing into the host. ``pip install 'spanloop[agent]'``; see docs/sdk.md.
"""

from spanloop.collectors.sdk._acts import (
    agent,
    aggregate,
    decision,
    delegate,
    guardrail,
    message,
    model_call,
    receive,
    spawn,
    stop,
    tool,
)
from spanloop.collectors.sdk._decide import Decided, decide, decide_async
from spanloop.collectors.sdk._failures import failures, raise_in_tests
from spanloop.collectors.sdk._harness import runtime_versions
from spanloop.collectors.sdk._instrumentor import SpanloopInstrumentor, instrument, uninstrument
from spanloop.collectors.sdk._kinds import Act, Decision, ModelCall, Run, Tool
from spanloop.collectors.sdk._outcomes import feedback, flush_feedback
from spanloop.collectors.sdk._propagation import ThreadPool, bind, extract, inject

__all__ = [
    "Act",
    "Decided",
    "Decision",
    "ModelCall",
    "Run",
    "SpanloopInstrumentor",
    "ThreadPool",
    "Tool",
    "agent",
    "aggregate",
    "bind",
    "decide",
    "decide_async",
    "decision",
    "delegate",
    "extract",
    "failures",
    "feedback",
    "flush_feedback",
    "guardrail",
    "inject",
    "instrument",
    "message",
    "model_call",
    "raise_in_tests",
    "receive",
    "runtime_versions",
    "spawn",
    "stop",
    "tool",
    "uninstrument",
]
