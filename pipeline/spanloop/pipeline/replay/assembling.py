"""Rows of one orchestration to its result: content, rewards, credit, samples, and their hashes. Pure.

Place in the flow: behind the grouping, in the local run as in one big pipeline. Assembly and derivation are the stream's own
functions (``build_content``, ``compose`` and the batch form of the signal stage); what is here is what the stages keep in their
state: the winners of spans, who feedback belongs to, the recorded version.

Invariants: a result depends on the set of rows only. Values of one model are asked for many orchestrations at once, which
changes no number (``value_model``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from spanloop.pipeline.assembly.join import MAX_SPANS, Component, TraceBuffer
from spanloop.pipeline.assembly.revise import build_content
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.dialects import decode_operation
from spanloop.pipeline.dialects.operation import Operation
from spanloop.pipeline.held import FEEDBACK_MAX, targets_of
from spanloop.pipeline.replay.reading import FeedbackRow, SpansRow, VersionRow, decode_row
from spanloop.pipeline.replay.results import Result, result_of
from spanloop.pipeline.rewards.compose import RewardTerms, compose
from spanloop.pipeline.signal import NO_MODEL, Draft, choice_of, estimate_drafts, finish_draft
from spanloop.schemas import topics
from spanloop.schemas.events import FeedbackReceived, decode
from spanloop.schemas.ids import orchestration_id, version_number
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Pipeline

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault

__all__ = ["Assembled", "Deriver", "Group", "assemble"]

DERIVE_TOGETHER = 128
"""Orchestrations of one model that are derived at once."""
WAITING_MAX = 1_024
"""Orchestrations that wait for others with their model at most."""


class Assembled(msgspec.Struct):
    """One orchestration before its rewards."""

    content: OrchestrationContent
    complete: bool
    spans: int
    first_ns: int
    """When its first spans were appended."""
    touched_ns: int
    """When its last spans or feedback were appended."""
    feedback: list[FeedbackReceived]
    recorded: dict[str, VersionRow]
    """Last of each derived topic."""
    late: bool
    """Had spans that the stream refused as later than the retention."""
    erased: bool = False
    """Token arrays of its calls can no longer be read."""


class _Whole(Component):
    """A component whose operations were decoded already."""

    def __init__(self, tenant: str) -> None:
        super().__init__(tenant)
        self.decoded: dict[bytes, Operation] = {}

    def operations(self) -> Iterator[Operation]:
        """The winners of all spans."""
        decoded = self.decoded
        for buffer in self.traces.values():
            for encoded in buffer.spans.values():
                yield decoded[encoded]


class Group(NamedTuple):
    """What the rows of one label are."""

    orchestration: Assembled | None
    recorded: list[VersionRow]
    """What the stream published under other ids than the orchestration's, not merged away: it should not be there."""
    unmatched: int
    """Feedback on nothing."""


def assemble(encoded: Iterable[bytes]) -> Group:
    """The orchestration that some rows are.

    Args:
        encoded: All rows of one label, in any order.
    """
    spans: list[SpansRow] = []
    feedback: list[FeedbackRow] = []
    last: dict[tuple[str, str, str], VersionRow] = {}
    for data in encoded:
        row = decode_row(data)
        if isinstance(row, SpansRow):
            spans.append(row)
        elif isinstance(row, FeedbackRow):
            feedback.append(row)
        else:
            key = (row.topic, row.tenant, row.orchestration_id)
            if key not in last or row.revision > last[key].revision:
                last[key] = row
    component, count = _component(spans) if spans else (Component(""), 0)
    if not component.relevant:
        return Group(None, _live(last.values()), len(feedback))
    content = build_content(component)
    name = (content.tenant, content.orchestration_id)
    recorded = {row.topic: row for row in last.values() if (row.tenant, row.orchestration_id) == name}
    recorded.pop(topics.DEAD_LETTERS, None)
    mine = _feedback_on(content, feedback)
    item = Assembled(
        content=content,
        complete=component.complete,
        spans=count,
        first_ns=min(row.appended_ns for row in spans),
        touched_ns=max(row.appended_ns for row in (*spans, *feedback)),
        feedback=mine,
        recorded=recorded,
        late=any(row.topic == topics.DEAD_LETTERS for row in last.values()),
    )
    others = _live(row for row in last.values() if (row.tenant, row.orchestration_id) != name)
    return Group(item, others, len(feedback) - len(mine))


def _live(rows: Iterable[VersionRow]) -> list[VersionRow]:
    return [row for row in rows if row.topic == topics.ORCHESTRATIONS and not row.merged]


def _component(rows: list[SpansRow]) -> tuple[Component, int]:
    """Rows in log order, as far as there is one, because beyond ``MAX_SPANS`` what comes first is kept."""
    component = _Whole(rows[0].tenant)
    count = 0
    for row in sorted(rows, key=lambda r: (r.appended_ns, r.partition, r.offset)):
        buffer = component.traces.get(row.trace_id)
        if buffer is None:
            buffer = component.traces[row.trace_id] = TraceBuffer()
        for encoded in row.operations:
            if encoded in component.decoded:
                continue
            operation = decode_operation(encoded)
            new = operation.span_id not in buffer.spans
            if new and count >= MAX_SPANS:
                component.overflow += 1
                continue
            component.decoded[encoded] = operation
            buffer.add(operation, encoded)
            count += new
    return component, count


def _feedback_on(content: OrchestrationContent, rows: list[FeedbackRow]) -> list[FeedbackReceived]:
    """Feedback that names this orchestration, under the rules of ``held.Store``."""
    if not rows:
        return []
    by_target: dict[str, dict[str, FeedbackReceived]] = {}
    for row in sorted(rows, key=lambda r: (r.partition, r.offset)):
        event = decode(row.event)
        assert isinstance(event, FeedbackReceived)  # noqa: S101
        target = event.key
        if event.target_kind == "span" and event.trace_id:
            target = f"{event.tenant}/trace/{event.trace_id}"
        by_target.setdefault(target, {}).setdefault(event.feedback_id, event)
    names = {f"{content.tenant}/trace/{trace}" for trace in content.trace_ids}
    names |= {
        f"{content.tenant}/orchestration/{orchestration_id(content.tenant, (trace,))}"
        for trace in content.trace_ids
    }
    if not names.issuperset(by_target):
        names.update(targets_of(content))
    found: list[FeedbackReceived] = []
    for target, items in by_target.items():
        if target in names:
            kept = sorted(items.values(), key=lambda f: (f.observed_ns, f.feedback_id))[-FEEDBACK_MAX:]
            found += kept
    return found


class Deriver:
    """Rewards, credit and samples of orchestrations, those of one model together.

    Args:
        settings: Weights, holdout, kind of credit.
        asking: The value model of (tenant, version), None where it is not there.
        version_of: Which version counts for an orchestration.
        vault: Opens token arrays while something is derived from them; results stay sealed.
    """

    def __init__(
        self,
        settings: Pipeline,
        asking: Callable[[str, str], Asking | None],
        version_of: Callable[[Assembled], str],
        vault: Vault | None = None,
    ) -> None:
        self._vault = vault
        self._settings = settings
        self._terms = RewardTerms.of(settings)
        self._asking = asking
        self._version_of = version_of
        self._waiting: dict[tuple[str, str], list[tuple[Assembled, Draft]]] = {}
        self._count = 0

    def add(self, item: Assembled) -> list[Result]:
        """Take an orchestration; returns the results that are ready."""
        content = item.content
        if self._vault is not None:
            content = self._vault.open_content(content)
        item.erased = any(
            call.sealed and opened is call
            for call, opened in zip(item.content.calls, content.calls, strict=True)
        )
        version = self._version_of(item)
        composite = compose(
            content,
            item.feedback,
            complete=item.complete,
            terms=self._terms,
            progress=version_number(version),
            indicators=self._indicators(item.content.tenant, version),
        )
        draft = Draft(content, composite, version, choice_of(self._settings, content.orchestration_id))
        key = (item.content.tenant, version)
        waiting = self._waiting.setdefault(key, [])
        waiting.append((item, draft))
        self._count += 1
        if len(waiting) >= DERIVE_TOGETHER:
            return self._derive(key)
        return self.flush() if self._count >= WAITING_MAX else []

    def _indicators(self, tenant: str, version: str) -> Mapping[str, float]:
        if version == NO_MODEL or not self._terms.goes_by_indicators:
            return {}
        asking = self._asking(tenant, version)
        return asking.indicators if asking is not None else {}

    def flush(self) -> list[Result]:
        """All that still wait."""
        return [result for key in list(self._waiting) for result in self._derive(key)]

    def _derive(self, key: tuple[str, str]) -> list[Result]:
        waiting = self._waiting.pop(key)
        self._count -= len(waiting)
        version = key[1]
        problem = ""
        models: dict[str, Asking] = {}
        if version != NO_MODEL and any(draft.composite.team is not None for _, draft in waiting):
            asking = self._asking(*key)
            if asking is None:
                problem = f"value model {version} is not in the archive"
            else:
                models[version] = asking
        if not problem:
            estimate_drafts([draft for _, draft in waiting], models)
        return [
            result_of(item, finish_draft(draft, item.complete, self._settings), version, problem)
            for item, draft in waiting
        ]
