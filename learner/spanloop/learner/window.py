"""Which orchestrations a batch trains on: a fold over samples in the order of the log.

Place: ``trainer`` folds SamplesBuilt records into a ``Window``; when it holds enough trainable orchestrations its
boundary goes on the log (BatchCommitted) and its rollouts are trained on. A replay folds the same records between the
same offsets and gets the same batch.

Invariants: pure, no torch; the order is that of the log; of several revisions of an orchestration in one window the last
counts; an orchestration is taught once (the sample ledger), and what a later revision changes is taught as the difference to
what was taught; whatever is dropped is counted under its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from spanloop.learner.batches import Call, Rollout, to_rollout
from spanloop.schemas.events import SamplesBuilt

__all__ = ["Window", "correction", "refusal"]


def correction(new: Rollout | None, old: Rollout, *, batch: int) -> Rollout | None:
    """What makes up for having taught ``old`` where ``new`` is right: the same tokens, acted by the same versions, with the
    difference of their accounts as advantage. None: they say the same.

    A call that ``new`` no longer has is taken back, one that ``old`` did not have is taught as it is. To first order in the step
    this is what training on ``new`` in the first place would have done.

    Args:
        new: The later revision; None: there is nothing left of it.
        old: The revision that was taught.
        batch: That taught it.
    """
    before = {call.call_id: call for call in old.calls}
    after = {call.call_id: call for call in new.calls} if new is not None else {}
    calls: list[Call] = []
    for call_id in [*before, *(name for name in after if name not in before)]:
        changed = _difference(after.get(call_id), before.get(call_id))
        if changed is not None:
            calls.append(changed)
    if not calls:
        return None
    versions = tuple(sorted({*old.versions, *(new.versions if new is not None else ())}))
    return msgspec.structs.replace(new or old, calls=tuple(calls), versions=versions, corrects=batch)


def _difference(new: Call | None, old: Call | None) -> Call | None:
    taught = {(d.position, d.menu, d.chosen): d.advantage for d in old.decisions} if old is not None else {}
    call = new if new is not None else old
    if call is None or (old is not None and new is not None and old.ids != new.ids):
        return None
    decisions = [
        msgspec.structs.replace(
            d,
            advantage=(d.advantage if new is not None else 0.0)
            - taught.get((d.position, d.menu, d.chosen), 0.0),
            values=(),
        )
        for d in call.decisions
    ]
    changed = tuple(d for d in decisions if abs(d.advantage) > 1e-9)
    return msgspec.structs.replace(call, decisions=changed) if changed else None


def refusal(
    rollout: Rollout, *, ledger: Mapping[str, int], lag: Callable[[int], int | None], max_staleness: int
) -> str:
    """Why a rollout may not be trained on now; empty when it may.

    Args:
        rollout: A training example.
        ledger: Orchestration id -> batch that used it.
        lag: Version -> updates since it was made, None when the version is not on the log.
        max_staleness: eta of METHODS 4.3: a larger lag of any of its versions is stale.
    """
    if rollout.orchestration_id in ledger:
        return "used"
    lags = [lag(version) for version in rollout.versions]
    if any(value is None for value in lags):
        return "unknown_version"
    return "stale" if any(value is not None and value > max_staleness for value in lags) else ""


class _Verdict(msgspec.Struct, frozen=True):
    revision: int
    offset: int
    source: str
    found: Rollout | str

    @property
    def is_fresh(self) -> bool:
        return isinstance(self.found, Rollout) and not self.found.corrects


class Window:
    """A fold over SamplesBuilt in offset order that stops being interesting at a boundary.

    ``add`` returns how many orchestrations are trainable now; a later revision replaces an earlier one and may also
    take it back (its orchestration was joined into another).

    Args:
        ledger: Orchestration id -> batch that used it.
        lag: Version -> updates since it was made, None when the version is not on the log.
        max_staleness: See ``refusal``.
        vocabulary_size: Of the policy.
        context: Longest prompt + response in tokens.
        full_vocabulary: See ``to_rollout``.
        roles: See ``to_rollout``.
        source_max: Orchestrations of one source (harness) that are trained on at most; 0: no bound.
        taught: The revision of an orchestration that the ledger's batch trained on; None: late revisions are not made up for.
    """

    def __init__(
        self,
        *,
        ledger: Mapping[str, int],
        lag: Callable[[int], int | None],
        max_staleness: int,
        vocabulary_size: int,
        context: int,
        full_vocabulary: bool = False,
        roles: Collection[str] = (),
        source_max: int = 0,
        taught: Callable[[str], SamplesBuilt | None] | None = None,
    ) -> None:
        self._ledger = ledger
        self._lag = lag
        self._max_staleness = max_staleness
        self._vocabulary_size = vocabulary_size
        self._context = context
        self._full_vocabulary = full_vocabulary
        self._roles = roles
        self._source_max = source_max
        self._taught = taught
        self._verdicts: dict[str, _Verdict] = {}
        self._by_source: Counter[str] = Counter()
        self._trainable = 0
        self._superseded = 0
        self.max_lag = 0

    def add(self, built: SamplesBuilt, offset: int = -1) -> int:
        """Fold one record; returns the number of trainable orchestrations."""
        known = self._verdicts.get(built.orchestration_id)
        if known is not None:
            if known.revision >= built.revision:
                return self._trainable
            self._superseded += 1
            self._count(known, -1)
        verdict = _Verdict(built.revision, offset, built.harness, self._judge(built))
        self._count(verdict, 1)
        self._verdicts[built.orchestration_id] = verdict
        return self._trainable

    def _count(self, verdict: _Verdict, change: int) -> None:
        if verdict.is_fresh:
            self._trainable += change
            self._by_source[verdict.source] += change

    def _judge(self, built: SamplesBuilt) -> Rollout | str:
        if built.holdout:
            return "holdout"
        rollout = self._rollout(built)
        batch = self._ledger.get(built.orchestration_id)
        if batch is not None and self._taught is not None:
            return self._corrected(built, rollout, batch)
        if isinstance(rollout, str):
            return rollout
        reason = refusal(rollout, ledger=self._ledger, lag=self._lag, max_staleness=self._max_staleness)
        if not reason and 0 < self._source_max <= self._by_source[built.harness]:
            reason = "source_share"
        if reason:
            return reason
        self.max_lag = max(self.max_lag, *(self._lag(version) or 0 for version in rollout.versions))
        return rollout

    def _rollout(self, built: SamplesBuilt) -> Rollout | str:
        return to_rollout(
            built,
            vocabulary_size=self._vocabulary_size,
            context=self._context,
            full_vocabulary=self._full_vocabulary,
            roles=self._roles,
        )

    def _corrected(self, built: SamplesBuilt, new: Rollout | str, batch: int) -> Rollout | str:
        """What a late revision of something that was taught calls for."""
        earlier = self._taught(built.orchestration_id) if self._taught is not None else None
        old = self._rollout(earlier) if earlier is not None and earlier.revision < built.revision else "used"
        if isinstance(old, str) or (isinstance(new, str) and new != "no_rows"):
            return "used"
        found = correction(None if isinstance(new, str) else new, old, batch=batch)
        if found is None:
            return "used"
        reason = refusal(found, ledger={}, lag=self._lag, max_staleness=self._max_staleness)
        return f"{reason}_correction" if reason else found

    @property
    def trainable(self) -> int:
        """Orchestrations that would be trained on for the first time if the window ended now."""
        return self._trainable

    def rollouts(self) -> list[Rollout]:
        """The trainable ones, in the order in which they first appeared."""
        return [v.found for v in self._verdicts.values() if isinstance(v.found, Rollout)]

    def taught(self) -> dict[str, int]:
        """Orchestration id -> offset of the record, of what ``rollouts`` gives."""
        return {name: v.offset for name, v in self._verdicts.items() if isinstance(v.found, Rollout)}

    def groups(self) -> Counter[str]:
        """Group -> trainable members."""
        return Counter(r.group for r in self.rollouts() if not r.corrects)

    def dropped(self) -> dict[str, int]:
        """Reason -> number of orchestrations that were not trained on (and of revisions replaced in the window)."""
        counts = Counter(v.found for v in self._verdicts.values() if isinstance(v.found, str))
        if self._superseded:
            counts["superseded"] += self._superseded
        return dict(sorted(counts.items()))
