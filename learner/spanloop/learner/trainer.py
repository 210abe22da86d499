"""The process ``learner``: samples become candidates, candidates become champions.

Place: reads ``samples`` and ``policies``, appends to ``policies``, writes artifacts, MLflow and routing. Run as
``python -m spanloop.learner.trainer [--config TOML]``; prints one JSON line on stdout when it is ready.

One batch, in this order: BatchCommitted on the log; weights; checkpoint; artifact; MLflow; CandidateRegistered; loaded and
probed in serving; RoutingChanged. Killed anywhere, the next start takes up at the first of these that is missing and
gets the same weights. What fails for a while (MLflow, serving, disk) is tried again with growing pauses while the
other processes go on collecting.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from spanloop.learner.audit import FILE as AUDIT_FILE
from spanloop.learner.audit import Audit
from spanloop.learner.checkpoint import BatchReport
from spanloop.learner.decision_policy import DecisionConfig, DecisionNet
from spanloop.learner.evaluation import Evaluation
from spanloop.learner.history import decode_samples, fetcher, read_policies, read_samples
from spanloop.learner.model import Policy, load_artifact, other_policy, read_manifest
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.promoter import Promoter
from spanloop.learner.registry import Registry
from spanloop.learner.sentinels.patrol import Patrol
from spanloop.learner.sentinels.watch import Watch
from spanloop.learner.serving.port import ServingPort
from spanloop.learner.signing import trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.learner.training import Teach, Training
from spanloop.learner.update import hyper_of, initialise_torch
from spanloop.pipeline.ports import Clock, Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SpanloopError, TerminalError, TransientError
from spanloop.schemas.events import BatchCommitted
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["Learner", "initial_policy", "main", "run", "workspace_lock"]

_LOG = logging.getLogger(__name__)

POLL_S = 0.1
READ_MAX = 500
BACKOFF_MAX_S = 30.0
READY_S = 15.0
"""Ready is said after this long even without serving, so that a supervisor can go on and start it."""
REREAD_BATCHES = 16
"""After a start, samples of so many past batches are read again for the gate."""


def initial_policy(settings: Settings) -> tuple[Any, Tokenizer | None, Policy]:
    """The first policy: version 0's artifact where the workspace has one, else from settings and seed.

    Returns:
        Its shape (``model.Shape``), the embedded policy's tokenizer (None where the model brings its own), and itself.

    Raises:
        ConfigError: no vocabulary, no such model, or settings ask for another shape than the workspace's policy has.
    """
    folder = settings.workspace / "policies" / policy_name(settings.gateway.policy, 0)
    if settings.learner.model:
        from spanloop.learner.hf_policy import initial_lora

        return initial_lora(settings, folder)
    if settings.learner.decisions:
        return _initial_decisions(settings, folder)
    tokenizer = Tokenizer(settings.learner.vocabulary)
    config = PolicyConfig(
        vocabulary_size=tokenizer.size,
        width=settings.learner.width,
        layers=settings.learner.layers,
        heads=settings.learner.heads,
        context=settings.learner.context,
    )
    if not folder.exists():
        return config, tokenizer, PolicyNet.initial(config, settings.learner.seed)
    trust = trust_of(settings.workspace)
    found = read_manifest(folder, trust).config
    if found != config:
        raise other_policy(settings.workspace, found, config)
    artifact = load_artifact(folder, trust=trust)
    if artifact.tokenizer is None or artifact.tokenizer.hash != tokenizer.hash:
        raise other_policy(settings.workspace, f"{config} with other words", config)
    return config, tokenizer, artifact.net


def _initial_decisions(settings: Settings, folder: Path) -> tuple[Any, Tokenizer | None, Policy]:
    section = settings.learner
    config = DecisionConfig(width=section.width, buckets=section.decision_buckets)
    if not folder.exists():
        return config, None, DecisionNet.initial(config, section.seed)
    trust = trust_of(settings.workspace)
    found = read_manifest(folder, trust).config
    if found != config:
        raise other_policy(settings.workspace, found, config)
    return config, None, load_artifact(folder, trust=trust).net


def _teach(settings: Settings) -> Teach | None:
    """How batches are trained: on the ranks that settings ask for; None: in this process."""
    section = settings.learner
    if section.ranks == 1 or not section.model:
        return None
    from spanloop.learner.ranks import train_on_ranks

    return partial(train_on_ranks, device=section.device, ranks=section.ranks)


class Learner:
    """All of the process but its loop: ``step`` does what can be done now.

    Args:
        settings: Of the deployment.
        log: Any Log.
        registry: MLflow.
        serving: Where versions are loaded; None: nowhere (experiments).
        clock: Processing time, for the canary's time limit.
    """

    def __init__(
        self, settings: Settings, *, log: Log, registry: Registry, serving: ServingPort | None, clock: Clock
    ) -> None:
        self.settings = settings
        self._log = log
        self._clock = clock
        self._tenant, self._policy = settings.tenant, settings.gateway.policy
        self._hyper = hyper_of(settings)
        self._fetch = fetcher(log, self._tenant)
        self._full_s: float | None = None
        """Since when the open window has been full and waits for groups."""
        config, tokenizer, net = initial_policy(settings)
        self.promoter = Promoter(
            settings, log=log, registry=registry, serving=serving, clock=clock, tokenizer=tokenizer
        )
        self.training = Training(config, net, settings.workspace / "checkpoints", teach=_teach(settings))
        self.evaluation = Evaluation(
            settings.learner,
            exploration=settings.serving.exploration,
            floor=self.promoter.floor,
            load=self.promoter.net,
            vocabulary_size=config.vocabulary_size,
            context=config.context,
            full_vocabulary=config.full_vocabulary,
            mismatch=(settings.learner.probe_tolerance or net.tolerance.mean)
            if config.full_vocabulary
            else 0.0,
        )
        section = settings.learner
        watch = Watch(window=section.sentinel_window, confidence=section.sentinel_confidence)
        place = settings.workspace / "sentinels.json"
        self._patrol = Patrol(log, settings.tenant, watch, place) if section.sentinels else None
        self._audit = Audit(
            self.promoter.deployment,
            self._policy,
            every_s=section.audit_s,
            place=settings.workspace / AUDIT_FILE,
        )
        self._initial = net
        self._unsaved = False
        self._trained_to = -1
        self._measured_to = -1

    def start(self) -> None:
        """Take up where the log and the newest checkpoint are."""
        self.promoter.sync()
        state = self.promoter.state
        events = read_policies(self._log, self._tenant, self._policy)
        batches = [e for e, _ in events if isinstance(e, BatchCommitted)]
        redone = self.training.resume(self._log, state, batches, self._tenant)
        if redone:
            _LOG.info("trained %d committed batches again after the last checkpoint", redone)
        self._trained_to = self.training.state.to_offset
        recent = [b.from_offset for b in batches[-REREAD_BATCHES:]]
        starts = [*recent[:1], *([state.canary.from_offset] if state.canary is not None else [])]
        self._measured_to = min(starts, default=-1)
        self._open_window()

    def _open_window(self) -> None:
        self.training.open_window(self._batch_of, self._hyper, self._fetch)
        self._full_s = None
        self._trained_to = self.training.state.to_offset

    def _batch_of(self, version: int) -> int | None:
        return self.promoter.state.batch_of(version)

    @property
    def bootstrapped(self) -> bool:
        """Whether a champion is routed to."""
        return self.promoter.state.routing is not None

    # ------------------------------------------------------------ one round

    def step(self) -> bool:
        """Everything that can be done now; True when a batch was trained.

        Raises TransientError when something has to wait; what was done stays done, call it again.
        """
        promoter = self.promoter
        frozen = promoter.state.frozen
        promoter.sync()
        self._measure()
        self._watch_over(unfrozen=frozen and not promoter.state.frozen)
        promoter.audit(self._audit)
        waiting: list[TransientError] = []
        for part in (
            self._register,
            lambda: promoter.obey(self._batch),
            self._advance,
            promoter.route,
            promoter.mirror,
        ):
            try:
                part()
            except TransientError as exc:
                waiting.append(exc)
        trained = False
        if not waiting:
            trained = self._train()
            if trained:
                self._register()
                self._advance()
                promoter.route()
                promoter.mirror()
        if waiting:
            raise waiting[0]
        return trained

    @property
    def _batch(self) -> int:
        return self.training.state.batch

    def _advance(self) -> None:
        self.promoter.advance(self.evaluation, self._batch)

    def _measure(self) -> None:
        self.evaluation.watch(self.promoter.state.canary)
        while records := self._log.read([topics.SAMPLES], {topics.SAMPLES: self._measured_to}, READ_MAX):
            for record in records:
                self._measured_to = record.offset
                built = decode_samples(record.value, self._tenant)
                if built is not None:
                    self.evaluation.add(built, record.offset)
            if len(records) < READ_MAX:
                break

    def _watch_over(self, *, unfrozen: bool) -> None:
        if self._patrol is None:
            return
        if unfrozen:
            self._patrol.accept()
        self._patrol.step(self.promoter.alarm)

    def _register(self) -> None:
        """Checkpoint and register what is not yet: the first policy, or the last batch's weights."""
        if self._unsaved:
            self.training.save()
            self._unsaved = False
        if 0 not in self.promoter.state.versions:
            self.promoter.register(self._initial, 0, BatchReport(orchestrations=0, parent_version=-1))
        report = self.training.state.report
        if self._batch > 0 and report is not None:
            known = self.promoter.state.candidate_of_batch(self._batch)
            if known is None:
                self.promoter.register(self.training.updater.net, self._batch, report)

    def _train(self) -> bool:
        """Fill the window; when it is full, commit the batch's boundary, train it and save."""
        if self.promoter.state.frozen or not self._fill():
            return False
        parent = self.promoter.state.newest
        committed = self.training.next_batch(self._hyper, parent, tenant=self._tenant, policy=self._policy)
        if not self.promoter.append(committed):
            raise TerminalError(
                f"batch {committed.batch} is on the log already: another learner works on this workspace; stop one"
            )
        samples = read_samples(self._log, self._tenant, committed.from_offset, committed.to_offset)
        self.training.train(committed, samples, self._batch_of, self._fetch)
        self._unsaved = True
        self._open_window()
        return True

    def _fill(self) -> bool:
        """Read on until a batch is due; True when it is."""
        wanted = self.settings.learner.batch_orchestrations
        while self.training.trainable < wanted or not self._groups_are_whole():
            records = self._log.read([topics.SAMPLES], {topics.SAMPLES: self._trained_to}, READ_MAX)
            if not records:
                return False
            for record in records:
                self._trained_to = record.offset
                self.training.offer(decode_samples(record.value, self._tenant), record.offset)
                if self.training.trainable >= wanted and self._groups_are_whole():
                    break
        return True

    def _groups_are_whole(self) -> bool:
        """Whether no group of the open window waits for members, or has waited long enough. Where the boundary falls is written
        on the log, so that a clock may decide it."""
        section, window = self.settings.learner, self.training.window
        if section.advantage != "group" or section.group_size < 2 or window is None:
            return True
        if all(members >= section.group_size for members in window.groups().values()):
            return True
        now_s = self._clock.now_ns() / 1e9
        self._full_s = now_s if self._full_s is None else self._full_s
        return now_s - self._full_s >= section.group_timeout_s

    def idle_reason(self) -> str:
        """Why no batch is being trained, for people."""
        if self.promoter.state.frozen:
            return "learning is frozen: `spanloop policies unfreeze` goes on"
        window = self.training.window
        have, wanted = self.training.trainable, self.settings.learner.batch_orchestrations
        if window is None:
            return "no window is open"
        if have >= wanted:
            return f"{have} orchestrations wait for the rest of their groups"
        dropped = ", ".join(f"{count} {reason}" for reason, count in window.dropped().items())
        return f"{have} of {wanted} trainable orchestrations have come" + (
            f"; left out: {dropped}" if dropped else ""
        )


# ---------------------------------------------------------------- the process


@contextmanager
def workspace_lock(workspace: Path) -> Iterator[None]:
    """One learner a workspace. Raises TerminalError when another holds the lock; a killed one's is free at once."""
    workspace.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(workspace / "learner.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise TerminalError(f"another learner works on {workspace}; stop it first") from exc
        yield
    finally:
        os.close(descriptor)


def run(learner: Learner, stop: threading.Event, *, ready: Callable[[], None]) -> None:
    """Step until ``stop``; ``ready`` is called once, when a champion is routed to or serving lets us wait too long."""
    pause_s, announced = POLL_S, False
    deadline = time.monotonic() + READY_S
    stall_s = learner.settings.learner.stall_s
    last_s = time.monotonic()
    while not stop.is_set():
        reason = ""
        try:
            busy = learner.step()
            pause_s = POLL_S
        except TransientError as exc:
            pause_s = min(BACKOFF_MAX_S, max(0.5, pause_s * 2))
            _LOG.warning("%s (again in %.1f s)", exc.message, pause_s)
            busy, reason = False, exc.message
        if busy:
            last_s = time.monotonic()
        elif time.monotonic() - last_s >= stall_s:
            _LOG.warning("no batch was trained for %.0f s: %s", stall_s, reason or learner.idle_reason())
            last_s = time.monotonic()
        if not announced and (learner.bootstrapped or time.monotonic() > deadline):
            ready()
            announced = True
        if not busy:
            stop.wait(min(pause_s, 1.0) if not announced else pause_s)


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Settings (TOML).")
def main(config: Path | None) -> None:
    """Learn from this workspace's samples until SIGTERM."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        _serve(load_settings(config))
    except SpanloopError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(exc.exit_code)


def _serve(settings: Settings) -> None:
    from spanloop.learner.registry import MlflowRegistry, tracking_uri
    from spanloop.learner.serving.vllm import serving_of
    from spanloop.pipeline.clock import SystemClock
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.sealing.opening import opened_log

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    initialise_torch(settings.learner.threads, deterministic=settings.learner.deterministic)
    with workspace_lock(settings.workspace):
        log = opened_log(open_log(settings), settings)
        try:
            uri = tracking_uri(settings.learner.tracking_uri, settings.workspace)
            learner = Learner(
                settings,
                log=log,
                registry=MlflowRegistry(uri, settings.gateway.policy, settings.workspace),
                serving=serving_of(settings),
                clock=SystemClock(),
            )
            learner.start()
            run(learner, stop, ready=_announce)
        finally:
            log.close()


def _announce() -> None:
    sys.stdout.write(json.dumps({"ready": "learner", "url": ""}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
