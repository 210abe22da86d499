"""What the collector answers to, and what a key must allow for it: one table, so that no route can be forgotten."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GRPC_ROUTES", "HTTP_ROUTES", "GrpcRoute", "Route", "paths"]


class Route(NamedTuple):
    """One method and path."""

    method: str
    path: str
    action: str | None
    """What the key's role must allow (``auth.MAY``); None: open to everyone."""
    handler: str


class GrpcRoute(NamedTuple):
    """One gRPC method."""

    path: str
    action: str
    handler: str


HTTP_ROUTES = (
    Route("POST", "/v1/traces", "spans", "traces"),
    Route("POST", "/v1/logs", "spans", "logs"),
    Route("POST", "/api/public/otel/v1/traces", "spans", "traces"),  # where Langfuse's clients send
    Route("POST", "/otel/v1/traces", "spans", "traces"),  # where LangSmith's clients send
    Route("POST", "/v1/feedback", "feedback", "feedback"),
    Route("GET", "/metrics", "metrics", "metrics"),
    Route("GET", "/healthz", None, "health"),
)

GRPC_ROUTES = (
    GrpcRoute("/opentelemetry.proto.collector.trace.v1.TraceService/Export", "spans", "traces"),
    GrpcRoute("/opentelemetry.proto.collector.logs.v1.LogsService/Export", "spans", "logs"),
)


def paths(handler: str) -> tuple[str, ...]:
    """Paths that reach a handler.

    >>> paths("feedback")
    ('/v1/feedback',)
    """
    return tuple(route.path for route in HTTP_ROUTES if route.handler == handler)
