"""The fingerprint of a run's harness, captured from what the SDK sees: models, tools, system prompts, runtime.

The definition is the gateway's (``collectors.harness``); only the hash leaves the process. What a run declares counts as declared;
what it does not declare is taken from the model calls and decorated tools seen until it ends, so that a run that happens to use
less of its harness has another fingerprint: declare it where runs must compare.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from typing import Any

import msgspec

from spanloop.collectors.harness import harness_fingerprint
from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._failures import failed
from spanloop.schemas.canonical import canonical_json, digest

__all__ = ["Harness", "register_tool", "runtime_versions"]

_FRAMEWORKS = (
    "agent-framework-core", "anthropic", "autogen-core", "crewai", "google-adk", "google-genai", "langchain-core", "langgraph",
    "litellm", "mistralai", "openai", "openai-agents", "pydantic-ai-slim", "smolagents", "strands-agents", "transformers", "vllm",
)  # fmt: skip
_SEEN_MAX = 256
"""Models, prompts and tools of one run that are told apart."""
_tools: dict[str, Any] = {}


def register_tool(name: str, function: Callable[..., Any]) -> None:
    """Note a decorated tool: its name, its parameters and a hash of its description are part of every harness."""
    if len(_tools) >= _SEEN_MAX and name not in _tools:
        return
    try:
        parameters = str(inspect.signature(function))
    except (TypeError, ValueError):
        parameters = ""
    _tools[name] = {
        "name": name,
        "parameters": parameters,
        "description": digest(inspect.getdoc(function) or ""),
    }


@lru_cache(1)
def runtime_versions() -> str:
    """Interpreter and installed agent frameworks, as they go into the fingerprint (and into X-Harness-Runtime)."""
    parts = [f"python/{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"]
    for name in _FRAMEWORKS:
        try:
            parts.append(f"{name}/{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return " ".join(parts)


class Harness:
    """What one run declares and shows of its harness."""

    __slots__ = ("declared", "models", "prompts", "tools")

    def __init__(self, model: str, tools: Any, prompts: tuple[str, ...]) -> None:
        self.models = {model: None} if model else {}
        self.prompts = dict.fromkeys(prompts)
        self.tools = _plain_tools(tools)
        self.declared = bool(model or prompts or self.tools)

    def saw(self, model: str, prompts: tuple[str, ...]) -> None:
        """Note a model call; nothing where the harness is declared."""
        if self.declared or len(self.models) + len(self.prompts) >= _SEEN_MAX:
            return
        if model:
            self.models[model] = None
        self.prompts.update(dict.fromkeys(prompts))

    def include(self, inner: Harness) -> None:
        """Note what a run inside this one saw."""
        if self.declared or len(self.models) + len(self.prompts) >= _SEEN_MAX:
            return
        self.models.update(inner.models)
        self.prompts.update(inner.prompts)

    def fingerprint(self, key: bytes) -> str:
        """32 hex digits, empty where nothing is known."""
        tools = self.tools or [_tools[name] for name in sorted(_tools)]
        if not (self.models or self.prompts or tools):
            return ""
        order = list if self.declared else sorted
        registry = canonical_json(tools)
        return _fingerprint(tuple(order(self.models)), tuple(order(self.prompts)), registry, key)


@lru_cache(512)
def _fingerprint(models: tuple[str, ...], prompts: tuple[str, ...], registry: bytes, key: bytes) -> str:
    body = {
        "model": ",".join(models),
        "tools": msgspec.json.decode(registry),
        "messages": [{"role": "system", "content": prompt} for prompt in prompts],
    }
    return harness_fingerprint(body, runtime=runtime_versions(), key=key)


def _plain_tools(given: Any) -> list[Any]:
    """A declared registry as JSON: names, schemas, or functions by name and parameters."""
    found: list[Any] = []
    for tool in given[:_SEEN_MAX] if isinstance(given, list | tuple) else ():
        if isinstance(tool, str | dict):
            try:
                canonical_json(tool)
            except Exception as exc:
                failed("a declared tool", exc)
            else:
                found.append(tool)
        elif callable(tool):
            name = _values.label(getattr(tool, "__name__", ""), {})
            found.append({"name": name, "parameters": _signature(tool)})
    return found


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""
