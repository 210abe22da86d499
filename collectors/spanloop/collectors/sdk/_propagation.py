"""The way of the context into other processes, threads and queues, as W3C trace context.

asyncio tasks take the context along by themselves. Threads and processes do not: ``bind`` a function, use a ``ThreadPool``, or send
``inject()`` along and go on inside ``extract(...)`` on the other side.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spanloop.collectors.sdk._blocks import RUN
from spanloop.collectors.sdk._failures import failed

__all__ = ["ThreadPool", "bind", "carrier_of", "contexts_in", "extract", "inject"]

P = ParamSpec("P")
R = TypeVar("R")
_w3c = TraceContextTextMapPropagator()


def inject(carrier: MutableMapping[str, str] | None = None) -> MutableMapping[str, str]:
    """Put the current context into ``carrier`` (headers of a request or a message; a new dict if None) and return it."""
    found: MutableMapping[str, str] = {} if carrier is None else carrier
    try:
        _w3c.inject(found)
    except Exception as exc:
        failed("injecting the context", exc)
    return found


def carrier_of(context: Context | None) -> dict[str, str]:
    """A carrier with ``context``."""
    found: dict[str, str] = {}
    try:
        _w3c.inject(found, context)
    except Exception as exc:
        failed("injecting the context", exc)
    return found


@contextmanager
def extract(carrier: Mapping[str, str] | None = None) -> Iterator[None]:
    """Go on inside the context that ``carrier`` brings; None: the TRACEPARENT of the environment. Without one nothing changes."""
    token, context = None, None
    try:
        context = _w3c.extract(_lower(os.environ if carrier is None else carrier), otel.get_current())
        if get_current_span(context) is not get_current_span():
            context = otel.set_value(RUN, None, context)
        token = otel.attach(context)
    except Exception as exc:
        failed("extracting a context", exc)
    try:
        yield
    finally:
        if token is not None and otel.get_current() is context:
            otel.detach(token)


def contexts_in(carrier: Any) -> list[SpanContext]:
    """The span that a carrier names; empty without one."""
    try:
        found = get_current_span(_w3c.extract(_lower(carrier), Context())).get_span_context()
    except Exception as exc:
        failed("extracting a context", exc)
        return []
    return [found] if found.is_valid else []


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the context of now, to be called in any thread, any number of times at once."""
    context = contextvars.copy_context()

    @functools.wraps(function)
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.copy().run(function, *args, **kwargs)

    return bound


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose tasks go on in the context of whoever submitted them."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit with the current context."""
        return super().submit(bind(fn), *args, **kwargs)


def _lower(carrier: Mapping[str, str]) -> dict[str, str]:
    """The two headers, whatever their case."""
    return {key.lower(): carrier[key] for key in carrier if key.lower() in ("traceparent", "tracestate")}
