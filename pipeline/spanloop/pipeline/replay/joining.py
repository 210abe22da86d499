"""Which traces belong together, for millions of them: evidence sorted by key, matched in its groups, united by its edges.

Place in the flow: between ``reading`` and ``assembling``. The rule itself is ``assembly.join.match``; here is only what brings
both ends of a piece of evidence together without holding spans. Sets of 16-byte keys are numpy arrays.

Invariants: pure; the components depend on the set of pieces and links, up to the limit of ``match`` on ends of one piece
of evidence, which takes them in the order given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from spanloop.pipeline.assembly.join import Seen, match
from spanloop.pipeline.dialects.operation import Operation
from spanloop.pipeline.replay.reading import Node, Piece

__all__ = ["ID", "PIECE", "Union", "as_ids", "components", "edges_of", "match_pieces", "pack_pieces"]

ID = np.dtype("S16")
PIECE = np.dtype(
    [("key", "S16"), ("node", "S16"), ("span", "S16"), ("start", "<i8"), ("end", "<i8"), ("side", "u1")]
)
Array = np.ndarray[Any, Any]


def as_ids(nodes: Sequence[bytes]) -> Array:
    """16-byte keys as an array."""
    return np.frombuffer(b"".join(nodes), ID)


def pack_pieces(pieces: Sequence[Piece]) -> Array:
    """Pieces as an array of ``PIECE``."""
    out = np.zeros(len(pieces), PIECE)
    if pieces:
        keys, nodes, sides, spans, starts, ends = zip(*pieces, strict=True)
        out["key"], out["node"] = as_ids(keys), as_ids(nodes)
        out["side"], out["span"] = sides, [span.encode() for span in spans]
        out["start"], out["end"] = starts, ends
    return out


def match_pieces(pieces: Array) -> Array:
    """Edges [n, 2] between nodes, from pieces in log order; most keys have one node and are left out at once."""
    if not len(pieces):
        return np.zeros((0, 2), ID)
    order = np.argsort(pieces["key"], kind="stable")
    keys = pieces["key"][order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    ends = np.append(starts[1:], len(keys))
    several = ends - starts > 1
    starts, ends = starts[several], ends[several]
    edges: list[tuple[Node, Node]] = []
    nodes, sides = pieces["node"][order], pieces["side"][order]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        own, side = nodes[start:end], sides[start:end]
        if (own == own[0]).all() or (side == side[0]).all():
            continue
        edges += edges_of(_piece(item) for item in pieces[order[start:end]])
    return np.array(sorted(set(edges)), ID).reshape(-1, 2)


def _piece(item: Any) -> Piece:
    return Piece(
        item["key"].ljust(16, b"\0"), item["node"].ljust(16, b"\0"), int(item["side"]), item["span"].decode(),
        int(item["start"]), int(item["end"]),
    )  # fmt: skip


def edges_of(pieces: Iterable[Piece]) -> list[tuple[Node, Node]]:
    """Edges that the pieces of one key give, in their order."""
    known: list[Seen] = []
    edges = []
    for piece in pieces:
        name = piece.node.hex()
        operation = None
        if piece.span_id:
            operation = Operation(
                name, piece.span_id, "", "unknown", piece.start_ns, piece.end_ns
            )  # all that ``lost_in`` looks at
        for other in match(known, Seen(name, operation, piece.side))[0]:
            edges.append((piece.node, bytes.fromhex(other)))
    return edges


def components(edges: Array) -> tuple[Array, Array]:
    """Nodes of all edges, sorted, and for each the smallest node that it is joined with."""
    nodes, inverse = np.unique(edges.reshape(-1), return_inverse=True)
    left, right = inverse.reshape(-1, 2).T
    label = np.arange(len(nodes))
    while True:
        low, high = np.minimum(label[left], label[right]), np.maximum(label[left], label[right])
        if (low == high).all():
            return nodes, nodes[label]
        np.minimum.at(label, high, low)
        while (label[label] != label).any():
            label = label[label]


class Union:
    """Union-find over the nodes of edges only; what one big pipeline combines. Mergeable."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """The smallest node joined with ``node``; itself where nothing is."""
        root = node
        while (above := self.parent.get(root, root)) != root:
            root = above
        while (above := self.parent.get(node, node)) != root:
            self.parent[node] = root
            node = above
        return root

    def add(self, one: Node, two: Node) -> None:
        """Join two nodes."""
        first, second = sorted((self.find(one), self.find(two)))
        self.parent.setdefault(first, first)
        self.parent[second] = first

    def merge(self, other: Union) -> None:
        """Take over all unions of another."""
        for node, parent in other.parent.items():
            self.add(node, parent)

    def labels(self) -> dict[Node, Node]:
        """Node -> label, of every node that has one other than itself."""
        return {node: root for node in list(self.parent) if (root := self.find(node)) != node}
