"""What one replay is going to do, frozen before it starts so that a resumed one does the same.

Place in the flow: ``cli`` makes a ``Plan``, ``driver`` keeps it as work/plan.json, passes and pipelines read it.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.ports import topic_of
from spanloop.pipeline.replay.results import check_name, code_version
from spanloop.pipeline.replay.source import Chunk, plan_chunks
from spanloop.pipeline.sealing.opening import keys_path
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import Pipeline, Settings

__all__ = ["BUCKET_BYTES", "REWARD_KEYS", "Plan", "make_plan", "parse_moment", "read_rewards"]

BUCKET_BYTES = 128 * 2**20
"""Values of spans in one bucket: about 130,000 spans of 1 kB."""
CHUNK_BYTES = 64 * 2**20
"""Records that one step reads, uncompressed; of spans it is more where that gives more than ``CHUNKS_MAX`` chunks."""
CHUNK_BYTES_MAX = 512 * 2**20
CHUNKS_MAX = 64
REWARD_KEYS = (
    "parallel_weight", "finish_weight", "tool_weight", "tool_price", "tool_duplicate_penalty", "rewards", "reward_functions",
    "outcome_floor", "holdout", "credit",
)  # fmt: skip
"""Settings that define rewards, credit and samples; a rewards file may give these."""
_DAY_NS = 86_400 * 10**9
_FAR_NS = 2**62


class Plan(msgspec.Struct, frozen=True):
    """One replay."""

    name: str
    settings: dict[str, Any]
    """Section [pipeline]."""
    rewards_file: str
    models: str
    """recorded or newest."""
    since: str
    until: str
    since_ns: int
    until_ns: int
    """Orchestrations whose first spans were appended in [since_ns, until_ns)."""
    archive: str
    endpoint: str
    contained: dict[str, int]
    code_version: str
    compare: bool
    """Whether hashes of what the stream published go into the results."""
    buckets: int
    chunks: dict[str, list[Chunk]]
    """Topic -> what to read of it."""
    keys: str = ""
    """Key store that opens sealed token arrays; empty: there is none, and what is sealed counts as erased."""

    @property
    def pipeline(self) -> Pipeline:
        """The settings to derive with."""
        return Pipeline(**self.settings)

    @property
    def span_records(self) -> int:
        """Records of spans to read."""
        return sum(chunk.rows for chunk in self.chunks[topics.SPANS])

    def same_job(self, other: Plan) -> bool:
        """Whether going on with ``other``'s work makes this plan's result; what was archived since does not count."""
        names = ("settings", "models", "since", "until", "archive", "code_version", "compare")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def make_plan(
    settings: Settings,
    store: ArchiveStore,
    *,
    name: str,
    since: str = "",
    until: str = "",
    rewards: Path | None = None,
    models: str = "recorded",
    compare: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """Look at the archive and decide what to read.

    Args:
        settings: Of the deployment.
        store: Its archive.
        name: Of the result set.
        since, until: UTC days or times; an orchestration belongs to the range when its first spans were appended in it. A
            day as ``until`` counts as a whole.
        rewards: File with another reward definition.
        models: recorded: the version that the stream credited with; newest: the last one published.
        compare: Keep hashes of what the stream published beside each result.
        bucket_bytes: Uncompressed spans of one bucket.
        chunk_bytes: Uncompressed records that one step of the first pass reads, at least.

    Raises:
        ConfigError: a time or the rewards file is malformed, or the archive has no spans in the range.
    """
    check_name(name)
    pipeline, text = read_rewards(rewards, settings.pipeline) if rewards else (settings.pipeline, "")
    since_ns, until_ns = parse_moment(since, "--from", 0), parse_moment(until, "--to", _FAR_NS, ends=True)
    if since_ns >= until_ns:
        raise ConfigError(f"--from {since} is not before --to {until}")
    margin_ns = int(pipeline.retention_s * 1e9)
    first = _day(since_ns - margin_ns) if since else None
    last = _day(until_ns + margin_ns) if until else None
    wanted: dict[str, Any] = {
        topics.SPANS: {"since": first, "until": last},
        topics.FEEDBACK: {"since": first},
        topics.MODELS: {},
        topics.DEAD_LETTERS: {"since": first},
        topics.CREDITS: {"since": first},
    }
    if compare:
        wanted |= {topics.ORCHESTRATIONS: {"since": first}, topics.REWARDS: {"since": first}}
    contained = store.contained()
    chunks = {
        topic: plan_chunks(store, topic, chunk_bytes=chunk_bytes, **days) for topic, days in wanted.items()
    }
    size = sum(chunk.bytes for chunk in chunks[topics.SPANS])
    if size > CHUNKS_MAX * chunk_bytes:  # each bucket reads from each chunk's file
        larger = min(CHUNK_BYTES_MAX, size // CHUNKS_MAX)
        chunks[topics.SPANS] = plan_chunks(store, topics.SPANS, chunk_bytes=larger, **wanted[topics.SPANS])
    if not chunks[topics.SPANS]:
        what = (
            "has no spans in this range"
            if any(topic_of(s)[0] == topics.SPANS for s in contained)
            else "has no spans"
        )
        raise ConfigError(
            f"the archive {store.files.uri('')} {what}: `spanloop archive once` writes what is on the log; "
            "archive.url (--archive) names another archive"
        )  # fmt: skip
    return Plan(
        name=name, settings=pipeline.model_dump(mode="json"), rewards_file=text, models=models, since=since, until=until,
        since_ns=since_ns, until_ns=until_ns, archive=_archive_url(settings), endpoint=settings.archive.endpoint,
        contained=contained, code_version=code_version(), compare=compare,
        buckets=max(1, min(4096, -(-size // bucket_bytes))), chunks=chunks,
        keys=_keys(settings),
    )  # fmt: skip


def _keys(settings: Settings) -> str:
    path = keys_path(settings).absolute()
    return str(path) if path.exists() else ""


def _archive_url(settings: Settings) -> str:
    if "://" in settings.archive.url:
        return settings.archive.url
    return str(Path(settings.archive.url or settings.workspace / "archive").absolute())


def _day(moment_ns: int) -> dt.date:
    days = max(0, min(moment_ns, _FAR_NS)) // _DAY_NS
    return dt.date(1970, 1, 1) + dt.timedelta(days=days)


def parse_moment(text: str, flag: str, default_ns: int, *, ends: bool = False) -> int:
    """Nanoseconds of a UTC day or a time with or without zone (UTC).

    >>> parse_moment("1970-01-02", "--from", 0) // 10**9, parse_moment("1970-01-02", "--to", 0, ends=True) // 10**9
    (86400, 172800)
    >>> parse_moment("1970-01-01T01:00+01:00", "--from", 5)
    0
    """
    if not text:
        return default_ns
    try:
        if len(text) == 10:
            moment = dt.datetime.combine(dt.date.fromisoformat(text), dt.time(), dt.UTC)
            moment += dt.timedelta(days=int(ends))
        else:
            moment = dt.datetime.fromisoformat(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    except ValueError as exc:
        raise ConfigError(
            f"{flag} {text!r} is no time: give a UTC day like 2026-11-30, or a time like 2026-11-30T08:00"
        ) from exc
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1) * 1000


def read_rewards(path: Path, base: Pipeline) -> tuple[Pipeline, str]:
    """Settings under another reward definition, and the file's text.

    Raises:
        ConfigError: the file is missing, no TOML, or has keys or values that no reward definition has.
    """
    try:
        text = path.read_text()
        data = tomllib.loads(text)
    except FileNotFoundError as exc:
        raise ConfigError(
            f"no rewards file {path}; it is TOML with a section [pipeline], see docs/replay.md"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot read the rewards file {path}: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the rewards file {path} is not valid TOML: {exc}") from exc
    given = data.get("pipeline")
    unknown = [key for key in data if key != "pipeline"]
    if not isinstance(given, dict) or unknown:
        told = f"; it also has {', '.join(sorted(unknown))}" if unknown else ""
        raise ConfigError(
            f"the rewards file {path} must have one section, [pipeline], with any of {', '.join(REWARD_KEYS)}{told}"
        )
    strange = sorted(set(given) - set(REWARD_KEYS))
    if strange:
        raise ConfigError(
            f"the rewards file {path} has pipeline.{', pipeline.'.join(strange)}, which defines no reward; known: {', '.join(REWARD_KEYS)}"
        )
    try:
        return Pipeline(**{**base.model_dump(), **given}), text
    except ValidationError as exc:
        lines = [f"  pipeline.{e['loc'][0]}: {e['msg']}" for e in exc.errors(include_input=False)]
        raise ConfigError(f"the rewards file {path} is wrong:\n" + "\n".join(lines)) from exc
