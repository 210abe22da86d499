"""The error tree. Families are named by what the caller does about them.

SpanloopError
├── ConfigError      a setting is wrong: say which, what was expected, what to do; exit 2
├── SchemaError      a record or span is malformed: reject it, keep its batch, dead-letter it
├── TransientError   may work on retry (a port refused, disk full, a busy file); exit 4
├── TerminalError    cannot work: stop the component; exit 1
└── StaleError       right, but too late or for another version: skip and count
"""

from __future__ import annotations

__all__ = ["ConfigError", "SchemaError", "SpanloopError", "StaleError", "TerminalError", "TransientError"]


class SpanloopError(Exception):
    """Root of all errors that spanloop raises on purpose; the message says what happened, what was
    expected and what to do next. Keyword arguments stay on the instance and survive pickling."""

    exit_code = 1

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self.message = message
        self.attributes = attributes

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.attributes))


def _rebuild(cls: type[SpanloopError], message: str, attributes: dict[str, object]) -> SpanloopError:
    return cls(message, **attributes)


class ConfigError(SpanloopError):
    """A setting, flag or file given by the user is wrong."""

    exit_code = 2


class SchemaError(SpanloopError):
    """A record, span or body does not have the shape it must have."""

    exit_code = 3


class TransientError(SpanloopError):
    """The same call may succeed later."""

    exit_code = 4


class TerminalError(SpanloopError):
    """The component cannot go on."""


class StaleError(SpanloopError):
    """The item is valid but superseded, or taught by a version that is too old."""
