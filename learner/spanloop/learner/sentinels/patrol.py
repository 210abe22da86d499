"""Reads orchestrations and rewards off the log for the watch, and puts what it raises on the policies topic.

Place: the learner's process steps it. Its state is where it stands and the windows; after a start it reads the log from where the
windows begin (``sentinels.json`` in the workspace), so that nothing is missed and nothing raised twice: an alarm is a fact of
its own on the log.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from spanloop.learner.durable import write_durably
from spanloop.learner.sentinels.signals import Seen, measure
from spanloop.learner.sentinels.watch import Alarm, Memory, Observation, Watch
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import OrchestrationRevised, RewardsComputed, decode
from spanloop.schemas.ids import policy_number
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["Patrol"]

READ_MAX = 500
PENDING_MAX = 5_000
"""Orchestrations that wait for their outcome; the oldest is forgotten first."""
SAVE_EVERY = 50
"""Orchestrations between two notes of where it stands."""


class _Place(msgspec.Struct):
    offsets: dict[str, int]
    memory: Memory


class Patrol:
    """The watch over one tenant's log.

    Args:
        log: Any Log; one that opens sealed tokens where there are some.
        tenant: Whose orchestrations.
        watch: What decides.
        place: File in which it notes where it stands; None: nowhere (tests).
    """

    def __init__(self, log: Log, tenant: str, watch: Watch, place: Path | None) -> None:
        self._log = log
        self._tenant = tenant
        self._watch = watch
        self._place = place
        self._offsets: dict[str, int] = {}
        self._contents: dict[str, OrchestrationContent] = {}
        self._unsaved = 0
        self._restore()

    def step(self, raise_alarm: Callable[[Alarm], None]) -> None:
        """Read what is new; ``raise_alarm`` is called before the place is noted."""
        names = [topics.ORCHESTRATIONS, topics.REWARDS]
        while records := self._log.read(names, self._offsets, READ_MAX):
            for record in records:
                if record.key.startswith(f"{self._tenant}/"):
                    try:
                        seen = self._take(decode(record.value))
                    except SchemaError:
                        seen = None  # the pipeline dead-letters what nobody can read
                    for alarm in self._watch.add(seen) if seen is not None else ():
                        raise_alarm(alarm)
                    self._unsaved += seen is not None
                self._offsets[record.source] = record.offset
            if self._unsaved >= SAVE_EVERY:
                self._save()
            if len(records) < READ_MAX:
                break

    def accept(self) -> None:
        """Somebody unfroze: see ``Watch.accept``."""
        self._watch.accept()
        self._save()

    def _take(self, event: object) -> Observation | None:
        if isinstance(event, OrchestrationRevised):
            if event.content is not None and any(call.policy_version for call in event.content.calls):
                self._contents.pop(event.orchestration_id, None)
                self._contents[event.orchestration_id] = event.content
                while len(self._contents) > PENDING_MAX:
                    del self._contents[next(iter(self._contents))]
            return None
        if not isinstance(event, RewardsComputed) or event.team is None:
            return None
        content = self._contents.pop(event.orchestration_id, None)
        outcome = next((r.value for r in event.rewards if r.family == "R1" and r.name == "outcome"), None)
        if content is None or outcome is None:
            return None
        version = max(policy_number(call.policy_version) for call in content.calls)
        signals = measure(Seen(content, event.rewards))
        return Observation(event.orchestration_id, version, unmicro(outcome), signals)

    def _save(self) -> None:
        self._unsaved = 0
        if self._place is None:
            return
        data = msgspec.json.encode(_Place(self._offsets, self._watch.memory()))
        temporary = self._place.with_suffix(".tmp")
        write_durably(temporary, data)
        temporary.rename(self._place)

    def _restore(self) -> None:
        if self._place is None or not self._place.exists():
            return
        try:
            known = msgspec.json.decode(self._place.read_bytes(), type=_Place)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return  # reads the log from its beginning instead
        self._offsets = dict(known.offsets)
        self._watch.restore(known.memory)
