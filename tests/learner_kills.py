"""The learner's process killed with SIGKILL at random points of its work, and the same log learned undisturbed.

A point is drawn among what the interpreter does in the workspace (audit events: files opened, renamed, removed, folders made), and
up to 50 ms behind it, so that computing and the log's appends are hit too; what is hit hardly depends on how fast the machine is.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from learner_world import CONFIG, World, append, settings

from spanloop.learner.checkpoint import load_latest, tensors_hash
from spanloop.learner.history import read_policies
from spanloop.learner.policy import PolicyNet
from spanloop.learner.promotion import PromotionState, fold
from spanloop.learner.provenance import provenance
from spanloop.learner.registry import MemoryRegistry, MlflowRegistry, tracking_uri
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner, run, workspace_lock
from spanloop.learner.update import initialise_torch
from spanloop.pipeline.clock import ManualClock, SystemClock
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.events import BatchCommitted, SamplesBuilt, decode

SECTION: dict[str, Any] = {"gate": False, "max_staleness": 10**6, "epochs": 1}
BATCH = 16
POINTS_MAX = 150
"""About what a learner does in six batches."""


def learn(workspace: Path, die_at: int, delay_s: float) -> None:
    """A learner's process; dies at its ``die_at``-th point (0: never)."""
    initialise_torch(1, deterministic=True)
    options = settings(workspace, **SECTION)
    with workspace_lock(workspace), closing(SqliteLog(workspace / "spanloop.db")) as log:
        uri = tracking_uri("", workspace)
        made = Learner(
            options, log=log, registry=MlflowRegistry(uri, "policy", workspace), serving=MemoryServing(),
            clock=SystemClock(),
        )  # fmt: skip
        if die_at:
            _arm(str(workspace), die_at, delay_s)
        made.start()
        run(made, threading.Event(), ready=lambda: None)


def _arm(workspace: str, die_at: int, delay_s: float) -> None:
    seen = 0

    def die() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(_event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if not arguments or not str(arguments[0]).startswith(workspace):
            return
        seen += 1
        if seen != die_at:
            return
        if delay_s <= 0.0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=die).start()

    sys.addaudithook(hook)


class Killing:
    """One workspace whose learner is killed again and again while samples come in."""

    def __init__(self, workspace: Path, seed: int) -> None:
        self.workspace = workspace
        self.rng = random.Random(seed)
        self.world = World(seed)
        self.first = PolicyNet.initial(CONFIG, 0)
        self.log = SqliteLog(workspace / "spanloop.db")
        self.clean = multiprocessing.get_context("forkserver")  # forks of a process that opened nothing
        self.clean.set_forkserver_preload(
            ["mlflow", "mlflow.store.model_registry.sqlalchemy_store", "learner_kills"]
        )
        self.deaths: Counter[int] = Counter()
        """By batches that were committed when it died."""

    def feed(self, count: int) -> None:
        """More samples, one in ten a later revision of an earlier one, which must not be learned from again."""
        for _ in range(count):
            built = self.world.play(self.first, 0, holdout=self.rng.random() < 0.1)
            again = [] if self.rng.random() > 0.1 else [_revised(built)]
            append(self.log, [built, *again])

    def batches(self) -> int:
        """Batches whose version is registered."""
        state = fold(read_policies(self.log, "default", "policy"))
        return max((c.batch for c in state.versions.values()), default=-1)

    def kill(self, limit_s: float = 120.0) -> None:
        """Start a learner and wait until it has died at a random point."""
        self.feed(2 * BATCH)
        die_at = round(math.exp(self.rng.uniform(0.0, math.log(POINTS_MAX))))
        delay_s = self.rng.choice([0.0, self.rng.uniform(0.0, 0.05)])
        child = self.clean.Process(target=learn, args=(self.workspace, die_at, delay_s), daemon=True)
        child.start()
        deadline = time.monotonic() + limit_s
        while child.is_alive():
            child.join(0.5)
            if time.monotonic() > deadline or (child.is_alive() and self._idle()):
                child.kill()  # it is done before its point comes: killed while it waits
                child.join()
        assert child.exitcode == -signal.SIGKILL, f"the learner ended by itself with {child.exitcode}"
        self.deaths[self.batches()] += 1

    def _idle(self) -> bool:
        return self._left() < BATCH

    def _left(self) -> int:
        """Orchestrations that no registered batch has taken yet, those held out not counted."""
        committed = [
            e for e, _ in read_policies(self.log, "default", "policy") if isinstance(e, BatchCommitted)
        ]
        last = committed[-1].to_offset if committed and committed[-1].batch <= self.batches() else -1
        new = {b.orchestration_id for b in self.samples(last) if not b.holdout and b.revision == 1}
        return len(new)

    def samples(self, after: int = -1) -> list[SamplesBuilt]:
        found = [decode(r.value) for r in scan(self.log, [topics.SAMPLES], after={topics.SAMPLES: after})]
        return [b for b in found if isinstance(b, SamplesBuilt)]

    def finish(self, limit_s: float = 300.0) -> None:
        """Let a last learner work until nothing is left."""
        child = self.clean.Process(target=learn, args=(self.workspace, 0, 0.0), daemon=True)
        child.start()
        deadline = time.monotonic() + limit_s
        while not self._idle():
            assert child.is_alive()
            assert time.monotonic() < deadline, f"{self._left()} orchestrations are left"
            time.sleep(0.1)
        child.kill()
        child.join()

    def check(self, elsewhere: Path) -> dict[str, Any]:
        """Compare with the same samples learned undisturbed; returns figures."""
        state = fold(read_policies(self.log, "default", "policy"))
        calm, calm_state, used = _undisturbed(elsewhere, self.samples())
        found = load_latest(self.workspace / "checkpoints")
        assert found is not None
        assert found.state.batch == calm.training.state.batch == self.batches()
        assert tensors_hash(found.tensors) == calm.training.weights_hash()
        assert {v: c.sha256 for v, c in state.versions.items()} == {
            v: c.sha256 for v, c in calm_state.versions.items()
        }
        taught = Counter(
            f"{lesson.orchestration_id}@{lesson.revision}"
            for batch in provenance(self.log, CONFIG, max(state.versions)).batches
            for lesson in batch.lessons
        )
        assert set(taught.values()) == {1}
        assert set(taught) == used
        return {
            "kills": sum(self.deaths.values()), "batches": found.state.batch, "samples_used": len(taught),
            "versions": len(state.versions), "most_kills_in_one_batch": max(self.deaths.values(), default=0),
        }  # fmt: skip


def _revised(built: SamplesBuilt) -> SamplesBuilt:
    return msgspec.structs.replace(built, revision=2, reward=-built.reward)


def _undisturbed(
    workspace: Path, samples: Sequence[SamplesBuilt]
) -> tuple[Learner, PromotionState, set[str]]:
    """The same samples through one learner that nobody disturbs, and the orchestrations it was taught by."""
    workspace.mkdir()
    log = SqliteLog(workspace / "spanloop.db")
    append(log, samples)
    made = Learner(
        settings(workspace, **SECTION), log=log, registry=MemoryRegistry(), serving=MemoryServing(),
        clock=ManualClock(10**18),
    )  # fmt: skip
    made.start()
    made.step()
    while made.step():
        pass
    state = made.promoter.state
    taught = {
        f"{lesson.orchestration_id}@{lesson.revision}"
        for batch in provenance(log, CONFIG, max(state.versions)).batches
        for lesson in batch.lessons
    }
    log.close()
    return made, state, taught
