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
from typing import Any, NamedTuple

import msgspec

from spanloop.collectors.allowlist import DROP, KEEP, LABELS, MESSAGES, RECORDED, classify
from spanloop.collectors.labels import HEX, LABEL_MAX, has_secret, looks_like_label
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
_SHAPES_MAX = 4 * 2**20
"""Sets of keys are remembered with what becomes of each: so many characters of keys, each key counted as _COLUMN more."""
_COLUMN = 256
_REMEMBERED = range(64, 16_384)
"""Lengths of JSON texts whose result is remembered: tool definitions and histories come again and again."""


class _Column(NamedTuple):
    """What becomes of the values under one key among certain others."""

    key: str
    """As it came."""
    written: str
    """As it is written."""
    plain: bool
    """A count or an id in hex stays without a second look."""
    texts: dict[str, Any] | None
    """Short texts as they came, and what is written for them; None: not remembered."""


class _Shape(NamedTuple):
    """The keys of an attribute map: spans of one kind have the same, again and again."""

    reserved: bool
    """Whether there are some that a sender may not set."""
    columns: list[_Column]


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
        self._short_key = lru_cache(4096)(self._make_clean_key)
        self._short_name = lru_cache(4096)(self._make_name)
        self._resource: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._shapes: tuple[dict[tuple[str, ...], _Shape], dict[tuple[str, ...], _Shape]] = ({}, {})
        """By the keys in their order, of spans and of events."""
        self._short: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]] = ({}, {})
        """Short texts by key."""
        self._num_short = 0
        self._shapes_size = 0
        self.reserved_removed = 0

    def span(self, span: Span, *, trusted: bool = False) -> Span:
        """``span`` as it may be written; ``trusted``: from our own gateway, which may set ``spanloop.*`` and its own scope."""
        if span.scope == GATEWAY and not trusted:
            self.reserved_removed += 1
            span = msgspec.structs.replace(span, scope="")
        attributes, removed = span.attributes, 0
        shape = self._shape(attributes, event=False)
        if shape.reserved and not trusted:
            attributes, removed = self._without_reserved(attributes)
            shape = self._shape(attributes, event=False)
        if self._keep_content:
            if not removed:
                return span
            return msgspec.structs.replace(
                span, attributes=attributes, dropped_attributes=span.dropped_attributes + removed
            )
        return Span(  # by position: names cost as much as the rest of it
            span.trace_id,
            span.span_id,
            self._name(span.name),
            span.start_ns,
            span.end_ns,
            span.parent_span_id,
            span.kind,
            span.status,
            self.text_stand_in(span.status_message) if span.status_message else "",
            self._written(attributes, shape.columns, event=False),
            tuple(self._event(event) for event in span.events) if span.events else (),
            tuple(SpanLink(x.trace_id, x.span_id, self._attributes(x.attributes)) for x in span.links)
            if span.links
            else (),
            self._name(span.scope),
            self._name(span.scope_version),
            self._of_resource(span.resource),
            span.dropped_attributes + removed,
        )

    def text(self, text: str) -> Any:
        """A free text (a comment): itself where content is kept, else its stand-in."""
        return text if self._keep_content or not text else self._redact(text)

    def attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Attributes of a span, none of them reserved, as they may be written."""
        return attributes if self._keep_content else self._attributes(attributes)

    def resource(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Attributes of a resource."""
        return attributes if self._keep_content else self._of_resource(attributes)

    def name(self, text: str) -> str:
        """The name of a span or scope."""
        return text if self._keep_content else self._name(text)

    def message(self, text: str) -> str:
        """What a span's status says."""
        return text if self._keep_content or not text else self.text_stand_in(text)

    def written_key(self, key: str) -> str:
        """The key of a span's attribute as it may be written."""
        if self._keep_content or self._is_allowed(key) or classify(key) is not DROP:
            return key
        return self._clean_key(key)

    def keeps_ids(self, key: str) -> bool:
        """Whether an id in hex under the key stays as it is."""
        return self._keep_content or self._is_allowed(key) or classify(key) is KEEP

    def is_alone(self, key: str) -> bool:
        """Whether what becomes of an attribute of a span is told by it alone: it is not reserved, and its neighbours do not count."""
        return key != "name" and not _is_reserved(key)

    def label(self, text: str) -> str:
        """A short name given by a client: itself when it looks like a label, else its stand-in as text."""
        return text if self._keep_content or looks_like_label(text) else self.text_stand_in(text)

    def text_stand_in(self, text: str) -> str:
        """The stand-in where the schema has room for a text only."""
        return f"redacted:{len(text)}:{self._hmac(text)}"

    def _name(self, name: str) -> str:
        return self._short_name(name) if len(name) <= LABEL_MAX else self.text_stand_in(name)

    def _make_name(self, name: str) -> str:
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
        bad = {key for key in attributes if _is_reserved(key)}
        self.reserved_removed += len(bad)
        return {k: v for k, v in attributes.items() if k not in bad}, len(bad)

    def _shape(self, attributes: dict[str, Any], *, event: bool) -> _Shape:
        keys = tuple(attributes)
        return self._shapes[event].get(keys) or self._new_shape(keys, event=event)

    def _new_shape(self, keys: tuple[str, ...], *, event: bool) -> _Shape:
        self._shapes_size += sum(map(len, keys)) + _COLUMN * len(keys)
        if self._shapes_size > _SHAPES_MAX:
            self._shapes_size = self._num_short = 0
            for known in (*self._shapes, *self._short):
                known.clear()
        columns = [self._column(key, event=event) for key in keys]
        found = self._shapes[event][keys] = _Shape(any(map(_is_reserved, keys)), columns)
        return found

    def _column(self, key: str, *, event: bool) -> _Column:
        if self._is_allowed(key):
            return _Column(key, key, plain=True, texts=None)
        kind = classify(key, event)
        written = self._clean_key(key) if kind is DROP else key
        texts = self._short[event].setdefault(key, {}) if key != "name" else None
        return _Column(key, written, kind is KEEP, texts)

    def _is_allowed(self, key: str) -> bool:
        """Whether the deployment lets the key through as it is."""
        return key in self._exact or (bool(self._prefixes) and key.startswith(self._prefixes))

    def _attributes(self, attributes: dict[str, Any], event: bool = False) -> dict[str, Any]:
        return self._written(attributes, self._shape(attributes, event=event).columns, event=event)

    def _written(self, attributes: dict[str, Any], columns: list[_Column], *, event: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (key, written, plain, texts), value in zip(columns, attributes.values(), strict=True):
            kind = type(value)
            if kind is str:
                new = texts.get(value) if texts is not None else None
                if new is None:
                    if plain and HEX.match(value):
                        new = value
                    else:
                        new = self._attribute(key, value, attributes, event=event)
                        if texts is not None and len(value) <= _SHORT:
                            self._remember_short(texts, value, new)
            elif kind is int and plain:
                new = value
            else:
                new = self._attribute(key, value, attributes, event=event)
            found[written] = new
        return found

    def _remember_short(self, texts: dict[str, Any], value: str, new: Any) -> None:
        if self._num_short >= _SHORT_MAX:
            self._num_short = 0
            for by_key in self._short:
                for known in by_key.values():
                    known.clear()
        self._num_short += 1
        texts[value] = new

    def _attribute(self, key: str, value: Any, attributes: dict[str, Any], *, event: bool) -> Any:
        """The value of one attribute as it may be written. Only the key "name" looks at its neighbours."""
        if self._is_allowed(key):
            return value
        kind = classify(key, event)
        if kind is KEEP or (kind is DROP and key == "name" and "logfire.msg_template" in attributes):
            return self._keep(value)
        if kind is LABELS:
            return self._label_json(value)
        if kind is RECORDED:
            return self._json(value, self._recorded, 0)
        if kind is not DROP:
            return self._json(value, self._messages if kind is MESSAGES else self._top, 0)
        if key in _TEMPLATES and type(value) is str and len(value) <= 256 and not has_secret(value):
            return value
        return self._drop(value)

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

    def _clean_key(self, key: str) -> str:
        return self._short_key(key) if len(key) <= LABEL_MAX else f"redacted:{self._hmac(key)}"

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


def _is_reserved(key: str) -> bool:
    """Whether a sender may not set the attribute."""
    return key.startswith(RESERVED) and key not in _SENDERS_OWN and not key.startswith(PREFIX)


def _are_messages(value: Any) -> bool:
    return (
        type(value) is list
        and bool(value)
        and all(
            type(m) is dict and ("role" in m or "message" in m or type(m.get("type")) is str) for m in value
        )
    )
