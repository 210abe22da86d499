"""Port of the key store: a random key for each trace, and which subjects a trace is about.

It stands outside the log: what the log, state and archive hold of content is readable only with a key from here. Invariants:
a key that ``ensure`` returned is durable and never changes; a destroyed key never comes back, and its trace never gets
another; a trace of a subject that was erased gets none. Any adapter must pass ``tests/unit/test_sealing_keys.py``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["KEY_BYTES", "KeyStore", "MemoryKeys", "subject_name"]

KEY_BYTES = 64
"""32 for the cipher, 32 for its nonces."""

Found = dict[str, bytes | None]
"""Key by trace id; None: it was destroyed, the trace's content is not kept."""


class KeyStore(Protocol):
    """Keys of one deployment."""

    def subject(self, tenant: str, attribute: str, value: str) -> str:
        """Name of a subject in this store: a keyed hash, so that the store lists no persons."""
        ...

    def ensure(self, tenant: str, traces: Mapping[str, Iterable[str]]) -> Found:
        """Keys of traces, made where there are none; ``traces``: trace id -> subjects that spans just named.

        Raises:
            TransientError: they cannot be made durable now.
        """
        ...

    def find(self, tenant: str, trace_id: str) -> bytes | None:
        """The key of a trace; None: there is none or it was destroyed."""
        ...

    def known(self, tenant: str, trace_ids: Iterable[str]) -> set[str]:
        """Those of ``trace_ids`` that have or had a key: others were never sealed here."""
        ...

    def traces_of(self, tenant: str, subjects: Iterable[str]) -> set[str]:
        """Traces in which any of the subjects was named."""
        ...

    def destroy(self, tenant: str, trace_ids: Iterable[str], subjects: Iterable[str], now_ns: int) -> int:
        """Destroy keys for good and refuse new ones for these traces and subjects; returns how many keys there were."""
        ...

    def readmit(self, tenant: str, subjects: Iterable[str]) -> None:
        """Let later traces of erased subjects have keys again; what was destroyed stays so."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


def subject_name(salt: bytes, tenant: str, attribute: str, value: str) -> str:
    """32 hex digits that stand for a subject."""
    parts = b"\0".join(part.encode("utf-8", "surrogatepass") for part in (tenant, attribute, value))
    return hashlib.blake2b(parts, key=salt[:64], digest_size=16).hexdigest()


class MemoryKeys:
    """A KeyStore that ends with the process: for tests and simulations."""

    def __init__(self, salt: bytes = b"") -> None:
        self._salt = salt or secrets.token_bytes(32)
        self._keys: dict[tuple[str, str], bytes | None] = {}
        self._links: dict[tuple[str, str], set[str]] = {}
        self._erased: set[tuple[str, str]] = set()

    def subject(self, tenant: str, attribute: str, value: str) -> str:
        return subject_name(self._salt, tenant, attribute, value)

    def ensure(self, tenant: str, traces: Mapping[str, Iterable[str]]) -> Found:
        found: Found = {}
        for trace_id, subjects in traces.items():
            name = (tenant, trace_id)
            if name not in self._keys:
                self._keys[name] = secrets.token_bytes(KEY_BYTES)
            for subject in subjects:
                self._links.setdefault((tenant, subject), set()).add(trace_id)
                if (tenant, subject) in self._erased:
                    self._keys[name] = None
            found[trace_id] = self._keys[name]
        return found

    def find(self, tenant: str, trace_id: str) -> bytes | None:
        return self._keys.get((tenant, trace_id))

    def known(self, tenant: str, trace_ids: Iterable[str]) -> set[str]:
        return {t for t in trace_ids if (tenant, t) in self._keys}

    def traces_of(self, tenant: str, subjects: Iterable[str]) -> set[str]:
        return {trace for subject in subjects for trace in self._links.get((tenant, subject), ())}

    def destroy(self, tenant: str, trace_ids: Iterable[str], subjects: Iterable[str], now_ns: int) -> int:
        count = 0
        for trace_id in trace_ids:
            count += self._keys.get((tenant, trace_id)) is not None
            self._keys[tenant, trace_id] = None
        self._erased.update((tenant, subject) for subject in subjects)
        return count

    def readmit(self, tenant: str, subjects: Iterable[str]) -> None:
        self._erased.difference_update((tenant, subject) for subject in subjects)

    def close(self) -> None:
        """Nothing is held."""
