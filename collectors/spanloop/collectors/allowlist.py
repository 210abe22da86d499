"""Which attribute keys are structure (kept), which hold messages or JSON whose structure is kept, and which are
content (replaced). A key that is in no list is content: the list fails closed.

Sources: OpenTelemetry GenAI conventions, OpenInference, OpenLLMetry, pydantic-ai, logfire, Google ADK, Strands,
Microsoft agent-framework, AutoGen, CrewAI, LangGraph, Langfuse, MLflow, Claude Code.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["DROP", "KEEP", "LABELS", "MESSAGES", "RECORDED", "TREE", "classify"]

KEEP = "keep"
"""An identifier, name, number or state: kept when its text looks like a label."""
MESSAGES = "messages"
"""JSON of messages or tool definitions: roles, types, ids and tool names are kept, texts replaced one by one."""
LABELS = "labels"
"""JSON of labels and numbers (token counts, a quoted name): each is kept like one of KEEP."""
TREE = "tree"
"""JSON of arguments or results: keys kept, every text and number replaced one by one."""
RECORDED = "recorded"
"""What a function got or gave: like TREE, but the messages in a model's request or answer like MESSAGES."""
DROP = "drop"
"""Replaced as a whole."""

_KEEP = """
gen_ai.operation.name gen_ai.system gen_ai.provider.name gen_ai.agent.id gen_ai.agent.name gen_ai.agent.version
gen_ai.agent.call.id gen_ai.conversation.id gen_ai.workflow.name gen_ai.workflow.nested gen_ai.request.model
gen_ai.request.temperature gen_ai.request.top_p gen_ai.request.top_k gen_ai.request.max_tokens gen_ai.request.seed
gen_ai.request.frequency_penalty gen_ai.request.presence_penalty gen_ai.request.choice.count gen_ai.request.stream
gen_ai.response.model gen_ai.response.id gen_ai.response.finish_reasons gen_ai.output.type gen_ai.token.type
gen_ai.tool.name gen_ai.tool.type gen_ai.tool.call.id gen_ai.tool.status gen_ai.agent.handoff_parent
gen_ai.handoff.from_agent gen_ai.handoff.to_agent gen_ai.transfer.mode gen_ai.transfer.target.name
gen_ai.caller.type gen_ai.caller.name gen_ai.task.id gen_ai.task.name gen_ai.task.parent.id gen_ai.task.status
gen_ai.task.kind gen_ai.guardrail.name gen_ai.guardrail.triggered gen_ai.evaluation.name gen_ai.prompt.name
gen_ai.evaluation.score.value gen_ai.evaluation.score.label gen_ai.server.time_to_first_token
gen_ai.event.start_time gen_ai.event.end_time gen_ai.data_source.id
error.type exception.type exception.escaped otel.status_code server.address server.port
http.response.status_code http.request.method http.status_code http.method rpc.system rpc.service rpc.method
agent_name model_name pydantic_ai.tool.retry.attempt pydantic_ai.tool.retry.max_retries
pydantic_ai.tool.retry.cause pydantic_ai.tool.failure_stage pydantic_ai.tool.deferral.name pydantic_ai.new_message_index
operation.cost logfire.span_type logfire.level_num sdk_span_type
openinference.span.kind agent.name graph.node.id graph.node.name graph.node.parent_id session.id llm.model_name
llm.request.model_name llm.response.model_name llm.provider llm.system llm.finish_reason tool.name tool.id
tool_call.id tool_call.function.name input.mime_type output.mime_type
traceloop.span.kind traceloop.workflow.name traceloop.entity.name traceloop.entity.path
traceloop.association.properties.session_id traceloop.association.properties.thread_id llm.request.type
gcp.vertex.agent.invocation_id gcp.vertex.agent.event_id gcp.vertex.agent.session_id event_loop.cycle_id
event_loop.parent_cycle_id agent_framework.function.invocation.duration
messaging.operation messaging.destination messaging.message.type messaging.system sender_agent_type
sender_agent_class recipient_agent_type recipient_agent_class from_agent to_agent triggered turn group_id
agent_trace_id executor.id executor.type workflow.id workflow.name edge_group.type edge_group.id
edge_group.delivered edge_group.delivery_status message.source_id message.target_id message.type
crew_key crew_id task_key task_id
langgraph.command.source_node langgraph.command.goto_node langgraph.command.goto_nodes
langfuse.observation.type langfuse.observation.model.name langfuse.trace.name langfuse.observation.level
ai.operationId ai.model.id ai.model.provider ai.toolCall.name ai.toolCall.id ai.response.id ai.response.model
ai.response.finishReason operation.name resource.name
span.type model input_tokens output_tokens cache_read_tokens cache_creation_tokens stop_reason success attempt
request_id agent_id parent_agent_id subagent.id tool_name tool_use_id duration_ms prompt.id
log.severity event.name event.kind event.sequence conversation.id call_id decision source decision_source
decision_type cost_usd status_code input_token_count output_token_count cached_token_count reasoning_token_count
tool_token_count interaction.sequence interaction.duration_ms query_source terminal.type app.version originator
gen_ai.guardrail.result.type gen_ai.guardrail.component.name gen_ai.guardrail.policy.id guardrail.component.name
ai.telemetry.functionId ai.response.msToFinish
mlflow.experiment_id service.name service.version service.namespace service.instance.id deployment.environment
deployment.environment.name deployment.name telemetry.sdk.language telemetry.sdk.name telemetry.sdk.version
openai_agents.span_type openai_agents.name openai_agents.tools openai_agents.handoffs openai_agents.output_type
openai_agents.server openai_agents.from_agent openai_agents.to_agent openai_agents.triggered
openai_agents.sdk_span_type openai_agents.agent_name openai_agents.turn
event_log.format event_log.type event_log.agent event_log.to event_log.tool event_log.status event_log.mode
event_log.triggered event_log.key event_log.turn event_log.turns event_log.harness
event_log.edges.src event_log.edges.dst event_log.edges.type
survey.place survey.events survey.edges survey.id survey.t survey.type survey.agent survey.role survey.from survey.to
survey.tool survey.content_ref survey.trusted survey.spanloop_type survey.confidence survey.rule survey.status
survey.triggered survey.mode survey.call_id survey.trace_id survey.task_id survey.system survey.topology
survey.rewards.team survey.rewards.individual survey.rewards.role survey.rewards.process survey.rewards.tool
survey.rewards.debate survey.rewards.verifier survey.rewards.orchestration survey.rewards.hybrid survey.rewards.safety
survey.costs.tokens survey.costs.wall_clock_s survey.costs.tool_calls survey.costs.messages
survey.metrics.task_success survey.metrics.parallelism_efficiency survey.metrics.protocol_overhead
survey.metrics.error_amplification
process.pid process.runtime.name process.runtime.version os.type thread.id
"""
_KEEP_PREFIX = (
    "gen_ai.usage.", "gen_ai.aggregated_usage.", "llm.token_count.", "llm.usage.", "llm.cost.", "ai.usage.",
    "spanloop.",
)  # fmt: skip
_LABELS = """
mlflow.spanType mlflow.llm.model mlflow.llm.provider mlflow.trace.session mlflow.chat.tokenUsage
mlflow.llm.cost mlflow.traceRequestId mlflow.spanFunctionName langfuse.observation.usage_details
langfuse.observation.cost_details
"""
_MESSAGES = """
log.body ai.response.toolCalls
gen_ai.input.messages gen_ai.output.messages gen_ai.system_instructions gen_ai.tool.definitions
pydantic_ai.all_messages all_messages_events events ai.prompt.messages gen_ai.agent.tools
handoffs tools content message
"""
_TREE = """
gen_ai.tool.call.arguments gen_ai.tool.call.result tool_arguments tool_response final_result input.value
output.value tool.parameters input output request_data response metadata traceloop.entity.input
traceloop.entity.output gcp.vertex.agent.llm_request gcp.vertex.agent.llm_response
gcp.vertex.agent.tool_call_args gcp.vertex.agent.tool_response ai.toolCall.args ai.toolCall.result
gen_ai.task.input gen_ai.task.output
"""
_RECORDED = """
langfuse.observation.input langfuse.observation.output mlflow.spanInputs mlflow.spanOutputs
"""
_KEY_MAX = 256
"""No longer key is on the list."""
_EVENT_KEEP = frozenset({"role", "id", "index", "finish_reason", "name"})
_TABLE: dict[str, str] = {}
for _kind, _keys in (
    (TREE, _TREE),
    (RECORDED, _RECORDED),
    (MESSAGES, _MESSAGES),
    (LABELS, _LABELS),
    (KEEP, _KEEP),
):
    _TABLE.update((key, _kind) for key in _keys.split())
_PATTERNS = (
    (
        re.compile(
            r"llm\.(input|output)_messages\.\d+\.message\.(role|name|tool_call_id|finish_reason"
            r"|tool_calls\.\d+\.tool_call\.(id|function\.name)|contents\.\d+\.message_content\.type)\Z"
            r"|gen_ai\.(prompt|completion)\.\d+\.(role|finish_reason|tool_call_id|tool_calls\.\d+\.(id|name))\Z"
        ),
        KEEP,
    ),
    (
        re.compile(r"(llm\..*\.arguments|gen_ai\.(prompt|completion)\.\d+\.tool_calls\.\d+\.arguments)\Z"),
        TREE,
    ),
)


def classify(key: str, event: bool = False) -> str:
    """KEEP, MESSAGES, RECORDED, LABELS, TREE or DROP for an attribute key; ``event``: of a GenAI message event.

    >>> classify("gen_ai.request.model"), classify("gen_ai.tool.call.arguments"), classify("customer.note")
    ('keep', 'tree', 'drop')
    """
    return _classify(key, event) if len(key) < _KEY_MAX else DROP


@lru_cache(4096)
def _classify(key: str, event: bool) -> str:
    found = _TABLE.get(key)
    if found is not None:
        return found
    if (event and key in _EVENT_KEEP) or key.startswith(_KEEP_PREFIX):
        return KEEP
    return next((kind for pattern, kind in _PATTERNS if pattern.match(key)), DROP)
