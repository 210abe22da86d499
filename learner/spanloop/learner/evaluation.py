"""What the learner measures for promotions: held-out orchestrations for the gate, both arms of the running canary.

Place: the trainer feeds every SamplesBuilt record in offset order; ``promoter`` asks for a gate verdict or the canary's.
Bounded: the newest ``HELDOUT_MAX`` held-out orchestrations, the champion and the last ``LOGGERS_MAX`` versions as loggers.
Log-probabilities of an orchestration under a version are computed once and kept.

Legend of suffixes: N orchestrations, K loggers or menu options.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from spanloop.learner.arrays import collate
from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.canary import CanaryTest, Verdict
from spanloop.learner.gate import ORCHESTRATIONS_MIN, GateVerdict, judge
from spanloop.learner.model import Policy, TensorBatch, chosen_log_probs
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.events import CanaryStarted, SamplesBuilt
from spanloop.schemas.ids import policy_number
from spanloop.schemas.settings import Learner

__all__ = ["HELDOUT_MAX", "LOGGERS_MAX", "LOGGER_LAG_MAX", "Evaluation", "start_value", "versions_of"]

_LOG = logging.getLogger(__name__)

HELDOUT_MAX = 512
"""Held-out orchestrations kept for the gate."""
LOGGERS_MAX = 6
"""Learning versions whose orchestrations the gate uses, besides the champion's."""
LOGGER_LAG_MAX = 8
"""Older ones are too far from a candidate to say anything about it."""
MISMATCH_MAX = 0.1
"""An orchestration whose logged log-probability is further than this (nats) from its logger's own, with the floor of a champion
and with that of the learning share, is left out: it was sampled otherwise (another temperature), so its weight would be
wrong."""

Logger = tuple[int, float]
"""A version and the exploration floor with which it answered: one behaviour policy."""


class _Held(msgspec.Struct):
    rollout: Rollout
    version: int
    gain: float
    logged: float
    log_probs: dict[Logger, float] = {}
    """Log-probability of all decisions under a version and floor."""
    logger: Logger | None = None
    """Which of the two floors explains what was logged; None: neither."""


def start_value(built: SamplesBuilt) -> int:
    """What the value model says of the start, micro-units: the best open option of the first decision; 0 without a model.

    A control variate has to be the same whatever the policy does. The ledger's baseline is not: it is the mean over
    the menu under the policy that acted, so it takes away just what a better (or worse) policy adds.

    >>> from spanloop.schemas.events import Sample
    >>> row = Sample("c", "a", "r", "p@v1", (1,), (2,), (-0.1,), (0,), ("t",), menu_values=((10, 30),))
    >>> made = dict(orchestration_id="o", revision=1, group="g", harness="h", reward=5, baseline=9, value_model="v", holdout=False)
    >>> start_value(SamplesBuilt(**made, rows=(row,))), start_value(SamplesBuilt(**made, rows=()))
    (30, 0)
    """
    return next((max(values) for row in built.rows for values in row.menu_values if len(values) > 1), 0)


def versions_of(built: SamplesBuilt) -> frozenset[int]:
    """Versions that answered an orchestration's calls; -1 stands for anything else."""
    return frozenset(policy_number(row.policy_version) for row in built.rows)


class Evaluation:
    """Measurements over the samples topic.

    Args:
        settings: Gate and canary settings.
        exploration: The server's floor; versions are evaluated as they are served to all.
        floor: Version -> its floor in the learning share.
        load: Version -> its verified network (raises SchemaError, which makes the gate refuse).
        vocabulary_size: Of the policy.
        context: Of the policy.
        full_vocabulary: Whether tokens without a menu are decisions.
        mismatch: Mean difference between serving's and the learner's log-probability of a token, nats.
    """

    def __init__(
        self,
        settings: Learner,
        *,
        exploration: float,
        floor: Callable[[int], float],
        load: Callable[[int], Policy],
        vocabulary_size: int,
        context: int,
        full_vocabulary: bool = False,
        mismatch: float = 0.0,
    ) -> None:
        self._settings = settings
        self._exploration = exploration
        self._floor = floor
        self._load = load
        self._vocabulary_size = vocabulary_size
        self._context = context
        self._full_vocabulary = full_vocabulary
        self._mismatch = mismatch
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._canary: CanaryStarted | None = None
        self._test: CanaryTest | None = None

    # ------------------------------------------------------------ feeding

    def add(self, built: SamplesBuilt, offset: int) -> None:
        """Take one record."""
        if built.holdout:
            self._hold(built)
        if self._test is not None and self._canary is not None and offset > self._canary.from_offset:
            self._feed(self._test, self._canary, built)

    def _hold(self, built: SamplesBuilt) -> None:
        known = self._held.pop(built.orchestration_id, None)
        if known is not None and known.rollout.revision >= built.revision:
            self._held[built.orchestration_id] = known
            return
        rollout = to_rollout(
            built,
            vocabulary_size=self._vocabulary_size,
            context=self._context,
            full_vocabulary=self._full_vocabulary,
        )
        if isinstance(rollout, str) or len(rollout.versions) != 1:
            return
        logged = math.fsum(d.behaviour for c in rollout.calls for d in c.decisions)
        gain = (built.reward - start_value(built)) / MICRO
        self._held[built.orchestration_id] = _Held(rollout, rollout.versions[0], gain, logged)
        while len(self._held) > HELDOUT_MAX:
            self._held.popitem(last=False)

    @staticmethod
    def _feed(test: CanaryTest, canary: CanaryStarted, built: SamplesBuilt) -> None:
        versions = versions_of(built)
        if versions in ({canary.version}, {canary.against}):
            test.add(
                built.orchestration_id,
                built.revision,
                built.reward - start_value(built),
                candidate=canary.version in versions,
            )
        else:
            test.discard(built.orchestration_id)

    # ------------------------------------------------------------ canary

    def watch(self, canary: CanaryStarted | None) -> bool:
        """Test ``canary`` from now on (None: none); True when it is another one than before, and its records since
        ``from_offset`` are to be fed."""
        if canary == self._canary:
            return False
        self._canary = canary
        self._test = None
        if canary is not None:
            self._test = CanaryTest(
                confidence=self._settings.canary_confidence,
                minimum=self._settings.canary_min,
                maximum=self._settings.canary_max,
                max_s=self._settings.canary_max_s,
            )
        return canary is not None

    def canary_verdict(self, elapsed_s: float) -> Verdict | None:
        """What the running canary's test says, None without one."""
        return None if self._test is None else self._test.verdict(elapsed_s)

    # ------------------------------------------------------------ gate

    @property
    def heldout(self) -> int:
        """Held-out orchestrations at hand."""
        return len(self._held)

    def usable(self, champion: int, lag: Callable[[int], int | None]) -> int:
        """Held-out orchestrations that a gate against ``champion`` would use."""
        return len(self._sample(champion, lag))

    def gate(self, version: int, champion: int, lag: Callable[[int], int | None]) -> GateVerdict:
        """Evaluate ``version`` against ``champion``; ``lag`` as in ``batches.refusal``."""
        held = self._sample(champion, lag)
        self._recognise(held)
        held = [h for h in held if h.logger is not None]
        loggers = sorted({h.logger for h in held if h.logger is not None})
        new, old = (version, self._exploration), (champion, self._exploration)
        for policy in {new, old, *loggers}:
            self._score(policy, held)
        if len(held) < ORCHESTRATIONS_MIN:
            reason = f"{len(held)} held-out orchestrations, {ORCHESTRATIONS_MIN} needed"
            return GateVerdict(0.0, 0.0, 0.0, 0.0, 0.0, len(held), passed=False, reason=reason)
        return judge(
            np.array([h.log_probs[new] for h in held]),
            np.array([h.log_probs[old] for h in held]),
            np.array([[h.log_probs[k] for k in loggers] for h in held]),
            np.array([loggers.index(h.logger) for h in held if h.logger is not None]),
            np.array([h.gain for h in held]),
            confidence=self._settings.gate_confidence,
            margin=self._settings.gate_margin,
            min_ess=self._settings.gate_min_ess,
        )

    def _sample(self, champion: int, lag: Callable[[int], int | None]) -> list[_Held]:
        lags = {v: lag(v) for v in {h.version for h in self._held.values()} if v != champion}
        recent = sorted((age, -v) for v, age in lags.items() if age is not None and age <= LOGGER_LAG_MAX)
        kept = {champion, *(-v for _, v in recent[:LOGGERS_MAX])}
        return [h for h in self._held.values() if h.version in kept]

    def _recognise(self, held: Sequence[_Held]) -> None:
        """Find out with which floor each orchestration was sampled."""
        unknown: dict[int, list[_Held]] = {}
        for h in held:
            if h.logger is None:
                unknown.setdefault(h.version, []).append(h)
        for version, theirs in unknown.items():
            choices = sorted({(version, self._exploration), (version, self._floor(version))})
            for policy in choices:
                self._score(policy, theirs)
            for h in theirs:
                nearest = min(choices, key=lambda policy, h=h: abs(h.log_probs[policy] - h.logged))
                allowed = MISMATCH_MAX + self._mismatch * h.rollout.num_decisions
                if abs(h.log_probs[nearest] - h.logged) <= allowed:
                    h.logger = nearest

    def _score(self, policy: Logger, held: Sequence[_Held]) -> None:
        missing = [h for h in held if policy not in h.log_probs]
        if not missing:
            return
        version, exploration = policy
        net = self._load(version)
        for start in range(0, len(missing), 64):
            part = missing[start : start + 64]
            arrays = collate([h.rollout for h in part])
            logp_N = chosen_log_probs(
                net, TensorBatch.of(arrays), exploration, self._settings.microbatch_tokens
            )
            sums = np.zeros(len(part))
            np.add.at(sums, arrays.rollout_B[arrays.row_N], logp_N.double().numpy())
            for h, value in zip(part, sums.tolist(), strict=True):
                h.log_probs[policy] = value
