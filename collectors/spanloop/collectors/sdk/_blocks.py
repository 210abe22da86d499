"""One span around a piece of the host's program: a context manager (sync and async) and a decorator.

Invariants: nothing raises into the host but the host's own exceptions, which pass unchanged; the current context is restored
whatever fails; a block that is not recorded costs two attribute reads. A block may be entered again after it was left; as a
decorator each call has a block of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._functions import wrap
from spanloop.collectors.sdk._runtime import Runtime, active
from spanloop.schemas import sdk_attributes as names

__all__ = ["RUN", "Block", "Spec", "attributes_of"]

P = ParamSpec("P")
R = TypeVar("R")

RUN = otel.create_key("spanloop-sdk-run")
"""Key of the agent run that the host is in, in OpenTelemetry's context."""


class Spec:
    """What a block's span is made of; shared by all calls of a decorated function."""

    __slots__ = ("attributes", "content", "extra", "kind", "links", "name")

    def __init__(
        self,
        name: str,
        attributes: dict[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        content: tuple[str, Any] | None = None,
        extra: Any = None,
    ) -> None:
        self.name, self.attributes, self.kind, self.links = name, attributes, kind, links
        self.content = content
        """(attribute, text) that is kept where message content is captured."""
        self.extra = extra


class Block:
    """A span that is open while its block runs. Made by the functions of this package, not by hand."""

    __slots__ = ("_again", "_before", "_context", "_span", "_spec", "_token", "span_id", "trace_id")

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._span: Span | None = None
        self._token: Any = None
        self._context: Context | None = None
        self._before: Context | None = None
        self._again = 0
        """Times that the open block was entered once more, by mistake."""
        self.span_id = ""
        """16 hex digits once entered; empty while nothing is recorded. Names this act in ``delegate``, ``aggregate`` and others."""
        self.trace_id = ""

    # ------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Self:
        runtime = active()
        if runtime is None and self._span is None:
            return self
        if self._span is not None:
            self._again += 1
            failed("a block was entered while it is open", "use a new block for each use")
            return self
        try:
            self._open(runtime)  # type: ignore[arg-type]
        except Exception as exc:
            self._abandon()
            failed("entering a block", exc)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        if self._again:
            self._again -= 1
            return
        self._detach()
        try:
            self._close(exc)
        except Exception as problem:
            failed("leaving a block", problem)
        self._span = None

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, exc, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, coroutine function, generator or async generator: a block around each call."""
        return wrap(function, self._fresh)

    def now(self) -> Self:
        """Record the act as a moment, for where there is no block to put it around."""
        with self:
            pass
        return self

    def _fresh(self) -> Block:
        return type(self)(self._spec)

    def _open(self, runtime: Runtime) -> None:
        current = otel.get_current()
        spec = self._spec
        attributes = spec.attributes
        run = current.get(RUN)
        if run is not None and "gen_ai.agent.name" not in attributes:
            attributes = {**attributes, "gen_ai.agent.name": run.agent}  # type: ignore[attr-defined]
        self._span = span = runtime.tracer.start_span(
            spec.name, current, spec.kind, attributes, spec.links or None
        )
        said = span.get_span_context()
        self.span_id, self.trace_id = f"{said.span_id:016x}", f"{said.trace_id:032x}"
        if spec.content is not None:
            self._content(*spec.content)
        self._before = current
        self._context = self._inner(set_span_in_context(span, current), runtime)
        self._token = otel.attach(self._context)

    def _inner(self, context: Context, runtime: Runtime) -> Context:
        """The context of what is inside."""
        return context

    def _close(self, exc: BaseException | None) -> None:
        span = self._span
        if span is None:
            return
        if exc is not None and not isinstance(exc, GeneratorExit):
            span.set_attribute("error.type", type(exc).__qualname__)
            span.set_status(StatusCode.ERROR)
            runtime = active()
            if runtime is not None and runtime.capture_content and isinstance(exc, Exception):
                span.record_exception(exc)
        span.end()

    def _abandon(self) -> None:
        """Give up a block that could not be entered."""
        self._detach()
        span, self._span = self._span, None
        if span is not None:
            try:
                span.end()
            except Exception as exc:
                failed("ending an abandoned span", exc)

    # ------------------------------------------------------------ the context, also between the steps of a generator

    def _detach(self) -> None:
        token, self._token = self._token, None
        if token is None:
            return
        try:
            token.var.reset(token)
        except (
            ValueError
        ):  # left in another task than entered: what is current there is not this block's to restore
            if otel.get_current() is self._context and self._before is not None:
                otel.attach(self._before)
        except Exception as exc:
            failed("restoring the context", exc)

    def suspend(self) -> None:
        """Leave the context and not the span: the host goes on elsewhere."""
        if self._span is not None and self._token is not None:
            self._context = otel.get_current()
            self._detach()

    def resume(self) -> None:
        """Be in the context again as it was at ``suspend``."""
        if self._span is not None and self._token is None and self._context is not None:
            self._before = otel.get_current()
            self._token = otel.attach(self._context)

    # ------------------------------------------------------------ saying more

    def set(self, **attributes: Any) -> Self:
        """Attributes of the host's own."""
        if self._span is not None:
            try:
                found: dict[str, Any] = {}
                _values.add(found, attributes)
                self._span.set_attributes(found)
            except Exception as exc:
                failed("setting attributes", exc)
        return self

    def _tell(self, attributes: dict[str, Any]) -> None:
        """Our own attributes on the open span."""
        if self._span is None:
            return
        try:
            self._span.set_attributes(attributes)
        except Exception as exc:
            failed("setting attributes", exc)

    def _content(self, key: str, value: Any) -> None:
        runtime = active()
        if self._span is None or runtime is None or not runtime.capture_content:
            return
        try:
            found: dict[str, Any] = {}
            text = _values.content(value, found)
            if text is not None:
                found[key] = text
            self._span.set_attributes(found)
        except Exception as exc:
            failed("capturing content", exc)


def attributes_of(act: str, given: Any) -> dict[str, Any]:
    """The first attributes of an act: the host's own, then what it is."""
    attributes: dict[str, Any] = {}
    if given is not None:
        _values.add(attributes, given)
    attributes[names.ACT] = act
    return attributes
