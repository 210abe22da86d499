"""OpenInference, the conventions that Arize's instrumentations write."""

from __future__ import annotations

from spanloop.pipeline.dialects.fields import base_fields
from spanloop.pipeline.dialects.operation import Operation
from spanloop.schemas.spans import Span

__all__ = ["ALSO", "NAME", "matches", "read"]

NAME = "openinference"
ALSO = ("genai",)


def matches(span: Span) -> bool:
    return "openinference.span.kind" in span.attributes


def read(span: Span) -> Operation:
    return Operation(**base_fields(span), kind="unknown")
