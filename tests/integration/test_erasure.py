"""One of twenty subjects is erased: nothing of theirs can be read at rest, and nothing else changes.

The grep is over everything unpacked, and over everything that any key in the store still opens, so that it finds what a reader
with all rights would find.
"""

from __future__ import annotations

import base64
import re
import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from privacy_world import DERIVED, World, job_spans, secret, texts_at_rest, tokens, trace_of

from spanloop.learner.batches import to_rollout
from spanloop.learner.erase_cli import erase
from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.credit.states import has_tokens
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.replay.checking import verify_archive
from spanloop.pipeline.replay.diff import diff
from spanloop.pipeline.replay.driver import replay
from spanloop.pipeline.replay.plan import make_plan
from spanloop.pipeline.replay.published import published_set
from spanloop.pipeline.replay.results import Manifest, ResultSet
from spanloop.pipeline.replay.tables import lines
from spanloop.pipeline.sealing.opening import OpenedLog
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.pipeline.verify import Verified, verify
from spanloop.schemas import topics
from spanloop.schemas.events import (
    CreditAssigned,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    SpansReceived,
    SubjectErased,
    decode,
)
from spanloop.schemas.settings import Settings

PERSONS, JOBS, ERASED = 20, 2, 7
_BLOB = re.compile(rb"([0-9a-f]{32})/([0-9a-f]{16})/([A-Za-z0-9+/]{16,}={0,2})")


def _filled(folder: Path, *, sealed: bool = True) -> World:
    world = World(folder, sealed=sealed)
    for job in range(JOBS):
        for person in range(PERSONS):
            world.append(world.records(person, job))
    world.run()
    world.archive()
    return world


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "ws"
    _filled(folder)
    return folder


@pytest.fixture
def world(filled: Path, tmp_path: Path) -> World:
    """Forty jobs of twenty persons, in a workspace of the test's own."""
    return World(Path(shutil.copytree(filled, tmp_path / "ws")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same in the clear."""
    return _filled(tmp_path_factory.mktemp("plain") / "ws", sealed=False)


def _erase(world: World, *arguments: str) -> str:
    world.settings.workspace.joinpath("settings.toml").write_text(
        "[content]\ntraining = true\nsubject_keys = true\n[pipeline]\nvalue_every = 8\nholdout = 0.2\n"
    )
    options = [
        "--workspace",
        str(world.settings.workspace),
        "--config",
        str(world.settings.workspace / "settings.toml"),
    ]
    result = CliRunner().invoke(erase, [*arguments, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def _readable(world: World, person: int) -> set[str]:
    """Which of a person's secrets can be read at rest, by anybody who has every file and every key."""
    assert world.vault is not None
    needles = {
        "text": secret(person).encode(),
        **{f"token {t}": str(t).encode() for j in range(JOBS) for t in tokens(person, j)},
    }
    found: set[str] = set()
    for data in texts_at_rest(world.settings.workspace):
        found |= {f"clear {name}" for name, needle in needles.items() if needle in data}
        for trace, span, blob in _BLOB.findall(data):
            for kind in ("spanloop.sealed", "spanloop.sealed.tokens"):
                text = f"{trace.decode()}/{span.decode()}/{blob.decode()}"
                opened = world.vault.open_text("default", text, kind) or b""
                found |= {name for name, needle in needles.items() if needle in opened}
    return found


def _events(world: World, kind: type, topic: str) -> list:
    return [e for value in world.values(topic).values() if isinstance(e := decode(value), kind)]


def test_in_the_clear_the_grep_finds_them(plain: World) -> None:
    needles = [secret(ERASED).encode(), str(tokens(ERASED, 0)[0]).encode()]
    assert all(any(needle in data for data in texts_at_rest(plain.settings.workspace)) for needle in needles)


def test_with_keys_nothing_stands_in_the_clear_and_keys_open_it(world: World) -> None:
    for person in (0, ERASED):
        found = _readable(world, person)
        assert not [name for name in found if name.startswith("clear")]
        assert found == {"text", *(f"token {t}" for j in range(JOBS) for t in tokens(person, j))}


def test_erasing_one_subject_leaves_nothing_of_theirs_and_all_else_as_it_was(world: World) -> None:
    before = world.values(*DERIVED, topics.SPANS, topics.FEEDBACK, topics.MODELS)
    dry = _erase(world, f"u-{ERASED}", "--dry-run")
    assert "4 keys would be destroyed: 4 traces, 2 orchestrations" in dry
    assert _readable(world, ERASED)
    assert "4 keys destroyed" in _erase(world, f"user.id=u-{ERASED}")
    assert _readable(world, ERASED) == set()
    assert _readable(world, ERASED + 1) == {
        "text",
        *(f"token {t}" for j in range(JOBS) for t in tokens(ERASED + 1, j)),
    }
    world.run()
    world.archive()
    assert world.values(*DERIVED, topics.SPANS, topics.FEEDBACK, topics.MODELS) == before
    assert _readable(world, ERASED) == set()
    (event,) = _events(world, SubjectErased, topics.POLICIES)
    assert (event.keys, len(event.trace_ids), len(event.orchestration_ids)) == (4, 4, 2)
    assert f"u-{ERASED}" not in event.subject
    assert event.value_models


def test_a_destroyed_key_is_not_in_the_files_of_the_store(world: World) -> None:
    assert world.vault is not None
    key = world.vault.keys.find("default", trace_of(ERASED, 0))
    folder = world.settings.workspace / "keys"
    assert key is not None
    assert any(key in path.read_bytes() for path in folder.iterdir())
    _erase(world, f"u-{ERASED}")
    assert not any(key in path.read_bytes() for path in folder.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def _checked(world: World):
    with (
        closing(SqliteLog(world.settings.database)) as log,
        closing(SqliteState(world.settings.database)) as state,
    ):
        return verify(log, state, world.settings.pipeline, world.clock, vault=world.vault)


def test_verify_proves_contents_and_rewards_before_and_after(world: World) -> None:
    found = _checked(world)
    assert (found.differences, found.erased) == ([], 0)
    assert found.credits == PERSONS * JOBS
    _erase(world, f"u-{ERASED}")
    found = _checked(world)
    assert (found.differences, found.erased) == ([], JOBS)
    assert found.equal == PERSONS * JOBS


def _replayed(world: World, name: str, settings: Settings | None = None) -> Manifest:
    settings = settings or world.settings
    store = ArchiveStore.open(settings)
    return replay(make_plan(settings, store, name=name), store, settings.workspace / "replays")


def _verified_archive(world: World) -> Verified:
    settings = world.settings
    store = ArchiveStore.open(settings)
    return verify_archive(settings, store, settings.workspace / "replays", 2**62)


def test_replay_verify_and_diff_of_the_archive_open_token_ids_and_count_what_is_erased(world: World) -> None:
    root = world.settings.workspace / "replays"
    found = _verified_archive(world)
    assert (found.differences, found.erased, found.credits) == ([], 0, PERSONS * JOBS)
    assert _replayed(world, "before").counts.erased == 0
    recorded = published_set(world.settings, ArchiveStore.open(world.settings), root)
    assert diff(recorded, ResultSet(root / "before")).equal
    at_rest = b"".join(texts_at_rest(root))
    assert b'"token"' in at_rest  # token accounts
    ids = [str(token).encode() for person in range(PERSONS) for token in tokens(person, 0)]
    assert not any(token in at_rest for token in ids)

    _erase(world, f"u-{ERASED}")
    found = _verified_archive(world)
    assert (found.differences, found.erased) == ([], JOBS)
    assert (found.equal, found.credits) == (PERSONS * JOBS, (PERSONS - 1) * JOBS)
    assert _replayed(world, "after").counts.erased == JOBS
    compared = diff(ResultSet(root / "before"), ResultSet(root / "after"))
    assert (compared.equal, compared.erased, compared.same) == (True, JOBS, PERSONS * JOBS)
    assert f"{JOBS} without their token ids on one side" in "\n".join(lines(compared))
    assert diff(ResultSet(root / "after"), ResultSet(root / "after")).erased == 0


def test_a_replay_without_the_key_store_counts_everything_sealed_as_erased(world: World) -> None:
    elsewhere = world.settings.content.model_copy(update={"subject_keys": False, "keys": "/nowhere/keys.db"})
    manifest = _replayed(world, "without", world.settings.model_copy(update={"content": elsewhere}))
    assert manifest.counts.erased == PERSONS * JOBS
    assert manifest.counts.credited == PERSONS * JOBS
    assert (manifest.counts.bad, manifest.counts.problems, manifest.counts.samples) == (0, 0, PERSONS * JOBS)


def test_rewards_of_an_erased_job_can_still_be_computed(world: World) -> None:
    _erase(world, f"u-{ERASED}")
    late = FeedbackReceived(
        feedback_id="late",
        target_kind="trace",
        target_id=trace_of(ERASED, 0),
        value=1.0,
        scorer="desk",
        observed_ns=2**61,
    )
    world.append([new_record(late)])
    world.run()
    orchestration = next(
        e
        for e in _events(world, OrchestrationRevised, topics.ORCHESTRATIONS)
        if trace_of(ERASED, 0) in e.content.trace_ids
    )
    mine = [
        e
        for e in _events(world, RewardsComputed, topics.REWARDS)
        if e.orchestration_id == orchestration.orchestration_id
    ]
    assert max(mine, key=lambda e: e.revision).team == 1_000_000
    credit = [
        e
        for e in _events(world, CreditAssigned, topics.CREDITS)
        if e.orchestration_id == orchestration.orchestration_id
    ]
    newest = max(credit, key=lambda e: e.revision)
    parents = {node.parent for node in newest.nodes}
    assert sum(node.credit for node in newest.nodes if node.id not in parents) + newest.baseline == 1_000_000
    built = [
        e
        for e in _events(world, SamplesBuilt, topics.SAMPLES)
        if e.orchestration_id == orchestration.orchestration_id
    ]
    last = max(built, key=lambda e: e.revision)
    assert (last.rows, last.excluded) == ((), {"erased": 1})


def test_the_learner_gets_token_ids_with_the_key_and_a_reason_without(world: World) -> None:
    def rollouts():
        with closing(SqliteLog(world.settings.database)) as log:
            opened = OpenedLog(log, world.vault)
            built = [decode(r.value) for r in scan(opened, [topics.SAMPLES])]
        return {
            b.orchestration_id: to_rollout(b, vocabulary_size=10**8, context=64)
            for b in built
            if isinstance(b, SamplesBuilt)
        }

    before = rollouts()
    assert len(before) == PERSONS * JOBS
    assert not [r for r in before.values() if isinstance(r, str)]
    _erase(world, f"u-{ERASED}")
    after = rollouts()
    changed = {name for name in before if after[name] != before[name]}
    assert len(changed) == JOBS
    assert {after[name] for name in changed} == {"erased"}


def test_credit_is_that_of_a_deployment_without_keys(world: World, plain: World) -> None:
    """Keys change where token ids stand, not what is made of them: same rewards, same accounts, same rows once opened."""
    assert world.vault is not None
    for topic, kind in ((topics.REWARDS, RewardsComputed), (topics.CREDITS, CreditAssigned)):
        one = {(e.orchestration_id, e.revision): e for e in _events(world, kind, topic)}
        two = {(e.orchestration_id, e.revision): e for e in _events(plain, kind, topic)}
        assert one.keys() == two.keys()
        if kind is RewardsComputed:
            assert one == two
        else:
            assert {k: [(n.id, n.credit) for n in e.nodes] for k, e in one.items()} == {
                k: [(n.id, n.credit) for n in e.nodes] for k, e in two.items()
            }
            assert any(n.unit == "token" for e in one.values() for n in e.nodes)
    rows = {row.call_id: row for e in _events(plain, SamplesBuilt, topics.SAMPLES) for row in e.rows}
    for event in _events(world, SamplesBuilt, topics.SAMPLES):
        for row in world.vault.open_samples(event).rows:
            assert row.prompt_token_ids == rows[row.call_id].prompt_token_ids
            assert row.advantages == rows[row.call_id].advantages
            assert (row.menu_ids, row.menu_values) == (
                rows[row.call_id].menu_ids,
                rows[row.call_id].menu_values,
            )


def test_what_comes_after_the_erasure_is_kept_without_content(world: World) -> None:
    _erase(world, f"u-{ERASED}")
    world.append(world.records(ERASED, 0))  # a retry, a replay of a spool
    world.append(
        world.records(ERASED, 5)
    )  # they come back: refused too, and the trace's earlier spans with it
    world.run()
    world.archive()
    assert _readable(world, ERASED) <= {"text", *(f"token {t}" for t in tokens(ERASED, 5))}
    events = [e for e in _events(world, SpansReceived, topics.SPANS) if e.trace_id == trace_of(ERASED, 5)]
    assert len(events) == 3
    assert world.vault is not None
    assert all(world.vault.open_span("default", span) in (None, span) for e in events for span in e.spans)
    again = _erase(world, f"u-{ERASED}")
    assert "1 keys destroyed" in again, "the gateway's trace of the new job, which names nobody"
    assert _readable(world, ERASED) == set()


def test_readmitting_brings_nothing_back_and_keeps_later_traces(world: World) -> None:
    assert world.vault is not None
    _erase(world, f"u-{ERASED}")
    _erase(world, f"u-{ERASED}", "--readmit")
    assert _readable(world, ERASED) == set()
    world.append(world.records(ERASED, 6))
    assert "text" in _readable(world, ERASED)


def test_a_trace_or_an_orchestration_can_be_named(world: World) -> None:
    _erase(world, f"trace={trace_of(3, 1)}")
    assert _readable(world, 3) == {"text", *(f"token {t}" for t in tokens(3, 0))}
    name = next(
        e.orchestration_id
        for e in _events(world, OrchestrationRevised, topics.ORCHESTRATIONS)
        if trace_of(3, 0) in e.content.trace_ids
    )
    _erase(world, f"orchestration={name}")
    assert _readable(world, 3) == set()


def test_nobody_of_that_name_is_an_error(world: World) -> None:
    options = ["--workspace", str(world.settings.workspace)]
    result = CliRunner().invoke(erase, ["u-99", *options])
    assert result.exit_code != 0
    assert "no trace of tenant 'default' names 'u-99'" in result.exception.message
    other = CliRunner().invoke(erase, [f"u-{ERASED}", "--tenant", "other", *options])
    assert other.exit_code != 0
    assert _readable(world, ERASED)


def test_two_tenants_have_subjects_and_keys_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path / "ws")
    assert world.vault is not None
    for tenant in ("a", "b"):
        world.append(world.records(1, 0, tenant))
    world.run()
    keys = {tenant: world.vault.keys.find(tenant, trace_of(1, 0)) for tenant in ("a", "b")}
    assert keys["a"] != keys["b"]
    _erase(world, "u-1", "--tenant", "a")
    assert world.vault.keys.find("a", trace_of(1, 0)) is None
    assert world.vault.keys.find("b", trace_of(1, 0)) == keys["b"]


def test_a_sealed_span_opens_to_what_came(world: World) -> None:
    assert world.vault is not None
    raw = {span.span_id: span for span in job_spans(2, 1)}
    stored = [
        s
        for e in _events(world, SpansReceived, topics.SPANS)
        if e.trace_id == trace_of(2, 1)
        for s in e.spans
    ]
    assert len(stored) == len(raw)
    for span in stored:
        assert world.vault.open_span("default", span) == raw[span.span_id]
    assert base64.b64encode(secret(2).encode()) not in b"".join(world.values(topics.SPANS).values())


def test_orchestrations_hold_no_token_ids_and_their_texts_hash_as_without_content(world: World) -> None:
    for event in _events(world, OrchestrationRevised, topics.ORCHESTRATIONS):
        assert not any(has_tokens(call) for call in event.content.calls)
        assert any(call.sealed for call in event.content.calls)
