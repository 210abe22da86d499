"""``spanloop diff`` and ``spanloop verify --archive`` on deployments where it is known what changed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest
from made_spans import agent, chat, gateway, tool
from replay_support import T0, archive_of, batches, published, run, settings_of
from simulation.small_system import job, outcome

from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.replay.checking import verify_archive
from spanloop.pipeline.replay.diff import diff
from spanloop.pipeline.replay.published import published_set
from spanloop.pipeline.replay.tables import lines
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import CreditAssigned, RewardsComputed, decode

TOKENS = {
    "spanloop__prompt_token_ids": [1, 2, 3], "spanloop__response_token_ids": [7, 8], "spanloop__response_logprobs": [-0.5, -0.25],
    "spanloop__task__key": "desk",
}  # fmt: skip


def trainable(number: int) -> list:
    """A run with one call that the gateway kept the tokens of."""
    at, r = number * 100.0, f"chatcmpl-{number:032x}"
    spans = [
        agent(number, None, at, at + 9, "lead", trace=number),
        chat(number + 10**6, number, at + 1, at + 2, trace=number, response=r),
        tool(number + 2 * 10**6, number, at + 3, at + 5, "ask", trace=number),
        agent(number + 3 * 10**6, number + 2 * 10**6, at + 3.5, at + 4.5, "helper", trace=number),
    ]
    tokens = gateway(r, at + 1, at + 2, **TOKENS)
    return [*batches(spans, source="otlp"), *batches([tokens], source="gateway")]


def target(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    settings = settings_of(tmp_path_factory.mktemp("diff"), holdout=0.0)
    events = [event for n in range(1, 13) for event in trainable(n)]
    events += [outcome(n, n / 12, target=target(n)) for n in range(1, 13)]
    log = published(settings, events)
    return settings, log, archive_of(settings, log)


@pytest.fixture(scope="module")
def plain(stream):
    settings, _, store = stream
    return run(settings, store, "plain")


@pytest.fixture(scope="module")
def paid(stream):
    """Half a unit more for every run that ends well, from an outcome of a half on."""
    settings, _, store = stream
    path = settings.workspace / "paid.toml"
    path.write_text("[pipeline]\nfinish_weight = 0.5\noutcome_floor = 0.5\n")
    return run(settings, store, "paid", rewards=path)


def test_what_the_stream_published_is_the_replay(stream, plain):
    settings, _, store = stream
    recorded = published_set(settings, store, settings.workspace / "replays")
    found = diff(recorded, plain)
    assert found.equal, lines(found)
    assert found.a.definitions == found.b.definitions != ()
    assert (found.same, found.a.credited, found.b.credited) == (12, 12, 12)
    assert found.taught == []
    before = (recorded.folder / "manifest.json").stat().st_mtime_ns
    again = published_set(settings, store, settings.workspace / "replays")
    assert (again.folder / "manifest.json").stat().st_mtime_ns == before, (
        "made again only when the archive grew"
    )


def test_a_known_change_of_rewards(plain, paid):
    found = diff(plain, paid, top=3)
    rows = {row["orchestration_id"]: row["team"] for row in plain.rows(["orchestration_id", "team"])}
    others = {row["orchestration_id"]: row["team"] for row in paid.rows(["orchestration_id", "team"])}
    raised = {name for name in rows if others[name] != rows[name]}
    assert {others[name] - rows[name] for name in raised} == {500_000}
    assert len(raised) == 7, "outcomes 6/12 to 12/12"
    assert (found.same, found.only_a, found.only_b) == (5, 0, 0)
    assert found.changed["credit"] == 7
    assert found.changed["samples"] == 7
    assert found.changed["rewards"] == 7, "the weight as paid is part of a reward"
    assert dict(found.histogram)[0.5] == 7
    assert [item.orchestration_id in raised for item in found.orchestrations] == [True] * 3
    assert {round(item.after - item.before, 6) for item in found.orchestrations} == {0.5}
    assert found.b.team - found.a.team == pytest.approx(3.5)
    (team,) = [account for account in found.units if account.unit == "team"]
    assert (team.accounts, team.changed, team.flipped) == (7, 7, 0)
    assert team.after - team.before == pytest.approx(3.5)
    assert {("agent", "lead", 7), ("agent", "helper", 7)} <= {
        (x.unit, x.label, x.changed) for x in found.agents
    }
    assert {item.orchestration_id for item in found.decisions} <= raised
    (taught,) = found.taught
    assert (taught.role, taught.added, taught.removed, taught.changed) == ("lead", 0, 0, 14)
    assert taught.after > taught.before
    text = "\n".join(lines(found))
    (plain_terms,), (paid_terms,) = found.a.definitions, found.b.definitions
    assert plain_terms != paid_terms
    assert paid_terms in text, "under which definitions a value was computed"
    assert "7 with other credit" in text
    assert "what the learner would be taught" in text


def test_a_sign_that_flips_and_rows_that_come_and_go(stream, tmp_path):
    """The outcomes of two runs are turned in one archive, a third has none there."""
    settings, _, _ = stream
    events = [event for n in range(1, 5) for event in trainable(n)]
    values = {1: 0.5, 2: -0.25, 3: 0.75, 4: 0.25}
    sets = []
    for name, sign, skip in (("a", 1, 9), ("b", -1, 4)):
        own = settings.model_copy(update={"workspace": tmp_path / name})
        given = [
            outcome(n, value * (sign if n < 3 else 1), target=target(n))
            for n, value in values.items()
            if n != skip
        ]
        log = published(own, [*events, *given])
        sets.append(run(own, archive_of(own, log), name))
    found = diff(*sets)
    (taught,) = found.taught
    assert (taught.removed, taught.added) == (1, 0)
    assert taught.flipped == 4, "two tokens of each of the two"
    assert [account.flipped for account in found.units if account.unit == "team"] == [2]
    lost = [item for item in found.orchestrations if item.after is None]
    assert len(lost) == 1
    assert "missing" in "\n".join(lines(found))


def test_many_differences_are_compared_in_parts(plain, paid, monkeypatch):
    from spanloop.pipeline.replay import pairing

    whole = diff(plain, paid)
    monkeypatch.setattr(pairing, "_PAIRS_TOGETHER", 3)
    parts = diff(plain, paid)
    assert parts.taught == whole.taught
    assert {msgspec.json.encode(item) for item in parts.decisions} == {
        msgspec.json.encode(item) for item in whole.decisions
    }
    assert not list(plain.folder.parent.glob(".diff-*"))


def test_orchestrations_that_only_one_side_has(stream, tmp_path):
    settings, _, store = stream
    own = settings.model_copy(update={"workspace": tmp_path})
    log = published(own, [event for n in range(1, 4) for event in trainable(n)])
    few = run(own, archive_of(own, log), "few")
    everything = run(settings, store, "everything")
    found = diff(few, everything)
    assert (found.only_a, found.only_b) == (0, 9)
    assert found.changed == {"rewards": 3, "credit": 3, "samples": 3}


# ---------------------------------------------------------------- verify over the archive


def check(settings, store, **options):
    return verify_archive(settings, store, settings.workspace / "replays", T0 + 10**15, **options)


def test_an_honest_archive_is_equal(stream):
    settings, _, store = stream
    found = check(settings, store)
    assert found.differences == []
    assert (found.orchestrations, found.equal, found.rewards, found.credits) == (12, 12, 12, 12)
    assert (found.open, found.behind, found.late) == (0, 0, 0)
    assert not (settings.workspace / "replays" / "verify").exists()


def last(log, kind):
    return [event for r in log.read([kind.TOPIC], {}, 10**6) if isinstance(event := decode(r.value), kind)][
        -1
    ]


def test_what_was_changed_missing_or_extra_is_named(tmp_path):
    settings = settings_of(tmp_path)
    log = published(settings, [event for n in range(6) for event in [*job(n), outcome(n, n / 6)]])
    rewards, credit = last(log, RewardsComputed), last(log, CreditAssigned)
    log.append([new_record(msgspec.structs.replace(rewards, revision=99, team=(rewards.team or 0) + 1))])
    log.append([new_record(msgspec.structs.replace(credit, revision=99, baseline=credit.baseline - 1))])
    revised = [decode(r.value) for r in log.read([topics.ORCHESTRATIONS], {}, 100)]
    invented = msgspec.structs.replace(revised[0], orchestration_id="ab" * 16, revision=1)
    content = msgspec.structs.replace(revised[1].content, flags=("invented",))
    log.append(
        [new_record(invented), new_record(msgspec.structs.replace(revised[1], revision=99, content=content))]
    )
    lost = revised[2].key
    records = log._topics[topics.ORCHESTRATIONS]
    log._topics[topics.ORCHESTRATIONS] = [record for record in records if record.key != lost]
    found = check(settings, archive_of(settings, log), workers=1)
    assert {(d.orchestration_id, d.what) for d in found.differences} == {
        (rewards.orchestration_id, "rewards"), (credit.orchestration_id, "credit"), ("ab" * 16, "missing"),
        (revised[1].orchestration_id, "orchestration"), (revised[2].orchestration_id, "extra"),
    }  # fmt: skip


def test_other_settings_are_seen(stream, tmp_path):
    _, log, _ = stream
    own = settings_of(tmp_path, holdout=0.0, finish_weight=0.5)
    found = check(own, archive_of(own, log))
    assert {d.what for d in found.differences} >= {"rewards"}


def test_what_was_touched_just_now_is_open_and_not_wrong(tmp_path):
    settings = settings_of(tmp_path)
    log = published(settings, [*job(1), outcome(1, 0.5)])
    log.append([new_record(event) for event in job(2)])
    store = archive_of(settings, log)
    root = tmp_path / "replays"
    found = verify_archive(settings, store, root, log.read([topics.SPANS], {}, 100)[-1].appended_ns + 10**9)
    assert (found.differences, found.open, found.equal) == ([], 1, 1)
    later = verify_archive(settings, store, root, T0 + 10**15)
    assert [d.what for d in later.differences] == ["extra"]


def test_a_span_that_the_stream_refused_as_too_late_is_not_a_difference(tmp_path):
    settings = settings_of(tmp_path, retention_s=300.0)
    batches_ = job(1)
    log = published(settings, [*batches_[1:], *job(2)], [*job(3)], [batches_[0]])
    store = archive_of(settings, log)
    found = check(settings, store)
    assert (found.differences, found.late) == ([], 1)


def spanloop(*arguments):
    command = [sys.executable, "-m", "spanloop.schemas.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_verbs_from_log_to_verdict(tmp_path):
    """archive once, replay, diff and verify as commands, on a workspace with the embedded log."""
    settings = settings_of(tmp_path)
    log = published(settings, [event for n in range(5) for event in [*job(n), outcome(n, n / 6)]])
    with closing(SqliteLog(settings.database)) as disk:
        for topic in (topics.SPANS, topics.FEEDBACK, *topics.DERIVED):
            disk.append([new_record(decode(record.value)) for record in log.read([topic], {}, 10**6)])
    assert spanloop("archive", "once", "--workspace", tmp_path).returncode == 0
    done = spanloop("replay", "--workspace", tmp_path, "--workers", 1, "--name", "again")
    assert done.returncode == 0, done.stderr
    assert "5 orchestrations (5 credited" in done.stdout
    same = spanloop("diff", "recorded", "again", "--workspace", tmp_path, "--exit-code")
    assert (same.returncode, "all 5 orchestrations are equal" in same.stdout) == (0, True), (
        same.stdout + same.stderr
    )
    (tmp_path / "r.toml").write_text("[pipeline]\nfinish_weight = 0.5\n")
    other = spanloop(
        "replay", "--workspace", tmp_path, "--workers", 1, "--rewards", tmp_path / "r.toml", "--json"
    )
    assert json.loads(other.stdout)["name"] == "replay-r", other.stderr
    changed = spanloop("diff", "again", "replay-r", "--workspace", tmp_path, "--exit-code", "--json")
    assert changed.returncode == 1
    assert json.loads(changed.stdout)["changed"]["rewards"] == 5
    assert spanloop("diff", "again", "nothing", "--workspace", tmp_path).returncode == 2
    told = spanloop("verify", "--archive", "--workspace", tmp_path, "--workers", 1, "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    assert json.loads(told.stdout)["differences"] == []
    wrong = spanloop("verify", "--workspace", tmp_path, "--from", "2026-01-01")
    assert (wrong.returncode, "--archive" in wrong.stderr) == (2, True)


def test_nothing_published_says_what_to_do(tmp_path):
    settings = settings_of(tmp_path)
    log = published(settings, job(1))
    for topic in topics.DERIVED:
        log._topics.pop(topic, None)
    with pytest.raises(ConfigError, match="has nothing that the stream published"):
        published_set(settings, archive_of(settings, log), tmp_path / "replays")
