"""Retraining without a source: the weights of a log that never had it, and which versions it taught."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from click.testing import CliRunner
from learner_world import World, drive, learner

from spanloop.learner.checkpoint import tensors_hash
from spanloop.learner.cli import policies
from spanloop.learner.model import load_artifact
from spanloop.learner.retraining import retrain, taught_by_source
from spanloop.learner.signing import trust_of
from spanloop.learner.update import exact_numerics
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas import topics
from spanloop.schemas.events import SamplesBuilt, decode


def test_the_weights_are_those_of_a_log_that_never_had_it(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "spanloop.db")
    with exact_numerics():
        made = learner(log, tmp_path, gate=False, max_staleness=100)
        drive(made, log, World(), 3, per_round=30)
        batches = made.training.state.batch
        gone = sorted(name for name, batch in made.training.state.ledger.items() if batch == 2)[:3]
        sources = [f"orchestration={name}" for name in gone]
        taught = taught_by_source(log, made.settings, sources)
        assert taught.orchestrations == tuple(gone)
        assert taught.versions == tuple(range(2, batches + 1))

        _, same = retrain(log, made.settings, ["orchestration=nobody"])
        assert same.weights_hash() == made.training.weights_hash()
        net, without = retrain(log, made.settings, sources)
        assert without.weights_hash() != made.training.weights_hash()

        # A log on which another record stands at each of those offsets: boundaries are offsets.
        (tmp_path / "never").mkdir()
        never = SqliteLog(tmp_path / "never" / "spanloop.db")
        for record in sorted(scan(log, [topics.SAMPLES, topics.POLICIES]), key=lambda r: r.offset):
            event = decode(record.value)
            if isinstance(event, SamplesBuilt) and event.orchestration_id in gone:
                event = msgspec.structs.replace(event, tenant="another", rows=())
            (appended,) = never.append([new_record(event)])
            assert appended.offset == record.offset
        _, clean = retrain(never, made.settings, ())
        assert clean.weights_hash() == without.weights_hash()

    words = ["retrain", "--without", sources[0], "--without", sources[1], "--without", sources[2], "--json"]
    config = tmp_path / "spanloop.toml"
    config.write_text(_toml(made.settings.learner.model_dump(mode="json")))
    shown = CliRunner().invoke(
        policies,
        [*words, "--out", str(tmp_path / "clean"), "--workspace", str(tmp_path), "--config", str(config)],
    )
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert json.loads(shown.output)["versions"] == list(taught.versions)
    loaded = load_artifact(tmp_path / "clean", trust=trust_of(tmp_path)).net
    assert tensors_hash(loaded.tensors()) == tensors_hash(net.tensors())
    never.close()
    log.close()


def _toml(section: dict) -> str:
    wanted = ("vocabulary", "width", "heads", "context")
    return "[learner]\n" + "".join(f"{name} = {json.dumps(section[name])}\n" for name in wanted)
