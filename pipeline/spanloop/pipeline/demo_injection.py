"""The demo's bad candidate: made from the champion, handed to the learner, caught by the canary. A small state machine.

Steps: make it (``dispatch_desk.sabotage``: the champion, but that it ends tickets from the phone queue, which no ticket used so
far) -> wait for the end of a running canary, which a freeze would break off -> freeze, so that the champion it was made from stays
-> hand it over -> unfreeze -> it passes the gate, since held-out tickets know no phone queue -> its canary begins -> the desk opens
its phone queue, a real shift of the traffic -> the canary's test rejects it.
Invariant: ``step`` never blocks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanloop.pipeline.demo_system import Helper, System
from spanloop.pipeline.demo_watch import Watch
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import TerminalError
from spanloop.schemas.events import CanaryFinished, CanaryStarted, GateEvaluated, PolicyRolledBack

__all__ = ["Injection"]

ATTEMPTS_MAX = 3
CALM_MAX_S = 75.0
"""A canary of the learner's own that still runs after so long is broken off."""
REASON = "demo: the champion, but for tickets of one queue"


class Injection:
    """Makes, injects and follows one bad candidate.

    Args:
        system: Runs the helpers and opens the phone queue.
        watch: What the log says.
        folder: Where candidates are made.
        say: Takes a line for people.
    """

    def __init__(self, system: System, watch: Watch, folder: Path, say: Callable[[str], None]) -> None:
        self._system = system
        self._watch = watch
        self._folder = folder
        self._say = say
        self._helper: Helper | None = None
        self._attempt = 0
        self._step: Callable[[], None] = self._make
        self.made_from = -1
        self.version = -1
        self.closes_at_once = 0.0
        self.phone_opened_s: float | None = None
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.outcome = "running"
        """running, caught, promoted, inconclusive, refused by the gate, or not possible; undecided in a report of one that runs."""
        self._now_s = 0.0
        self._waits_since_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.outcome != "running"

    def step(self, now_s: float) -> None:
        """Do what can be done at ``now_s`` (seconds since the clients started)."""
        self._now_s = now_s
        if self.started_s is None:
            self.started_s = now_s
        if not self.over:
            self._step()

    def report(self) -> dict[str, Any]:
        """What happened, with the numbers of gate and canary."""
        gate = self._watch.newest(GateEvaluated, version=self.version) if self.version >= 0 else None
        canary = self._watch.newest(CanaryFinished, version=self.version) if self.version >= 0 else None
        return {
            "outcome": self.outcome if self.over else "undecided",
            "version": self.version,
            "made_from": self.made_from,
            "closes_phone_tickets_at_once": self.closes_at_once,
            "started_s": self.started_s,
            "phone_opened_s": self.phone_opened_s,
            "ended_s": self.ended_s,
            "gate": _sides(gate, "estimate") | ({"n": gate.n, "passed": gate.passed} if gate else {}),
            "canary": _sides(canary, "difference")
            | (
                {"verdict": canary.verdict, "n_version": canary.n_version, "n_against": canary.n_against}
                if canary
                else {}
            ),
        }

    # ------------------------------------------------------------ steps

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.ended_s = self._now_s

    def _make(self) -> None:
        if self._watch.champion < 0:
            return
        self._attempt += 1
        self.made_from = self._watch.champion
        out = self._folder / f"attempt-{self._attempt}"
        shutil.rmtree(out, ignore_errors=True)
        champion = self._watch.candidates[self.made_from].path
        self._helper = self._system.helper(
            f"sabotage-{self._attempt}",
            [
                "-m", self._system.saboteur, "--champion", str(self._system.workspace / champion), "--out", str(out),
            ],
        )  # fmt: skip
        self._step = self._made

    def _made(self) -> None:
        made = self._finished()
        if made is None:
            return
        self.closes_at_once = json.loads(made)["closes_at_once"]
        self._say(
            f"a bad candidate is made: v{self.made_from}, but it closes {self.closes_at_once:.0%} of tickets by phone "
            "at once (no ticket came by phone so far)"
        )
        self._waits_since_s = None
        self._step = self._calm

    def _calm(self) -> None:
        """Freeze when no canary runs."""
        if self._watch.canary is not None:
            if self._waits_since_s is None:
                self._waits_since_s = self._now_s
                self._say(f"it waits for the end of v{self._watch.canary.version}'s canary")
            if self._now_s - self._waits_since_s < CALM_MAX_S:
                return
        if self._watch.champion != self.made_from:
            self._again("the champion changed while the candidate was made")
            return
        self._policies("freeze", then=self._frozen)

    def _frozen(self) -> None:
        if self._finished() is None:
            return
        if (
            self._watch.champion != self.made_from
        ):  # it was promoted meanwhile: make one from the new champion
            self._policies("unfreeze", then=self._unfrozen_again)
            return
        out = self._folder / f"attempt-{self._attempt}"
        self._policies("inject", str(out), "--unsigned", then=self._injected)

    def _unfrozen_again(self) -> None:
        if self._finished() is not None:
            self._again("the champion changed while the candidate was made")

    def _injected(self) -> None:
        if self._finished() is None:
            return
        self._policies("unfreeze", then=self._unfrozen)

    def _unfrozen(self) -> None:
        if self._finished() is None:
            return
        self._step = self._gated

    def _gated(self) -> None:
        injected = self._watch.injected()
        if injected is None:
            return
        if injected.version != self.version:
            self.version = injected.version
            self._say(f"v{self.version} is injected (spanloop policies inject)")
        if self._watch.newest(CanaryStarted, version=self.version) is not None:
            self._system.open_phone()
            self.phone_opened_s = self._now_s
            self._say("the desk opens its phone queue: half of the new tickets come by phone")
            self._step = self._in_canary
            return
        gate = self._watch.gate_of(self.version)
        if gate is not None and not gate.passed:
            self._again(f"the gate refused it ({gate.reason})", outcome="refused by the gate")

    def _in_canary(self) -> None:
        rolled_back = self._watch.newest(PolicyRolledBack, version=self.version)
        finished = self._watch.newest(CanaryFinished, version=self.version)
        if rolled_back is not None:
            self._say(
                f"caught: v{self.version} is rolled back, {self._now_s - (self.phone_opened_s or 0):.0f} s after the first phone call"
            )
            self._end("caught")
        elif finished is not None and finished.verdict != "reject":
            self._end("promoted" if finished.verdict == "promote" else "inconclusive")

    # ------------------------------------------------------------ helpers

    def _again(self, why: str, *, outcome: str = "not possible") -> None:
        self._say(f"the bad candidate is given up: {why}")
        self._step = self._make
        if self._attempt >= ATTEMPTS_MAX:
            self._end(outcome)

    def _policies(self, verb: str, *arguments: str, then: Callable[[], None]) -> None:
        self._helper = self._system.helper(
            f"policies-{verb}-{self._attempt}",
            ["-m", "spanloop.schemas.cli", "policies", verb, *arguments, "--reason", REASON, "--wait", "60"],
        )
        self._step = then

    def _finished(self) -> str | None:
        """Output of the running helper, None while it runs; one that failed ends the injection."""
        if self._helper is None or not self._helper.done:
            return None
        try:
            return self._helper.output()
        except TerminalError as exc:
            self._say(exc.message)
            self._end("not possible")
            return None


def _sides(event: Any, name: str) -> dict[str, Any]:
    if event is None:
        return {}
    found = {name: unmicro(getattr(event, name)), "lower": unmicro(event.lower)}
    return found | ({"upper": unmicro(event.upper)} if hasattr(event, "upper") else {})
