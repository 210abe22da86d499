"""The signal stage's retention, dead letters, versions of value models and targets of feedback."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from synthetic_orchestrations import make_content, make_feedback, make_model, make_revision

from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.ports import LogRecord, Stage, new_record
from spanloop.pipeline.samples import is_holdout
from spanloop.pipeline.signal import SignalStage, derive
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    Event,
    FeedbackReceived,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
)
from spanloop.schemas.settings import SPECIAL_WORDS, Pipeline, Settings

SECOND = 10**9
SETTINGS = Pipeline(retention_s=60, orchestrations_max=3)  # type: ignore[call-arg]


class Driver:
    """A stage with the store it commits to; ``restart`` continues from what was committed."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.entries, self.offset = stage, {}, 0
        stage.restore({})

    def feed(self, *events: Event, at_s: float = 0) -> list[Event]:
        made = [new_record(event) for event in events]
        return self.raw([LogRecord(r.topic, self._next(), r.key, r.event_id, r.value, 0) for r in made], at_s)

    def raw(self, records: list[LogRecord], at_s: float = 0) -> list[Event]:
        return self._commit(self.stage.process(records, int(at_s * SECOND)))

    def tick(self, at_s: float) -> list[Event]:
        return self._commit(self.stage.tick(int(at_s * SECOND)))

    def restart(self, stage: Stage) -> None:
        self.stage = stage
        stage.restore(dict(self.entries))

    def _next(self) -> int:
        self.offset += 1
        return self.offset

    def _commit(self, result) -> list[Event]:
        for key, value in result.writes.items():
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value
        return result.events


@pytest.fixture
def driver() -> Driver:
    return Driver(SignalStage(SETTINGS))


def of(events: list[Event], kind):
    return [event for event in events if isinstance(event, kind)]


CONTENT = make_content(1)


@pytest.mark.parametrize("kind", ["orchestration", "trace", "span", "response"])
def test_feedback_before_and_after_the_spans(kind: str, driver: Driver):
    early = driver.feed(make_feedback(CONTENT, kind=kind, value=0.5))
    assert early == []
    driver.restart(SignalStage(SETTINGS))
    (rewards,) = of(driver.feed(make_revision(CONTENT), at_s=30), RewardsComputed)
    assert (rewards.team, rewards.status, rewards.revision) == (500_000, "final", 1)
    late = driver.feed(make_feedback(CONTENT, 1, kind=kind, value=-0.5), at_s=40)
    assert (of(late, RewardsComputed)[0].team, of(late, RewardsComputed)[0].status) == (-500_000, "corrected")
    assert of(late, CreditAssigned)[0].revision == 2
    assert of(late, SamplesBuilt)[0].reward == -500_000


def test_the_same_feedback_again_emits_nothing(driver: Driver):
    driver.feed(make_revision(CONTENT), make_feedback(CONTENT))
    assert driver.feed(make_revision(CONTENT), make_feedback(CONTENT), at_s=1) == []


def test_a_missing_outcome_is_said_and_gives_no_credit(driver: Driver):
    out = driver.feed(make_revision(CONTENT))
    assert [(e.team, e.status) for e in of(out, RewardsComputed)] == [(None, "missing")]
    assert len(out) == 1


def test_an_incomplete_orchestration_gives_no_samples_until_complete(driver: Driver):
    out = driver.feed(make_revision(CONTENT, complete=False), make_feedback(CONTENT))
    assert of(out, RewardsComputed)[0].status == "provisional"
    assert of(out, CreditAssigned)
    assert not of(out, SamplesBuilt)
    out = driver.feed(make_revision(CONTENT, 2))
    assert of(out, RewardsComputed)[0].status == "final"
    assert of(out, SamplesBuilt)


def test_feedback_for_a_target_that_never_comes_is_dead_lettered(driver: Driver):
    lost = FeedbackReceived(feedback_id="f-lost", target_kind="trace", target_id="e0f", value=1.0)
    driver.feed(lost, at_s=1)
    assert driver.stage.next_timer_ns() == 61 * SECOND
    assert driver.tick(60) == []
    driver.restart(SignalStage(SETTINGS))
    (letter,) = of(driver.tick(61), DeadLettered)
    assert letter.reason == "feedback target never arrived"
    assert letter.details["feedback_id"] == "f-lost"
    assert driver.entries == {}
    assert driver.stage.next_timer_ns() is None


def test_feedback_on_an_unknown_span_falls_back_to_its_trace(driver: Driver):
    lost = FeedbackReceived(
        feedback_id="f",
        target_kind="span",
        target_id="b0000000000003e7",
        trace_id=CONTENT.trace_ids[0],
        value=1.0,
    )
    out = driver.feed(make_revision(CONTENT), lost)
    assert of(out, RewardsComputed)[0].team == 1_000_000


def test_values_that_are_no_score_never_reach_a_reward(driver: Driver):
    out = driver.feed(make_revision(CONTENT), make_feedback(CONTENT, value=1e300))
    assert of(out, RewardsComputed)[0].team is None
    assert "not a finite number in range" in of(out, DeadLettered)[0].reason


def test_a_record_that_cannot_be_read_is_dead_lettered_and_costs_nothing_else(driver: Driver):
    bad = LogRecord("feedback", 1, "default/x", "e", b'{"type":"nonsense"}', 0)
    good = new_record(make_revision(CONTENT))
    out = driver.raw([bad, LogRecord(good.topic, 2, good.key, good.event_id, good.value, 0)])
    assert "unknown event type" in of(out, DeadLettered)[0].reason
    assert of(out, RewardsComputed)


def test_tenants_do_not_see_each_other(driver: Driver):
    """Case: the same trace id in two tenants; feedback of one is no feedback of the other."""
    mine, theirs = make_content(1), msgspec.structs.replace(make_content(1), tenant="b")
    out = driver.feed(make_revision(mine), make_revision(theirs), make_feedback(theirs, value=1.0))
    assert {e.tenant: e.team for e in of(out, RewardsComputed)} == {"default": None, "b": 1_000_000}


def test_retention_and_the_limit_forget_the_longest_untouched(driver: Driver):
    for seed in range(4):
        driver.feed(make_revision(make_content(seed)), at_s=seed)
    held = {key for key in driver.entries if key.startswith("held/")}
    assert len(held) == 3
    assert f"held/default/{make_content(0).orchestration_id}" not in held
    driver.feed(make_feedback(make_content(1)), at_s=50)
    driver.tick(70)
    assert {key for key in driver.entries if key.startswith("held/")} == {
        f"held/default/{make_content(1).orchestration_id}"
    }
    driver.tick(111)
    assert driver.entries == {}


class TestVersions:
    def test_the_newest_at_the_first_final_reward_is_kept(self, driver: Driver):
        out = driver.feed(make_model(1), make_revision(CONTENT), make_feedback(CONTENT), make_model(2))
        assert of(out, CreditAssigned)[0].value_model == "value@v1"
        driver.restart(SignalStage(SETTINGS))
        out = driver.feed(make_feedback(CONTENT, 1, value=0.25))
        (credit,) = of(out, CreditAssigned)
        assert (credit.value_model, credit.revision) == ("value@v1", 2)
        out = driver.feed(make_revision(make_content(2)), make_feedback(make_content(2)))
        assert of(out, CreditAssigned)[0].value_model == "value@v2"

    def test_a_provisional_reward_does_not_fix_the_version(self, driver: Driver):
        driver.feed(make_model(1), make_revision(CONTENT), make_feedback(CONTENT, final=False))
        out = driver.feed(make_model(2), make_feedback(CONTENT, 1))
        assert of(out, CreditAssigned)[0].value_model == "value@v2"

    def test_none_before_the_first(self, driver: Driver):
        out = driver.feed(make_revision(CONTENT), make_feedback(CONTENT))
        assert of(out, CreditAssigned)[0].value_model == "none"
        out = driver.feed(make_model(1), make_feedback(CONTENT, 1, value=0.25))
        assert of(out, CreditAssigned)[0].value_model == "none"

    def test_versions_that_nothing_uses_are_forgotten(self, driver: Driver):
        driver.feed(
            make_model(1), make_revision(CONTENT), make_feedback(CONTENT), make_model(2), make_model(3)
        )
        assert {key for key in driver.entries if key.startswith("model/")} == {
            "model/default/value@v1",
            "model/default/value@v3",
        }
        driver.tick(61)
        assert {key for key in driver.entries if key.startswith("model/")} == {"model/default/value@v3"}

    def test_a_malformed_model_is_dead_lettered(self, driver: Driver):
        bad = ValueModelPublished(version="value@v9", kind="x", trained_on=1, parameters={"kind": "x"})
        assert "value model of kind" in of(driver.feed(bad), DeadLettered)[0].reason


class TestValueStage:
    SETTINGS = Pipeline(value_every=4, value_features=256, holdout=0.5)  # type: ignore[call-arg]

    def outcome(self, seed: int, n: int = 0) -> list[Event]:
        content = make_content(seed)
        derived = derive(content, [make_feedback(content, n)], complete=True, settings=self.SETTINGS)
        return [make_revision(content), derived.rewards]

    def test_held_out_orchestrations_are_never_learned_from(self):
        driver = Driver(ValueStage(self.SETTINGS))
        kept = [s for s in range(20) if not is_holdout(make_content(s).orchestration_id, 0.5)]
        held = [s for s in range(20) if s not in kept]
        for seed in held:
            assert driver.feed(*self.outcome(seed)) == []
        assert driver.entries == {}
        published = [e for seed in kept[:8] for e in driver.feed(*self.outcome(seed))]
        assert [(e.version.split("-")[0], e.trained_on) for e in published] == [
            ("value@v1", 4),
            ("value@v2", 8),
        ]

    def test_a_correction_is_no_new_outcome_and_a_void_one_is_forgotten(self):
        driver = Driver(ValueStage(self.SETTINGS))
        seed = next(s for s in range(20) if not is_holdout(make_content(s).orchestration_id, 0.5))
        revised, rewards = self.outcome(seed)
        driver.feed(revised, rewards)
        for n in range(1, 8):
            again = msgspec.structs.replace(rewards, revision=n + 1, team=n, status="corrected")
            assert driver.feed(again) == []
        assert sum(key.startswith("memory/") for key in driver.entries) == 1
        driver.feed(msgspec.structs.replace(rewards, revision=9, team=None, status="missing"))
        assert not any(key.startswith("memory/") for key in driver.entries)

    def test_missing_and_provisional_rewards_teach_nothing(self):
        driver = Driver(ValueStage(self.SETTINGS))
        for seed in range(20):
            revised, rewards = self.outcome(seed)
            missing = msgspec.structs.replace(rewards, team=None, status="missing")
            provisional = msgspec.structs.replace(rewards, revision=2, status="provisional")
            assert driver.feed(revised, missing, provisional) == []
        assert not any(key.startswith(("memory/", "trainer/")) for key in driver.entries)


class TestUnits:
    def test_words_come_from_the_embedded_policys_vocabulary(self):
        settings = Settings(pipeline={"value_units": ["a"]}, learner={"vocabulary": ["a", "a-yes"]})  # type: ignore[arg-type]
        assert settings.pipeline.value_words == ("<pad>", "<bos>", "<eos>", "<act>", "<unk>", "a", "a-yes")

    def test_the_tokenizer_has_the_same_special_words(self):
        from spanloop.learner.tokenizer import SPECIALS

        assert SPECIALS == SPECIAL_WORDS

    def test_units_without_words_are_refused(self):
        with pytest.raises(ValueError, match=r"value_words or learner\.vocabulary"):
            Settings(pipeline={"value_units": ["a"]})  # type: ignore[arg-type]


def test_contents_held_by_an_older_build_are_read_as_they_were_written():
    """It kept the content alone, deflated; what is held now are the bytes of the revision."""
    content = make_content(3)
    key = f"{content.tenant}/{content.orchestration_id}"
    driver = Driver(SignalStage(SETTINGS))
    driver.feed(make_revision(content, 1))
    name = f"held/{key}"
    held = msgspec.msgpack.decode(driver.entries[name])
    assert held["content"][:1] == b"\x01"
    old = {**held, "content": zlib.compress(msgspec.json.encode(content), 1)}
    stage = SignalStage(SETTINGS)
    for entry in (held, old):
        stage.restore({name: msgspec.msgpack.encode(entry)})
        assert stage.store.content(key) == content
