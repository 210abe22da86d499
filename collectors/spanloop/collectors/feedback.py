"""Feedback: outcomes and scores from a scorer's credential, one object or an array, into ``FeedbackReceived`` events.

Idempotent: an item's id is made of the client's ``feedback_id`` (or the target) and the content, so that a repeat is
the same event and a correction under the same ``feedback_id`` is a new one. Of several for one (target, name,
scorer) the latest counts; ``observed_at`` decides, the time of arrival where it is absent.

``value`` must be a JSON number: true and "0.5" are refused rather than guessed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from spanloop.collectors.redaction import Redactor
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.ids import is_hex_id

__all__ = ["FeedbackItem", "Parsed", "parse_feedback"]

MAX_ITEMS = 10_000
MAX_AHEAD_NS = 300 * 10**9
"""An observation may be this far in the future (clocks differ); more would win for ever."""


def _hex(length: int) -> Any:
    def check(value: str) -> str:
        lower = value.lower()
        if not is_hex_id(lower, length):
            raise ValueError(f"expected {length} hex digits that are not all zero")
        return lower

    return Annotated[str, AfterValidator(check)]


class FeedbackItem(BaseModel):
    """What a scorer sends."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    orchestration_id: _hex(32) | None = None  # type: ignore[valid-type]
    trace_id: _hex(32) | None = None  # type: ignore[valid-type]
    span_id: _hex(16) | None = None  # type: ignore[valid-type]
    response_id: str | None = Field(None, min_length=1, max_length=256)
    """Id that the model server gave to a response."""
    value: float = Field(ge=-1e9, le=1e9, allow_inf_nan=False)
    name: str = Field("outcome", pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    label: str = Field("", max_length=64)
    comment: str = Field("", max_length=64 * 1024)
    feedback_id: str = Field("", max_length=256)
    observed_at: Annotated[AwareDatetime, Field(strict=False)] | int | None = None
    """ISO 8601 with a zone, or nanoseconds since 1970."""
    final: bool = True

    @model_validator(mode="after")
    def _one_target(self) -> FeedbackItem:
        given = [
            k
            for k in ("orchestration_id", "trace_id", "span_id", "response_id")
            if getattr(self, k) is not None
        ]
        if len(given) != 1 and given != ["trace_id", "span_id"]:
            found = " and ".join(given) or "none of them"
            raise ValueError(
                "name one target: orchestration_id, trace_id, span_id (with or without its trace_id) or response_id; "
                f"found {found}"
            )
        return self

    @property
    def target(self) -> tuple[str, str]:
        """(kind, id)."""
        for kind in ("orchestration", "span", "trace", "response"):
            found = getattr(self, f"{kind}_id")
            if found is not None:
                return kind, found
        raise AssertionError("the validator lets no item without target pass")

    def observed_ns(self) -> int | None:
        """Nanoseconds since 1970 as given, None when the sender gave none."""
        if isinstance(self.observed_at, datetime):
            since = self.observed_at - datetime(
                1970, 1, 1, tzinfo=UTC
            )  # astimezone overflows in years 1 and 9999
            return (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000
        return self.observed_at


class Parsed(msgspec.Struct):
    """Events of the good items and, by index, why the others were refused."""

    events: list[FeedbackReceived]
    indexes: list[int]
    rejected: list[dict[str, Any]]


def parse_feedback(data: Any, *, tenant: str, scorer: str, now_ns: int, redactor: Redactor) -> Parsed:
    """Events of a parsed body (an object or an array). Raises SchemaError when it is neither, or too many."""
    if not isinstance(data, (dict, list)):
        raise SchemaError("expected a JSON object or an array of objects")
    items = data if isinstance(data, list) else [data]
    if len(items) > MAX_ITEMS:
        raise SchemaError(f"{len(items)} items in one request, at most {MAX_ITEMS}")
    parsed = Parsed([], [], [])
    for index, item in enumerate(items):
        try:
            event = _event(FeedbackItem.model_validate(item), tenant, scorer, now_ns, redactor)
        except ValidationError as exc:
            parsed.rejected.append({"index": index, "reason": _reason(exc)})
        except SchemaError as exc:
            parsed.rejected.append({"index": index, "reason": exc.message})
        else:
            parsed.events.append(event)
            parsed.indexes.append(index)
    return parsed


def _event(item: FeedbackItem, tenant: str, scorer: str, now_ns: int, redactor: Redactor) -> FeedbackReceived:
    kind, target = item.target
    given_ns = item.observed_ns()
    if given_ns is not None and not 0 <= given_ns <= now_ns + MAX_AHEAD_NS:
        raise SchemaError("observed_at: before 1970 or more than five minutes ahead of this machine's clock")
    identity = digest(
        "feedback_id", item.feedback_id, kind, target, item.name, scorer, repr(float(item.value)), item.label,
        item.comment, "" if given_ns is None else given_ns, int(item.final),
    )  # fmt: skip
    return FeedbackReceived(
        tenant=tenant,
        feedback_id=f"{redactor.label(item.feedback_id)}:{identity[:16]}" if item.feedback_id else identity,
        target_kind=kind,
        target_id=target,
        trace_id=(item.trace_id or "") if kind == "span" else "",
        value=float(item.value) + 0.0,  # -0.0 is 0.0
        name=item.name,
        label=redactor.label(item.label),
        comment=redactor.text(item.comment) or None,
        scorer=scorer,
        observed_ns=now_ns if given_ns is None else given_ns,
        final=item.final,
    )


def _reason(exc: ValidationError) -> str:
    lines = []
    for error in exc.errors(include_url=False, include_context=False, include_input=False)[:5]:
        where = ".".join(str(p) for p in error["loc"])
        lines.append(f"{where}: {error['msg']}" if where else error["msg"])
    return "; ".join(lines)
