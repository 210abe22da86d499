"""The acts of an orchestration, each a block: agent, spawn, delegate, message, receive, aggregate, stop, decision, tool, model_call,
guardrail.

Each function makes a block for ``with``, ``async with`` or as a decorator; ``.now()`` records a moment. The acts that decide
(spawn, delegate, message, aggregate, stop) take the menu of the decision: ``options``, ``propensities`` (the probability with which
each option was drawn), ``chosen``, ``by_policy``, ``state`` (what the decider saw, names and numbers), or ``decision=``, the block of a decision that was told apart; ``call``, the
model call that decided (a block or a response id).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

from opentelemetry.trace import Link, SpanKind

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._blocks import Block, Spec, attributes_of
from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._kinds import Act, Decision, ModelCall, Run, Tool
from spanloop.collectors.sdk._menus import add_decision
from spanloop.collectors.sdk._propagation import contexts_in
from spanloop.schemas import sdk_attributes as names

__all__ = [
    "Menu", "agent", "aggregate", "decision", "delegate", "guardrail", "message", "model_call", "receive", "spawn", "stop", "tool",
]  # fmt: skip

_UNKNOWN = Spec("unknown", {})


class Menu(TypedDict, total=False):
    """The decision behind an act."""

    options: Any
    propensities: Any
    chosen: Any
    by_policy: bool | None
    state: Any
    decision: Any
    call: Any
    attributes: Mapping[str, Any] | None


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
        _values.add_label(found, "gen_ai.conversation.id", conversation)
        _values.add_label(found, "spanloop.task.key", task_key)
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
    return _act(
        "delegate", to, "delegate", menu, more=lambda found: found.update({"gen_ai.transfer.mode": mode})
    )


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

    def more(found: dict[str, Any]) -> None:
        given = sources if isinstance(sources, list | tuple | set | frozenset) else (sources,)
        spans = [_id_of(source) for source in list(given)[: names.SOURCES_MAX]]
        if any(spans):
            found[names.SOURCES] = [span for span in spans if span]

    return _act("aggregate", None, method, menu, more=more)


def stop(reason: str = "", **menu: Unpack[Menu]) -> Act:
    """End the run (O5); not to stop yet is ``decision("stop", ...)``."""
    return _act("stop", None, "stop", menu, more=lambda found: _values.add_label(found, names.REASON, reason))


def decision(
    kind: str,
    options: Any = None,
    propensities: Any = None,
    *,
    chosen: Any = None,
    by_policy: bool | None = None,
    state: Any = None,
    call: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> Decision:
    """A decision told apart from its act (spawn, delegate, message, aggregate or stop), or one not to act. Acts inside the block, or
    with ``decision=`` this block, carry it out."""

    def spec() -> Spec:
        found = attributes_of("decision", attributes)
        add_decision(
            found, _values.label(kind, found), options, propensities, chosen, by_policy=by_policy, state=state
        )
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
        _values.add_label(found, "gen_ai.tool.call.id", call_id)
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
        _values.add_label(found, "gen_ai.provider.name", provider)
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
    likely: Any,
    menu: Menu,
    *,
    more: Callable[[dict[str, Any]], None] | None = None,
    content: tuple[str, Any] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Act:
    def spec() -> Spec:
        found = attributes_of(act, menu.get("attributes"))
        if more is not None:
            more(found)
        name = ""
        if to is not None:
            name = to.agent if isinstance(to, Run) else _target_of(to) or _values.label(to, found)
            found[names.TARGET] = name
            if isinstance(to, Block) and to.span_id:
                found[names.TARGET_ID] = to.span_id
        if any(
            menu.get(key) is not None for key in ("options", "propensities", "chosen", "by_policy", "state")
        ):
            usual = _values.label(likely, found) or act
            guesses = (name, usual) if name else (usual,)
            add_decision(found, act, menu.get("options"), menu.get("propensities"), menu.get("chosen"),
                         likely=guesses, by_policy=menu.get("by_policy"), state=menu.get("state"))  # fmt: skip
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


def _made(make: Callable[[], Spec]) -> Spec:
    try:
        return make()
    except Exception as exc:
        failed("making a block", exc)
        return _UNKNOWN


def _id_of(block: Any) -> str:
    return block.span_id if isinstance(block, Block) else ""


def _target_of(block: Any) -> str:
    return block._spec.attributes.get(names.TARGET, "") if isinstance(block, Block) else ""
