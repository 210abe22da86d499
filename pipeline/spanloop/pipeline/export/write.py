"""A data set on disk: one folder with the rows, what each row is made of, and a card; there whole or not at all.

Place in the flow: ``cli`` gives it a ``Wish`` and calls with their words. Invariants: the same log gives the same bytes; the
counts of the card add up (calls = calls in rows + excluded); nothing stands at the final place before all is synced.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from spanloop.pipeline.export.messages import Conversation, problem_of
from spanloop.pipeline.export.rows import (
    DEFINITIONS,
    PAIRED,
    Call,
    Chosen,
    Example,
    Wish,
    answer_key,
    best_of_groups,
    pair_row,
    pairs_of,
    prompt_key,
    row_of,
    scored,
)
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import ConfigError

__all__ = ["Card", "Words", "write_data_set"]

CHUNK = 2_000
"""Calls whose words are in memory at once."""
_OPENAI_LEAST = 10
"""Rows below which OpenAI refuses a file."""

Words = Callable[[Sequence[Call]], Iterator[tuple[Call, Conversation | str]]]


class Card(msgspec.Struct, frozen=True):
    """What a data set is and what it leaves out."""

    format: str
    file: str
    sha256: str
    rows: int
    orchestrations: int
    """With a call in a row."""
    wish: Wish
    definitions: dict[str, str]
    calls: int
    """In the window."""
    used: int
    """Calls in a row."""
    excluded: dict[str, int]
    """Reason -> calls; ``used`` and these add up to ``calls``."""
    notes: dict[str, int]
    offsets: dict[str, dict[str, int]]
    """Topic -> partition -> last offset that it contains at least."""
    spanloop: str
    lost: tuple[str, ...] = ()
    """What belongs to it and cannot be read any more."""


class _Sink(Protocol):
    def add(self, row: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class _Lines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def add(self, row: dict[str, Any]) -> None:
        self._file.write(canonical_json(row) + b"\n")

    def close(self) -> None:
        _synced(self._file)


class _Parquet:
    """Parquet with fixed columns: what a row lacks is null."""

    def __init__(self, path: Path, form: str) -> None:
        import pyarrow.parquet as pq

        self._schema = _schema(form)
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())


def _schema(form: str) -> Any:
    import pyarrow as pa

    call = pa.struct(
        [
            ("id", pa.string()),
            ("type", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
        ]
    )
    messages = pa.list_(
        pa.struct(
            [
                ("role", pa.string()),
                ("content", pa.string()),
                ("tool_calls", pa.list_(call)),
                ("tool_call_id", pa.string()),
            ]
        )
    )
    sides = ("chosen", "rejected") if form == "dpo" else ("completion",)
    columns = [("prompt", messages), *((side, messages) for side in sides), ("tools", pa.string())]
    columns += {"weighted": [("weight", pa.float64())], "kto": [("label", pa.bool_())]}.get(form, [])
    texts = ("orchestration_id", "call_id", "tenant", "agent", "role", "model", "policy_version")
    about = [(name, pa.string()) for name in texts] + [("reward", pa.float64()), ("score", pa.float64())]
    prefixes = ("chosen_", "rejected_") if form == "dpo" else ("",)
    columns += [(prefix + name, kind) for prefix in prefixes for name, kind in about]
    return pa.schema([*columns, ("level", pa.string())])


def _synced(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


# ---------------------------------------------------------------- making


class _Making:
    """Counts, and rows on their way to the folder."""

    def __init__(self, folder: Path, wish: Wish, sink: _Sink, index: _Sink | None) -> None:
        self.folder, self.wish, self.sink, self.index = folder, wish, sink, index
        self.excluded: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.rows = 0
        self.used = 0
        self.orchestrations: set[tuple[str, str]] = set()

    def row(self, row: dict[str, Any], about: dict[str, Any], examples: Sequence[Example]) -> None:
        self.sink.add(row)
        if self.index is not None:
            self.index.add({"row": self.rows, **about})
        self.rows += 1
        for example in examples:
            said = example.conversation
            self.orchestrations.add((example.call.tenant, example.call.orchestration_id))
            if not said.tools and any("tool_calls" in m for m in (*said.prompt, said.answer)):
                self.notes["tool_calls_without_definitions"] += 1


def write_data_set(
    folder: Path,
    wish: Wish,
    calls: Sequence[Call],
    words: Words,
    *,
    parquet: bool = False,
    offsets: dict[str, dict[str, int]] | None = None,
    lost: Callable[[], tuple[str, ...]] = tuple,
) -> Card:
    """Make the folder; returns its card.

    Args:
        folder: Must not be there yet.
        wish: What is asked for.
        calls: All model calls of the window, in order.
        words: Gives conversations of some calls, in their order.
        parquet: Instead of JSON lines; not in OpenAI's formats.
        offsets: For the card.
        lost: For the card, asked at the end.

    Raises:
        ConfigError: the folder is there, or cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name another, or remove it first")
    openai = wish.form.startswith("openai")
    if openai and parquet:
        raise ConfigError("OpenAI takes JSON lines: leave --parquet out")
    name = "data.parquet" if parquet else "data.jsonl"
    with _building(folder) as building:
        sink: _Sink = _Parquet(building / name, wish.form) if parquet else _Lines(building / name)
        index = _Lines(building / "index.jsonl") if openai else None
        making = _Making(building, wish, sink, index)
        wanted = _wanted(calls, making)
        fill = _fill_pairs if wish.form in PAIRED else _fill
        fill(making, _examples(making, wanted, words))
        sink.close()
        if index is not None:
            index.close()
        if openai and making.rows < _OPENAI_LEAST:
            making.notes["fewer_rows_than_openai_takes"] = _OPENAI_LEAST - making.rows
        card = Card(
            format=wish.form,
            file=name,
            sha256=_sha256(building / name),
            rows=making.rows,
            orchestrations=len(making.orchestrations),
            wish=wish,
            definitions={"rows": DEFINITIONS[wish.form], "score": _SCORES.get(wish.level, _SCORES[""])},
            calls=len(calls),
            used=making.used,
            excluded=dict(sorted(making.excluded.items())),
            notes=dict(sorted(making.notes.items())),
            offsets=offsets or {},
            spanloop=_version(),
            lost=lost(),
        )
        with (building / "card.json").open("wb") as file:
            file.write(msgspec.json.format(canonical_json(card), indent=2) + b"\n")
            _synced(file)
    return card


_SCORES = {
    "reward": "the orchestration's reward",
    "team": "the orchestration's reward minus its baseline",
    "": "credit of the ledger account that the call is under: accounts of one level sum to their parent's",
}


def _version() -> str:
    from importlib.metadata import version

    return version("spanloop")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A folder that takes its place when the block ends, and is gone when it fails."""
    building = folder.parent / f".building-{folder.name}-{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        yield building
        descriptor = os.open(building, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        building.rename(folder)
    except OSError as exc:
        raise ConfigError(f"cannot write {folder}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _wanted(calls: Sequence[Call], making: _Making) -> list[tuple[Call, int]]:
    found: list[tuple[Call, int]] = []
    for call in calls:
        score = scored(call, making.wish)
        if isinstance(score, str):
            making.excluded[score] += 1
        else:
            found.append((call, score))
    if not making.wish.best:
        return found
    kept = best_of_groups([call for call, _ in found], making.wish.best)
    best = [(call, score) for call, score in found if (call.tenant, call.orchestration_id) in kept]
    making.excluded["not_best_of_group"] += len(found) - len(best)
    return best


def _examples(making: _Making, wanted: Sequence[tuple[Call, int]], words: Words) -> Iterator[Example]:
    for start in range(0, len(wanted), CHUNK):
        part = wanted[start : start + CHUNK]
        told = words([call for call, _ in part])
        for (call, score), (_, said) in zip(part, told, strict=True):
            reason = said if isinstance(said, str) else _unfit(said)
            if isinstance(said, str) or reason:
                making.excluded[reason] += 1
            else:
                yield Example(call, said, score)


def _unfit(said: Conversation) -> str:
    return "cut_answer" if said.finish == "length" else problem_of(said)


def _fill(making: _Making, examples: Iterator[Example]) -> None:
    for example in examples:
        made = row_of(example, making.wish)
        if isinstance(made, str):
            making.excluded[made] += 1
            continue
        making.used += 1
        making.row(*made, [example])


def _fill_pairs(making: _Making, examples: Iterator[Example]) -> None:
    """Examples wait in a file, since a prompt's answers may lie far apart; in memory are a hash and a score of each."""
    prompts: dict[str, list[Chosen]] = {}
    spool = making.folder / "spool"
    with spool.open("w+b") as file:
        for example in examples:
            chosen = Chosen(answer_key(example), example.score, file.tell())
            prompts.setdefault(prompt_key(example), []).append(chosen)
            file.write(msgspec.json.encode(example) + b"\n")

        def kept(item: Chosen) -> Example:
            file.seek(item.place)
            return msgspec.json.decode(file.readline(), type=Example)

        for answers in prompts.values():
            found, left = pairs_of(answers, making.wish)
            making.excluded += left
            making.used += 2 * len(found)
            for better, worse in found:
                pair = (kept(better), kept(worse))
                scores = (better.score, worse.score)
                pair = tuple(msgspec.structs.replace(e, score=s) for e, s in zip(pair, scores, strict=True))
                making.row(*pair_row(pair[0], pair[1], making.wish), pair)
    spool.unlink()
