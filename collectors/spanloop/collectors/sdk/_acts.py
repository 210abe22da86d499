"""The acts of an orchestration, each a block: agent, spawn, delegate, message, receive, aggregate, stop, decision, tool, model_call,
guardrail.

Each function makes a block for ``with``, ``async with`` or as a decorator; ``.now()`` records a moment. The acts that decide
(spawn, delegate, message, aggregate, stop) take the menu of the decision: ``options``, ``propensities`` (the probability with which
each option was drawn), ``chosen``, ``by_policy``, or ``decision=``, the block of a decision that was told apart; ``call``, the
model call that decided (a block or a response id).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack

from opentelemetry.context import Context, set_value
from opentelemetry.trace import Link, SpanKind

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._blocks import RUN, Block, Spec, attributes_of
from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._harness import Harness, register_tool
from spanloop.collectors.sdk._menus import add_decision
from spanloop.collectors.sdk._propagation import carrier_of, contexts_in
from spanloop.collectors.sdk._runtime import Runtime, active
from spanloop.schemas import sdk_attributes as names

__all__ = [
    "Act",
    "Decision",
    "Menu",
    "ModelCall",
    "Run",
    "Tool",
    "agent",
    "aggregate",
    "decision",
    "delegate",
    "guardrail",
    "message",
    "model_call",
    "receive",
    "spawn",
    "stop",
    "tool",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
_UNKNOWN = Spec("unknown", {})


class Menu(TypedDict, total=False):
    """The decision behind an act."""

    options: Any
    propensities: Any
    chosen: Any
    by_policy: bool | None
    decision: Any
    call: Any
    attributes: Mapping[str, Any] | None


class Act(Block):
    """Spawn, delegate, message, receive, aggregate, stop or guardrail."""

    __slots__ = ()

    @property
    def carrier(self) -> dict[str, str]:
        """Headers that let another process, thread or queue go on inside this act (``extract``, ``receive``)."""
        return carrier_of(self._context) if self._span is not None else {}

    def triggered(self, verdict: bool) -> None:
        """A guardrail's verdict: whether it stopped something."""
        self._tell({"gen_ai.guardrail.triggered": bool(verdict)})

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
        self.harness = Harness(*(self._spec.extra or ("", (), ())))
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
            for key, value in (("gen_ai.response.id", id), ("gen_ai.response.model", model)):
                if value:
                    found[key] = _values.label(value, found)
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


# ---------------------------------------------------------------- making them


def agent(
    name: Any = "",
    *,
    model: str = "",
    tools: Any = (),
    system_prompt: Any = "",
    conversation: str = "",
    task_key: str = "",
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """A run of an agent; as a decorator without a name the function's own.

    Args:
        model, tools, system_prompt: the harness where it is declared; hashed, never sent.
        conversation: id of the conversation that the run belongs to.
        task_key: runs of equal key work on the same task and can be compared.
    """
    if callable(name) and not isinstance(name, str):
        return agent(getattr(name, "__name__", ""))(name)

    def spec() -> Spec:
        found = attributes_of("agent", attributes)
        called = _values.label(name, found) or "agent"
        found |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": called}
        if conversation:
            found["gen_ai.conversation.id"] = _values.label(conversation, found)
        if task_key:
            found["spanloop.task.key"] = _values.label(task_key, found)
        harness = (_values.label(model, found), tools, _texts(system_prompt))
        return Spec(f"invoke_agent {called}", found, extra=harness)

    return Run(_made(spec))


def spawn(to: Any, **menu: Unpack[Menu]) -> Act:
    """Start an agent without giving it a task yet (O1). Its run begins inside the block, or goes on from ``carrier``."""
    return _act("spawn", to, "spawn", menu)


def delegate(to: Any, *, pass_control: bool = False, **menu: Unpack[Menu]) -> Act:
    """Have an agent do something (O2). ``to``: its name, or the run or spawn of an agent that is there already. The block ends when
    the result is back.

    Args:
        pass_control: a hand-over: the other one answers in this one's place.
    """
    mode = "pass_control" if pass_control else "return_to_caller"
    return _act("delegate", to, "delegate", menu, more={"gen_ai.transfer.mode": mode})


def message(to: Any, *, text: Any = None, **menu: Unpack[Menu]) -> Act:
    """Send a message to another agent that is neither a task nor a result (O3). Send ``carrier`` along for ``receive``."""
    content = None if text is None else ("input.value", text)
    return _act("message", to, "message", menu, content=content, kind=SpanKind.PRODUCER)


def receive(carrier: Any, *, attributes: Mapping[str, Any] | None = None) -> Act:
    """Take a message that came with ``carrier``, in the run of the agent that reads it."""

    def spec() -> Spec:
        links = tuple(Link(context) for context in contexts_in(carrier))
        return Spec(
            "receive message", attributes_of("receive", attributes), kind=SpanKind.CONSUMER, links=links
        )

    return Act(_made(spec))


def aggregate(sources: Any = (), *, method: str = "", **menu: Unpack[Menu]) -> Act:
    """Make one result of several (O4).

    Args:
        sources: runs or delegations whose results are used (blocks); none: all that came back so far.
        method: how; the choice where options are given.
    """

    def more() -> dict[str, Any]:
        given = sources if isinstance(sources, list | tuple | set | frozenset) else (sources,)
        spans = [_id_of(source) for source in list(given)[: names.SOURCES_MAX]]
        found: dict[str, Any] = {}
        if any(spans):
            found[names.SOURCES] = [span for span in spans if span]
        return found

    return _act("aggregate", None, method or "aggregate", menu, more=_made(more, {}))


def stop(reason: str = "", **menu: Unpack[Menu]) -> Act:
    """End the run (O5); not to stop yet is ``decision("stop", ...)``."""
    found: dict[str, Any] = {}
    if reason:
        found[names.REASON] = _values.label(reason, found)
    return _act("stop", None, "stop", menu, more=found)


def decision(
    kind: str,
    options: Any = None,
    propensities: Any = None,
    *,
    chosen: Any = None,
    by_policy: bool | None = None,
    call: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> Decision:
    """A decision told apart from its act (spawn, delegate, message, aggregate or stop), or one not to act. Acts inside the block, or
    with ``decision=`` this block, carry it out."""

    def spec() -> Spec:
        found = attributes_of("decision", attributes)
        add_decision(found, _values.label(kind, found), options, propensities, chosen, by_policy=by_policy)
        if call is not None:
            found[names.CALL] = _id_of(call) or _values.label(call, found)
        return Spec(f"decide {found[names.DECISION]}", found)

    return Decision(_made(spec))


def tool(
    name: Any = "", *, call_id: str = "", arguments: Any = None, attributes: Mapping[str, Any] | None = None
) -> Any:
    """A tool's execution; as a decorator without a name the function's own."""
    if callable(name) and not isinstance(name, str):
        return tool(getattr(name, "__name__", ""))(name)

    def spec() -> Spec:
        found = attributes_of("tool", attributes)
        called = _values.label(name, found) or "tool"
        found |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": called}
        if call_id:
            found["gen_ai.tool.call.id"] = _values.label(call_id, found)
        content = None if arguments is None else ("gen_ai.tool.call.arguments", arguments)
        return Spec(f"execute_tool {called}", found, content=content)

    return Tool(_made(spec))


def model_call(
    model: Any = "",
    *,
    provider: str = "",
    system_prompt: Any = "",
    attributes: Mapping[str, Any] | None = None,
) -> ModelCall:
    """A call of a model. ``system_prompt`` goes into the harness as a hash and is not sent."""

    def spec() -> Spec:
        found = attributes_of("model_call", attributes)
        called = _values.label(model, found)
        found |= {"gen_ai.operation.name": "chat", "gen_ai.request.model": called}
        if provider:
            found["gen_ai.provider.name"] = _values.label(provider, found)
        return Spec(
            f"chat {called}".strip(), found, kind=SpanKind.CLIENT, extra=(called, _texts(system_prompt))
        )

    return ModelCall(_made(spec))


def guardrail(name: str = "guardrail", *, attributes: Mapping[str, Any] | None = None) -> Act:
    """A check of what goes in or out; its verdict by ``triggered``."""

    def spec() -> Spec:
        found = attributes_of("guardrail", attributes)
        called = _values.label(name, found)
        found |= {"gen_ai.operation.name": "apply_guardrail", "gen_ai.guardrail.name": called}
        return Spec(f"apply_guardrail {called}", found)

    return Act(_made(spec))


def _act(
    act: str,
    to: Any,
    likely: str,
    menu: Menu,
    *,
    more: Any = None,
    content: tuple[str, Any] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Act:
    def spec() -> Spec:
        found = attributes_of(act, menu.get("attributes"))
        found |= more or {}
        name = ""
        if to is not None:
            name = to.agent if isinstance(to, Run) else _target_of(to) or _values.label(to, found)
            found[names.TARGET] = name
            if isinstance(to, Block) and to.span_id:
                found[names.TARGET_ID] = to.span_id
        if any(menu.get(key) is not None for key in ("options", "propensities", "chosen", "by_policy")):
            guesses = (name, likely) if name else (likely,)
            add_decision(found, act, menu.get("options"), menu.get("propensities"), menu.get("chosen"),
                         likely=guesses, by_policy=menu.get("by_policy"))  # fmt: skip
        decided = _id_of(menu.get("decision"))
        if decided:
            found[names.DECIDED_BY] = decided
        call = menu.get("call")
        if call is not None:
            found[names.CALL] = _id_of(call) or _values.label(call, found)
        return Spec(f"{act} {name}".strip(), found, kind=kind, content=content)

    return Act(_made(spec))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(
        v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, str) and v
    )


def _made(make: Callable[[], Any], otherwise: Any = _UNKNOWN) -> Any:
    try:
        return make()
    except Exception as exc:
        failed("making a block", exc)
        return otherwise


def _id_of(block: Any) -> str:
    return block.span_id if isinstance(block, Block) else ""


def _target_of(block: Any) -> str:
    return block._spec.attributes.get(names.TARGET, "") if isinstance(block, Block) else ""
