"""What the stream published as a result set like any replay's: the other side of ``spanloop diff recorded NAME``.

Place in the flow: reads the derived topics from the archive, keeps the last revision of each orchestration, writes parts. Made
again only when the archive has grown.

Invariants: merged orchestrations, withdrawn credit and void samples are not there; hashes are those of ``results``, so that equal
content is equal here too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.replay.driver import alone
from spanloop.pipeline.replay.hashes import credit_hash, rewards_hash, samples_hash
from spanloop.pipeline.replay.passes import read_chunk
from spanloop.pipeline.replay.reading import node_of
from spanloop.pipeline.replay.results import (
    RECORDED,
    Counts,
    Manifest,
    Part,
    PartWriter,
    Result,
    ResultSet,
    code_version,
)
from spanloop.pipeline.replay.source import plan_chunks
from spanloop.pipeline.replay.spill import Spill, read_spill
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json, content_hash
from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    decode,
)
from spanloop.schemas.ids import is_hex_id
from spanloop.schemas.settings import Settings

__all__ = ["published_set"]

BUCKET_BYTES = 128 * 2**20
_VOID = {"void": 1}


class _Line(msgspec.Struct, array_like=True):
    topic: str
    revision: int
    appended_ns: int
    value: bytes


class _Head(msgspec.Struct):
    orchestration_id: str
    revision: int
    tenant: str = "default"


_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.msgpack.Decoder(_Line)


def published_set(settings: Settings, store: ArchiveStore, root: Path) -> ResultSet:
    """The result set of what the stream published, up to what is archived now.

    Args:
        settings: Of the deployment.
        store: Its archive.
        root: Folder of result sets.

    Raises:
        ConfigError: the archive has no orchestrations.
    """
    folder = root / RECORDED
    with alone(root, RECORDED):
        wanted = (*topics.DERIVED,)
        contained = {s: o for s, o in store.contained().items() if s.partition("/")[0] in wanted}
        try:
            found = ResultSet(folder)
        except ConfigError:
            found = None
        version = code_version()
        if found and found.manifest.contained == contained and found.manifest.code_version == version:
            return found
        if not any(s.partition("/")[0] == topics.ORCHESTRATIONS for s in contained):
            raise ConfigError(
                f"the archive {store.files.uri('')} has nothing that the stream published: `spanloop archive once` writes what is "
                "on the log"
            )
        shutil.rmtree(folder, ignore_errors=True)
        parts, counts, buckets = _make(store, wanted, folder)
        manifest = Manifest(
            name=RECORDED, code_version=version, settings=settings.pipeline.model_dump(mode="json"), rewards_file="",
            models=RECORDED, since="", until="", archive=store.files.uri(""), contained=contained, runner="direct",
            buckets=buckets, counts=counts, parts=parts, finished_ns=SystemClock().now_ns(),
        )  # fmt: skip
        LocalFiles(folder).write(
            "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        )
        return ResultSet(folder)


def _make(store: ArchiveStore, wanted: Iterable[str], folder: Path) -> tuple[list[Part], Counts, int]:
    chunks = [chunk for topic in wanted for chunk in plan_chunks(store, topic)]
    buckets = max(1, sum(chunk.bytes for chunk in chunks) // BUCKET_BYTES)
    work = folder / "work"
    for number, chunk in enumerate(chunks):
        spill = Spill(buckets)
        for at, value in read_chunk(store, chunk):
            try:
                head = _heads.decode(value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the archive notes it as unreadable
            node = head.orchestration_id
            if not is_hex_id(node, 32):
                node = node_of(head.tenant, node).hex()
            line = _Line(chunk.topic, head.revision, at.appended_ns, value)
            spill.add(bytes.fromhex(node), msgspec.msgpack.encode(line))
        spill.save(work / f"{number}.arrow")
    parts, counts = [], Counts()
    for bucket in range(buckets):
        writer = PartWriter(LocalFiles(folder.parent), folder.name, f"parts/{bucket:05d}.parquet")
        for result in _results(work, len(chunks), bucket):
            counts.orchestrations += 1
            counts.credited += bool(result.credit)
            counts.samples += bool(result.samples)
            writer.add(result)
        part = writer.close()
        parts += [part] if part is not None else []
    shutil.rmtree(work, ignore_errors=True)
    return parts, counts, buckets


def _results(work: Path, files: int, bucket: int) -> Iterable[Result]:
    last: dict[tuple[bytes, str], _Line] = {}
    for number in range(files):
        nodes, rows = read_spill(work / f"{number}.arrow", bucket)
        for node, row in zip(np.asarray(nodes).tolist(), rows, strict=True):
            line = _lines.decode(row)
            old = last.get((node, line.topic))
            if old is None or line.revision > old.revision:
                last[(node, line.topic)] = line
    for node, topic in sorted(last):
        if topic != topics.ORCHESTRATIONS:
            continue
        lines = {name: last[(node, name)] for name in topics.DERIVED if (node, name) in last}
        try:
            events = {name: decode(line.value) for name, line in lines.items()}
        except SchemaError:
            continue
        result = _result(events, lines[topics.ORCHESTRATIONS].appended_ns)
        if result is not None:
            yield result


def _result(events: dict[str, Event], appended_ns: int) -> Result | None:
    """One row; None for an orchestration that was merged away."""
    orchestration, rewards = events[topics.ORCHESTRATIONS], events.get(topics.REWARDS)
    credit, samples = events.get(topics.CREDITS), events.get(topics.SAMPLES)
    if not isinstance(orchestration, OrchestrationRevised) or orchestration.content is None:
        return None
    rewards = rewards if isinstance(rewards, RewardsComputed) else None
    credit = credit if isinstance(credit, CreditAssigned) and credit.nodes else None
    samples = samples if isinstance(samples, SamplesBuilt) and samples.excluded != _VOID else None
    return Result(
        tenant=orchestration.tenant, orchestration_id=orchestration.orchestration_id, complete=orchestration.complete,
        spans=0, first_ns=appended_ns, touched_ns=appended_ns, late=False, erased=False, feedback=0,
        version=credit.value_model if credit else "", status=rewards.status if rewards else "",
        team=rewards.team if rewards else None, problem="", content_hash=content_hash(orchestration.content),
        rewards_hash=rewards_hash(rewards), credit_hash=credit_hash(credit), samples_hash=samples_hash(samples),
        recorded=b"", content=canonical_json(orchestration.content), rewards=canonical_json(rewards) if rewards else b"",
        credit=canonical_json(credit) if credit else b"", samples=canonical_json(samples) if samples else b"",
    )  # fmt: skip
