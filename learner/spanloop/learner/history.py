"""Reading the topics that the learner and its verbs fold: policies and samples. Imports no torch.

Invariant: a record that cannot be read is logged and skipped; it never stops training or a verb.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from spanloop.pipeline.log import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import Event, SamplesBuilt, decode

__all__ = ["decode_samples", "fetcher", "read_policies", "read_samples"]

_LOG = logging.getLogger(__name__)


def read_policies(log: Log, tenant: str, policy: str) -> list[tuple[Event, int]]:
    """All events of one policy with their append times, in order. Records that cannot be read are skipped and logged."""
    found: list[tuple[Event, int]] = []
    for record in scan(log, [topics.POLICIES]):
        if record.key != f"{tenant}/{policy}":
            continue
        try:
            found.append((decode(record.value), record.appended_ns))
        except SchemaError as exc:
            _LOG.warning("policies offset %d is skipped: %s", record.offset, exc.message)
    return found


def read_samples(log: Log, tenant: str, after: int, upto: int) -> Iterable[tuple[SamplesBuilt, int]]:
    """SamplesBuilt of a tenant with offsets in (after, upto], in order. Malformed records are skipped and logged."""
    for record in scan(log, [topics.SAMPLES], after={topics.SAMPLES: after}, upto={topics.SAMPLES: upto}):
        built = decode_samples(record.value, tenant)
        if built is not None:
            yield built, record.offset


def fetcher(log: Log, tenant: str) -> Callable[[int], SamplesBuilt | None]:
    """Reads the samples at one offset; None where they are not this tenant's, or cannot be read any more."""

    def fetch(offset: int) -> SamplesBuilt | None:
        return next((built for built, _ in read_samples(log, tenant, offset - 1, offset)), None)

    return fetch


def decode_samples(value: bytes, tenant: str) -> SamplesBuilt | None:
    """A SamplesBuilt of this tenant, else None (malformed ones are logged; a bad record never stops training)."""
    try:
        event = decode(value)
    except SchemaError as exc:
        _LOG.warning("a sample is skipped: %s", exc.message)
        return None
    return event if isinstance(event, SamplesBuilt) and event.tenant == tenant else None
