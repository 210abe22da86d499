"""Whatever crashes, is damaged or goes on writing after it lost the partition: what is loaded was the state at one moment, and the
newest one that the medium still has."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.archive.files import Entry, Files
from spanloop.pipeline.state import snapshots as module
from spanloop.pipeline.state.snapshots import Snapshots
from spanloop.schemas.errors import ConfigError, TransientError

LAW = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Crash(BaseException):
    """The process ends here."""


class Medium(Files):
    """Files in a dict; ``steps`` counts down to a crash, once at each place where a process can end."""

    def __init__(self):
        self.data: dict[str, bytes] = {}
        self.steps: int | None = None
        self.failing = 0

    def _step(self):
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                self.steps = None
                raise Crash

    def uri(self, path):
        return path

    def list(self, folder):
        return [
            Entry(path, len(data), 0)
            for path, data in sorted(self.data.items())
            if path.startswith(folder + "/")
        ]

    def read(self, path):
        if path not in self.data:
            raise FileNotFoundError(path)
        return self.data[path]

    def write(self, path, data):
        self._step()
        if self.failing:
            self.failing -= 1
            raise OSError("no space left")
        self.data[path] = bytes(data)
        self._step()

    def delete(self, path):
        self._step()
        self.data.pop(path, None)

    def move(self, source, target):
        self.data[target] = self.data.pop(source)


keys = st.sampled_from("abcdef")
writes = st.dictionaries(keys, st.one_of(st.none(), st.binary(max_size=30)), max_size=4)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), writes),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("crash in flush"), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("no space"), st.none()),
        st.tuples(st.just("takeover"), st.none()),
        st.tuples(st.just("zombie"), writes),
    ),
    max_size=40,
)


class World:
    """One partition's chain, its former owner's, and every state that was ever flushed, by offset."""

    def __init__(self):
        self.medium = Medium()
        self.snapshots = Snapshots("", files=self.medium)
        self.chain = self.snapshots.open("s")
        self.zombie = None
        self.states = {-1: {}}
        self.durable = -1
        """Offset of the newest state that a living owner saw flushed."""

    def commit(self, chain, changed):
        offset = chain.offsets.get("in", -1) + 1
        chain.commit(changed, {"in": offset})
        if chain is self.chain:
            self.states[offset] = dict(chain.entries)

    def flush(self):
        self.chain.flush()
        self.durable = self.chain.offsets.get("in", -1)

    def restart(self):
        """Load anew; what was not flushed is gone, as in a worker that is killed."""
        self.chain = self.snapshots.open("s")
        offset = self.chain.offsets.get("in", -1)
        self.states = {o: s for o, s in self.states.items() if o <= offset}
        return offset


def _act(world, action, argument):
    if action == "commit":
        world.commit(world.chain, argument)
    elif action == "flush":
        world.flush()
    elif action == "crash in flush":
        world.medium.steps = argument
        before = world.chain.offsets.get("in", -1)
        try:
            world.chain.flush()
            world.durable = before
        except Crash:
            assert world.restart() in (world.durable, before)
            world.durable = world.chain.offsets.get("in", -1)
        world.medium.steps = None
    elif action == "restart":
        assert world.restart() == world.durable
    elif action == "no space":
        if world.chain.dirty:
            world.medium.failing = 1
            with pytest.raises(TransientError, match="free space"):
                world.chain.flush()
        world.flush()
    elif action == "takeover":
        world.zombie = world.chain
        assert world.restart() == world.durable
    elif action == "zombie" and world.zombie is not None:
        world.commit(world.zombie, argument)
        world.zombie.flush()


@pytest.mark.parametrize("chain_max", [1, 3, 64])
@LAW
@given(actions)
def test_what_was_flushed_is_there_after_any_crash(chain_max, script):
    """Once a new owner has written, a former one changes nothing, whatever it still writes or deletes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHAIN_MAX", chain_max)
        world = World()
        for action, argument in script:
            _act(world, action, argument)
            assert world.chain.entries == world.states[world.chain.offsets.get("in", -1)]
        world.restart()
        assert world.chain.offsets.get("in", -1) == world.durable
        assert world.chain.entries == world.states[world.durable]


@LAW
@given(st.lists(writes, min_size=1, max_size=12), st.integers(0, 2**32), st.integers(1, 3))
def test_damage_costs_the_newest_states_and_is_put_aside(changes, seed, damaged):
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHAIN_MAX", 4)
        medium = Medium()
        snapshots = Snapshots("", files=medium)
        chain = snapshots.open("s")
        states = {-1: {}}
        for offset, changed in enumerate(changes):
            chain.commit(changed, {"in": offset})
            chain.flush()
            states[offset] = dict(chain.entries)
        for path in rng.sample(sorted(medium.data), min(damaged, len(medium.data))):
            data = medium.data[path]
            cut = rng.randrange(len(data))
            medium.data[path] = (
                data[:cut] if rng.random() < 0.5 else data[:cut] + bytes([data[cut] ^ 1]) + data[cut + 1 :]
            )
        loaded = snapshots.open("s")
        assert loaded.entries == states[loaded.offsets.get("in", -1)]
        if not any("damaged" in name for name in medium.data):
            assert loaded.offsets["in"] == len(changes) - 1
        loaded.commit({"z": b"1"}, {"in": 100})
        loaded.flush()
        again = snapshots.open("s")
        assert (again.entries["z"], again.offsets) == (b"1", {"in": 100})


def test_a_former_owner_deletes_nothing_of_a_chain_that_goes_on_from_its_files(monkeypatch):
    monkeypatch.setattr(module, "CHAIN_MAX", 2)
    medium = Medium()
    snapshots = Snapshots("", files=medium)
    old = snapshots.open("s")
    old.commit({"a": b"1"}, {"in": 0})
    old.flush()
    new = snapshots.open("s")
    new.commit({"b": b"2"}, {"in": 1})
    new.flush()
    for n in range(20):
        old.commit({"a": b"zombie"}, {"in": n})
        old.flush()
    assert not old.is_newest()
    assert new.is_newest()
    assert snapshots.open("s").entries == {"a": b"1", "b": b"2"}


def test_files_that_were_tidied_away_before_the_first_flush_make_it_a_base(monkeypatch):
    monkeypatch.setattr(module, "CHAIN_MAX", 2)
    medium = Medium()
    snapshots = Snapshots("", files=medium)
    old = snapshots.open("s")
    old.commit({"a": b"1"}, {"in": 0})
    old.flush()
    new = snapshots.open("s")
    for n in range(1, 8):
        old.commit({"a": str(n).encode()}, {"in": n})
        old.flush()
    new.commit({"b": b"2"}, {"in": 1})
    new.flush()
    assert snapshots.open("s").entries == {"a": b"1", "b": b"2"}


def test_a_load_that_meets_tidying_looks_again(monkeypatch):
    monkeypatch.setattr(module, "CHAIN_MAX", 2)
    medium = Medium()
    snapshots = Snapshots("", files=medium)
    chain = snapshots.open("s")
    for n in range(3):
        chain.commit({"a": str(n).encode()}, {"in": n})
        chain.flush()
    read = medium.read

    def racing(path):
        monkeypatch.setattr(medium, "read", read)
        for n in range(3, 9):
            chain.commit({"a": str(n).encode()}, {"in": n})
            chain.flush()
        return read(path)

    monkeypatch.setattr(medium, "read", racing)
    assert snapshots.open("s").offsets == {"in": 8}


def test_a_chain_of_many_small_files_is_folded_into_a_base():
    medium = Medium()
    chain = Snapshots("", files=medium).open("normalise")
    for n in range(1_000):
        chain.commit({}, {"spans": n})
        chain.flush()
    assert len(medium.data) <= 2 * module.CHAIN_MAX + 1


def test_stages_do_not_mix_and_places_are_checked(tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    for name in ("shard-1-of-4", "shard-11-of-4"):
        chain = snapshots.open(name)
        chain.commit({name: b"x"}, {"in": 1})
        chain.flush()
    assert snapshots.open("shard-1-of-4").entries == {"shard-1-of-4": b"x"}
    assert not list(tmp_path.rglob("*.tmp"))
    with pytest.raises(ConfigError, match=r"process\.snapshots"):
        Snapshots("gs://bucket/x")


def test_a_bucket_holds_snapshots_as_well(monkeypatch):
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "t"),
            ("AWS_SECRET_ACCESS_KEY", "t"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            monkeypatch.setenv(name, value)
        from pyarrow import fs

        endpoint = f"http://{host}:{port}"
        made = fs.S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True)
        made.create_dir("states")
        snapshots = Snapshots("s3://states/prod", endpoint)
        for n in range(3):
            chain = snapshots.open("s")
            assert chain.offsets.get("in", -1) == n - 1
            chain.commit({str(n): b"x"}, {"in": n})
            chain.flush()
        assert sorted(snapshots.open("s").entries) == ["0", "1", "2"]
    finally:
        server.stop()
