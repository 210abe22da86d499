"""The learner's memory: samples of the open window, weights, and what is needed to be the same again after a kill.

Place: ``trainer`` offers records and asks whether a batch is due; the batch's boundary is appended to the log, then
``train`` runs it, then the checkpoint is written. ``resume`` starts from the newest checkpoint and trains the batches that
the log has beyond it, with exactly their boundaries and hyper-parameters; ``replay`` does the same from nothing.

Invariants: weights after batch b are a function of the first policy and of the log up to b's boundary; every
orchestration is in at most one batch; samples of an open window are never half-trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from spanloop.learner import checkpoint as checkpoints
from spanloop.learner.batches import Rollout
from spanloop.learner.checkpoint import BatchReport, Checkpoint, LearnerState
from spanloop.learner.history import fetcher, read_policies, read_samples
from spanloop.learner.model import Policy, Shape
from spanloop.learner.promotion import PromotionState, fold
from spanloop.learner.update import Hyper, Updater, exact_numerics
from spanloop.learner.window import Window
from spanloop.pipeline.ports import Log
from spanloop.schemas.errors import SchemaError, TerminalError
from spanloop.schemas.events import BatchCommitted, SamplesBuilt

__all__ = [
    "Fetch",
    "Selection",
    "Teach",
    "Training",
    "hyper_of_batch",
    "open_window",
    "replay",
    "samples_hash",
    "select",
]

Fetch = Callable[[int], SamplesBuilt | None]
"""Reads the samples at an offset."""
Teach = Callable[[Updater, Sequence[Rollout], Hyper, int], dict[str, float]]
"""Trains an updater on a batch; returns metrics."""
LEDGER_BATCHES_MIN = 8
"""Batches that the sample ledger remembers at least; with a staleness bound of eta it remembers eta + 2: a revision
that arrives later is stale, because its rows were acted before the batch that used it."""


class Selection(msgspec.Struct):
    """What a committed batch trains on."""

    rollouts: list[Rollout]
    window: Window
    ledger: dict[str, int]
    """The sample ledger after the batch."""
    taught: dict[str, int]
    """Of each in it, the offset of the record that was trained on."""


def samples_hash(rollouts: Iterable[Rollout]) -> str:
    """Which samples a batch was trained on, in a version's manifest: what this prints for its "ID@REVISION" lines, sorted:

    LC_ALL=C sort | sha256sum
    """
    lines = sorted(f"{r.orchestration_id}@{r.revision}\n".encode() for r in rollouts)
    return hashlib.sha256(b"".join(lines)).hexdigest()


def hyper_of_batch(committed: BatchCommitted) -> Hyper:
    """The hyper-parameters written on a batch. Raises SchemaError when they are not all there."""
    try:
        return msgspec.convert(committed.parameters, Hyper)
    except msgspec.ValidationError as exc:
        raise SchemaError(f"batch {committed.batch} has no usable hyper-parameters: {exc}") from exc


def open_window(
    batches: int,
    hyper: Hyper,
    *,
    ledger: Mapping[str, int],
    batch_of: Callable[[int], int | None],
    config: Shape,
    taught: Mapping[str, int] | None = None,
    fetch: Fetch | None = None,
) -> Window:
    """An empty window behind ``batches`` batches."""
    at = taught or {}

    def earlier(orchestration_id: str) -> SamplesBuilt | None:
        offset = at.get(orchestration_id)
        return None if offset is None or fetch is None else fetch(offset)

    def lag(version: int) -> int | None:
        made = batch_of(version)
        return None if made is None or made > batches else batches - made

    return Window(
        ledger=ledger,
        lag=lag,
        max_staleness=hyper.max_staleness,
        vocabulary_size=config.vocabulary_size,
        context=config.context,
        full_vocabulary=config.full_vocabulary,
        roles=frozenset(hyper.train_roles),
        source_max=hyper.source_max,
        taught=earlier if hyper.corrections and hyper.advantage != "group" else None,
    )


def select(
    committed: BatchCommitted,
    samples: Iterable[tuple[SamplesBuilt, int]],
    *,
    ledger: Mapping[str, int],
    batch_of: Callable[[int], int | None],
    config: Shape,
    taught: Mapping[str, int] | None = None,
    fetch: Fetch | None = None,
) -> Selection:
    """Fold the samples between a committed boundary; the same for the learner, a replay and provenance.

    Args:
        committed: The boundary, with its hyper-parameters.
        samples: Records between it, with their offsets.
        ledger: Orchestration id -> batch that used it.
        batch_of: Version -> batch that made it.
        config: Shape of the policy.
        taught: ``Selection.taught`` of the batch before.
        fetch: Reads the samples at an offset; None: late revisions are not made up for.
    """
    hyper = hyper_of_batch(committed)
    window = open_window(
        committed.batch - 1,
        hyper,
        ledger=ledger,
        batch_of=batch_of,
        config=config,
        taught=taught,
        fetch=fetch,
    )
    for built, offset in samples:
        window.add(built, offset)
    rollouts = window.rollouts()
    oldest = committed.batch - max(LEDGER_BATCHES_MIN, hyper.max_staleness + 2)
    kept = {name: batch for name, batch in ledger.items() if batch > oldest}
    kept |= {r.orchestration_id: committed.batch for r in rollouts}
    places = {name: at for name, at in {**(taught or {}), **window.taught()}.items() if name in kept}
    return Selection(rollouts, window, kept, places)


class Training:
    """Weights, optimiser, sample ledger and the open window.

    Args:
        config: Shape of the policy.
        initial: The first policy's network.
        folder: Where checkpoints go; None: nowhere (replays, experiments).
        teach: Trains a batch in place of ``Updater.train``, on several devices; None: here.
    """

    def __init__(
        self, config: Shape, initial: Policy, folder: Path | None, *, teach: Teach | None = None
    ) -> None:
        self.config = config
        self.updater = Updater(initial)
        self.state = LearnerState(batch=0, to_offset=-1)
        self._folder = folder
        self._teach = teach or Updater.train
        self._window: Window | None = None
        self._boundary = -1

    # ------------------------------------------------------------ the open window

    def open_window(
        self, batch_of: Callable[[int], int | None], hyper: Hyper, fetch: Fetch | None = None
    ) -> None:
        """Start collecting behind the last batch."""
        self._window = open_window(
            self.state.batch,
            hyper,
            ledger=self.state.ledger,
            batch_of=batch_of,
            config=self.config,
            taught=self.state.taught,
            fetch=fetch,
        )
        self._boundary = self.state.to_offset

    def offer(self, built: SamplesBuilt | None, offset: int) -> None:
        """Fold the next record (None: one that is not ours) into the open window."""
        if self._window is None:
            raise TerminalError("no window is open")
        if offset <= self._boundary:
            return
        self._boundary = offset
        if built is not None:
            self._window.add(built, offset)

    @property
    def window(self) -> Window | None:
        """The open window."""
        return self._window

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

    # ------------------------------------------------------------ one batch

    def train(
        self,
        committed: BatchCommitted,
        samples: Iterable[tuple[SamplesBuilt, int]],
        batch_of: Callable[[int], int | None],
        fetch: Fetch | None = None,
    ) -> None:
        """Train the batch between a committed boundary; the window closes. ``fetch``: see ``select``."""
        if committed.batch != self.state.batch + 1 or committed.from_offset != self.state.to_offset:
            raise TerminalError(
                f"batch {committed.batch} (samples after {committed.from_offset}) does not follow the weights, which "
                f"contain batch {self.state.batch} (samples up to {self.state.to_offset}); was the log or "
                "the checkpoint of another workspace copied here?"
            )
        hyper = hyper_of_batch(committed)
        chosen = select(
            committed,
            samples,
            ledger=self.state.ledger,
            batch_of=batch_of,
            config=self.config,
            taught=self.state.taught,
            fetch=fetch,
        )
        rollouts, window = chosen.rollouts, chosen.window
        fresh = sum(not r.corrects for r in rollouts)
        metrics = self._teach(self.updater, rollouts, hyper, committed.batch) if rollouts else {}
        metrics |= {
            "orchestrations": float(fresh),
            "corrections": float(len(rollouts) - fresh),
            "frozen_rows": float(sum(r.frozen for r in rollouts)),
            "decisions": float(sum(r.num_decisions for r in rollouts)),
            "staleness": float(window.max_lag),
            "steps_skipped": float(self.updater.skipped),
            "reward": sum(r.reward for r in rollouts) / max(1, len(rollouts)),
        }
        self.state = LearnerState(
            batch=committed.batch,
            to_offset=committed.to_offset,
            ledger=chosen.ledger,
            taught=chosen.taught,
            steps=self.updater.steps,
            skipped=self.updater.skipped,
            report=BatchReport(
                len(rollouts), committed.parent_version, window.dropped(), metrics, samples_hash(rollouts)
            ),
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
            self.train(committed, samples, policies.batch_of, fetcher(log, tenant))
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
    config: Shape,
    initial: Policy,
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
    with exact_numerics():
        training.resume(log, fold(events), batches, tenant)
    return training.weights_hash()
