"""The collector as a process: ready line, SIGTERM, kill -9, a taken port, and OpenTelemetry's own exporter."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from otlp_requests import as_json, as_protobuf, corpora, span
from receiver_harness import process, read_all

from spanloop.pipeline.log.sqlite import SqliteLog

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _post(url: str, body: bytes, content_type: str = "application/x-protobuf") -> int:
    request = urllib.request.Request(f"{url}/v1/traces", body, {"Content-Type": content_type})
    with OPENER.open(request, timeout=30) as answer:
        return answer.status


def _stored(workspace: Path) -> set[str]:
    log = SqliteLog(workspace / "spanloop.db")
    try:
        return {s.span_id for e in read_all(log, "spans") for s in e.spans}  # type: ignore[attr-defined]
    finally:
        log.close()


def test_sigterm_flushes_and_exits_0(tmp_path: Path) -> None:
    with process(tmp_path, SPANLOOP_COLLECTOR__GROUP_COMMIT_MS="200") as (collector, url):
        answers: list[int] = []
        sender = threading.Thread(target=lambda: answers.append(_post(url, as_protobuf([span(7)]))))
        _post(url, as_json([span(1)]), "application/json")
        sender.start()
        sender.join(0.1)  # within the group's wait: the request is under way
        collector.send_signal(signal.SIGTERM)
        assert collector.wait(15) == 0
        sender.join(10)
    assert answers in ([200], [])
    expected = {f"{1:016x}"} | ({f"{7:016x}"} if answers else set())
    assert expected <= _stored(tmp_path)


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: set[str] = set()
    number = 0
    for round_ in range(3):
        with process(tmp_path) as (collector, url):
            killer = threading.Timer(0.15 + 0.1 * round_, collector.kill)
            killer.start()
            try:
                for _ in range(10_000):
                    number += 1
                    if _post(url, as_protobuf([span(number)])) == 200:
                        acknowledged.add(f"{number:016x}")
            except OSError:
                pass
            killer.join()
    assert len(acknowledged) > 10
    assert acknowledged <= _stored(tmp_path)


REFUSED = (
    b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer PRIVATE\x01\r\n\r\n",
    b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nX-Key: PRIVATE" + b"a" * 9_000 + b"\r\n\r\n",
    b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nPRIVATE TEXT\r\n",
    b'{"text": "PRIVATE"}\r\n\r\n',
)
"""What is no HTTP, with something that the process's own log must not hold."""


def test_bytes_of_a_request_that_is_no_http_are_not_logged(tmp_path: Path) -> None:
    with process(tmp_path) as (collector, url):
        port = int(url.rpartition(":")[2])
        for sent in REFUSED:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(sent)
                assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0]
        assert _post(url, as_json([span(1)]), "application/json") == 200
        collector.send_signal(signal.SIGTERM)
        _, log = collector.communicate(timeout=20)
    assert "PRIVATE" not in log
    assert "Traceback" not in log
    assert "no HTTP" in log


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tmp_path / "s.toml"
        config.write_text(f'workspace = "{tmp_path / "ws"}"\n[collector]\nport = {port}\n')
        done = subprocess.run(
            [sys.executable, "-m", "spanloop.collectors.receiver", "--config", str(config)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"port {port}" in done.stderr
    assert "collector.port" in done.stderr
    assert "Traceback" not in done.stderr


def test_otel_exporter_sends_here(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    program = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
provider = TracerProvider()
exporter = OTLPSpanExporter(endpoint=sys.argv[1] + "/v1/traces", compression=Compression.Gzip)
provider.add_span_processor(SimpleSpanProcessor(exporter))
with provider.get_tracer("t").start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}) as span:
    print(format(span.get_span_context().span_id, "016x"))
provider.shutdown()
"""
    with process(tmp_path) as (_, url):
        done = subprocess.run(
            [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=60, check=True
        )
    assert _stored(tmp_path) == {done.stdout.strip()}, done.stderr


def _cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spanloop.schemas.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_import_is_idempotent_over_formats_and_reports_bad_lines(tmp_path: Path) -> None:
    lines, workspace = tmp_path / "a.jsonl", tmp_path / "ws"
    lines.write_bytes(as_json([span(1)]) + b"\nbroken\n" + as_json([span(2), span(3)]) + b"\n")
    first = _cli("import", str(lines), "--workspace", str(workspace), "--json")
    assert first.returncode == 3, first.stderr
    assert json.loads(first.stdout) == {"files": 1, "spans": 3, "events": 2, "duplicates": 0, "rejected": 1}
    assert "a.jsonl line 2" in first.stderr
    packed = tmp_path / "b.pb.len"
    requests = [as_protobuf([span(1)]), as_protobuf([span(2), span(3)])]
    packed.write_bytes(b"".join(len(r).to_bytes(4, "big") + r for r in requests))
    again = _cli("import", str(packed), "--workspace", str(workspace), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["duplicates"] == 2
    assert len(_stored(workspace)) == 3
    missing = _cli("import", str(tmp_path / "none"), "--workspace", str(workspace))
    assert missing.returncode == 2
    assert "there is no" in missing.stderr


def test_import_of_real_spans(tmp_path: Path) -> None:
    folder = corpora() / "live-pydantic-ai" / "v5"
    done = _cli("import", str(folder), "--workspace", str(tmp_path / "ws"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"files": 2, "spans": 38, "events": 19, "duplicates": 19, "rejected": 0}


def test_feedback_by_url_and_by_workspace(tmp_path: Path) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    none = _cli("feedback", "--trace", trace, "--value", "1", "--workspace", str(tmp_path))
    assert none.returncode == 2
    with process(tmp_path) as (_, url):
        sent = _cli("feedback", "--trace", trace, "--value", "1", "--url", url, "--id", "t-1")
        assert (sent.returncode, sent.stdout) == (0, "accepted\n"), sent.stderr
        refused = _cli("feedback", "--trace", "zz", "--value", "1", "--url", url)
        assert refused.returncode == 3
        assert "32 hex digits" in refused.stderr
        local = _cli(
            "feedback", "--trace", trace, "--value", "1", "--workspace", str(tmp_path), "--id", "t-1"
        )
        assert (local.returncode, local.stdout) == (0, "known already\n"), local.stderr
    gone = _cli("feedback", "--trace", trace, "--value", "1", "--url", url)
    assert gone.returncode == 4
    assert "is the collector running" in gone.stderr
