"""Value models of a replay: copied out of the archive once, read by version when credit needs one.

Invariants: of a version published twice the first counts, as in the signal stage; the newest is the last new version on the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property

import msgspec

from spanloop.pipeline.archive.files import Files
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import ValueModelPublished, decode

__all__ = ["Models", "copy_models"]

KEPT = 24
"""Models in memory; one is about 2 MB and remembers up to some ten MB of answers."""
_NEWEST = "newest.json"


def copy_models(values: Iterable[bytes], files: Files, folder: str) -> dict[str, str]:
    """Write each version to a file of its own; returns the newest version by tenant.

    Args:
        values: Records of ``models``, in log order.
        files: Where to.
        folder: Relative to its root.
    """
    known: set[str] = set()
    newest: dict[str, str] = {}
    for value in values:
        try:
            event = decode(value)
        except SchemaError:
            continue  # the stream dead-lettered it too
        if not isinstance(event, ValueModelPublished):
            continue
        name = _name(event.tenant, event.version)
        if name in known:
            continue
        try:
            ValueModel.from_dict(event.parameters)
        except SchemaError:
            continue
        known.add(name)
        newest[event.tenant] = event.version
        files.write(f"{folder}/{name}.json", value)
    files.write(f"{folder}/{_NEWEST}", msgspec.json.encode(newest))
    return newest


def _name(tenant: str, version: str) -> str:
    return digest("value_model", tenant, version)


class Models:
    """Reads what ``copy_models`` wrote.

    Args:
        files: Where.
        folder: Relative to its root.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder
        self._kept: OrderedDict[str, Asking | None] = OrderedDict()

    @cached_property
    def newest(self) -> dict[str, str]:
        """Newest version by tenant."""
        return msgspec.json.decode(self._files.read(f"{self._folder}/{_NEWEST}"), type=dict[str, str])

    def asking(self, tenant: str, version: str) -> Asking | None:
        """A version ready to be asked; None where the archive has none of that name."""
        name = _name(tenant, version)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        try:
            event = decode(self._files.read(f"{self._folder}/{name}.json"))
        except FileNotFoundError:
            found = None
        else:
            assert isinstance(event, ValueModelPublished)  # noqa: S101
            found = Asking(ValueModel.from_dict(event.parameters))
        self._kept[name] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found
