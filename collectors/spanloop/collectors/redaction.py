"""What may be written: the allow-list applied to a whole span, before anything reaches the log.

Without ``[content] training = true`` no message text, argument, result, error text or unknown value is kept; a
dropped text leaves its length and a keyed hash, so that rules that compare texts still work. JSON keeps its shape:
roles, part types, tool call ids and tool names stay, each text inside is replaced by itself. Names and identifiers
stay when they look like labels and hold nothing that looks like a secret.

Attributes ``spanloop.*`` are ours: from a sender they are removed and counted, whatever the content settings, since
the gateway alone knows which policy answered. ``spanloop.sdk.*`` is what our SDK says of the sender's own acts: kept as labels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from spanloop.collectors.allowlist import DROP, KEEP, LABELS, MESSAGES, RECORDED, classify
from spanloop.collectors.labels import HEX, has_secret, looks_like_label
from spanloop.collectors.workspace_key import workspace_key
from spanloop.pipeline.otlp.decoded import FLAGS
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.sdk_attributes import PREFIX
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span, SpanEvent, SpanLink, redacted

__all__ = ["Redactor", "looks_like_label", "workspace_key"]

RESERVED = "spanloop."
GATEWAY = "spanloop.gateway"
"""Scope of our own gateway's spans: a call's policy version and tokens are read from them before others."""
_SENDERS_OWN = frozenset({"spanloop.task.key", FLAGS})
"""Reserved keys that a sender may set, and the flags that our decoder sets."""

_KEY = re.compile(r"[A-Za-z0-9_.\-/:$]{0,128}\Z")
_TEMPLATES = frozenset({"logfire.msg_template"})
"""Constants of the program, with braces and quotes."""

_LABELS = frozenset(
    {
        "role", "type", "id", "tool_call_id", "toolUseId", "call_id", "finish_reason", "kind", "part_kind",
        "tool_name", "tool_kind", "index", "mime_type", "modality", "status", "agent_name",
        "prompt_tokens", "completion_tokens",
    }
)  # fmt: skip
_CONTAINERS = frozenset(
    {
        "parts", "tool_calls", "toolUse", "toolResult", "function", "function_tools", "output_tools", "content",
        "messages", "message", "tool_call", "tool_call_response", "models_usage",
    }
)  # fmt: skip
_TOOLISH = frozenset(
    {"arguments", "args", "input", "result", "response", "parameters", "parameters_json_schema", "toolUseId",
     "tool_call_id", "id", "description"}
)  # fmt: skip
"""A "name" beside one of these is the name of a tool, not of a person."""
_ROUTING = frozenset(
    {
        "langgraph_node", "langgraph_step", "langgraph_checkpoint_ns", "checkpoint_ns", "langgraph_path",
        "langgraph_triggers", "thread_id", "session_id", "goto",
        "agent_name", "coworker", "subagent_type",
    }
)  # fmt: skip
"""Keys at the top of LangGraph's metadata and node outputs, and of the arguments of tools that hand over or delegate, that
say who comes next."""
_OUTCOMES = frozenset({"ok", "success", "error", "failed"})
"""Values of a result's ``status`` that say how it went and nothing else."""
_SCHEMAS = frozenset({"parameters", "parameters_json_schema", "input_schema", "outer_typed_dict_key"})
"""JSON Schemas of tools: only their equality matters, so they go as a whole."""
_DIALOGUES = frozenset({"messages", "choices", "output", "input", "content"})
"""Keys of a model's request or answer that hold messages or parts of them."""
_MAX_DEPTH = 64
_SHORT = 2_048
_SHORT_MAX = 4_096
"""Texts up to the first are remembered with what became of them, up to so many: names of models and agents, schemas, tools."""
_Short = dict[str, dict[str, tuple[str, Any]]]
"""Key and value as they are written, by key and text as they came."""
_REMEMBERED = range(64, 16_384)
"""Lengths of JSON texts whose result is remembered: tool definitions and histories come again and again."""


class Redactor:
    """The rules of one deployment. Pure apart from its counters.

    Args:
        content: the ``[content]`` settings.
        key: key of the hash left where a text was dropped; at least 16 bytes.
    """

    def __init__(self, content: Content, key: bytes) -> None:
        self._keep_content = content.clear
        self._key = key[:64]
        self._exact = frozenset(k for k in content.allow if not k.endswith("*"))
        self._prefixes = tuple(k[:-1] for k in content.allow if k.endswith("*"))
        self._remembered = lru_cache(512)(self._json_text)
        self._clean_key = lru_cache(4096)(self._make_clean_key)
        self._resource: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._kept: tuple[set[str], set[str]] = (set(), set())
        """Keys that are kept as labels, of spans and of events; a count or an id in hex there needs no second look."""
        self._short: tuple[_Short, _Short] = ({}, {})
        self._num_short = 0
        self.reserved_removed = 0

    def span(self, span: Span, *, trusted: bool = False) -> Span:
        """``span`` as it may be written; ``trusted``: from our own gateway, which may set ``spanloop.*`` and its own scope."""
        if span.scope == GATEWAY and not trusted:
            self.reserved_removed += 1
            span = msgspec.structs.replace(span, scope="")
        attributes, removed = (span.attributes, 0) if trusted else self._without_reserved(span.attributes)
        if self._keep_content:
            if not removed:
                return span
            return msgspec.structs.replace(
                span, attributes=attributes, dropped_attributes=span.dropped_attributes + removed
            )
        return Span(
            trace_id=span.trace_id,
            span_id=span.span_id,
            name=self._name(span.name),
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            parent_span_id=span.parent_span_id,
            kind=span.kind,
            status=span.status,
            status_message=self.text_stand_in(span.status_message) if span.status_message else "",
            attributes=self._attributes(attributes),
            events=tuple(self._event(event) for event in span.events) if span.events else (),
            links=tuple(SpanLink(x.trace_id, x.span_id, self._attributes(x.attributes)) for x in span.links)
            if span.links
            else (),
            scope=self._name(span.scope),
            scope_version=self._name(span.scope_version),
            resource=self._of_resource(span.resource),
            dropped_attributes=span.dropped_attributes + removed,
        )

    def text(self, text: str) -> Any:
        """A free text (a comment): itself where content is kept, else its stand-in."""
        return text if self._keep_content or not text else self._redact(text)

    def label(self, text: str) -> str:
        """A short name given by a client: itself when it looks like a label, else its stand-in as text."""
        return text if self._keep_content or looks_like_label(text) else self.text_stand_in(text)

    def text_stand_in(self, text: str) -> str:
        """The stand-in where the schema has room for a text only."""
        return f"redacted:{len(text)}:{self._hmac(text)}"

    def _name(self, name: str) -> str:
        return name if len(name.split()) <= 6 and looks_like_label(name) else self.text_stand_in(name)

    def _of_resource(self, resource: dict[str, Any]) -> dict[str, Any]:
        """The spans of one resource share it: done once for neighbours."""
        raw, done = self._resource
        if raw is not resource:
            done = self._attributes(resource)
            self._resource = (resource, done)
        return done

    def _event(self, event: SpanEvent) -> SpanEvent:
        genai = event.name.startswith("gen_ai.")
        return SpanEvent(self._name(event.name), event.t_ns, self._attributes(event.attributes, genai))

    def _without_reserved(self, attributes: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if RESERVED not in " ".join(attributes):
            return attributes, 0
        bad = [
            k
            for k in attributes
            if k.startswith(RESERVED) and k not in _SENDERS_OWN and not k.startswith(PREFIX)
        ]
        if not bad:
            return attributes, 0
        self.reserved_removed += len(bad)
        return {k: v for k, v in attributes.items() if k not in bad}, len(bad)

    def _attributes(self, attributes: dict[str, Any], event: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {}
        short, kept = self._short[event], self._kept[event]
        for key, value in attributes.items():
            kind = type(value)
            if kind is str:
                texts = short.get(key)
                pair = texts.get(value) if texts is not None else None
                if pair is None:
                    if key in kept and HEX.match(value):
                        found[key] = value
                        continue
                    pair = self._attribute(key, value, attributes, event=event)
                    if len(value) <= _SHORT and key != "name":
                        self._remember_short(short, key, value, pair)
                found[pair[0]] = pair[1]
            elif kind is int and key in kept:
                found[key] = value
            else:
                key, value = self._attribute(key, value, attributes, event=event)  # noqa: PLW2901
                found[key] = value
        return found

    def _remember_short(self, short: _Short, key: str, value: str, pair: tuple[str, Any]) -> None:
        if self._num_short >= _SHORT_MAX:
            self._num_short = 0
            for texts in self._short:
                texts.clear()
        self._num_short += 1
        short.setdefault(key, {})[value] = pair

    def _attribute(self, key: str, value: Any, attributes: dict[str, Any], *, event: bool) -> tuple[str, Any]:
        """One attribute as it may be written. Only the key "name" looks at its neighbours."""
        if key in self._exact or (self._prefixes and key.startswith(self._prefixes)):
            return key, value
        kind = classify(key, event)
        if kind is KEEP and len(self._kept[event]) < _SHORT_MAX:
            self._kept[event].add(key)
        if kind is KEEP or (kind is DROP and key == "name" and "logfire.msg_template" in attributes):
            return key, self._keep(value)
        if kind is LABELS:
            return key, self._label_json(value)
        if kind is RECORDED:
            return key, self._json(value, self._recorded, 0)
        if kind is not DROP:
            return key, self._json(value, self._messages if kind is MESSAGES else self._top, 0)
        if key in _TEMPLATES and type(value) is str and len(value) <= 256 and not has_secret(value):
            return key, value
        return self._clean_key(key), self._drop(value)

    def _keep(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            return value if looks_like_label(value) else self._redact(value)
        if kind is list:
            return [self._keep(item) if type(item) is not dict else self._drop(item) for item in value[:1024]]
        return self._drop(value) if kind is dict else value

    def _drop(self, value: Any) -> Any:
        if value is None or type(value) is bool:
            return value
        return self._redact(value if type(value) is str else canonical_json(value).decode())

    def _redact(self, text: str) -> dict[str, Any]:
        return redacted(len(text), self._hmac(text))

    def _hmac(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=16).hexdigest()

    def _make_clean_key(self, key: str) -> str:
        return key if _KEY.match(key) and not has_secret(key) else f"redacted:{self._hmac(key)}"

    # ------------------------------------------------------------ inside JSON

    def _label_json(self, value: Any) -> Any:
        """A label, or JSON of labels and numbers, which may be a text in quotes."""
        if type(value) is not str or value[:1] not in ("[", "{", '"'):
            return self._labels(value, 0)
        try:
            return canonical_json(self._labels(msgspec.json.decode(value), 0)).decode()
        except (msgspec.DecodeError, RecursionError):
            return self._redact(value)

    def _labels(self, value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return self._drop(value)
        if type(value) is list:
            return [self._labels(item, depth + 1) for item in value]
        if type(value) is dict:
            return {self._clean_key(k): self._labels(v, depth + 1) for k, v in value.items()}
        return self._keep(value)

    def _json(self, value: Any, walk: Callable[[Any, int], Any], depth: int) -> Any:
        """Walk a value; a text that is a JSON list or map is walked inside and stays a text."""
        if type(value) is not str:
            return walk(value, depth)
        if value[:1] not in ("[", "{"):
            return self._redact(value)
        if depth == 0 and len(value) in _REMEMBERED:
            return self._remembered(value, walk)
        return self._json_text(value, walk, depth)

    def _json_text(self, text: str, walk: Callable[[Any, int], Any], depth: int = 0) -> Any:
        try:
            return canonical_json(walk(msgspec.json.decode(text), depth)).decode()
        except (msgspec.DecodeError, RecursionError):  # cut, or no JSON after all
            return self._redact(text)

    def _messages(self, value: Any, depth: int) -> Any:
        """Messages, parts and tool definitions: labels stay, texts go."""
        if depth > _MAX_DEPTH:
            return self._drop(value)
        if type(value) is list:
            return [self._messages(item, depth + 1) for item in value]
        if type(value) is not dict:
            return self._drop(value)
        found: dict[str, Any] = {}
        for key, item in value.items():
            if key in _LABELS or (key == "name" and not _TOOLISH.isdisjoint(value)):
                found[key] = self._keep(item)
            elif key in _SCHEMAS:
                found[key] = self._drop(item)
            elif key in _CONTAINERS and type(item) in (list, dict):
                found[key] = self._messages(item, depth + 1)
            else:
                found[self._clean_key(key)] = self._json(item, self._tree, depth + 1)
        return found

    def _top(self, value: Any, depth: int) -> Any:
        """The top level of inputs, outputs and metadata, where LangGraph keeps its routing."""
        if type(value) is not dict or _ROUTING.isdisjoint(value):
            return self._tree(value, depth)
        return {
            self._clean_key(k): self._keep(v) if k in _ROUTING else self._json(v, self._tree, depth + 1)
            for k, v in value.items()
        }

    def _recorded(self, value: Any, depth: int) -> Any:
        """The messages of a model's request or answer as messages, everything else as arguments or results."""
        if _are_messages(value) or (type(value) is dict and "role" in value and "content" in value):
            return self._messages(value, depth)
        if type(value) is not dict:
            return self._tree(value, depth)
        return {
            self._clean_key(k): self._messages(v, depth + 1)
            if k in _DIALOGUES and _are_messages(v)
            else self._json(v, self._tree, depth + 1)
            for k, v in value.items()
        }

    def _tree(self, value: Any, depth: int) -> Any:
        """Arguments and results: keys stay, leaves go."""
        if depth > _MAX_DEPTH:
            return self._drop(value)
        if type(value) is list:
            return [self._json(item, self._tree, depth + 1) for item in value]
        if type(value) is dict:
            return {
                self._clean_key(k): v
                if k == "status" and type(v) is str and v in _OUTCOMES
                else self._json(v, self._tree, depth + 1)
                for k, v in value.items()
            }
        return self._drop(value)


def _are_messages(value: Any) -> bool:
    return (
        type(value) is list
        and bool(value)
        and all(
            type(m) is dict and ("role" in m or "message" in m or type(m.get("type")) is str) for m in value
        )
    )
