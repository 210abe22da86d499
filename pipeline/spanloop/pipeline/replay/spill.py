"""Rows on local disk, by bucket, between the passes of the local driver.

Place in the flow: each pass writes one file for each piece of its input and each bucket reads its part of all files. A file is an
Arrow IPC file with one record batch a bucket: (node, row bytes), lz4.

Invariants: a file appears whole or not at all; what bucket a node is in depends on the node and the number of buckets only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spanloop.pipeline.replay.joining import ID

__all__ = ["Labels", "Spill", "bucket_of", "buckets_of", "read_spill", "save_array", "write_atomically"]

Array = np.ndarray[Any, Any]
_SCHEMA = pa.schema([("node", pa.binary(16)), ("row", pa.large_binary())])
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


def buckets_of(nodes: Array, buckets: int) -> Array:
    """Bucket of each node of an array of ``ID``."""
    heads = np.ascontiguousarray(nodes).view(np.uint8).reshape(-1, 16)[:, :4].astype(np.uint64)
    numbers = (heads[:, 0] << 24) | (heads[:, 1] << 16) | (heads[:, 2] << 8) | heads[:, 3]
    return (numbers % buckets).astype(np.int64)


def bucket_of(node: bytes, buckets: int) -> int:
    """Bucket of one node.

    >>> node = bytes(range(16))
    >>> bucket_of(node, 7) == int(buckets_of(np.frombuffer(node, ID), 7)[0])
    True
    """
    return int.from_bytes(node[:4], "big") % buckets


def write_atomically(path: Path, data: Any) -> None:
    """Make a file in one step; durable enough for a file that can be made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def save_array(path: Path, array: Array) -> None:
    """Keep an array for ``numpy.load(mmap_mode="r")``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.save(file, array)
    temporary.replace(path)


class Spill:
    """Rows of one file, collected in memory until ``save``."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._nodes: list[bytes] = []
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, node: bytes, row: bytes) -> None:
        """Take a row."""
        self._nodes.append(node)
        self._rows.append(row)

    def save(self, path: Path, buckets: Array | None = None) -> None:
        """Write all rows; ``buckets`` where they are not those of the nodes."""
        nodes = np.frombuffer(b"".join(self._nodes), ID)
        own = buckets_of(nodes, self._buckets) if buckets is None else buckets
        order = np.argsort(own, kind="stable")
        bounds = np.searchsorted(own[order], np.arange(self._buckets + 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with (
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, _SCHEMA, options=_OPTIONS) as file,
        ):
            for bucket in range(self._buckets):
                part = order[bounds[bucket] : bounds[bucket + 1]].tolist()
                file.write_batch(
                    pa.record_batch(
                        [
                            pa.array([self._nodes[i] for i in part], pa.binary(16)),
                            pa.array([self._rows[i] for i in part], pa.large_binary()),
                        ],
                        schema=_SCHEMA,
                    )
                )
        temporary.replace(path)


def read_spill(path: Path, bucket: int) -> tuple[Array, list[bytes]]:
    """Nodes and rows of one bucket of a file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        batch = file.get_batch(bucket)
        nodes = np.frombuffer(b"".join(batch.column(0).to_pylist()), ID)
        return nodes, batch.column(1).to_pylist()


class Labels:
    """Which component a node belongs to: a sorted table of those that are joined at all.

    Args:
        nodes, labels: As ``joining.components`` gives them.
    """

    def __init__(self, nodes: Array, labels: Array) -> None:
        self._nodes, self._labels = nodes, labels

    @classmethod
    def load(cls, folder: Path) -> Labels:
        """What ``save`` kept."""
        return cls(
            np.load(folder / "nodes.npy", mmap_mode="r"), np.load(folder / "labels.npy", mmap_mode="r")
        )

    def save(self, folder: Path) -> None:
        """Keep the table in a folder."""
        save_array(folder / "labels.npy", self._labels)
        save_array(folder / "nodes.npy", self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, nodes: Array) -> Array:
        """Label of each node; its own where it is joined with nothing."""
        if not len(self._nodes) or not len(nodes):
            return nodes
        at = np.searchsorted(self._nodes, nodes)
        at[at == len(self._nodes)] = 0
        return np.where(self._nodes[at] == nodes, self._labels[at], nodes)

    def moved(self, buckets: int) -> bool:
        """Whether any node's rows lie in another bucket than its component's."""
        if not len(self._nodes):
            return False
        return bool((buckets_of(self._nodes, buckets) != buckets_of(self._labels, buckets)).any())


def labelled(rows: Sequence[tuple[bytes, bytes]], labels: Labels) -> Iterator[tuple[bytes, bytes]]:
    """Rows under their component's label."""
    nodes = labels.of(np.frombuffer(b"".join(node for node, _ in rows), ID))
    for node, (_, row) in zip(nodes.tolist(), rows, strict=True):
        yield node.ljust(16, b"\0"), row
