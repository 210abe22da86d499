"""What the signal stage holds: contents, feedback by target, value models, and who a target belongs to.

Invariants: every change is in ``take_writes``; ``restore`` of the committed entries gives the same store; feedback of a target
is a set by id, so that order of arrival leaves no trace; whatever is untouched for the retention is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from spanloop.pipeline.packing import packed, unpacked
from spanloop.pipeline.rewards.outcome import OUTCOME
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    DeadLettered,
    FeedbackReceived,
    OrchestrationRevised,
    ValueModelPublished,
    decode,
    encode,
)
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["Held", "Store", "expired"]

FEEDBACK_MAX = 256
"""Feedbacks kept on one target; those with the smallest (observed_ns, feedback_id) go first."""
TARGETS_MAX = 50_000
"""Targets that wait for their orchestration; the oldest is dead-lettered first."""

_content = msgspec.json.Decoder(OrchestrationContent)
_REVISION = b'{"complete":'
"""How the canonical JSON of a revision begins, and that of no content."""
_json = msgspec.json.Encoder()
_pack = msgspec.msgpack.Encoder()


class Held(msgspec.Struct, frozen=True, omit_defaults=True):
    """One orchestration as held."""

    tenant: str
    orchestration_id: str
    orchestration_revision: int
    complete: bool
    touched_ns: int
    claimed: int = 0
    """Sequence number of its last revision here: where two claim one target, the later has it."""
    targets: tuple[str, ...] = ()
    """Keys that feedback may name: its own id, traces, spans, responses, and ids that were merged into it."""
    lost: tuple[str, ...] = ()
    """Ids that were merged into it."""
    content: bytes = b""
    """Packed JSON of the revision (its bytes on the log) or of its content alone; empty when merged away."""
    merged_into: str = ""
    value_model: str = ""
    version_fixed: bool = False
    revision: int = 0
    rewards_hash: str = ""
    credit_hash: str = ""
    samples_hash: str = ""
    dirty: bool = False
    """Touched while nothing may be derived."""
    ahead: int = 0
    """Revision from which something on the log was derived that is newer than what is held: that one is to come again."""

    @property
    def key(self) -> str:
        """Key among the held."""
        return f"{self.tenant}/{self.orchestration_id}"


class _Feedback(msgspec.Struct):
    """Feedback on one target."""

    touched_ns: int
    items: dict[str, FeedbackReceived] = {}


_held_decoder = msgspec.msgpack.Decoder(Held)
_feedback_decoder = msgspec.msgpack.Decoder(_Feedback)


def targets_of(content: OrchestrationContent) -> tuple[str, ...]:
    """Everything that feedback may name and that belongs to this orchestration."""
    spans = {agent.span_id for agent in content.agents}
    spans.update(*[event.evidence for event in content.events], *[call.span_ids for call in content.calls])
    responses = {call.response_id for call in content.calls}
    tenant = content.tenant
    span, response = f"{tenant}/span/", f"{tenant}/response/"
    return (
        f"{tenant}/orchestration/{content.orchestration_id}",
        *[f"{tenant}/trace/{trace}" for trace in content.trace_ids],
        *[span + name for name in sorted(spans) if name],
        *[response + name for name in sorted(responses) if name],
    )


def _home(event: FeedbackReceived) -> str:
    """Where feedback is kept: under its target; on a span whose trace is named, under that trace, so that it counts
    there even where the span itself never arrives."""
    if event.target_kind == "span" and event.trace_id:
        return f"{event.tenant}/trace/{event.trace_id}"
    return event.key


def _id_targets(tenant: str, ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{tenant}/orchestration/{name}" for name in ids)


class Store:
    """State of the signal stage."""

    def __init__(self, retention_ns: int, held_max: int = 2**62) -> None:
        self._retention_ns = retention_ns
        self._held_max = held_max
        self.held: dict[str, Held] = {}
        """By key, the longest untouched first."""
        self._owner: dict[str, str] = {}
        self._sequence = 0
        self._orphans: dict[str, list[str]] = {}
        """Ids that were merged into an orchestration that is not here yet, by its key."""
        self._feedback: dict[str, _Feedback] = {}
        self._marked: dict[str, None] = {}
        self._unclaimed: dict[str, int] = {}
        """Targets with feedback and no orchestration, since when, oldest first."""
        self._models: dict[str, bytes] = {}
        self._uses: dict[str, int] = {}
        self._newest: dict[str, str] = {}
        self._writes: dict[str, bytes | None] = {}
        self._changed: dict[str, None] = {}
        """Keys of the held that changed, to be written as they are in the end."""

    # ------------------------------------------------------------ persistence

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Fill an empty store from committed entries."""
        for key, value in entries.items():
            kind, _, rest = key.partition("/")
            if kind == "held":
                self.held[rest] = _held_decoder.decode(value)
            elif kind == "feedback":
                self._feedback[rest] = _feedback_decoder.decode(value)
            elif kind == "model":
                self._models[rest] = value
            elif kind == "newest":
                self._newest[rest] = value.decode()
        self.held = dict(sorted(self.held.items(), key=lambda pair: (pair[1].touched_ns, pair[0])))
        for item in sorted(self.held.values(), key=lambda held: held.claimed):
            self._owner.update(dict.fromkeys(item.targets, item.key))
            self._count_use(item, 1)
            self._sequence = max(self._sequence, item.claimed)
        self._marked = {key: None for key, item in self.held.items() if item.dirty}
        for item in self.held.values():
            if item.merged_into and self._heir(item.key) not in self.held:
                self._orphans.setdefault(self._heir(item.key), []).extend((item.orchestration_id, *item.lost))
        waiting = [
            (f.touched_ns, target) for target, f in self._feedback.items() if target not in self._owner
        ]
        self._unclaimed = {target: touched for touched, target in sorted(waiting)}

    def take_writes(self) -> dict[str, bytes | None]:
        """Changed entries since the last call."""
        writes, self._writes = self._writes, {}
        for key in self._changed:
            item = self.held.get(key)
            writes[f"held/{key}"] = None if item is None else _pack.encode(item)
        self._changed = {}
        return writes

    def replace(self, item: Held) -> None:
        """Put a changed orchestration back, at the end of the line."""
        old = self.held.pop(item.key, None)
        self._count_use(item, 1)
        if old is not None:
            self._count_use(old, -1)
        self.held[item.key] = item
        if item.dirty:
            self._marked[item.key] = None
        self._changed[item.key] = None

    # ------------------------------------------------------------ orchestrations

    def put_orchestration(
        self, event: OrchestrationRevised, now_ns: int, raw: bytes | None = None
    ) -> list[str]:
        """Take in a revision; returns the touched keys, the orchestration's own first. An old revision touches nothing. ``raw``: its
        bytes on the log, where they are at hand."""
        key = event.key
        old = self.held.get(key)
        if old is not None and event.revision <= old.orchestration_revision:
            return []
        if event.content is None and not event.merged_into:
            raise SchemaError(f"orchestration {event.orchestration_id} has neither content nor merged_into")
        if event.content is not None and event.content.tenant != event.tenant:
            raise SchemaError(f"orchestration {event.orchestration_id} has content of another tenant")
        base = old or Held(event.tenant, event.orchestration_id, 0, False, now_ns)
        lost = tuple(dict.fromkeys((*base.lost, *self._orphans.pop(key, ()))))
        targets: tuple[str, ...] = ()
        content = b""
        if event.content is not None:
            targets = (*targets_of(event.content), *_id_targets(event.tenant, lost))
            content = packed(raw if raw is not None else _json.encode(event.content))
        self._sequence += 1
        item = msgspec.structs.replace(
            base,
            orchestration_revision=event.revision,
            complete=event.complete,
            touched_ns=now_ns,
            claimed=self._sequence,
            targets=targets,
            lost=lost,
            content=content,
            merged_into=event.merged_into,
        )
        self._reown(key, base.targets, targets, now_ns)
        self.replace(item)
        return [key, *self._inherit(item, now_ns)] if event.merged_into else [key]

    def touch_after(self, now_ns: int) -> int:
        """``now_ns``, but not before the last touch of any: the held stay in order."""
        last = next(reversed(self.held.values())).touched_ns if self.held else now_ns
        return max(now_ns, last)

    @property
    def marked(self) -> bool:
        """Whether anything was touched and not derived."""
        return bool(self._marked)

    @property
    def has_unclaimed(self) -> bool:
        """Whether any feedback waits for its orchestration."""
        return bool(self._unclaimed)

    def owner(self, target: str) -> str | None:
        """Key of the orchestration held here that answers to a target."""
        return self._owner.get(target)

    def mark(self, key: str) -> None:
        """Remember that an orchestration was touched and nothing was derived."""
        self._put_dirty(key, dirty=True)

    def take_marked(self) -> list[str]:
        """The marked keys, no longer marked."""
        keys = [key for key in self._marked if key in self.held]
        for key in keys:
            self._put_dirty(key, dirty=False)
        self._marked = {}
        return keys

    def _put_dirty(self, key: str, *, dirty: bool) -> None:
        item = self.held.get(key)
        if item is not None and item.dirty != dirty:
            item = self.held[key] = msgspec.structs.replace(item, dirty=dirty)
            self._changed[key] = None
        if dirty:
            self._marked[key] = None

    def inherit(self, key: str, ids: Iterable[str]) -> None:
        """Let an orchestration answer to ids that were merged into it, from its next revision on."""
        known = self.held.get(key)
        lost = known.lost if known is not None else ()
        new = [name for name in ids if name not in lost]
        if new:
            self._orphans.setdefault(key, []).extend(new)

    def give_away(
        self, keys: Iterable[str], targets: Iterable[str]
    ) -> tuple[list[Held], list[FeedbackReceived]]:
        """Take orchestrations out, with the feedback on them and on further ``targets``: another store goes on with both."""
        helds, feedback = [], []
        wanted = dict.fromkeys(targets)
        for key in keys:
            item = self.held.pop(key, None)
            if item is None:
                continue
            helds.append(item)
            wanted.update(dict.fromkeys(item.targets))
            for target in item.targets:
                if self._owner.get(target) == key:
                    del self._owner[target]
            self._count_use(item, -1)
            self._changed[key] = None
        for target in wanted:
            if target in self._owner:
                continue
            feedback += self._items(target)
            self._unclaimed.pop(target, None)
            self._drop_feedback(target)
        return helds, feedback

    def adopt(self, item: Held) -> None:
        """Go on with the numbers of an orchestration that another store gave away, or that were found on the log; its content
        comes with its next revision. Equal numbers of something else are gone on from, not believed."""
        known = self.held.get(item.key)
        if known is None:
            self.replace(item)
            return
        if known.revision > item.revision:
            return
        said, ours = ((h.rewards_hash, h.credit_hash, h.samples_hash) for h in (item, known))
        if known.revision == item.revision and said != ours:
            item = msgspec.structs.replace(item, rewards_hash="")
        changes: dict[str, object] = {
            name: getattr(item, name)
            for name in ("revision", "rewards_hash", "credit_hash", "samples_hash", "dirty")
        }
        if item.version_fixed and not known.version_fixed:
            changes.update(value_model=item.value_model, version_fixed=True)
        self.replace(msgspec.structs.replace(known, touched_ns=item.touched_ns, **changes))

    def _inherit(self, item: Held, now_ns: int) -> list[str]:
        """Let the orchestration that ``item`` was merged into answer to its ids; returns its key if it is here."""
        ids = (item.orchestration_id, *item.lost)
        heir = self._heir(item.key)
        survivor = self.held.get(heir)
        if survivor is None or survivor.merged_into:
            self._orphans.setdefault(heir, []).extend(ids)
            return []
        lost = tuple(dict.fromkeys((*survivor.lost, *ids)))
        targets = tuple(dict.fromkeys((*survivor.targets, *_id_targets(item.tenant, ids))))
        self._sequence += 1
        self._reown(heir, survivor.targets, targets, now_ns)
        self.replace(
            msgspec.structs.replace(
                survivor, lost=lost, targets=targets, touched_ns=now_ns, claimed=self._sequence
            )
        )
        return [heir]

    def _reown(self, key: str, old: Iterable[str], new: Iterable[str], now_ns: int) -> None:
        kept = set(new)
        for target in old:
            if target not in kept and self._owner.get(target) == key:
                del self._owner[target]
                if target in self._feedback:
                    self._unclaimed[target] = now_ns
        self._owner.update(dict.fromkeys(new, key))
        if self._unclaimed:
            for target in new:
                self._unclaimed.pop(target, None)

    def _heir(self, key: str) -> str:
        """Where an id's feedback counts now: follow merges to the end."""
        for _ in range(64):
            item = self.held.get(key)
            if item is None or not item.merged_into:
                return key
            key = f"{item.tenant}/{item.merged_into}"
        return key

    def content(self, key: str) -> OrchestrationContent:
        """The content of a held orchestration."""
        data = unpacked(self.held[key].content)
        if not data.startswith(_REVISION):
            return _content.decode(data)
        event = decode(data)
        assert isinstance(event, OrchestrationRevised)  # noqa: S101
        assert event.content is not None  # noqa: S101
        return event.content

    # ------------------------------------------------------------ feedback

    def put_feedback(self, event: FeedbackReceived, now_ns: int) -> list[str]:
        """Take in feedback; returns the key of the orchestration that it is on, if that is here."""
        target = _home(event)
        entry = self._feedback.setdefault(target, _Feedback(now_ns))
        if event.feedback_id not in entry.items:
            entry.items[event.feedback_id] = event
            entry.touched_ns = now_ns
            if len(entry.items) > FEEDBACK_MAX:
                oldest = min(entry.items.values(), key=lambda f: (f.observed_ns, f.feedback_id))
                del entry.items[oldest.feedback_id]
            self._writes[f"feedback/{target}"] = _pack.encode(entry)
        owner = self._owner.get(target)
        if owner is None:
            self._unclaimed.setdefault(target, now_ns)
            return []
        self.replace(msgspec.structs.replace(self.held[owner], touched_ns=now_ns))
        return [owner]

    def feedback_on(self, key: str) -> list[FeedbackReceived]:
        """All feedback on an orchestration, under any of its names and those of ids merged into it."""
        found: list[FeedbackReceived] = []
        entries = self._feedback
        for target in self.held[key].targets:
            if target in entries:
                found += entries[target].items.values()
        return found

    def _items(self, target: str) -> Iterator[FeedbackReceived]:
        entry = self._feedback.get(target)
        if entry is not None:
            yield from entry.items.values()

    def latest_outcomes(self, key: str) -> list[FeedbackReceived]:
        """The outcome feedbacks that count, one a (target, scorer)."""
        latest: dict[tuple[str, str, str], FeedbackReceived] = {}
        for item in self.feedback_on(key):
            name = (item.target_kind, item.target_id, item.scorer)
            old = latest.get(name)
            if item.name == OUTCOME and (
                old is None or (old.observed_ns, old.feedback_id) < (item.observed_ns, item.feedback_id)
            ):
                latest[name] = item
        return list(latest.values())

    # ------------------------------------------------------------ value models

    def put_model(self, event: ValueModelPublished) -> None:
        """Take in a version; it is the tenant's newest from here on."""
        name = f"{event.tenant}/{event.version}"
        if name in self._models:
            return
        before = self._newest.get(event.tenant)
        self._models[name] = self._writes[f"model/{name}"] = encode(event)
        self._newest[event.tenant] = name
        self._writes[f"newest/{event.tenant}"] = name.encode()
        if before is not None:
            self._drop_unused(before)

    def models_of(self, keys: Iterable[str]) -> list[ValueModelPublished]:
        """The versions that orchestrations have for good."""
        names = {
            f"{item.tenant}/{item.value_model}": None
            for key in keys
            if (item := self.held.get(key)) is not None and item.version_fixed and not item.merged_into
        }
        return [self.model(name) for name in names if name in self._models]

    def keep_model(self, event: ValueModelPublished) -> None:
        """Take in a version that an adopted orchestration uses."""
        name = f"{event.tenant}/{event.version}"
        if name not in self._models and self._uses.get(name, 0) > 0:
            self._models[name] = self._writes[f"model/{name}"] = encode(event)

    def model(self, name: str) -> ValueModelPublished:
        """A version by tenant/version."""
        event = decode(self._models[name])
        assert isinstance(event, ValueModelPublished)  # noqa: S101
        return event

    def newest_names(self) -> set[str]:
        """The newest version of each tenant."""
        return set(self._newest.values())

    def choose_version(self, key: str, final: bool) -> None:
        """Give an orchestration the newest version, for good once its reward is final."""
        item = self.held[key]
        if item.merged_into or (item.version_fixed and self._knows(item)):
            return
        newest = self._newest.get(item.tenant, "").partition("/")[2]
        if final or newest != item.value_model:
            self.replace(msgspec.structs.replace(item, value_model=newest, version_fixed=final))

    def _knows(self, item: Held) -> bool:
        return not item.value_model or f"{item.tenant}/{item.value_model}" in self._models

    def _count_use(self, item: Held, change: int) -> None:
        if item.value_model:
            name = f"{item.tenant}/{item.value_model}"
            self._uses[name] = self._uses.get(name, 0) + change
            if self._uses[name] <= 0:
                self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        if self._uses.get(name, 0) <= 0 and name not in self._newest.values() and name in self._models:
            del self._models[name]
            self._uses.pop(name, None)
            self._writes[f"model/{name}"] = None

    # ------------------------------------------------------------ eviction

    def next_eviction_ns(self) -> int | None:
        """When the first thing is older than the retention."""
        first = [item.touched_ns for item in islice(self.held.values(), 1)]
        first += islice(self._unclaimed.values(), 1)
        return min(first) + self._retention_ns if first else None

    def evict(self, now_ns: int) -> list[DeadLettered]:
        """Drop what is too old or too many; the dead letters of feedback whose target never came."""
        limit = now_ns - self._retention_ns
        while self.held:
            key, item = next(iter(self.held.items()))
            if item.touched_ns > limit and len(self.held) <= self._held_max:
                break
            self._drop_held(key, item)
        letters: list[DeadLettered] = []
        while self._unclaimed:
            target, since = next(iter(self._unclaimed.items()))
            if since > limit and len(self._unclaimed) <= TARGETS_MAX:
                break
            del self._unclaimed[target]
            letters += [expired(item) for item in self._items(target)]
            self._drop_feedback(target)
        return letters

    def _drop_held(self, key: str, item: Held) -> None:
        for target in item.targets:
            if self._owner.get(target) == key:
                del self._owner[target]
                self._drop_feedback(target)
        del self.held[key]
        self._count_use(item, -1)
        self._changed[key] = None

    def _drop_feedback(self, target: str) -> None:
        if self._feedback.pop(target, None) is not None:
            self._writes[f"feedback/{target}"] = None


def expired(item: FeedbackReceived) -> DeadLettered:
    """The dead letter of feedback whose target never came."""
    raw = encode(item)
    return DeadLettered(
        tenant=item.tenant,
        source="feedback",
        reason="feedback target never arrived",
        sha256=content_hash(item),
        size=len(raw),
        details={
            "feedback_id": item.feedback_id,
            "target": f"{item.target_kind}/{item.target_id}",
            "name": item.name,
        },
    )
