"""What makes one version another: weights, samples, evaluations, settings. Read side, behind ``spanloop policies diff``.

Invariants: both folders are verified as for loading before a number is computed; what taught a version is derived from the log
(``provenance``), never from what a manifest claims; a difference from a version to itself is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from spanloop.learner.artifact import read_weights
from spanloop.learner.history import read_policies
from spanloop.learner.promotion import PromotionState, fold
from spanloop.learner.provenance import lessons_of, policy_config
from spanloop.learner.signing import trust_of
from spanloop.pipeline.ports import Log
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import BatchCommitted
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings

__all__ = ["Changed", "Differences", "TensorChange", "differences", "lines"]


class TensorChange(msgspec.Struct, frozen=True):
    """One tensor in both versions, Euclidean norms in float64."""

    name: str
    norm: float
    """Of A's."""
    delta: float
    """Of B's minus A's."""
    largest: float
    """Largest absolute change of one weight."""

    @property
    def relative(self) -> float:
        """Delta as a share of A's norm; 0 where both are 0."""
        return self.delta / self.norm if self.norm > 0.0 else float(self.delta > 0.0)


class Changed(msgspec.Struct, frozen=True):
    """A setting or figure with A's and B's value; None: that version has none."""

    name: str
    a: Any
    b: Any


class Differences(msgspec.Struct, frozen=True):
    """From version ``a`` to version ``b``."""

    a: int
    b: int
    tensors: tuple[TensorChange, ...]
    """Changed ones, the largest relative change first."""
    only_a: tuple[str, ...]
    """Tensors that B does not have ..."""
    only_b: tuple[str, ...]
    """... and that A does not have, or has in another shape."""
    delta: float
    """Norm of the whole change."""
    taught_b: tuple[str, ...]
    """``ORCHESTRATION@REVISION`` that taught B but not A ..."""
    taught_a: tuple[str, ...]
    """... and the reverse."""
    settings: tuple[Changed, ...]
    """Hyper-parameters of the versions' batches, the network's configuration and the learner's code."""
    figures: tuple[Changed, ...]
    """The last gate and the metrics of the versions' batches."""


def differences(log: Log, settings: Settings, a: int, b: int) -> Differences:
    """Compare two registered versions. Raises SchemaError when one is not registered, or its folder does not verify."""
    import torch

    events = read_policies(log, settings.tenant, settings.gateway.policy)
    state = fold(events)
    for version in (a, b):
        if version not in state.versions:
            raise SchemaError(f"version {version} is not registered; `spanloop policies` lists what is")
    trust = trust_of(settings.workspace)
    (weights_a, config_a, origin_a), (weights_b, config_b, origin_b) = (
        read_weights(settings.workspace / state.versions[v].path, trust) for v in (a, b)
    )
    changes: list[TensorChange] = []
    square = 0.0
    shared = {n for n in weights_a.keys() & weights_b.keys() if weights_a[n].shape == weights_b[n].shape}
    for name in sorted(shared):
        before = weights_a[name].to(torch.float64)
        moved = weights_b[name].to(torch.float64) - before
        delta = float(moved.norm())
        square += delta * delta
        if delta > 0.0:
            changes.append(TensorChange(name, float(before.norm()), delta, float(moved.abs().max())))
    taught_a, taught_b = _taught(log, settings, state, (a, b))
    parameters = {e.batch: e.parameters for e, _ in events if isinstance(e, BatchCommitted)}
    return Differences(
        a=a,
        b=b,
        tensors=tuple(sorted(changes, key=lambda c: (-c.relative, c.name))),
        only_a=tuple(sorted(weights_a.keys() - shared)),
        only_b=tuple(sorted(weights_b.keys() - shared)),
        delta=square**0.5,
        taught_b=tuple(sorted(taught_b - taught_a)),
        taught_a=tuple(sorted(taught_a - taught_b)),
        settings=_changed(
            *(
                {"code": origin.code, **config, **_own(state, version, parameters)}
                for version, config, origin in ((a, config_a, origin_a), (b, config_b, origin_b))
            )
        ),
        figures=_changed(_figures(state, a), _figures(state, b)),
    )


def _own(
    state: PromotionState, version: int, parameters: Mapping[int, Mapping[str, Any]]
) -> Mapping[str, Any]:
    candidate = state.versions[version]
    return {} if candidate.injected else parameters.get(candidate.batch, {})


def _taught(
    log: Log, settings: Settings, state: PromotionState, versions: tuple[int, int]
) -> tuple[set[str], set[str]]:
    lessons = lessons_of(
        log, policy_config(settings.workspace, state), tenant=settings.tenant, policy=settings.gateway.policy
    )
    first, second = (
        {
            f"{r.orchestration_id}@{r.revision}"
            for committed, rollouts, _ in lessons
            if not state.versions[version].injected and committed.batch <= state.versions[version].batch
            for r in rollouts
        }
        for version in versions
    )
    return first, second


def _figures(state: PromotionState, version: int) -> dict[str, Any]:
    gate = state.gates.get(version)
    told = (
        {}
        if gate is None
        else {
            "gate.against": gate.against, "gate.passed": gate.passed, "gate.estimate": unmicro(gate.estimate),
            "gate.lower": unmicro(gate.lower), "gate.ess": gate.ess, "gate.n": gate.n,
        }
    )  # fmt: skip
    return {**told, **state.versions[version].metrics}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Changed, ...]:
    return tuple(
        Changed(name, a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    )


def lines(found: Differences, policy: str, limit: int) -> Iterator[str]:
    """The comparison for people."""
    name_a, name_b = policy_name(policy, found.a), policy_name(policy, found.b)
    yield f"{name_a} -> {name_b}: {len(found.tensors)} tensors changed, by {found.delta:.4g} together"
    for change in found.tensors[:limit]:
        yield f"  {change.name:<40} {change.relative:>8.2%}  ({change.delta:.4g} of {change.norm:.4g}, largest {change.largest:.4g})"
    for version, names in ((name_a, found.only_a), (name_b, found.only_b)):
        if names:
            yield f"  only {version} has: {', '.join(names[:limit])}"
    for version, names in ((name_b, found.taught_b), (name_a, found.taught_a)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            yield f"taught {version} only: {len(names)} orchestrations: {', '.join(names[:limit])}{more}"
    for title, rows in (("settings", found.settings), ("figures", found.figures)):
        if rows:
            yield f"{title}:"
        for row in rows:
            yield f"  {row.name:<24} {_shown(row.a)} -> {_shown(row.b)}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
