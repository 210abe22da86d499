"""Rollouts as padded arrays, and their split into minibatches.

Place: between ``batches`` (what is trained on) and ``update`` (how). Pure, no torch; the same rollouts and seed are the same
arrays. Decision weights sum to 1 in every batch and minibatch.

Legend of suffixes: B rows (model calls), T positions, N decisions, K options of a menu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.learner.batches import Rollout

__all__ = ["Arrays", "collate", "minibatches", "roles_of", "standardised", "summed", "take"]


class Arrays(msgspec.Struct, frozen=True):
    """A batch as arrays. ``weight_N`` sums to 1, but see ``summed``."""

    ids_BT: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    row_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    menu_NK: NDArray[np.int64]
    open_NK: NDArray[np.bool_]
    chosen_N: NDArray[np.int64]
    behaviour_N: NDArray[np.float32]
    advantage_N: NDArray[np.float32]
    values_NK: NDArray[np.float32]
    valued_N: NDArray[np.bool_]
    weight_N: NDArray[np.float32]
    full_N: NDArray[np.bool_]
    """True for a decision over the whole vocabulary: its menu is the token taken, alone."""
    rollout_B: NDArray[np.int64]
    """Index of the row's rollout."""


def collate(rollouts: Sequence[Rollout], *, weighting: str = "decision") -> Arrays:
    """Pad and stack.

    Args:
        rollouts: At least one, each with at least one decision.
        weighting: decision: every decision counts the same, which is the policy gradient of the mean return;
            rollout: every orchestration counts the same, its rows by their ``weight`` (WideSeek, METHODS 2.5); or one of
            ``objectives.means.MEANS``, whose sequences are the model calls.
    """
    calls = [(index, call) for index, rollout in enumerate(rollouts) for call in rollout.calls]
    flat = [(row, index, d) for row, (index, call) in enumerate(calls) for d in call.decisions]
    longest = max(len(call.ids) for _, call in calls)
    widest = max(1, *(len(d.menu) for _, _, d in flat))
    ids_BT = np.zeros((len(calls), longest), np.int64)
    for row, (_, call) in enumerate(calls):
        ids_BT[row, : len(call.ids)] = call.ids
    menu_NK = np.zeros((len(flat), widest), np.int64)
    open_NK = np.zeros((len(flat), widest), np.bool_)
    values_NK = np.zeros((len(flat), widest), np.float32)
    for n, (row, _, d) in enumerate(flat):
        menu = d.menu or (calls[row][1].ids[d.position + 1],)
        menu_NK[n, : len(menu)] = menu
        open_NK[n, : len(menu)] = True
        values_NK[n, : len(d.values)] = d.values
    if weighting in ("rollout", "seq-mean-token-mean"):
        whole = (call.weight if weighting == "rollout" else 1.0 for _, call in calls)
        rows = [share / len(call.decisions) for share, (_, call) in zip(whole, calls, strict=True)]
        weight = np.array([rows[row] for row, _, _ in flat], np.float64)
    else:
        weight = np.ones(len(flat), np.float64)
    return Arrays(
        ids_BT=ids_BT,
        lengths_B=np.array([len(call.ids) for _, call in calls], np.int64),
        row_N=np.array([row for row, _, _ in flat], np.int64),
        position_N=np.array([d.position for _, _, d in flat], np.int64),
        menu_NK=menu_NK,
        open_NK=open_NK,
        chosen_N=np.array([d.chosen for _, _, d in flat], np.int64),
        behaviour_N=np.array([d.behaviour for _, _, d in flat], np.float32),
        advantage_N=np.array([d.advantage for _, _, d in flat], np.float32),
        values_NK=values_NK,
        valued_N=np.array([bool(d.values) for _, _, d in flat], np.bool_),
        weight_N=(weight / max(weight.sum(), 1e-12)).astype(np.float32),
        full_N=np.array([not d.menu for _, _, d in flat], np.bool_),
        rollout_B=np.array([index for index, _ in calls], np.int64),
    )


def take(arrays: Arrays, part: Sequence[int]) -> tuple[Arrays, NDArray[np.int64]]:
    """The rows and decisions of some rollouts, weights summing to 1 again; and the indices of those decisions."""
    keep_B = np.isin(arrays.rollout_B, part)
    new_row_B = np.cumsum(keep_B) - 1
    index_N = np.flatnonzero(keep_B[arrays.row_N])
    longest = int(arrays.lengths_B[keep_B].max())
    weight_N = arrays.weight_N[index_N]
    chosen: dict[str, Any] = {
        name: getattr(arrays, name)[index_N]
        for name in arrays.__struct_fields__
        if name.endswith(("_N", "_NK"))
    }
    chosen["row_N"] = new_row_B[chosen["row_N"]]
    chosen["weight_N"] = (weight_N / max(float(weight_N.sum()), 1e-12)).astype(np.float32)
    rows: dict[str, Any] = {
        "ids_BT": arrays.ids_BT[keep_B][:, :longest],
        "lengths_B": arrays.lengths_B[keep_B],
        "rollout_B": arrays.rollout_B[keep_B],
    }
    return Arrays(**chosen, **rows), index_N


def summed(arrays: Arrays, weighting: str, horizon: int) -> Arrays:
    """Weights of the means that sum over a call's tokens: not 1 together, but tokens a call (over a constant ``horizon``), so that
    a token counts the same in a batch of long and of short calls. Others stay as they are."""
    if not weighting.startswith("seq-mean-token-sum"):
        return arrays
    scale = len(arrays.weight_N) / len(arrays.lengths_B)
    if weighting.endswith("norm"):
        scale /= horizon
    return msgspec.structs.replace(arrays, weight_N=(arrays.weight_N * scale).astype(np.float32))


def roles_of(rollouts: Sequence[Rollout]) -> NDArray[np.int64]:
    """Number of each decision's role, in the order of ``collate``."""
    names: dict[str, int] = {}
    calls = [call for rollout in rollouts for call in rollout.calls]
    numbers = [names.setdefault(call.role, len(names)) for call in calls]
    return np.repeat(np.array(numbers, np.int64), [len(call.decisions) for call in calls])


def standardised(arrays: Arrays, group_N: NDArray[np.int64] | None = None) -> Arrays:
    """Advantages divided by their root mean square, so that one learning rate fits rewards of any unit; what has no
    signal stays as it is. Values keep their unit: the temperature is given in it.

    Args:
        arrays: A batch.
        group_N: Group of each decision: each group's own root mean square, so that a role whose accounts are small learns as
            fast as one whose are large (agent-wise normalisation, Dr. MAS; without its mean, since accounts have one). None: one.
    """
    if group_N is None:
        scale = _root_mean_square(arrays.advantage_N)
        if not scale > 1e-9:
            return arrays
        return msgspec.structs.replace(arrays, advantage_N=(arrays.advantage_N / scale).astype(np.float32))
    advantage_N = arrays.advantage_N.copy()
    for group in np.unique(group_N):
        own_N = group_N == group
        scale = _root_mean_square(advantage_N[own_N])
        if scale > 1e-9:
            advantage_N[own_N] /= scale
    return msgspec.structs.replace(arrays, advantage_N=advantage_N)


def _root_mean_square(values_N: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values_N, dtype=np.float64))))


def minibatches(count: int, size: int, *, seed: tuple[int, ...]) -> list[list[int]]:
    """A permutation of ``range(count)`` in pieces of ``size``; the last may be short. The same seed is the same split.

    >>> sorted(i for part in minibatches(5, 2, seed=(0, 1)) for i in part)
    [0, 1, 2, 3, 4]
    """
    order = np.random.default_rng(list(seed)).permutation(count).tolist()
    return [order[start : start + size] for start in range(0, count, size)]
