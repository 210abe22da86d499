"""Two result sets compared: what changes under another reward or credit definition, by how much, and what would be taught.

Place in the flow: ``spanloop diff`` gives it two finished replays, or one and what the stream published. Orchestrations are paired
by id on their hashes first; only those that differ are read whole, an orchestration at a time.

Invariants: nothing but the sets decides; the report's size does not grow with the sets.
"""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from spanloop.pipeline.replay.pairing import HASHES, Pairing
from spanloop.pipeline.replay.results import ResultSet
from spanloop.schemas.canonical import MICRO, unmicro
from spanloop.schemas.events import CreditAssigned, CreditNode, SamplesBuilt, decode

__all__ = ["Account", "Changed", "Diff", "Side", "Taught", "diff"]

_EDGES = (0, 1, 10_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)
"""Lower edges of the histogram of |change|, micro-units."""
_AGENTS = ("orchestrator", "role", "agent")
_DECISIONS = ("message", "tool_call")


class Side(msgspec.Struct, frozen=True):
    """One of the two sets."""

    name: str
    orchestrations: int
    credited: int
    team: float
    """Sum of team rewards."""
    rewards_file: str
    models: str
    definitions: tuple[str, ...] = ()
    """Digests of the reward definitions that its values were computed under."""


class Changed(msgspec.Struct):
    """One orchestration that changed."""

    tenant: str
    orchestration_id: str
    what: list[str]
    """content, rewards, credit, samples; or only_a, only_b."""
    before: float | None
    after: float | None
    """Team reward; None: missing."""


class Account(msgspec.Struct):
    """Accounts of one label: an agent by name, or decisions by what they are."""

    unit: str
    label: str
    accounts: int = 0
    """In both, of the orchestrations that differ."""
    changed: int = 0
    flipped: int = 0
    """Credit changed its sign."""
    before: float = 0.0
    after: float = 0.0


class Decision(msgspec.Struct):
    """One decision's credit in both sets."""

    tenant: str
    orchestration_id: str
    account: str
    label: str
    before: float
    after: float


class Taught(msgspec.Struct):
    """Training rows of one role."""

    role: str
    rows: int = 0
    """In both, of the orchestrations that differ."""
    added: int = 0
    removed: int = 0
    """Rows that would no longer be there."""
    tokens: int = 0
    changed: int = 0
    """Tokens with another advantage."""
    flipped: int = 0
    """Tokens whose advantage changed its sign: pushed the other way."""
    before: float = 0.0
    after: float = 0.0
    """Mean advantage of a token, in units."""


class Diff(msgspec.Struct):
    """What ``diff`` found. Rewards and credit are in units."""

    a: Side
    b: Side
    same: int = 0
    only_a: int = 0
    only_b: int = 0
    erased: int = 0
    """Orchestrations whose token ids only one side could read: their credit and samples are not compared."""
    changed: dict[str, int] = {}
    """Orchestrations by what changed of them; one counts under each."""
    histogram: list[tuple[float, int]] = []
    """Lower edge of |change of the team reward|, orchestrations whose rewards changed."""
    orchestrations: list[Changed] = []
    """The largest changes."""
    agents: list[Account] = []
    decisions: list[Decision] = []
    units: list[Account] = []
    taught: list[Taught] = []
    holdout_moved: int = 0
    """Orchestrations that would be held out and were not, or the other way."""

    @property
    def equal(self) -> bool:
        """Whether nothing at all differs."""
        return not (self.only_a or self.only_b or self.changed)


class _Top:
    """The ``size`` largest, by a number."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0

    def add(self, number: float, item: Any) -> None:
        self._count += 1
        entry = (number, -self._count, item)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif self._size and number > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    def items(self) -> list[Any]:
        return [item for *_, item in sorted(self._heap, key=lambda entry: (-entry[0], -entry[1]))]


class _Comparison:
    """Folds pairs into a ``Diff``."""

    def __init__(self, found: Diff, top: int) -> None:
        self.found = found
        self._top = top
        self._orchestrations, self._decisions = _Top(top), _Top(top)
        self._accounts: dict[tuple[str, str], Account] = {}
        self._units: dict[str, Account] = {}
        self._taught: dict[str, Taught] = {}
        self._histogram = [0] * len(_EDGES)

    def key(self, row: dict[str, Any]) -> None:
        """One orchestration that differs, by its hashes."""
        found, what = self.found, []
        if row["a_content_hash"] is None or row["b_content_hash"] is None:
            what = ["only_b" if row["a_content_hash"] is None else "only_a"]
            setattr(found, what[0], getattr(found, what[0]) + 1)
        else:
            for name in HASHES[:2] if row["partly"] else HASHES:
                if row[f"a_{name}"] != row[f"b_{name}"]:
                    what.append(name.removesuffix("_hash"))
                    found.changed[what[-1]] = found.changed.get(what[-1], 0) + 1
        before, after = row["a_team"], row["b_team"]
        change = abs((after or 0) - (before or 0))
        if "rewards" in what:
            self._histogram[sum(edge <= change for edge in _EDGES) - 1] += 1
        self._orchestrations.add(
            change,
            Changed(row["tenant"], row["orchestration_id"], what, _units(before), _units(after)),
        )

    def pair(self, row: dict[str, Any]) -> None:
        """One orchestration with what it was and is."""
        a, b = (_nodes(row[f"{side}_credit"]) for side in "ab")
        for name in a.keys() | b.keys():
            self._node(row, a.get(name), b.get(name))
        one, two = (_samples(row[f"{side}_samples"]) for side in "ab")
        self._rows(one, two)

    def _node(self, row: dict[str, Any], one: CreditNode | None, two: CreditNode | None) -> None:
        node = one or two
        assert node is not None  # noqa: S101
        before, after = one.credit if one else 0, two.credit if two else 0
        accounts = [self._units.setdefault(node.unit, Account(node.unit, ""))]
        if node.unit in _AGENTS:
            name = (node.unit, node.label)
            accounts.append(self._accounts.setdefault(name, Account(*name)))
        for account in accounts:
            account.accounts += one is not None and two is not None
            account.changed += before != after
            account.flipped += before * after < 0
            account.before += unmicro(before)
            account.after += unmicro(after)
        if node.unit in _DECISIONS and before != after:
            label = f"{node.unit} {node.label}"
            self._decisions.add(
                abs(after - before),
                Decision(
                    row["tenant"], row["orchestration_id"], node.id, label, unmicro(before), unmicro(after)
                ),
            )

    def _rows(self, one: SamplesBuilt | None, two: SamplesBuilt | None) -> None:
        if one is not None and two is not None and one.holdout != two.holdout:
            self.found.holdout_moved += 1
        a = {sample.call_id: sample for sample in one.rows} if one else {}
        b = {sample.call_id: sample for sample in two.rows} if two else {}
        for name in a.keys() | b.keys():
            before, after = a.get(name), b.get(name)
            sample = before or after
            assert sample is not None  # noqa: S101
            role = self._taught.setdefault(sample.role, Taught(sample.role))
            role.added += before is None
            role.removed += after is None
            role.rows += before is not None and after is not None
            old = before.advantages if before else (0,) * len(sample.advantages)
            new = after.advantages if after else (0,) * len(sample.advantages)
            for x, y in zip(old, new, strict=False):
                role.tokens += 1
                role.changed += x != y
                role.flipped += x * y < 0
                role.before += x
                role.after += y

    def finish(self) -> Diff:
        """The report."""
        found = self.found
        found.orchestrations, found.decisions = self._orchestrations.items(), self._decisions.items()
        ranked = sorted(self._accounts.values(), key=lambda x: (-abs(x.after - x.before), x.unit, x.label))
        found.agents = [account for account in ranked if account.changed][: self._top]
        found.units = sorted(self._units.values(), key=lambda x: (-abs(x.after - x.before), x.unit))
        found.histogram = [(unmicro(edge), n) for edge, n in zip(_EDGES, self._histogram, strict=True)]
        found.taught = sorted(self._taught.values(), key=lambda x: x.role)
        for role in found.taught:
            role.before, role.after = (x / MICRO / max(1, role.tokens) for x in (role.before, role.after))
        return found


def _units(value: int | None) -> float | None:
    return None if value is None else unmicro(value)


def _nodes(data: bytes | None) -> dict[str, CreditNode]:
    event = decode(data) if data else None
    return {node.id: node for node in event.nodes} if isinstance(event, CreditAssigned) else {}


def _samples(data: bytes | None) -> SamplesBuilt | None:
    event = decode(data) if data else None
    return event if isinstance(event, SamplesBuilt) else None


def diff(a: ResultSet, b: ResultSet, *, top: int = 10) -> Diff:
    """Compare two sets.

    Args:
        a: Before.
        b: After.
        top: How many of the largest changes of each kind to keep.
    """
    with Pairing(a, b) as pairing:
        before = _side(a, pairing.totals("a"), pairing.definitions("a"))
        after = _side(b, pairing.totals("b"), pairing.definitions("b"))
        comparison = _Comparison(Diff(before, after), top)
        comparison.found.same, comparison.found.erased = pairing.same(), pairing.erased()
        for row in pairing.different():
            comparison.key(row)
        for row in pairing.pairs():
            comparison.pair(row)
        return comparison.finish()


def _side(found: ResultSet, totals: tuple[int, int, int], definitions: tuple[str, ...]) -> Side:
    count, credited, team = totals
    manifest = found.manifest
    return Side(
        manifest.name, count, credited, unmicro(team), manifest.rewards_file, manifest.models, definitions
    )
