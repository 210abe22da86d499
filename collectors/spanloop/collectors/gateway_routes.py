"""Which paths the gateway answers: OpenAI's inference routes and what a deployment adds. Everything else is 404.

vLLM serves its control routes (pause, weights, adapters, /invocations, ...) on the same port and does not ask a key for most of
them, so a path goes on only if it is listed here.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from spanloop.schemas.errors import ConfigError

__all__ = ["PASSED", "PREFIXES", "extra_route", "is_control", "path_below_session"]

PREFIXES = ("", "/sessions/{session}")
"""Each route is also there below a session."""

PASSED = (
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/moderations"),
    ("GET", "/v1/models/{model:[A-Za-z0-9_\\-.:@/]+}"),
    ("GET", "/v1/responses/{response_id:[A-Za-z0-9_\\-]+}"),
    ("DELETE", "/v1/responses/{response_id:[A-Za-z0-9_\\-]+}"),
    ("POST", "/v1/responses/{response_id:[A-Za-z0-9_\\-]+}/cancel"),
    ("GET", "/v1/responses/{response_id:[A-Za-z0-9_\\-]+}/input_items"),
)
"""Passed on and not recorded."""

_CONTROL = frozenset({
    "abort_requests", "classify", "collective_rpc", "derender", "detokenize",
    "fault_tolerance", "finish_weight_update", "flush_cache", "generate", "generative_scoring",
    "get_world_size", "inference", "init_weight_transfer_engine", "invocations", "is_paused",
    "is_scaling_elastic_ep", "is_sleeping", "kv_event_sources", "load", "load_lora_adapter",
    "metrics", "pause", "ping", "pooling", "profile",
    "release_kv_cache_memory", "render", "reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache",
    "resume", "rpc", "scale_elastic_ep", "score", "server_info",
    "shutdown_weight_transfer_engine", "sleep", "start_draft_weight_update", "start_profile", "start_weight_update",
    "stop_profile", "systemone", "tokenize", "tokenizer_info", "unload_lora_adapter",
    "update_weight_version", "update_weights", "version", "wake_up", "weight_checker",
    "weight_info",
})  # fmt: skip
"""Segments of serving's control and debugging routes. They never go on, whatever a deployment adds."""
_EXTRA = re.compile(r"/v1(/[A-Za-z0-9_\-]+)+(/\*)?")


def is_control(path: str) -> bool:
    """Whether a path is one of serving's control routes, or could become one: an encoded slash or dots in it lead elsewhere.

    >>> is_control("/v1/load_lora_adapter"), is_control("/v1/models/../../pause"), is_control("/v1/audio/speech")
    (True, True, False)
    """
    parts = path.lower().split("/")[1:]
    return not _CONTROL.isdisjoint(parts) or any(part in ("", ".", "..") for part in parts)


def path_below_session(raw: str, *, below: bool) -> str:
    """The decoded path of a request, without its session.

    >>> path_below_session("/sessions/v1%2Fa/v1/models/a", below=True)
    '/v1/models/a'
    """
    return unquote("/" + raw.split("/", 3)[3] if below else raw)


def extra_route(path: str) -> str:
    """The route of a ``gateway.passthrough`` entry. Raises ConfigError when it may not go on.

    >>> extra_route("/v1/audio/*")
    '/v1/audio/{rest:[A-Za-z0-9_\\\\-./]+}'
    """
    if not _EXTRA.fullmatch(path):
        raise ConfigError(
            f"gateway.passthrough has {path!r}: expected a path such as /v1/audio/speech, or /v1/audio/* for all below it"
        )
    if is_control(path):
        raise ConfigError(
            f"gateway.passthrough has {path!r}: control routes of serving never go through the gateway"
        )
    return path[:-1] + r"{rest:[A-Za-z0-9_\-./]+}" if path.endswith("/*") else path
