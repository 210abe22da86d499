"""The vault of a deployment, and a log whose samples are opened as they are read: for the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from spanloop.pipeline.ports import Appended, Log, LogRecord, NewRecord
from spanloop.pipeline.sealing.vault import Vault
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import SamplesBuilt, decode, encode
from spanloop.schemas.settings import Settings

__all__ = ["OpenedLog", "keys_path", "open_vault", "opened_log", "vault_at"]

_MARK = b'"sealed":"'


def keys_path(settings: Settings) -> Path:
    """Where the key store of a deployment is."""
    return (
        Path(settings.content.keys) if settings.content.keys else settings.workspace / "keys" / "subjects.db"
    )


def open_vault(settings: Settings) -> Vault | None:
    """The deployment's vault; None: content.subject_keys is off and never was on."""
    from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys

    path = keys_path(settings)
    if not settings.content.subject_keys and not path.exists():
        return None
    return Vault(SqliteKeys(path))


def vault_at(path: str) -> Vault | None:
    """The vault over a key store that is there, for a process that only opens; None: no path."""
    from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys

    return Vault(SqliteKeys(Path(path), create=False)) if path else None


class OpenedLog:
    """A log whose sealed samples come with their token arrays, where their keys still are. Everything else is the log's."""

    def __init__(self, log: Log, vault: Vault) -> None:
        self._log = log
        self._vault = vault

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        return [self._opened(record) for record in self._log.read(topic_names, after, limit)]

    def _opened(self, record: LogRecord) -> LogRecord:
        if record.topic != topics.SAMPLES or _MARK not in record.value:
            return record
        try:
            event = decode(record.value)
        except SchemaError:
            return record
        if not isinstance(event, SamplesBuilt):
            return record
        return msgspec.structs.replace(record, value=encode(self._vault.open_samples(event)))

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        return self._log.append(records)

    def end(self, source: str) -> int:
        return self._log.end(source)

    def sources(self, topic: str) -> tuple[str, ...]:
        return self._log.sources(topic)

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        self._log.commit(group, offsets)

    def committed(self, group: str) -> dict[str, int]:
        return self._log.committed(group)

    def close(self) -> None:
        self._log.close()
        self._vault.keys.close()


def opened_log(log: Log, settings: Settings) -> Log:
    """``log`` for a reader of samples."""
    vault = open_vault(settings)
    return log if vault is None else OpenedLog(log, vault)
