"""The learner's memory: samples of the open window, weights, and what is needed to be the same again after a kill.

Place: ``trainer`` offers records and asks whether a batch is due; the batch's boundary is appended to the log, then
``train`` runs it, then the checkpoint is written. ``resume`` starts from the newest checkpoint and trains the batches that
the log has beyond it, with exactly their boundaries and hyper-parameters; ``replay`` does the same from nothing.

Invariants: weights after batch b are a function of the first policy and of the log up to b's boundary; every
orchestration is in at most one batch; samples of an open window are never half-trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from spanloop.learner import checkpoint as checkpoints
from spanloop.learner.batches import Window
from spanloop.learner.checkpoint import BatchReport, Checkpoint, LearnerState
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.promotion import PromotionState, fold
from spanloop.learner.update import Hyper, Updater
from spanloop.pipeline.log import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, TerminalError
from spanloop.schemas.events import BatchCommitted, Event, SamplesBuilt, decode

__all__ = ["Training", "read_policies", "read_samples", "replay"]

_LOG = logging.getLogger(__name__)

LEDGER_BATCHES_MIN = 8
"""Batches that the sample ledger remembers at least; with a staleness bound of eta it remembers eta + 2: a revision
that arrives later is stale, because its rows were acted before the batch that used it."""


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


def decode_samples(value: bytes, tenant: str) -> SamplesBuilt | None:
    """A SamplesBuilt of this tenant, else None (malformed ones are logged; a bad record never stops training)."""
    try:
        event = decode(value)
    except SchemaError as exc:
        _LOG.warning("a sample is skipped: %s", exc.message)
        return None
    return event if isinstance(event, SamplesBuilt) and event.tenant == tenant else None


class Training:
    """Weights, optimiser, sample ledger and the open window.

    Args:
        config: Shape of the policy.
        initial: The first policy's network.
        folder: Where checkpoints go; None: nowhere (replays, experiments).
    """

    def __init__(self, config: PolicyConfig, initial: PolicyNet, folder: Path | None) -> None:
        self.config = config
        self.updater = Updater(config, initial)
        self.state = LearnerState(batch=0, to_offset=-1)
        self._folder = folder
        self._window: Window | None = None
        self._boundary = -1

    # ------------------------------------------------------------ the open window

    def open_window(self, batch_of: Callable[[int], int | None], hyper: Hyper) -> None:
        """Start collecting behind the last batch."""
        self._window = self._new_window(batch_of, hyper)
        self._boundary = self.state.to_offset

    def offer(self, built: SamplesBuilt | None, offset: int) -> None:
        """Fold the next record (None: one that is not ours) into the open window."""
        if self._window is None:
            raise TerminalError("no window is open")
        if offset <= self._boundary:
            return
        self._boundary = offset
        if built is not None:
            self._window.add(built)

    @property
    def trainable(self) -> int:
        """Orchestrations in the open window that would be trained on."""
        return 0 if self._window is None else self._window.trainable

    def next_batch(self, hyper: Hyper, parent_version: int, *, tenant: str, policy: str) -> BatchCommitted:
        """The boundary of the open window, to be appended before ``train``."""
        return BatchCommitted(
            tenant=tenant,
            policy=policy,
            batch=self.state.batch + 1,
            from_offset=self.state.to_offset,
            to_offset=self._boundary,
            parent_version=parent_version,
            parameters=msgspec.to_builtins(hyper),
        )

    def _new_window(self, batch_of: Callable[[int], int | None], hyper: Hyper) -> Window:
        current = self.state.batch

        def lag(version: int) -> int | None:
            made = batch_of(version)
            return None if made is None or made > current else current - made

        return Window(
            ledger=self.state.ledger,
            lag=lag,
            max_staleness=hyper.max_staleness,
            vocabulary_size=self.config.vocabulary_size,
            context=self.config.context,
        )

    # ------------------------------------------------------------ one batch

    def train(
        self,
        committed: BatchCommitted,
        samples: Iterable[tuple[SamplesBuilt, int]],
        batch_of: Callable[[int], int | None],
    ) -> None:
        """Train the batch between a committed boundary; the window closes."""
        if committed.batch != self.state.batch + 1 or committed.from_offset != self.state.to_offset:
            raise TerminalError(
                f"batch {committed.batch} (samples after {committed.from_offset}) does not follow the weights, which "
                f"contain batch {self.state.batch} (samples up to {self.state.to_offset}); was the log or "
                "the checkpoint of another workspace copied here?"
            )
        hyper = msgspec.convert(committed.parameters, Hyper)
        window = self._new_window(batch_of, hyper)
        for built, _ in samples:
            window.add(built)
        rollouts = window.rollouts()
        metrics = self.updater.train(rollouts, hyper, committed.batch) if rollouts else {}
        metrics |= {
            "orchestrations": float(len(rollouts)),
            "decisions": float(sum(r.num_decisions for r in rollouts)),
            "staleness": float(window.max_lag),
            "steps_skipped": float(self.updater.skipped),
            "reward": sum(r.reward for r in rollouts) / max(1, len(rollouts)),
        }
        oldest = committed.batch - max(LEDGER_BATCHES_MIN, hyper.max_staleness + 2)
        ledger = {k: b for k, b in self.state.ledger.items() if b > oldest}
        ledger |= {r.orchestration_id: committed.batch for r in rollouts}
        self.state = LearnerState(
            batch=committed.batch,
            to_offset=committed.to_offset,
            ledger=ledger,
            steps=self.updater.steps,
            skipped=self.updater.skipped,
            report=BatchReport(len(rollouts), committed.parent_version, window.dropped(), metrics),
        )
        self._window = None

    def save(self) -> None:
        """Write the checkpoint of the present state."""
        if self._folder is not None:
            checkpoints.save(self._folder, Checkpoint(self.state, self.updater.tensors()))

    def resume(
        self, log: Log, policies: PromotionState, batches: Iterable[BatchCommitted], tenant: str
    ) -> int:
        """Load the newest checkpoint and train the committed batches behind it; returns how many those were."""
        found = checkpoints.load_latest(self._folder) if self._folder is not None else None
        if found is not None:
            self._fits(found.tensors)
            self.updater.restore(found.tensors, steps=found.state.steps, skipped=found.state.skipped)
            self.state = found.state
        behind = [b for b in batches if b.batch > self.state.batch]
        for committed in behind:
            samples = read_samples(log, tenant, committed.from_offset, committed.to_offset)
            self.train(committed, samples, policies.batch_of)
            self.save()
        return len(behind)

    def _fits(self, tensors: Mapping[str, Tensor]) -> None:
        wanted = {k: t.shape for k, t in self.updater.tensors().items()}
        if wanted != {k: t.shape for k, t in tensors.items()}:
            raise TerminalError(
                "the checkpoint's tensors do not fit the policy of this workspace; restore its policy@v0 or "
                "start a new workspace"
            )

    def weights_hash(self) -> str:
        """sha256 of weights and optimiser state."""
        return checkpoints.tensors_hash(self.updater.tensors())


def replay(
    log: Log,
    config: PolicyConfig,
    initial: PolicyNet,
    *,
    until: int | None = None,
    tenant: str = "default",
    policy: str = "policy",
) -> str:
    """Train the log's batches from the first policy, undisturbed; returns ``Training.weights_hash``.

    Args:
        log: Any Log.
        config: Shape of the policy.
        initial: The first policy.
        until: Last batch to train; None: all that are on the log.
        tenant: Of the workspace.
        policy: Its name.
    """
    events = read_policies(log, tenant, policy)
    batches = [e for e, _ in events if isinstance(e, BatchCommitted) and (until is None or e.batch <= until)]
    training = Training(config, initial, None)
    training.resume(log, fold(events), batches, tenant)
    return training.weights_hash()
