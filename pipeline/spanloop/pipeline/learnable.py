"""What can be learned from each deployment's spans and feedback, and what is missing: the reading half of ``doctor``.

A deployment is a tenant and a ``service.name``. The gateway's spans count for the deployment whose trace or response
they share. Counts come from the log's newest records; nothing is guessed: a thing is there because a record shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from spanloop.pipeline.dialects import Operation, operation_of
from spanloop.pipeline.ports import LogRecord
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import FeedbackReceived, SpansReceived, decode
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.settings import Settings
from spanloop.schemas.spans import Span

__all__ = ["Deployment", "Need", "examine"]

UNKNOWN_SERVICE = "unknown_service"
_Names = tuple[str, str]
"""Tenant and a trace, span, response or orchestration id."""


class Need(msgspec.Struct, frozen=True):
    """One thing that is missing, what it would make possible, and how to add it."""

    for_: str = msgspec.field(name="for")
    missing: str
    do: str
    setting: str = ""


class Deployment(msgspec.Struct):
    """Counts and verdicts of one deployment."""

    tenant: str
    service: str
    spans: int = 0
    traces: int = 0
    agent_runs: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    unknown_spans: int = 0
    """Spans that no dialect reads as part of an agent's work (plain HTTP, databases, ...)."""
    calls_without_usage: int = 0
    calls_without_response_id: int = 0
    gateway_calls: int = 0
    with_token_ids: int = 0
    with_propensities: int = 0
    """Have a log-probability for each response token."""
    with_version: int = 0
    traces_with_outcome: int = 0
    learns: dict[str, Any] = {}
    """traces, team_reward, credit (the units it reaches), token_training."""
    needs: list[Need] = []


class _GatewayCall(msgspec.Struct, frozen=True):
    tenant: str
    trace_id: str
    response_id: str
    token_ids: bool
    propensities: bool
    version: bool


class _Survey:
    """Everything seen on the log, by name."""

    def __init__(self) -> None:
        self.deployments: dict[_Names, Deployment] = {}
        self.owner: dict[_Names, Deployment] = {}
        """Who a trace, span, response or orchestration belongs to."""
        self.traces: dict[_Names, Deployment] = {}
        self.gateway: dict[str, _GatewayCall] = {}
        self.feedback: list[FeedbackReceived] = []
        self.trace_of: dict[_Names, str] = {}

    def deployment(self, tenant: str, service: str) -> Deployment:
        name = (tenant, service)
        if name not in self.deployments:
            self.deployments[name] = Deployment(tenant, service)
        return self.deployments[name]

    def take_spans(self, event: SpansReceived) -> None:
        for span in event.spans:
            try:
                operation = operation_of(span, event.source)
            except Exception:  # noqa: S112 - the assembly stage dead-letters what a dialect fails on
                continue
            if operation.call is not None and operation.call.gateway is not None:
                self._take_gateway(event.tenant, span, operation)
            else:
                self._take_span(event.tenant, span, operation)

    def _take_gateway(self, tenant: str, span: Span, operation: Operation) -> None:
        call = operation.call
        if call is None or call.gateway is None:
            return
        ids = span.attributes.get("spanloop.response_token_ids") or ()
        logprobs = span.attributes.get("spanloop.response_logprobs") or ()
        self.gateway[operation.span_id] = _GatewayCall(
            tenant,
            operation.trace_id,
            call.response_id,
            bool(ids and span.attributes.get("spanloop.prompt_token_ids")),
            bool(ids) and len(ids) == len(logprobs),
            bool(call.gateway.policy_version),
        )

    def _take_span(self, tenant: str, span: Span, operation: Operation) -> None:
        found = self.deployment(tenant, str(span.resource.get("service.name") or UNKNOWN_SERVICE))
        if (tenant, span.span_id) in self.owner:
            return  # sent twice
        found.spans += 1
        found.agent_runs += operation.run is not None
        found.tool_calls += operation.tool is not None
        found.unknown_spans += operation.kind == "unknown"
        self._name(tenant, span.trace_id, span.span_id, found)
        call = operation.call
        if call is not None:
            found.model_calls += 1
            found.calls_without_usage += call.input_tokens is None or call.output_tokens is None
            found.calls_without_response_id += not call.response_id
            if call.response_id:
                self._name(tenant, span.trace_id, call.response_id, found)

    def _name(self, tenant: str, trace_id: str, name: str, found: Deployment) -> None:
        self.owner[(tenant, name)] = found
        self.trace_of[(tenant, name)] = trace_id
        if (tenant, trace_id) not in self.traces:
            self.traces[(tenant, trace_id)] = found
            found.traces += 1
            for alias in (trace_id, orchestration_id(tenant, [trace_id])):
                self.owner.setdefault((tenant, alias), found)
                self.trace_of.setdefault((tenant, alias), trace_id)

    def assign(self) -> list[Deployment]:
        """Give gateway calls and outcomes to their deployments."""
        for call in self.gateway.values():
            found = self.traces.get((call.tenant, call.trace_id)) or self.owner.get(
                (call.tenant, call.response_id)
            )
            if found is None:
                found = self.deployment(call.tenant, "(only the gateway saw it)")
                found.model_calls += 1
                self._name(call.tenant, call.trace_id, call.response_id, found)
            found.gateway_calls += 1
            found.with_token_ids += call.token_ids
            found.with_propensities += call.propensities
            found.with_version += call.version
        scored: set[_Names] = set()
        for item in self.feedback:
            found = self.owner.get((item.tenant, item.target_id))
            trace = self.trace_of.get((item.tenant, item.target_id), "")
            if found is not None and item.name == "outcome" and (item.tenant, trace) not in scored:
                scored.add((item.tenant, trace))
                found.traces_with_outcome += 1
        return [self.deployments[name] for name in sorted(self.deployments)]


class _OrchestrationHead(msgspec.Struct):
    trace_ids: tuple[str, ...] = ()


class _RevisionHead(msgspec.Struct):
    tenant: str = "default"
    orchestration_id: str = ""
    content: _OrchestrationHead | None = None


_revision_head = msgspec.json.Decoder(_RevisionHead)


def examine(records: Iterable[LogRecord], settings: Settings) -> list[Deployment]:
    """Deployments by (tenant, service) with verdicts and needs.

    Args:
        records: of the topics spans, orchestrations and feedback, in append order.
        settings: decide which remedy applies.
    """
    survey = _Survey()
    for record in records:
        try:
            if record.topic == topics.ORCHESTRATIONS:
                _take_revision(survey, record.value)
                continue
            event = decode(record.value)
        except (SchemaError, msgspec.MsgspecError):
            continue
        if isinstance(event, SpansReceived):
            survey.take_spans(event)
        elif isinstance(event, FeedbackReceived):
            survey.feedback.append(event)
    deployments = survey.assign()
    for found in deployments:
        _judge(found, settings)
    return deployments


def _take_revision(survey: _Survey, value: bytes) -> None:
    head = _revision_head.decode(value)
    for trace_id in head.content.trace_ids if head.content else ():
        found = survey.traces.get((head.tenant, trace_id))
        if found is not None:
            survey.owner[(head.tenant, head.orchestration_id)] = found
            survey.trace_of[(head.tenant, head.orchestration_id)] = trace_id
            return


def _judge(found: Deployment, settings: Settings) -> None:
    acts = found.agent_runs + found.model_calls > 0
    rewarded = found.traces_with_outcome > 0
    trainable = min(found.with_token_ids, found.with_propensities, found.with_version)
    units = ["team"]
    units += ["orchestrator", "role", "agent"] if found.agent_runs else []
    units += ["turn", "message"] if found.model_calls else []
    units += ["tool_call"] if found.tool_calls else []
    units += ["token"] if found.with_token_ids else []
    found.learns = {
        "traces": acts,
        "team_reward": rewarded,
        "credit": units if rewarded and acts else [],
        "token_training": rewarded and trainable > 0,
        "trainable_calls": trainable,
    }
    found.needs = [
        *_trace_needs(found, acts),
        *_reward_needs(found, settings),
        *_training_needs(found, settings),
    ]


def _trace_needs(found: Deployment, acts: bool) -> list[Need]:
    needs = []
    if not acts:
        needs.append(Need("traces", f"none of {found.spans} spans is an agent run, model call or tool call",
                          "switch on your framework's OpenTelemetry GenAI instrumentation "
                          "(pydantic-ai: Agent.instrument_all())"))  # fmt: skip
    elif not found.agent_runs:
        needs.append(Need("credit by role and agent", "no span of an agent run (invoke_agent)",
                          "use a framework or instrumentation that writes one span for each agent's run"))  # fmt: skip
    if found.calls_without_usage:
        needs.append(Need("token counts", f"{found.calls_without_usage} of {found.model_calls} model calls say no usage",
                          "have the instrumentation record gen_ai.usage.*, or call through the gateway"))  # fmt: skip
    return needs


def _reward_needs(found: Deployment, settings: Settings) -> list[Need]:
    without = found.traces - found.traces_with_outcome
    if not without:
        return []
    url = f"http://{settings.collector.host}:{settings.collector.port}/v1/feedback"
    return [Need("team reward", f"{without} of {found.traces} traces have no outcome",
                 f"send one for each job: POST {url}, or spanloop feedback (by trace, response, span or orchestration id)",
                 "credentials with role scorer, where credentials are set")]  # fmt: skip


def _training_needs(found: Deployment, settings: Settings) -> list[Need]:
    if settings.learner.decisions:
        return _decision_needs(found, settings)
    for_ = "token training"
    needs = []
    if not found.gateway_calls:
        if not found.model_calls:
            return []
        url = f"http://{settings.gateway.host}:{settings.gateway.port}/v1"
        needs.append(Need(for_, f"none of {found.model_calls} model calls went through the gateway",
                          f"set the agents' OpenAI base URL to {url} and the model to {settings.gateway.policy!r}",
                          "" if settings.gateway.enabled else "gateway.enabled = true"))  # fmt: skip
    if not settings.content.training:
        needs.append(Need(for_, "this deployment has not opted in to keeping token ids and texts",
                          "opt in, if those who speak in these conversations agree",
                          "content.training = true (SPANLOOP_CONTENT__TRAINING=true)"))  # fmt: skip
    elif found.with_token_ids < found.gateway_calls:
        without = found.gateway_calls - found.with_token_ids
        needs.append(Need(for_, f"{without} of {found.gateway_calls} gateway calls have no token ids",
                          "use an upstream that returns token ids (vLLM with return_token_ids, or the embedded "
                          "server); calls from before the opt-in stay without", "gateway.upstream"))  # fmt: skip
    if found.with_propensities < found.with_token_ids:
        without = found.with_token_ids - found.with_propensities
        needs.append(Need(for_, f"{without} calls have no log-probability for each token (propensities)",
                          "use an upstream that returns logprobs", "gateway.upstream"))  # fmt: skip
    if found.gateway_calls and found.with_version < found.gateway_calls:
        without = found.gateway_calls - found.with_version
        needs.append(Need(for_, f"{without} of {found.gateway_calls} gateway calls were passed to another model",
                          f"ask for model {settings.gateway.policy!r}, the alias that spanloop trains",
                          "gateway.policy"))  # fmt: skip
    if settings.learner.enabled and not settings.learner.has_policy and not settings.gateway.upstream:
        needs.append(Need(for_, "the embedded policy has no vocabulary", "list the words it may read and say, or name "
                          "a model of your own that vLLM serves", "learner.vocabulary or learner.model"))  # fmt: skip
    return needs


def _decision_needs(found: Deployment, settings: Settings) -> list[Need]:
    for_ = "decision training"
    url = f"http://{settings.gateway.host}:{settings.gateway.port}/v1/decide"
    needs = []
    if not settings.content.training:
        needs.append(Need(for_, "this deployment has not opted in to keeping hashed features of decisions",
                          "opt in, if those whose work they describe agree",
                          "content.training = true (SPANLOOP_CONTENT__TRAINING=true)"))  # fmt: skip
    if not found.with_version:
        needs.append(Need(for_, "no decision was taken by the policy",
                          f"ask for decisions at POST {url}, or with spanloop.collectors.sdk.decide",
                          "" if settings.gateway.enabled else "gateway.enabled = true"))  # fmt: skip
    elif settings.content.training and found.with_token_ids < found.with_version:
        without = found.with_version - found.with_token_ids
        needs.append(Need(for_, f"{without} of {found.with_version} decisions of the policy have no features",
                          "nothing: they are from before the opt-in"))  # fmt: skip
    return needs
