"""Carries out promotions: registers versions, evaluates gates, runs canaries, changes routing, obeys commands.

Place: the effects around ``promotion``'s rules. Everything it decides is an event on the policies topic, appended before
MLflow's alias and the gateway's routing follow; after a crash both are brought to what the log says.

Invariants: every append is idempotent by event id; a version is loaded under its own name and has passed its probe
before routing names it; where serving refuses a version, routing stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from spanloop.learner import promotion
from spanloop.learner.artifact import Origin, code_version, signer_of
from spanloop.learner.audit import SENTINEL, Audit, Mismatch
from spanloop.learner.checkpoint import BatchReport
from spanloop.learner.deployment import Deployment
from spanloop.learner.evaluation import Evaluation
from spanloop.learner.gate import GateVerdict
from spanloop.learner.model import Artifact, Policy, load_artifact, read_manifest, save_artifact
from spanloop.learner.promotion import (
    EvaluateGate,
    Facts,
    FinishCanary,
    Promote,
    PromotionState,
    StartCanary,
    Withdraw,
)
from spanloop.learner.registry import ALIASES, CHAMPION, Registry
from spanloop.learner.sentinels.watch import Alarm
from spanloop.learner.serving.port import ServingPort
from spanloop.learner.signing import open_signer, trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.pipeline.ports import Clock, Log, new_record
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, StaleError, TransientError
from spanloop.schemas.events import (
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    GateEvaluated,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyEvent,
    PolicyPromoted,
    PolicyRolledBack,
    SentinelRaised,
    decode,
)
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings

__all__ = ["Promoter"]

_LOG = logging.getLogger(__name__)

NETS_MAX = 16
ATTEMPTS_MAX = 1000
"""Times that one mismatch can be raised again in one champion's time."""
RECHECK_S = 10.0
"""Where MLflow's aliases point is asked again after this long."""
_BOUND = 10**9


class Promoter:
    """State of the policies topic and the means to move it on."""

    def __init__(
        self,
        settings: Settings,
        *,
        log: Log,
        registry: Registry,
        serving: ServingPort | None,
        clock: Clock,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._settings = settings
        self._log = log
        self._registry = registry
        self._clock = clock
        self._tokenizer = tokenizer
        self._signer = open_signer(settings.workspace)
        self._names: dict[str, Any] = {"tenant": settings.tenant, "policy": settings.gateway.policy}
        self._read_to = -1
        self._nets: OrderedDict[int, Policy] = OrderedDict()
        self._asked_s = 0.0
        self._aliases: dict[str, int] = {}
        """Where MLflow's point, as far as it was asked or told."""
        self.deployment = Deployment(
            serving,
            settings.gateway.policy,
            net=self.net,
            folder=self.folder,
            tolerance=settings.learner.probe_tolerance,
        )
        self.state = PromotionState()

    # ------------------------------------------------------------ the log

    def sync(self) -> None:
        """Fold what is new on the policies topic."""
        key = f"{self._names['tenant']}/{self._names['policy']}"
        while records := self._log.read([topics.POLICIES], {topics.POLICIES: self._read_to}, 500):
            for record in records:
                self._read_to = record.offset
                if record.key != key:
                    continue
                try:
                    event = decode(record.value)
                except SchemaError as exc:
                    _LOG.warning("policies offset %d is skipped: %s", record.offset, exc.message)
                    continue
                self.state = promotion.apply(self.state, event, record.appended_ns)

    def alarm(self, raised: Alarm) -> None:
        """Freeze, and say why."""
        event = SentinelRaised(
            **self._names,
            sentinel=raised.sentinel,
            version=raised.version,
            epoch=self.state.epoch,
            value=raised.value,
            reference=raised.reference,
            limit=raised.limit,
            orchestrations=raised.orchestrations,
            reason=raised.reason,
        )
        if self.append(event):
            _LOG.warning(
                "frozen by %s; such as %s. `spanloop policies unfreeze` accepts it",
                raised.reason,
                ", ".join(raised.orchestrations),
            )

    def audit(self, audit: Audit) -> None:
        """Audit what routing names, where it is time; a version that does not fit freezes. Raises nothing that may be retried."""
        routing, now_ns = self.state.routing, self._clock.now_ns()
        if routing is None:
            return
        named = {routing.champion, routing.learner, routing.canary} - {-1}
        if audit.step(named, self.state.versions, now_ns, self._misserved) and audit.last:
            worst = max(audit.last.values(), key=lambda a: a.mean)
            metrics = {
                "served.difference": worst.mean,
                "served.mismatches": sum(not a.fits for a in audit.last.values()),
            }
            with contextlib.suppress(TransientError):  # a figure for people; what counts is on the log
                self._registry.measure(metrics, step=self.state.newest)

    def _misserved(self, mismatch: Mismatch) -> None:
        if self.state.frozen and any(s.sentinel == SENTINEL for s in self.state.sentinels):
            return
        found = mismatch.found
        for attempt in range(ATTEMPTS_MAX):
            event = SentinelRaised(
                **self._names,
                sentinel=SENTINEL,
                version=found.version,
                epoch=self.state.epoch,
                value=found.mean,
                reference=0.0,
                limit=found.allowed_mean,
                orchestrations=(),
                reason=mismatch.reason,
                attempt=attempt,
            )
            if self.append(event):
                _LOG.warning("frozen by %s", mismatch.reason)
                return

    def append(self, event: PolicyEvent) -> bool:
        """Append an event and fold the topic; False when its place was taken already (the state then says by what)."""
        (result,) = self._log.append([new_record(event)])
        self.sync()
        if not result.duplicate:
            _LOG.info("%s", _line(event))
        return not result.duplicate

    # ------------------------------------------------------------ versions

    def folder(self, version: int) -> Path:
        """Artifact folder of a version."""
        return self._settings.workspace / self._relative(version)

    def _relative(self, version: int) -> str:
        return f"policies/{policy_name(self._names['policy'], version)}"

    def net(self, version: int) -> Policy:
        """Verified network of a registered version. Raises SchemaError."""
        found = self._nets.pop(version, None)
        if found is None:
            found = self._artifact(version).net
        self._nets[version] = found
        while len(self._nets) > NETS_MAX:
            self._nets.popitem(last=False)
        return found

    def floor(self, version: int) -> float:
        """Exploration floor of a version's calls while it was the learning share."""
        candidate = self.state.versions.get(version)
        return promotion.exploration_floor(self._settings.learner, candidate.batch if candidate else 0)

    def _artifact(self, version: int) -> Artifact:
        candidate = self.state.versions.get(version)
        if candidate is None:
            raise SchemaError(f"version {version} is not registered")
        folder = self._settings.workspace / candidate.path
        return load_artifact(folder, sha256=candidate.sha256, trust=trust_of(self._settings.workspace))

    def register(self, net: Policy, batch: int, report: BatchReport) -> int:
        """Make the weights after ``batch`` a version: artifact, MLflow, event. Doing it again changes nothing.

        Raises TransientError when disk, MLflow or the log refuse; the caller tries again.
        """
        known = self.state.candidate_of_batch(batch)
        if known is not None:
            return known.version
        return self._register(net, batch=batch, report=report)

    def _register(
        self,
        net: Policy,
        *,
        batch: int,
        report: BatchReport,
        injected: str = "",
        injected_signer: str = "",
        command: str = "",
    ) -> int:
        version = self.state.next_version
        origin = self._origin(version, batch, report, injected=injected, injected_signer=injected_signer)
        sha256 = self._save(version, net, origin)
        tags = {
            "spanloop.parent": str(report.parent_version),
            "spanloop.parent_sha256": origin.parent_sha256,
            "spanloop.batch": str(batch),
            "spanloop.sha256": sha256,
            "spanloop.orchestrations": str(report.orchestrations),
            "spanloop.offset": str(origin.to_offset),
            "spanloop.samples_sha256": origin.samples_sha256,
            "spanloop.code": origin.code,
            "spanloop.signer": self._signer.name,
            "spanloop.tenant": self._names["tenant"],
        }
        if injected:
            tags["spanloop.injected"] = injected[:250]
        mlflow_version = self._registry.register(
            version, self.folder(version), tags=tags, metrics=report.metrics, origin=origin
        )
        self.append(
            CandidateRegistered(
                **self._names,
                version=version,
                parent=report.parent_version,
                batch=batch,
                mlflow_version=mlflow_version,
                path=self._relative(version),
                sha256=sha256,
                orchestrations=report.orchestrations,
                dropped=report.dropped,
                metrics=report.metrics,
                injected=injected,
                command=command,
            )
        )
        return version

    def _origin(
        self, version: int, batch: int, report: BatchReport, *, injected: str, injected_signer: str
    ) -> Origin:
        last, parent = self.state.last_batch, self.state.versions.get(report.parent_version)
        own = last is not None and last.batch == batch and not injected
        return Origin(
            version=version,
            parent=report.parent_version,
            parent_sha256="" if parent is None else parent.sha256,
            batch=batch,
            from_offset=last.from_offset if last is not None and own else -1,
            to_offset=last.to_offset if last is not None and own else -1,
            samples=report.orchestrations,
            samples_sha256=report.samples_sha256,
            code=code_version(),
            injected=injected,
            injected_signer=injected_signer,
        )

    def _save(self, version: int, net: Policy, origin: Origin) -> str:
        folder = self.folder(version)
        if folder.exists() and version not in self.state.versions:
            self._clear_orphan(folder, net)
        try:
            return save_artifact(
                folder, net, self._tokenizer, about=msgspec.to_builtins(origin), signer=self._signer
            )
        except OSError as exc:
            raise TransientError(
                f"cannot write {folder}: {exc.strerror or exc}; the learner tries again"
            ) from exc

    def _clear_orphan(self, folder: Path, net: Policy) -> None:
        """Move a folder aside that a killed learner left without an event, unless it holds just these weights, signed."""
        try:
            same = _same(load_artifact(folder, trust=trust_of(self._settings.workspace)).net, net)
        except SchemaError:
            same = False
        if not same:
            folder.rename(folder.with_name(f".orphan-{folder.name}-{time.time_ns()}"))

    # ------------------------------------------------------------ deciding

    def advance(self, evaluation: Evaluation, batch: int) -> None:
        """Do what the rules ask for, until they ask for nothing."""
        for _ in range(20):
            evaluation.watch(self.state.canary)
            action = promotion.decide(self.state, self._facts(evaluation, batch), self._settings.learner)
            if action is None:
                return
            before = self._read_to
            self._do(action, evaluation, batch)
            if self._read_to == before:
                return

    def _facts(self, evaluation: Evaluation, batch: int) -> Facts:
        elapsed_s = (self._clock.now_ns() - self.state.canary_started_ns) / 1e9
        return Facts(
            heldout=evaluation.usable(self.state.champion, self._lag(batch)),
            canary=evaluation.canary_verdict(elapsed_s),
            unroutable=frozenset(self.deployment.unroutable),
        )

    def _lag(self, batch: int) -> Callable[[int], int | None]:
        def lag(version: int) -> int | None:
            made = self.state.batch_of(version)
            return None if made is None else batch - made

        return lag

    def _do(self, action: promotion.Action, evaluation: Evaluation, batch: int) -> None:
        state = self.state
        match action:
            case EvaluateGate(version=version, attempt=attempt):
                try:
                    verdict = evaluation.gate(version, state.champion, self._lag(batch))
                except SchemaError as exc:
                    verdict = GateVerdict(0.0, 0.0, 0.0, 0.0, 0.0, 0, passed=False, reason=exc.message)
                self.append(
                    GateEvaluated(
                        **self._names,
                        version=version,
                        against=state.champion,
                        attempt=attempt,
                        estimate=_micro(verdict.estimate),
                        lower=_micro(verdict.lower),
                        ess=round(verdict.ess, 3),
                        n=verdict.n,
                        passed=verdict.passed,
                        reason=verdict.reason,
                    )
                )
            case StartCanary(version=version):
                if self.deployment.ensure(version):
                    self.append(
                        CanaryStarted(
                            **self._names,
                            canary=state.num_canaries,
                            version=version,
                            against=state.champion,
                            share=self._settings.learner.canary_share,
                            from_offset=self._log.end(topics.SAMPLES),
                        )
                    )
            case FinishCanary(verdict=v) if state.canary is not None:
                self.append(
                    CanaryFinished(
                        **self._names,
                        canary=state.canary.canary,
                        version=state.canary.version,
                        against=state.canary.against,
                        verdict=v.verdict,
                        n_version=v.n_version,
                        n_against=v.n_against,
                        difference=_micro(v.difference),
                        lower=_micro(v.lower),
                        upper=_micro(v.upper),
                        reason=v.reason,
                    )
                )
            case Promote(version=version, reason=reason):
                if self.deployment.ensure(version):
                    epoch = state.epoch + 1
                    event = PolicyPromoted(
                        **self._names, epoch=epoch, version=version, previous=state.champion, reason=reason
                    )
                    self.append(event)
            case Withdraw(version=version, reason=reason):
                self._roll_back(version, state.champion, reason)
            case _:
                pass

    def _roll_back(self, version: int, to: int, reason: str, command: str = "") -> bool:
        event = PolicyRolledBack(
            **self._names, epoch=self.state.epoch + 1, version=version, to=to, reason=reason, command=command
        )
        return self.append(event)

    # ------------------------------------------------------------ commands

    def obey(self, batch: int) -> None:
        """Carry out pending commands in order; each is finished with done or refused. One that has to wait (MLflow is
        away) does not hold up the next: a rollback needs the log and serving only."""
        waiting: TransientError | None = None
        for command in self.state.commands:
            try:
                version = self._obey(command, batch)
            except (SchemaError, StaleError) as exc:
                self._finish(command, "refused", exc.message, -1)
            except TransientError as exc:
                waiting = waiting or exc
            else:
                self._finish(command, "done", "", version)
        if waiting is not None:
            raise waiting

    def _obey(self, command: PolicyCommand, batch: int) -> int:
        done = self.state.commanded.get(command.command_id)
        if done is not None:
            return done
        if command.kind == "inject":
            return self._inject(command, batch)
        if command.kind == "rollback":
            return self._command_rollback(command)
        if command.kind == "promote":
            return self._command_promote(command)
        if command.kind in ("freeze", "unfreeze"):
            return self.state.champion
        raise SchemaError(
            f"unknown command {command.kind!r}; this build knows inject, promote, rollback, freeze, unfreeze"
        )

    def _inject(self, command: PolicyCommand, batch: int) -> int:
        path = Path(command.argument)
        champion = self.net(self.state.champion) if self.state.champion >= 0 else None
        config = read_manifest(path).config
        if champion is not None and config != champion.config:
            raise SchemaError(f"{path} has another shape than the policy: {config}")
        artifact = load_artifact(path)
        signer = signer_of(path, trust_of(self._settings.workspace))
        tokenizer = artifact.tokenizer
        if tokenizer is not None and self._tokenizer is not None and tokenizer.hash != self._tokenizer.hash:
            raise SchemaError(f"{path} has another vocabulary than learner.vocabulary")
        report = BatchReport(orchestrations=0, parent_version=self.state.champion)
        reason = command.reason or "injected by hand"
        return self._register(
            artifact.net, batch=batch, report=report, injected=reason, injected_signer=signer,
            command=command.command_id,
        )  # fmt: skip

    def _command_promote(self, command: PolicyCommand) -> int:
        state = self.state
        version = _version_of(command.argument)
        if version not in state.versions:
            raise SchemaError(f"version {version} is not registered; `spanloop policies` lists what is")
        if version == state.champion:
            raise StaleError(f"version {version} is the champion already")
        if version in state.retired:
            raise StaleError(
                f"version {version} was rejected or rolled back and is never promoted again; `spanloop policies rollback --to "
                f"{version}` lets it serve nevertheless"
            )
        if state.frozen:
            raise StaleError("promotion is frozen; `spanloop policies unfreeze` first")
        if not self.deployment.ensure(version):
            raise SchemaError(f"serving refuses version {version}")
        event = PolicyPromoted(
            **self._names,
            epoch=state.epoch + 1,
            version=version,
            previous=state.champion,
            reason=f"by hand: {command.reason or 'no reason given'}; {state.evidence(version)[1]}",
            command=command.command_id,
        )
        if not self.append(event):
            raise TransientError("another promoter was quicker; trying again")
        return version

    def _command_rollback(self, command: PolicyCommand) -> int:
        state = self.state
        to = _version_of(command.argument) if command.argument else state.previous_champion
        if to < 0:
            raise StaleError("there is no earlier champion to roll back to; name a version with --to")
        if to not in state.versions:
            raise SchemaError(f"version {to} is not registered; `spanloop policies` lists what is")
        if to == state.champion:
            raise StaleError(f"version {to} is the champion already")
        if not self.deployment.ensure(to):
            raise SchemaError(f"serving refuses version {to}")
        if not self._roll_back(state.champion, to, command.reason or "by hand", command.command_id):
            raise TransientError("another promoter was quicker; trying again")
        return to

    def _finish(self, command: PolicyCommand, status: str, message: str, version: int) -> None:
        self.append(
            PolicyCommandFinished(
                **self._names, command_id=command.command_id, status=status, message=message, version=version
            )
        )

    # ------------------------------------------------------------ serving and MLflow follow the log

    def route(self) -> None:
        """Bring routing to what the state asks for: load, verify, then switch."""
        for _ in range(4):
            wanted = promotion.desired_routing(
                self.state,
                self._settings.learner,
                **self._names,
                unroutable=frozenset(self.deployment.unroutable),
            )
            if wanted is None:
                break
            named = [v for v in (wanted.champion, wanted.learner, wanted.canary) if v >= 0]
            if all(self.deployment.ensure(v) for v in named):
                self.append(wanted)
                break
            if wanted.champion in self.deployment.unroutable or wanted.canary in self.deployment.unroutable:
                break
        if self.state.routing is not None:
            named = {self.state.routing.champion, self.state.routing.learner, self.state.routing.canary}
            self.deployment.drain(named, self._clock.now_ns() / 1e9)

    def _register_again(self, version: int) -> None:
        """A version that MLflow does not know any more (its store was lost) from what the log says; nothing where it does."""
        candidate = self.state.versions.get(version)
        if candidate is None:
            return
        tags = {
            "spanloop.parent": str(candidate.parent),
            "spanloop.batch": str(candidate.batch),
            "spanloop.sha256": candidate.sha256,
            "spanloop.orchestrations": str(candidate.orchestrations),
            "spanloop.tenant": self._names["tenant"],
        }
        self._registry.register(version, self.folder(version), tags=tags, metrics=candidate.metrics)

    def mirror(self) -> None:
        """Point MLflow's aliases at what the log says, the champion's first. Raises TransientError.

        They are read again now and then: a promoter that lost a race may have moved one late, and so may a person."""
        now_s = self._clock.now_ns() / 1e9
        if now_s - self._asked_s >= RECHECK_S:
            self._aliases, self._asked_s = {}, now_s
        wanted = dict(
            zip(ALIASES, (self.state.champion, self.state.challenger, self.state.newest), strict=True)
        )
        for alias, version in wanted.items():
            if alias not in self._aliases:
                self._aliases[alias] = self._registry.pointed(alias)
            if self._aliases[alias] != version and (version >= 0 or alias != CHAMPION):
                self._register_again(version)
                self._registry.point(alias, version, epoch=self.state.epoch)
                self._aliases[alias] = version


def _version_of(argument: str) -> int:
    try:
        return int(argument)
    except ValueError as exc:
        raise SchemaError(f"{argument!r} is not a version number") from exc


def _micro(value: float) -> int:
    """Micro-units; an unknown bound (infinite) is shown as +-1000 units."""
    scaled = value * 1e6
    return _BOUND if scaled >= _BOUND else -_BOUND if scaled <= -_BOUND else round(scaled)


def _same(one: Policy, other: Policy) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def _line(event: PolicyEvent) -> str:
    fields = {
        k: getattr(event, k)
        for k in event.__struct_fields__
        if k not in ("tenant", "policy", "metrics", "parameters")
    }
    return f"{type(event).__name__} " + " ".join(f"{k}={v}" for k, v in fields.items() if v not in ("", {}))
