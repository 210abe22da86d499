"""Fingerprint of the harness: model alias, tool registry, system prompts and runtime of a call. Pure.

Groups never mix fingerprints: two calls compare only when the same system asked in the same way. The order of tools
is part of it (it is part of the prompt); the served version and the conversation are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanloop.schemas.canonical import canonical_json, digest

__all__ = ["harness_fingerprint"]


def harness_fingerprint(body: Mapping[str, Any], *, runtime: str, key: bytes = b"") -> str:
    """32 hex digits over the request's alias, tools, response format, system prompts, and the runtime.

    Args:
        body: The chat request as the client sent it.
        key: Secret of the workspace, so that nobody can confirm a guessed system prompt from the hash.
        runtime: What runs the agent: the User-Agent of its client, or what it says in ``X-Harness-Runtime``.
    """
    messages = body.get("messages")
    system = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict) and message.get("role") in ("system", "developer")
    ]
    return digest(
        "harness",
        key,
        str(body.get("model", "")),
        canonical_json(body.get("tools") or []),
        canonical_json(body.get("response_format")),
        canonical_json(system),
        runtime,
    )
