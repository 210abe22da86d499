"""The vault: content sealed under the key of its trace, and opened where the key still is.

What is sealed is a text ``TRACE/SPAN/base64`` that anybody may carry along: spans, orchestrations, samples and states hold the
same bytes, so one destroyed key closes all of them. AES-256-GCM; the nonce is a keyed hash (BLAKE2b, a key of its own) of
what is sealed and where it belongs, so that sealing the same content again gives the same bytes: a retry is the same event.
The tenant, trace, span and kind are authenticated: sealed content moved elsewhere does not open.

Source: NIST SP 800-38D for GCM; RFC 8452 section 1 for nonces from the message.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from spanloop.pipeline.dialects.gateway import SEALED_TOKENS
from spanloop.pipeline.sealing.entries import ENTRY, sealed_by
from spanloop.pipeline.sealing.keys import KeyStore
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.orchestration import MenuOption, ModelCall, OrchestrationContent
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

__all__ = ["SEALED", "SEALED_TOKENS", "TOO_LARGE", "Hidden", "Place", "Tokens", "Vault", "hidden_of"]

SEALED = "spanloop.sealed"
"""Attribute of a span: what the allow-list took away, sealed."""
TOO_LARGE = "spanloop.sealed.too_large"
"""Attribute of a span whose content is larger than SEALED_MAX and was not kept."""
SEALED_MAX = 384 * 1024
"""Bytes of sealed content, before base64."""
_NONCE = 12
_SHORT = 512
"""Shorter content is not compressed."""


class Place(NamedTuple):
    """Where sealed content belongs: it opens nowhere else."""

    tenant: str
    trace_id: str
    span_id: str
    kind: str


class Hidden(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a span that the allow-list changed, as they came."""

    name: str | None = None
    status_message: str | None = None
    scope: str | None = None
    scope_version: str | None = None
    attributes: dict[str, Any] = {}
    gone: tuple[str, ...] = ()
    """Keys that stand for others in the redacted span."""
    resource: dict[str, Any] = {}
    resource_gone: tuple[str, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Token arrays of one model call; they fit together."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    menus: tuple[tuple[tuple[int, float], ...], ...] = ()


_hidden = msgspec.json.Decoder(Hidden)
_tokens = msgspec.json.Decoder(Tokens)


class Vault:
    """Seals and opens with the keys of one store.

    Raises:
        ConfigError: the package ``cryptography`` is not installed.
    """

    def __init__(self, keys: KeyStore) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as exc:
            raise ConfigError(
                "content.subject_keys needs the package cryptography: pip install cryptography"
            ) from exc
        self.keys = keys
        self._invalid = InvalidTag
        self._cipher = lru_cache(4096)(lambda key: AESGCM(key[:32]))

    # ------------------------------------------------------------ bytes

    def seal_bytes(self, key: bytes, place: bytes, data: bytes) -> bytes:
        """``data`` sealed for ``place``; the same arguments give the same bytes."""
        packed = b"z" + zlib.compress(data, 1) if len(data) > _SHORT else b"-" + data
        hashed = hashlib.blake2b(len(place).to_bytes(4, "big") + place, key=key[32:], digest_size=_NONCE)
        hashed.update(packed)
        nonce = hashed.digest()
        return nonce + self._cipher(key).encrypt(nonce, packed, place)

    def open_bytes(self, key: bytes, place: bytes, sealed: bytes) -> bytes | None:
        """What was sealed; None: another key or place, or it was changed."""
        try:
            packed = self._cipher(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], place)
        except (self._invalid, ValueError):
            return None
        return zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]

    def seal_text(self, key: bytes, place: Place, data: bytes) -> str:
        """``data`` as a text that says whose key opens it; empty: too large."""
        sealed = self.seal_bytes(key, _place(*place), data)
        if len(sealed) > SEALED_MAX:
            return ""
        return f"{place.trace_id}/{place.span_id}/{base64.b64encode(sealed).decode('ascii')}"

    def open_text(self, tenant: str, text: str, kind: str) -> bytes | None:
        """What ``seal_text`` sealed; None: erased, or no such text."""
        trace_id, _, rest = text.partition("/")
        span_id, _, encoded = rest.partition("/")
        key = self.keys.find(tenant, trace_id)
        if key is None:
            return None
        try:
            sealed = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return None
        return self.open_bytes(key, _place(tenant, trace_id, span_id, kind), sealed)

    # ------------------------------------------------------------ spans

    def seal_span(
        self, key: bytes, tenant: str, raw: Span, shown: Span, tokens: Tokens | None = None
    ) -> Span:
        """``shown`` (what the allow-list leaves of ``raw``) with what it took away, sealed. Ids are those of ``shown``."""
        added: dict[str, Any] = {}
        at = (tenant, shown.trace_id, shown.span_id)
        hidden = hidden_of(raw, shown)
        if hidden is not None:
            text = self.seal_text(key, Place(*at, SEALED), canonical_json(hidden))
            added[SEALED if text else TOO_LARGE] = text or True
        if tokens is not None:
            text = self.seal_text(key, Place(*at, SEALED_TOKENS), canonical_json(tokens))
            added[SEALED_TOKENS if text else TOO_LARGE] = text or True
        if not added:
            return shown
        return msgspec.structs.replace(shown, attributes={**shown.attributes, **added})

    def open_span(self, tenant: str, span: Span) -> Span | None:
        """The span as it came, without its token arrays; None: its content was erased. A span without sealed content is
        returned as it is."""
        text = span.attributes.get(SEALED)
        if not isinstance(text, str):
            return span
        data = self.open_text(tenant, text, SEALED)
        if data is None:
            return None
        hidden = _hidden.decode(data)
        attributes = {
            k: v
            for k, v in span.attributes.items()
            if k not in hidden.gone and k not in (SEALED, SEALED_TOKENS, TOO_LARGE)
        }
        changes: dict[str, Any] = {
            name: value
            for name in ("name", "status_message", "scope", "scope_version")
            if (value := getattr(hidden, name)) is not None
        }
        if hidden.events:
            changes["events"] = hidden.events
        if hidden.links:
            changes["links"] = hidden.links
        if hidden.resource or hidden.resource_gone:
            kept = {k: v for k, v in span.resource.items() if k not in hidden.resource_gone}
            changes["resource"] = {**kept, **hidden.resource}
        return msgspec.structs.replace(span, attributes={**attributes, **hidden.attributes}, **changes)

    # ------------------------------------------------------------ what is derived

    def open_tokens(self, tenant: str, text: str) -> Tokens | None:
        """Token arrays of a sealed call; None: erased."""
        data = self.open_text(tenant, text, SEALED_TOKENS)
        return None if data is None else _tokens.decode(data)

    def open_content(self, content: OrchestrationContent) -> OrchestrationContent:
        """``content`` with the token arrays of its sealed calls; a call whose key is gone stays without."""
        if not any(call.sealed for call in content.calls):
            return content
        calls = tuple(self._opened(content.tenant, call) if call.sealed else call for call in content.calls)
        return msgspec.structs.replace(content, calls=calls)

    def _opened(self, tenant: str, call: ModelCall) -> ModelCall:
        found = self.open_tokens(tenant, call.sealed)
        if found is None:
            return call
        return msgspec.structs.replace(
            call,
            prompt_token_ids=found.prompt,
            response_token_ids=found.response,
            logprobs=found.logprobs,
            menus=tuple(tuple(MenuOption(t, p) for t, p in menu) for menu in found.menus),
        )

    def open_samples(self, built: SamplesBuilt) -> SamplesBuilt:
        """``built`` with the token arrays of its sealed rows."""
        if not any(row.sealed for row in built.rows):
            return built
        return msgspec.structs.replace(
            built, rows=tuple(self._row(built.tenant, row) if row.sealed else row for row in built.rows)
        )

    def _row(self, tenant: str, row: Sample) -> Sample:
        found = self.open_tokens(tenant, row.sealed)
        if found is None:
            return row
        fits = len(found.menus) == len(found.response)
        return msgspec.structs.replace(
            row,
            prompt_token_ids=found.prompt,
            response_token_ids=found.response,
            logprobs=found.logprobs,
            menu_ids=tuple(tuple(t for t, _ in menu) for menu in found.menus) if fits else (),
            menu_logprobs=tuple(tuple(p for _, p in menu) for menu in found.menus) if fits else (),
        )

    def is_erased(self, content: OrchestrationContent) -> bool:
        """Whether token arrays of any of its calls can no longer be read."""
        return any(
            call.sealed and self.open_tokens(content.tenant, call.sealed) is None for call in content.calls
        )

    # ------------------------------------------------------------ entries of states

    def seal_entry(self, tenant: str, trace_id: str, data: bytes) -> bytes:
        """A state's entry that is made of a trace's content; as it is where the trace never had a key."""
        key = self.keys.find(tenant, trace_id)
        if key is None:
            return data if trace_id not in self.keys.known(tenant, [trace_id]) else ENTRY
        place = _place(tenant, trace_id, "", "entry")
        return ENTRY + trace_id.encode() + b"/" + self.seal_bytes(key, place, data)

    def open_entry(self, tenant: str, data: bytes) -> bytes | None:
        """What ``seal_entry`` was given; None: erased."""
        if data[:1] != ENTRY:
            return data
        trace_id, sealed = sealed_by(data), data[1:].partition(b"/")[2]
        key = self.keys.find(tenant, trace_id)
        return None if key is None else self.open_bytes(key, _place(tenant, trace_id, "", "entry"), sealed)


def hidden_of(raw: Span, shown: Span) -> Hidden | None:
    """What of ``raw`` does not stand in ``shown``; None: nothing."""
    changes: dict[str, Any] = {
        name: value
        for name in ("name", "status_message", "scope", "scope_version")
        if (value := getattr(raw, name)) != getattr(shown, name)
    }
    for name in ("attributes", "resource"):
        before, after = getattr(raw, name), getattr(shown, name)
        if before == after:
            continue
        lost = {
            k: v
            for k, v in before.items()
            if k not in after or after[k] != v or type(after[k]) is not type(v)
        }
        if lost:
            changes[name] = lost
        if gone := tuple(sorted(k for k in after if k not in before)):
            changes["gone" if name == "attributes" else "resource_gone"] = gone
    for name in ("events", "links"):
        if getattr(raw, name) != getattr(shown, name):
            changes[name] = getattr(raw, name)
    return Hidden(**changes) if changes else None


def _place(*parts: str) -> bytes:
    return "\0".join(parts).encode("utf-8", "surrogatepass")
