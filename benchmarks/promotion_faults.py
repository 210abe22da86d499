"""Promotion under faults: two promoters at once, a promoter killed at every step, and real SIGKILLs.

All three use the real promoter, SQLite log, MLflow's sqlite store and artifacts on disk; only serving is in memory and verdicts
of gate and canary are drawn.

- *races*: two promoters on one log, interleaved at every read and effect by a seeded schedule, with conflicting requests
  and a canary's verdict to carry out; then one of them is gone for good.
- *kills*: a promoter that dies before or after an effect, until each kind of effect has been died at so many times; what is
  durable stays, a new one takes up.
- *sigkills*: a process that is killed with SIGKILL at random moments while requests come in.

Checked after each: epochs on the log are 1, 2, 3, ... with one record each; every request is answered once and has one effect;
whoever folds the log gets the promoters' state; within 30 s of a survivor's clock MLflow's aliases are what the log says, and
routing and serving name the champion.

Run: .venv/bin/python benchmarks/promotion_faults.py [--races 200] [--kills 100] [--sigkills 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from _harness import write

from spanloop.learner import promoter as promoters
from spanloop.learner.canary import Verdict
from spanloop.learner.checkpoint import BatchReport
from spanloop.learner.gate import GateVerdict
from spanloop.learner.history import read_policies
from spanloop.learner.model import save_artifact
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.promoter import Promoter
from spanloop.learner.promotion import PromotionState, desired_routing, fold
from spanloop.learner.registry import ALIASES, MlflowRegistry, tracking_uri
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.tokenizer import Tokenizer
from spanloop.pipeline.clock import ManualClock, SystemClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import Appended, Clock, Log, NewRecord, new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import (
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
    PolicyRolledBack,
    decode,
)
from spanloop.schemas.settings import Settings, load_settings

WORDS = ("a", "b", "c")
CONFIG = PolicyConfig(vocabulary_size=8, width=8, layers=1, heads=1, context=16)
VERSIONS = 4
HEAL_S = 30.0
"""Log, registry and serving agree this long after a fault."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Hook:
    """Told of every effect before and after it; does nothing."""

    lost = 0
    """Epochs that another promoter had taken."""

    def look(self) -> None:
        """A read."""

    def before(self, kind: str) -> None:
        """An effect of this kind comes."""

    def after(self, kind: str) -> None:
        """It has happened."""

    def do(self, kind: str, effect: Callable[[], Any]) -> Any:
        self.before(kind)
        found = effect()
        self.after(kind)
        return found


class HookedLog:
    """A log whose appends to ``policies`` are effects."""

    def __init__(self, log: Log, hook: Hook) -> None:
        self._log, self._hook = log, hook

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        event = decode(records[0].value)
        found = self._hook.do(f"append {type(event).__name__}", lambda: self._log.append(records))
        self._hook.lost += isinstance(event, PolicyPromoted | PolicyRolledBack) and found[0].duplicate
        return found

    def read(self, *arguments: Any) -> Any:
        self._hook.look()
        return self._log.read(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class HookedRegistry:
    """A registry whose writes are effects."""

    def __init__(self, registry: MlflowRegistry, hook: Hook) -> None:
        self._registry, self._hook = registry, hook

    def register(self, *arguments: Any, **options: Any) -> str:
        return self._hook.do("register in MLflow", lambda: self._registry.register(*arguments, **options))

    def point(self, alias: str, version: int, *, epoch: int) -> None:
        self._hook.do(f"alias {alias}", lambda: self._registry.point(alias, version, epoch=epoch))

    def pointed(self, alias: str) -> int:
        self._hook.look()
        return self._registry.pointed(alias)

    def measure(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._registry.measure(metrics, step=step)


class HookedServing:
    """Serving whose loads are effects."""

    def __init__(self, serving: MemoryServing, hook: Hook) -> None:
        self._serving, self._hook = serving, hook

    def load(self, name: str, path: Path) -> None:
        self._hook.do("load in serving", lambda: self._serving.load(name, path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)


class Judge:
    """Stands for ``Evaluation``: gates pass mostly, canaries end at once with a drawn verdict; the same for all who ask.

    It says nothing of a canary before ``open``."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.open = True
        self._canary: Any = None

    def watch(self, canary: Any) -> None:
        self._canary = canary

    def usable(self, *_: Any) -> int:
        return 100

    def gate(self, version: int, champion: int, *_: Any) -> GateVerdict:
        passed = random.Random(f"{self.seed}/{version}/{champion}").random() < 0.8
        return GateVerdict(
            0.05, 0.01, 0.01, 50.0, 2.0, 60, passed=passed, reason="" if passed else "drawn to fail"
        )

    def canary_verdict(self, _elapsed_s: float) -> Verdict | None:
        if self._canary is None or not self.open:
            return None
        verdict = random.Random(f"{self.seed}/canary/{self._canary.canary}").choice(
            ["promote", "promote", "reject", "inconclusive"]
        )
        return Verdict(verdict, 0.1, 0.01, 0.2, 60, 60, "drawn")


class World:
    """What outlives a promoter: workspace, log, registry, serving, clock."""

    def __init__(
        self, home: Path, uri: str, name: str, *, clock: Clock | None = None, canary: bool = True
    ) -> None:
        self.workspace = home / name
        self.workspace.mkdir(parents=True, exist_ok=True)
        self.uri, self.name = uri, name
        self.settings: Settings = load_settings(
            flags={
                "workspace": str(self.workspace),
                "learner": {"vocabulary": WORDS, "width": 8, "heads": 1, "context": 16, "gate_every": 1, "gate": canary},
                "gateway": {"policy": "policy"},
            }
        )  # fmt: skip
        self.serving = MemoryServing()
        self.clock = clock or ManualClock(10**18)
        self.judge = Judge(0)

    def log(self) -> SqliteLog:
        return SqliteLog(self.workspace / "spanloop.db")

    def registry(self) -> MlflowRegistry:
        return MlflowRegistry(self.uri, self.name, self.workspace)

    def promoter(self, log: Log, hook: Hook) -> Promoter:
        return Promoter(
            self.settings,
            log=HookedLog(log, hook),  # type: ignore[arg-type]
            registry=HookedRegistry(self.registry(), hook),
            serving=HookedServing(self.serving, hook),  # type: ignore[arg-type]
            clock=self.clock,
            tokenizer=Tokenizer(WORDS),
        )

    def step(self, made: Promoter, batch: int) -> None:
        """What the trainer does of promotion in one round."""
        made.sync()
        made.obey(batch)
        made.advance(self.judge, batch)  # type: ignore[arg-type]
        made.route()
        made.mirror()

    def settle(self, made: Promoter, batch: int) -> None:
        """Rounds until the log stands still."""
        for _ in range(20):
            before = made._read_to
            with suppress(TransientError):
                self.step(made, batch)
                if made._read_to == before:
                    return
        raise AssertionError("the promoter never comes to rest")

    def check(self, made: Promoter) -> PromotionState:
        """All that must hold once a promoter is at rest."""
        with closing(self.log()) as log:
            events = read_policies(log, "default", "policy")
        state = fold(events)
        epochs = [e.epoch for e, _ in events if isinstance(e, PolicyPromoted | PolicyRolledBack)]
        assert epochs == list(range(1, len(epochs) + 1)), epochs
        assert made.state == state
        commands = [e.command_id for e, _ in events if isinstance(e, PolicyCommand)]
        answers = Counter(e.command_id for e, _ in events if isinstance(e, PolicyCommandFinished))
        assert answers == Counter(commands), (commands, answers)
        effects = Counter(
            e.command for e, _ in events if isinstance(e, PolicyPromoted | PolicyRolledBack) and e.command
        )
        assert all(count == 1 for count in effects.values()), effects
        done = {
            e.command_id for e, _ in events if isinstance(e, PolicyCommandFinished) and e.status == "done"
        }
        moved = {
            e.command_id
            for e, _ in events
            if isinstance(e, PolicyCommand) and e.kind in ("promote", "rollback")
        }
        assert done & moved == set(effects), (done, effects)
        wanted = dict(zip(ALIASES, (state.champion, state.challenger, state.newest), strict=True))
        registry = self.registry()
        assert {a: registry.pointed(a) for a in ALIASES} == wanted, wanted
        assert state.routing is not None
        assert state.routing.champion == state.champion
        assert desired_routing(state, self.settings.learner, tenant="default", policy="policy") is None
        return state

    def check_serving(self, state: PromotionState) -> None:
        assert state.routing is not None
        named = {state.routing.champion, state.routing.learner, state.routing.canary} - {-1}
        assert {f"policy@v{v}" for v in named} <= set(self.serving.loaded())


def version_net(number: int) -> PolicyNet:
    return PolicyNet.initial(CONFIG, number)


def register(made: Promoter, number: int) -> None:
    """Version ``number`` as the learner's batch ``number`` would make it."""
    if number not in made.state.versions:
        made.register(version_net(number), number, BatchReport(8, number - 1, {}, {"reward": 0.1 * number}))


# ---------------------------------------------------------------- races


class Turns(Hook):
    """One promoter's seat at a table where one runs at a time; who is next is drawn at every read and effect."""

    def __init__(self, table: Table, name: int) -> None:
        self._table, self._name = table, name

    def look(self) -> None:
        self._table.pass_on(self._name)

    def before(self, kind: str) -> None:
        self._table.pass_on(self._name)

    def after(self, kind: str) -> None:
        self._table.pass_on(self._name)


class Table:
    """The seeded schedule."""

    def __init__(self, rng: random.Random, names: Sequence[int]) -> None:
        self._rng = rng
        self._present = set(names)
        self._turn = rng.choice(list(names))
        self._changed = threading.Condition()
        self.switches = 0

    def pass_on(self, name: int) -> None:
        with self._changed:
            following = self._rng.choice(sorted(self._present))
            self.switches += following != name
            self._turn = following
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == name)

    def wait(self, name: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == name)

    def leave(self, name: int) -> None:
        with self._changed:
            self._present.discard(name)
            if self._present:
                self._turn = self._rng.choice(sorted(self._present))
            self._changed.notify_all()


def race(home: Path, uri: str, seed: int) -> dict[str, int]:
    """One race. Raises AssertionError when something does not hold."""
    rng = random.Random(seed)
    world = World(home, uri, f"race-{seed}")
    world.judge = Judge(seed)
    with closing(world.log()) as log:
        first = world.promoter(log, Hook())
        for number in range(VERSIONS):
            register(first, number)
        world.judge.open = False
        world.settle(first, 0)
        for number in range(rng.randrange(1, 4)):
            kind = rng.choice(["promote", "promote", "rollback"])
            target = "" if kind == "rollback" and rng.random() < 0.5 else str(rng.randrange(VERSIONS))
            log.append([new_record(PolicyCommand(command_id=f"c{number}", kind=kind, argument=target))])
    world.judge.open = True
    table = Table(rng, (0, 1))
    seats = [Turns(table, name) for name in (0, 1)]
    errors: list[BaseException] = []

    def work(name: int) -> None:
        table.wait(name)
        try:
            with closing(world.log()) as own:
                made = world.promoter(own, seats[name])
                judge = Judge(10 * seed + name)  # they see different traffic
                for _ in range(6):
                    with suppress(TransientError):
                        made.sync()
                        made.obey(0)
                        made.advance(judge, VERSIONS - 1)  # type: ignore[arg-type]
                        made.route()
                        made.mirror()
        except BaseException as exc:
            errors.append(exc)
        finally:
            table.leave(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    with closing(world.log()) as log:
        survivor = world.promoter(log, Hook())
        world.settle(survivor, VERSIONS - 1)
        state = world.check(survivor)
        world.check_serving(state)
        # Whoever lost may still write late: the aliases are set by one who does not know the newest epoch, and it is gone.
        assert isinstance(world.clock, ManualClock)
        world.registry().point(
            "champion", rng.choice([v for v in state.versions if v != state.champion]), epoch=0
        )
        world.clock.advance(seconds=HEAL_S)
        world.settle(survivor, VERSIONS - 1)
        world.check(survivor)
    return {"epochs": state.epoch, "switches": table.switches, "lost": sum(seat.lost for seat in seats)}


# ---------------------------------------------------------------- kills


class Executioner(Hook):
    """Kills before or after an effect, those first that were died at least."""

    def __init__(self, rng: random.Random, wanted: int) -> None:
        self._rng, self._wanted = rng, wanted
        self.deaths: Counter[str] = Counter()

    def before(self, kind: str) -> None:
        self._maybe(f"before {kind}")

    def after(self, kind: str) -> None:
        self._maybe(f"after {kind}")

    def _maybe(self, step: str) -> None:
        self.deaths.setdefault(step, 0)
        if self.deaths[step] < self._wanted and self._rng.random() < 0.5:
            self.deaths[step] += 1
            raise Killed

    @property
    def done(self) -> bool:
        return bool(self.deaths) and min(self.deaths.values()) >= self._wanted


def life(home: Path, uri: str, seed: int, hook: Executioner) -> int:
    """A workspace from its first version through gates, canaries and requests, with deaths; returns its last epoch."""
    rng = random.Random(seed)
    world = World(home, uri, f"life-{seed}")
    world.judge = Judge(seed)
    log, made = world.log(), None
    save = promoters.save_artifact

    def saved(*arguments: Any, **options: Any) -> str:
        return hook.do("write the artifact", lambda: save(*arguments, **options))

    promoters.save_artifact = saved
    try:
        for number in range(VERSIONS):
            request = None
            if number > 1:
                kind = rng.choice(["promote", "rollback", "freeze", "inject"])
                target = {"promote": str(rng.randrange(number)), "inject": str(_folder(world, 100 + number))}
                request = [PolicyCommand(command_id=f"c{number}", kind=kind, argument=target.get(kind, ""))]
                if kind == "freeze":
                    request.append(PolicyCommand(command_id=f"u{number}", kind="unfreeze"))
            while True:
                try:
                    if made is None:
                        log.close()
                        log = world.log()
                        made = world.promoter(log, hook)
                        made.sync()
                    if number not in {c.batch for c in made.state.versions.values() if not c.injected}:
                        made.register(
                            version_net(number),
                            number,
                            BatchReport(8, made.state.newest, {}, {"reward": 0.1}),
                        )
                    if request is not None:
                        log.append(
                            [new_record(r) for r in request]
                        )  # an outsider's; sending it again changes nothing
                        request = None
                    for world.judge.open in (False, True):  # a canary lives for a while
                        world.settle(made, number)
                    break
                except Killed:
                    made = None
            world.check_serving(world.check(made))
        return made.state.epoch if made is not None else 0
    finally:
        promoters.save_artifact = save
        log.close()


def _folder(world: World, seed: int) -> Path:
    folder = world.workspace / f"other-{seed}"
    save_artifact(folder, version_net(seed), Tokenizer(WORDS))
    return folder


# ---------------------------------------------------------------- SIGKILL


def _child(home: Path, uri: str, name: str, seed: int) -> None:
    """Promote for ever."""
    world = World(home, uri, name, clock=SystemClock())
    world.judge = Judge(seed)
    with closing(world.log()) as log:
        made, number = world.promoter(log, Hook()), 0
        while True:
            with suppress(TransientError):
                made.sync()
                number = max(made.state.versions, default=-1) + 1
                if number <= 12:
                    made.register(
                        version_net(number), number, BatchReport(8, number - 1, {}, {"reward": 0.1})
                    )
                world.step(made, number)
            time.sleep(0.005)


def _consistent(world: World, registry: MlflowRegistry) -> bool:
    with closing(world.log()) as log:
        state = fold(read_policies(log, "default", "policy"))
    if state.champion < 0 or state.routing is None or state.commands:
        return False
    return state.routing.champion == state.champion == registry.pointed("champion")


def sigkills(home: Path, uri: str, count: int, seed: int) -> dict[str, Any]:
    """So many SIGKILLs of a promoter's process while requests come in; how long until log, registry and routing agree again."""
    rng = random.Random(seed)
    name = f"sigkill-{seed}"
    world = World(home, uri, name, clock=SystemClock())
    registry = world.registry()
    clean = multiprocessing.get_context(
        "forkserver"
    )  # forks of a process that has imported all and opened nothing
    clean.set_forkserver_preload(
        ["mlflow", "mlflow.store.model_registry.sqlalchemy_store", "promotion_faults"]
    )
    warm = clean.Process(
        target=time.sleep, args=(0,)
    )  # the imports of the first are no part of anybody's healing
    warm.start()
    warm.join()
    waited: list[float] = []
    for number in range(count + 1):
        child = clean.Process(target=_child, args=(home, uri, name, seed), daemon=True)
        child.start()
        try:
            started = time.monotonic()
            while not _consistent(world, registry):
                assert time.monotonic() - started < HEAL_S, f"no agreement {HEAL_S} s after SIGKILL {number}"
                assert child.is_alive(), "the promoter ended by itself"
                time.sleep(0.01)
            waited.append(time.monotonic() - started)
            with closing(world.log()) as log:
                state = fold(read_policies(log, "default", "policy"))
                kind = rng.choice(["promote", "rollback"])
                target = str(rng.choice(sorted(state.versions))) if kind == "promote" else ""
                log.append([new_record(PolicyCommand(command_id=f"k{number}", kind=kind, argument=target))])
            if number == count:
                while not _consistent(world, registry):
                    time.sleep(0.01)
            else:
                time.sleep(rng.expovariate(1 / 0.03))
        finally:
            child.kill()
            child.join()
    with closing(world.log()) as log:
        made = world.promoter(log, Hook())
        world.settle(made, 99)
        state = world.check(made)
    waited.sort()
    return {
        "kills": count, "epochs": state.epoch, "versions": len(state.versions),
        "heal_s_p50": round(waited[len(waited) // 2], 3), "heal_s_max": round(waited[-1], 3),
    }  # fmt: skip


# ---------------------------------------------------------------- all of it


def open_store(home: Path) -> str:
    """MLflow's sqlite store with its tables; returns its URI."""
    uri = tracking_uri("", home)
    MlflowRegistry(uri, "warm", home).pointed("champion")
    return uri


def kills(home: Path, uri: str, wanted: int, seed: int, *, lives_max: int = 10_000) -> dict[str, Any]:
    """Lives until every step was died at ``wanted`` times."""
    hook = Executioner(random.Random(seed), wanted)
    lives = epochs = 0
    while not hook.done and lives < lives_max:
        epochs += life(home, uri, seed * 100_000 + lives, hook)
        lives += 1
    return {"lives": lives, "epochs": epochs, "steps": len(hook.deaths), "deaths": sum(hook.deaths.values()),
            "least": min(hook.deaths.values()), "by_step": dict(sorted(hook.deaths.items()))}  # fmt: skip


def main() -> None:
    """Run all three and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100, help="at each step, before and after it")
    parser.add_argument("--sigkills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        uri = open_store(home)
        real = sigkills(home, uri, options.sigkills, options.seed) if options.sigkills else {}
        raced = Counter[str]()
        for number in range(options.races):
            raced.update(race(home, uri, options.seed * 100_000 + number))
            print(f"\rrace {number + 1}/{options.races}", end="", file=sys.stderr)
        died = kills(home, uri, options.kills, options.seed) if options.kills else {}
    write(
        "promotion_faults",
        f".venv/bin/python benchmarks/promotion_faults.py --races {options.races} --kills {options.kills} "
        f"--sigkills {options.sigkills} --seed {options.seed}",
        {
            "races": {"races": options.races, "violations": 0, **raced},
            "kills": {"violations": 0, **died},
            "sigkills": {"violations": 0, **real},
            "cpu_s": round(time.process_time() - began, 1),
        },
    )


if __name__ == "__main__":
    main()
