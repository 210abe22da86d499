"""Blocks of each kind, with what more can be said while they are open."""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context, set_value

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._blocks import RUN, Block, Spec
from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._harness import Harness, register_tool
from spanloop.collectors.sdk._propagation import carrier_of
from spanloop.collectors.sdk._runtime import Runtime, active
from spanloop.schemas import sdk_attributes as names

__all__ = ["Act", "Decision", "ModelCall", "Run", "Tool"]


class Act(Block):
    """Spawn, delegate, message, receive, aggregate, stop or guardrail."""

    __slots__ = ()

    @property
    def carrier(self) -> dict[str, str]:
        """Headers that let another process, thread or queue go on inside this act (``extract``, ``receive``)."""
        return carrier_of(self._context) if self._span is not None else {}

    def triggered(self, verdict: bool) -> None:
        """A guardrail's verdict: whether it stopped something."""
        if verdict is True or verdict is False:
            self._tell({"gen_ai.guardrail.triggered": verdict})

    def result(self, value: Any) -> None:
        """What came of it; kept only where message content is captured."""
        self._content("output.value", value)


class Decision(Block):
    """A decision told apart from its act, or one not to act."""

    __slots__ = ()

    def choose(self, option: str, *, by_policy: bool | None = None) -> str:
        """Tell what was chosen; returns it."""
        try:
            attributes: dict[str, Any] = {}
            attributes[names.CHOSEN] = _values.label(option, attributes, names.OPTION_CHARS)
            if isinstance(by_policy, bool):
                attributes[names.BY_POLICY] = by_policy
            self._tell(attributes)
        except Exception as exc:
            failed("telling a choice", exc)
        return option


class Tool(Block):
    """A tool's execution."""

    __slots__ = ()

    def __call__(self, function: Any) -> Any:
        """Decorate a tool; it becomes part of the harness."""
        try:
            register_tool(self._spec.attributes.get("gen_ai.tool.name", ""), function)
        except Exception as exc:
            failed("registering a tool", exc)
        return super().__call__(function)

    def result(self, value: Any) -> None:
        """What it gave; kept only where message content is captured."""
        self._content("gen_ai.tool.call.result", value)


class Run(Block):
    """One run of an agent."""

    __slots__ = ("_outer", "harness")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._outer: Run | None = None
        self.harness: Harness | None = None

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self._spec.attributes.get("gen_ai.agent.name", "")

    @property
    def carrier(self) -> dict[str, str]:
        """Headers that let another process or thread go on inside this run."""
        return carrier_of(self._context) if self._span is not None else {}

    def result(self, value: Any) -> None:
        """The run's answer; kept only where message content is captured."""
        self._content("output.value", value)

    def _inner(self, context: Context, runtime: Runtime) -> Context:
        outer = context.get(RUN)
        self._outer = outer if isinstance(outer, Run) else None
        model, tools, prompts = self._spec.extra or ("", (), ())
        self.harness = Harness(model, tools, prompts)
        return set_value(RUN, self, context)

    def _close(self, exc: BaseException | None) -> None:
        try:
            self._tell_harness()
        except Exception as problem:
            failed("the harness fingerprint", problem)
        super()._close(exc)

    def _tell_harness(self) -> None:
        runtime, harness = active(), self.harness
        if runtime is None or harness is None:
            return
        found = harness.fingerprint(runtime.hash_key)
        if found:
            self._tell({names.HARNESS: found})
        if self._outer is not None and self._outer.harness is not None:
            self._outer.harness.include(harness)


class ModelCall(Block):
    """A model call: a turn."""

    __slots__ = ()

    def _inner(self, context: Context, runtime: Runtime) -> Context:
        run = context.get(RUN)
        if isinstance(run, Run) and run.harness is not None and self._spec.extra is not None:
            run.harness.saw(*self._spec.extra)
        return context

    def response(
        self,
        *,
        id: str = "",  # noqa: A002  the conventions' word
        model: str = "",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        finish_reasons: Any = (),
        tool_calls: Any = (),
    ) -> None:
        """What came back.

        Args:
            tool_calls: (id, name) of each tool call that the model asked for.
        """
        if self._span is None:
            return
        try:
            found: dict[str, Any] = {}
            _values.add_label(found, "gen_ai.response.id", id)
            _values.add_label(found, "gen_ai.response.model", model)
            usage = {"gen_ai.usage.input_tokens": input_tokens, "gen_ai.usage.output_tokens": output_tokens}
            found |= {k: int(v) for k, v in usage.items() if isinstance(v, int) and 0 <= v < 2**53}
            reasons = _values.labels(list(finish_reasons), found, 16)
            if reasons:
                found["gen_ai.response.finish_reasons"] = reasons
            asked = [
                {"type": "tool_call", "id": _values.label(i, found), "name": _values.label(n, found)}
                for i, n in list(tool_calls)[:128]
            ]
            if asked:
                found["gen_ai.output.messages"] = (
                    _values.content([{"role": "assistant", "parts": asked}], found) or ""
                )
            self._tell(found)
        except Exception as exc:
            failed("reading a response", exc)
