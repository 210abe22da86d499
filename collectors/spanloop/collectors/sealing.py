"""What was taken away by the allow-list, kept under keys: the ``Sealer`` that collectors use where content.subject_keys is on.

Place in the flow: behind redaction and before the limits' last look, so that what reaches the log, the spool or a topic is the
redacted span with sealed attributes beside it. A trace whose key was destroyed, or whose subject was erased, has none.
Invariants: a key is durable before what it seals is written; where a key cannot be had, no content is kept (the gateway) or
the request is refused for now (everything else).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from spanloop.collectors.limits import cut_span
from spanloop.pipeline.dialects.gateway import UNFIT, token_arrays
from spanloop.pipeline.sealing.opening import open_vault
from spanloop.pipeline.sealing.vault import Tokens, Vault
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings
from spanloop.schemas.spans import Span

__all__ = ["TOKENS", "Sealer", "open_sealer"]

_log = logging.getLogger(__name__)
TOKENS = (
    "spanloop.prompt_token_ids",
    "spanloop.response_token_ids",
    "spanloop.response_logprobs",
    "spanloop.menus",
)
"""Attributes that a sealed span of the gateway has not."""
_NAME_MAX = 512
"""Longer values name nobody."""


class Sealer:
    """Seals what the allow-list takes away.

    Args:
        vault: of the deployment.
        subjects: attributes that say whom a trace is about.
        max_attribute_bytes: longer values are cut before they are sealed.
    """

    def __init__(self, vault: Vault, subjects: Sequence[str], max_attribute_bytes: int) -> None:
        self.vault = vault
        self._subjects = tuple(subjects)
        self._max_attribute_bytes = max_attribute_bytes
        self.num_unkept = 0
        """Spans whose content was not kept, because their subject was erased or there was no key."""

    def batch(self, raw: Sequence[Span], shown: Sequence[Span], tenant: str) -> list[Span]:
        """``shown`` (what the allow-list leaves of ``raw``, one by one, with their ids) with content sealed.

        Raises:
            TransientError: the key store cannot be written now.
        """
        named: dict[str, set[str]] = {}
        for before, after in zip(raw, shown, strict=True):
            named.setdefault(after.trace_id, set()).update(self._named(before, tenant))
        keys = self.vault.keys.ensure(tenant, named)
        found: list[Span] = []
        for before, after in zip(raw, shown, strict=True):
            key = keys[after.trace_id]
            if key is None:
                self.num_unkept += 1
                found.append(after)
            else:
                found.append(self._seal(key, tenant, before, after))
        return found

    def call(self, raw: Span, shown: Span, tenant: str) -> Span:
        """A span of our own gateway: its token arrays are sealed too. ``shown`` may still hold them. Never raises for the key store:
        a call is recorded without content rather than not at all."""
        arrays = token_arrays(raw.attributes)
        bare = _without(raw, TOKENS)
        shown = _without(shown, TOKENS)
        if not arrays.fit:
            shown = msgspec.structs.replace(shown, attributes={**shown.attributes, UNFIT: True})
        try:
            key = self.vault.keys.ensure(tenant, {shown.trace_id: self._named(raw, tenant)})[shown.trace_id]
        except TransientError as exc:
            _log.warning("a call is recorded without its content: %s", exc.message)
            key = None
        if key is None:
            self.num_unkept += 1
            return shown
        tokens = Tokens(*arrays[:4]) if arrays.prompt or arrays.response else None
        return self._seal(key, tenant, bare, shown, tokens)

    def _seal(self, key: bytes, tenant: str, raw: Span, shown: Span, tokens: Tokens | None = None) -> Span:
        return self.vault.seal_span(key, tenant, cut_span(raw, self._max_attribute_bytes), shown, tokens)

    def _named(self, span: Span, tenant: str) -> Iterable[str]:
        for attributes in (span.attributes, span.resource):
            for attribute in self._subjects:
                value = _text(attributes.get(attribute))
                if value:
                    yield self.vault.keys.subject(tenant, attribute, value)


def open_sealer(settings: Settings) -> Sealer | None:
    """The deployment's sealer; None: content.subject_keys is off."""
    if not settings.content.subject_keys:
        return None
    vault = open_vault(settings)
    if vault is None:
        return None
    return Sealer(vault, settings.content.subjects, settings.collector.max_attribute_bytes)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    text = (
        value if isinstance(value, str) else canonical_json(value).decode() if isinstance(value, int) else ""
    )
    return text if len(text) <= _NAME_MAX else ""


def _without(span: Span, keys: Sequence[str]) -> Span:
    if not any(key in span.attributes for key in keys):
        return span
    attributes = {k: v for k, v in span.attributes.items() if k not in keys}
    return msgspec.structs.replace(span, attributes=attributes)
