"""Prefix trees: rows that begin with the same tokens go through the model as one, so that what they share is computed once.

Place: ``hf_policy`` packs the rows of a part before the forward pass. The turns of an orchestration repeat the conversation so
far, and samples of one prompt repeat the prompt: of eight turns most tokens are repetitions.

How: rows in lexicographic order; each shares with the one before it a prefix and adds the rest. The added pieces, in this
order, are the preorder of the tree: a token sees those before it whose subtree it is in (``ends``). Positions are
depths, so a model with rotary or learned positions computes the same numbers as from the rows.
Invariants: pure numpy; exact up to the last bits of sums; every (row, position) has one packed place.

Legend of suffixes: B rows, T positions of a row, P packed tokens, R packed rows, L their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["SHARED_MIN", "Packed", "cuts", "pack"]

Ints = NDArray[np.int64]

LONGEST_RATIO = 2
"""A tree grows to so many times the longest row: attention costs the square of it, so a wide tree is cheaper in pieces."""
SHARED_MIN = 8
"""A shorter common prefix is repeated: it would only tie unrelated rows into one long tree."""


class Packed(msgspec.Struct, frozen=True):
    """Rows as packed rows of trees."""

    ids_RL: Ints
    positions_RL: Ints
    ends_RL: Ints
    """Index in the packed row behind the last token that may see this one; a padded place is seen by itself alone."""
    places: tuple[Ints, ...]
    """For each row, r * L + l of each of its tokens."""

    @property
    def size(self) -> int:
        """Places, padding included."""
        return int(self.ids_RL.size)

    def seen_RLL(self) -> NDArray[np.bool_]:
        """True where the token of the second axis sees that of the third."""
        here_L = np.arange(self.ids_RL.shape[1])
        return (here_L[None, None, :] <= here_L[None, :, None]) & (
            self.ends_RL[:, None, :] > here_L[None, :, None]
        )


class _Tree(msgspec.Struct):
    """One tree in the making."""

    ids: list[Ints]
    positions: list[Ints]
    ends: list[Ints]
    rows: list[int]
    places: list[Ints]
    size: int = 0


def _sorted(rows: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """Lexicographic order of rows, and how many tokens each shares with the one before it."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i8").tobytes(), i))
    shared = [0]
    for before, after in pairwise(order):
        a, b = rows[before], rows[after]
        width = min(len(a), len(b))
        differs = np.flatnonzero(a[:width] != b[:width])
        shared.append(int(differs[0]) if len(differs) else width)
    return order, shared


def cuts(rows: Sequence[Ints], tokens: int) -> Iterator[list[int]]:
    """Indices of rows in parts whose trees hold at most ``tokens`` tokens (at least one row each); rows that share a prefix stay
    together as far as that allows."""
    order, shared = _sorted(rows)
    part: list[int] = []
    size = 0
    for index, common in zip(order, shared, strict=True):
        added = len(rows[index]) - (common if part and common >= SHARED_MIN else 0)
        if part and size + added > tokens:
            yield part
            part, size, added = [], 0, len(rows[index])
        part.append(index)
        size += added
    if part:
        yield part


def _trees(rows: Sequence[Ints], longest: int) -> list[_Tree]:
    order, shared = _sorted(rows)
    trees: list[_Tree] = []
    path = np.zeros(0, np.int64)  # places of the row before, within its tree
    for index, with_last in zip(order, shared, strict=True):
        row = rows[index]
        common = with_last if with_last >= SHARED_MIN else 0
        if trees and common and trees[-1].size + len(row) - common > longest and common < len(row):
            common = 0
        if not common:
            trees.append(_Tree([], [], [], [], []))
        tree = trees[-1]
        added = np.arange(tree.size, tree.size + len(row) - common)
        if len(added):
            tree.ids.append(row[common:])
            tree.positions.append(np.arange(common, len(row)))
            path = np.concatenate([path[:common], added])
        else:
            path = path[: len(row)]
        tree.size += len(added)
        tree.rows.append(index)
        tree.places.append(path)
    for tree in trees:
        tree.ends.append(_ends(tree))
    return trees


def _ends(tree: _Tree) -> Ints:
    """Each token's subtree ends behind the last token of the rows that go through it; later rows lie further on."""
    ends_P = np.zeros(tree.size, np.int64)
    for path in tree.places:
        if len(path):
            ends_P[path] = np.maximum(ends_P[path], path[-1] + 1)
    return ends_P


def pack(rows: Sequence[Ints]) -> Packed:
    """Pack rows into trees, and trees into rows of the longest tree's length (first fit, longest first).

    Args:
        rows: Token ids of each row, at least one, none empty.

    >>> found = pack([np.arange(20), np.array([*range(15), 7, 7]), np.arange(3)])
    >>> found.ids_RL.shape, [len(p) for p in found.places]
    ((2, 22), [20, 17, 3])
    """
    longest = max(len(row) for row in rows)
    trees = _trees(rows, LONGEST_RATIO * longest)
    width = max(tree.size for tree in trees)
    filled: list[int] = []
    start: dict[int, tuple[int, int]] = {}
    for number in sorted(range(len(trees)), key=lambda i: (-trees[i].size, i)):
        size = trees[number].size
        fits = next((r for r, used in enumerate(filled) if used + size <= width), None)
        if fits is None:
            filled.append(0)
            fits = len(filled) - 1
        start[number] = (fits, filled[fits])
        filled[fits] += size
    ids_RL = np.zeros((len(filled), width), np.int64)
    positions_RL = np.zeros_like(ids_RL)
    ends_RL = np.tile(np.arange(1, width + 1), (len(filled), 1))
    places: list[Ints] = [np.zeros(0, np.int64)] * len(rows)
    for number, tree in enumerate(trees):
        r, at = start[number]
        here = slice(at, at + tree.size)
        ids_RL[r, here] = np.concatenate(tree.ids)
        positions_RL[r, here] = np.concatenate(tree.positions)
        ends_RL[r, here] = tree.ends[0] + at
        for index, path in zip(tree.rows, tree.places, strict=True):
            places[index] = r * width + at + path
    return Packed(ids_RL, positions_RL, ends_RL, tuple(places))
