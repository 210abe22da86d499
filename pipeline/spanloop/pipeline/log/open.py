"""The log of a deployment: Kafka where ``bootstrap_servers`` is set, else the workspace's SQLite file."""

from __future__ import annotations

from spanloop.pipeline.ports import Clock, Log
from spanloop.schemas.settings import Settings

__all__ = ["open_log"]


def open_log(settings: Settings, clock: Clock | None = None, *, create: bool = True) -> Log:
    """Open the log that settings name.

    Args:
        settings: of the deployment.
        clock: stamps what is appended.
        create: make the file or the topics where they are missing; False raises ConfigError then.
    """
    if settings.bootstrap_servers:
        from spanloop.pipeline.log.kafka import KafkaLog

        return KafkaLog(settings.bootstrap_servers, settings.kafka, clock, create=create)
    from spanloop.pipeline.log.sqlite import SqliteLog

    return SqliteLog(settings.database, clock, create=create)
