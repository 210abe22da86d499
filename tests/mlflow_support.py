"""A real MLflow server over sqlite on loopback, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

__all__ = ["Server"]

READY_S = 200.0
"""A server's first start makes its tables; alone on two cores it took 20 s."""


class Server:
    """Started by its constructor; ``wait`` until it answers."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = home / "server.log"
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{home}/server.db", "--artifacts-destination", str(home / "artifacts"),
        ]  # fmt: skip
        environment = {
            **os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_MODEL_CATALOG_URI": "",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # fmt: skip
        with self._log.open("w") as out:
            self.child = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        pytest.fail(self._log.read_text()[-3000:])

    def signal(self, number: int) -> None:
        os.killpg(self.child.pid, number)
