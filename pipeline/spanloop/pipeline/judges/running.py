"""Judges over a log: orchestrations whose reward is final are judged once, and the verdicts are appended as feedback.

Place in the flow: ``spanloop judge`` runs it. The log is all the state there is: a verdict's id is a function of what was judged, and how
far a judge has read is committed under its name when everything up to there was asked. So it can be stopped, killed and run twice:
nothing is asked again that has a verdict, and nothing counts twice.
Invariants: only feedback is appended, never an outcome; at most ``calls_per_day`` calls; a server that does not answer is not asked on and on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.attribution.steps import evidence_of
from spanloop.pipeline.attribution.texts import Words, words_of
from spanloop.pipeline.judges.cases import cases_of, is_drawn
from spanloop.pipeline.judges.port import Case, Judge, ask, feedback_id_of
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Clock, Log, LogRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError, TransientError
from spanloop.schemas.events import (
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SpansReceived,
    decode,
)
from spanloop.schemas.orchestration import OrchestrationContent

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault
    from spanloop.schemas.settings import JudgeTerm

__all__ = ["PAGE", "Counts", "Runner"]

PAGE = 500
"""Orchestrations that are looked at in one go."""
TRIES = 3
SILENT_MAX = 5
"""Cases in a row without an answer after which a judge is given up for now."""
_DAY_NS = 86_400 * 10**9
_FINAL = frozenset({"final", "corrected"})


class Counts(msgspec.Struct):
    """What a judge did."""

    orchestrations: int = 0
    """Final ones that were looked at."""
    not_drawn: int = 0
    without_texts: int = 0
    """Nothing in them has words that are kept."""
    known: int = 0
    """Cases that have a verdict on the log."""
    calls: int = 0
    verdicts: int = 0
    doubtful: int = 0
    """Of these, not final: cut or tainted."""
    no_verdict: dict[str, int] = {}
    """Answers that are none, by why."""
    waiting: int = 0
    """Cases that wait for tomorrow's calls."""

    def add(self, other: Counts) -> None:
        """Count what another run counted."""
        for name in self.__struct_fields__:
            if name not in ("no_verdict", "waiting"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for why, number in other.no_verdict.items():
            self.no_verdict[why] = self.no_verdict.get(why, 0) + number
        self.waiting = other.waiting


class _Watched:
    """A judge whose own error is kept: what is told of it must say what to do."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.name = judge.name
        self.error: Exception | None = None

    def __call__(self, system: str, data: str) -> bytes:
        try:
            return self._judge(system, data)
        except Exception as exc:
            self.error = exc
            raise


class Runner:
    """One judge over a log.

    Args:
        log: of the deployment.
        term: the judge's settings.
        judge: who is asked.
        clock: stamps verdicts.
        window_ns: how far back spans, orchestrations and verdicts of what has just become final can lie.
        vault: opens texts, where they are sealed.
        pause: waits between two tries.
    """

    def __init__(
        self,
        log: Log,
        term: JudgeTerm,
        judge: Judge,
        clock: Clock,
        *,
        window_ns: int,
        vault: Vault | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._log, self._term, self._judge, self._clock = log, term, judge, clock
        self._window_ns, self._vault, self._pause = window_ns, vault, pause
        self._group = f"judge:{term.name}"
        self._silent = 0
        self._fruitless: list[int] = []
        """When calls were made that gave no verdict; of the last 24 hours."""
        self.totals = Counts()
        """Of all runs, those included that ended with an error."""

    def run(self, *, dry: bool = False) -> Counts:
        """Judge what has become final since the last time, a page at a time.

        Args:
            dry: Ask nothing, count only.

        Raises:
            ConfigError: the server refuses the judge, or texts are not kept.
            TransientError: it does not answer. What was judged is kept; the next run goes on.
        """
        total = Counts()
        offsets = self._log.committed(self._group)
        while True:
            keys, ends = self._final_since(offsets)
            if not ends:
                return total
            counts = Counts()
            try:
                self._page(keys, offsets, counts, planned=total if dry else None)
            finally:
                total.add(counts)
                self.totals.add(counts)
            if counts.waiting and not dry:
                return total
            offsets = {**offsets, **ends}
            if not dry:
                self._log.commit(self._group, offsets)

    # ------------------------------------------------------------ reading

    def _final_since(self, offsets: dict[str, int]) -> tuple[list[str], dict[str, int]]:
        """Orchestrations of the next page whose last reward there is final, and where it ends."""
        status: dict[str, bool] = {}
        ends: dict[str, int] = {}
        for record in scan(self._log, (topics.REWARDS,), after=offsets):
            if record.key not in status and len(status) == PAGE:
                break
            event = _decoded(record)
            ends[record.source] = record.offset
            if isinstance(event, RewardsComputed):
                status[record.key] = event.status in _FINAL
        return [key for key, final in status.items() if final], ends

    def _recent(self, topic: str, offsets: dict[str, int]) -> Iterator[LogRecord]:
        """Records of a topic within the window. ``offsets`` moves on to where it begins."""
        since = self._clock.now_ns() - self._window_ns
        for record in scan(self._log, (topic,), after=dict(offsets)):
            if record.appended_ns < since:
                offsets[record.source] = record.offset
            else:
                yield record

    def _verdicts(self, offsets: dict[str, int]) -> tuple[set[str], int]:
        """Ids of the judge's feedback, and how many came in the last 24 hours."""
        ids: set[str] = set()
        lately = 0
        scorer = f"judge:{self._term.name}"
        for record in self._recent(topics.FEEDBACK, offsets):
            event = _decoded(record)
            if isinstance(event, FeedbackReceived) and event.scorer == scorer:
                ids.add(event.feedback_id)
                lately += event.observed_ns > self._clock.now_ns() - _DAY_NS
        return ids, lately

    def _contents(self, keys: set[str], offsets: dict[str, int]) -> dict[str, OrchestrationContent]:
        last: dict[str, OrchestrationRevised] = {}
        for record in self._recent(topics.ORCHESTRATIONS, offsets):
            event = _decoded(record) if record.key in keys else None
            if isinstance(event, OrchestrationRevised):
                known = last.get(record.key)
                if known is None or event.revision >= known.revision:
                    last[record.key] = event
        return {key: event.content for key, event in last.items() if event.content is not None}

    def _words(self, contents: dict[str, OrchestrationContent], offsets: dict[str, int]) -> dict[str, Words]:
        """What the spans of their evidence said; of a span sent twice, the version that said most."""
        wanted = {span for content in contents.values() for span in evidence_of(content)}
        traces = {f"{c.tenant}/{trace}" for c in contents.values() for trace in c.trace_ids}
        words: dict[str, Words] = {}
        for record in self._recent(topics.SPANS, offsets):
            event = _decoded(record) if record.key in traces else None
            for span in event.spans if isinstance(event, SpansReceived) else ():
                if span.span_id not in wanted:
                    continue
                opened = self._vault.open_span(event.tenant, span) if self._vault is not None else None  # type: ignore[union-attr]
                said = words_of(opened or span)
                known = words.get(span.span_id)
                if known is None or (said.length, said.text) > (known.length, known.text):
                    words[span.span_id] = said
        return words

    # ------------------------------------------------------------ asking

    def _page(
        self, keys: Sequence[str], offsets: dict[str, int], counts: Counts, *, planned: Counts | None
    ) -> None:
        """Judge a page. ``planned``: ask nothing, and take the calls of earlier pages as made; None: ask."""
        counts.orchestrations = len(keys)
        counts.waiting = 0 if planned is None else planned.waiting
        drawn = {key for key in keys if is_drawn(self._term, *key.split("/", 1))}
        counts.not_drawn = len(keys) - len(drawn)
        if not drawn:
            return
        contents = self._contents(drawn, offsets)
        words = self._words(contents, offsets)
        ids, lately = self._verdicts(offsets)
        cases: list[Case] = []
        for key in keys:
            content = contents.get(key)
            if content is None:
                continue
            own = cases_of(content, words, self._term)
            counts.without_texts += not own and not any(
                words[span].text for span in evidence_of(content) if span in words
            )
            new = [case for case in own if feedback_id_of(self._term.name, case) not in ids]
            counts.known += len(own) - len(new)
            cases += new
        since = self._clock.now_ns() - _DAY_NS
        self._fruitless = [moment for moment in self._fruitless if moment > since]
        room = max(0, self._term.calls_per_day - lately - len(self._fruitless))
        if planned is not None:
            room = max(0, room - planned.calls)
        counts.waiting += max(0, len(cases) - room)
        if planned is not None:
            counts.calls = min(room, len(cases))
            return
        self._ask_all(cases[:room], counts)

    def _ask_all(self, cases: Sequence[Case], counts: Counts) -> None:
        with ThreadPoolExecutor(self._term.parallel, thread_name_prefix="spanloop-judge") as pool:
            for start in range(0, len(cases), self._term.parallel):
                for said, error, calls in pool.map(self._ask, cases[start : start + self._term.parallel]):
                    counts.calls += calls
                    fruitless = calls - isinstance(said, FeedbackReceived)
                    self._fruitless += [self._clock.now_ns()] * fruitless
                    self._take(said, error, counts)

    def _ask(self, case: Case) -> tuple[FeedbackReceived | str, Exception | None, int]:
        """The verdict, or why there is none with the judge's own error, and how many calls it took."""
        attempt = 0
        while True:
            attempt += 1
            watched = _Watched(self._judge)
            said = ask(watched, case, self._term.timeout_s, self._clock.now_ns())
            if isinstance(said, FeedbackReceived) or not _may_pass(said, watched.error):
                return said, watched.error, attempt
            if attempt == TRIES:
                return said, watched.error or TransientError(f"judge {self._term.name}: {said}"), attempt
            self._pause(0.5 * 2**attempt)

    def _take(self, said: FeedbackReceived | str, error: Exception | None, counts: Counts) -> None:
        if isinstance(said, FeedbackReceived):
            self._silent = 0
            self._log.append([new_record(said)])
            counts.verdicts += 1
            counts.doubtful += not said.final
            return
        counts.no_verdict[said] = counts.no_verdict.get(said, 0) + 1
        if isinstance(error, ConfigError):
            raise error
        if isinstance(error, TransientError):
            self._silent += 1
            if self._silent >= SILENT_MAX:
                self._silent = 0
                raise error
        else:
            self._silent = 0


def _may_pass(said: str, error: Exception | None) -> bool:
    """Whether it is worth another try: no answer in time, or the server is away."""
    return isinstance(error, TransientError) or (error is None and said.startswith("no answer within"))


def _decoded(record: LogRecord) -> object:
    try:
        return record.event or decode(record.value)
    except SchemaError:
        return None
