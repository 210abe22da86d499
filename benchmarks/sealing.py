"""What keeping content under keys costs: microseconds a span and bytes a span, against in the clear and without content.

    python benchmarks/sealing.py [--spans N] [--text BYTES] [--out FILE]

Intake from decoded spans to encoded events (redaction, sealing, key store on disk), one thread, traces of ten spans, requests
of 300; then opening sealed token arrays, as the signal stage does for each call.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import Sealer
from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.sealing.keys import MemoryKeys
from spanloop.pipeline.sealing.keys_sqlite import SqliteKeys
from spanloop.pipeline.sealing.vault import Tokens, Vault
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span

WORDS = [f"w{n:04d}" for n in range(5_000)]
REQUEST, TRACE = 300, 10


def made(count: int, size: int) -> list[Span]:
    rng = random.Random(1)
    found = []
    for n in range(count):
        text = " ".join(rng.choices(WORDS, k=size // 6))
        messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])
        found.append(
            Span(
                f"{n // TRACE + 1:032x}", f"{n + 1:016x}", "chat m", n, n + 1, kind=3, scope="s",
                resource={"service.name": "desk"},
                attributes={"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": n, "gen_ai.input.messages": messages,
                            "user.id": f"u-{n // (5 * TRACE)}"},
            )
        )  # fmt: skip
    return found


def run(mode: str, spans: list[Span], folder: Path) -> dict[str, float]:
    content = Content(training=mode != "without content", subject_keys=mode.startswith("under keys"))
    sealer = None
    if content.subject_keys:
        keys = MemoryKeys() if mode.endswith("in memory") else SqliteKeys(folder / "k.db")
        sealer = Sealer(Vault(keys), content.subjects, 65_536)
    intake = Intake(Redactor(content, b"k" * 32), 65_536, keep_content=False, sealer=sealer)
    written = 0
    began, cpu = time.perf_counter(), time.process_time()
    for at in range(0, len(spans), REQUEST):
        prepared = intake.prepare(DecodedBatch(spans[at : at + REQUEST], []), tenant="t", source="otlp")
        written += sum(len(record.value) for record in prepared.records)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    count = len(spans)
    return {
        "us_per_span_cpu": used / count * 1e6,
        "us_per_span_wall": wall / count * 1e6,
        "bytes_per_span": written / count,
    }


def opening(tokens: int) -> float:
    vault = Vault(MemoryKeys())
    key = vault.keys.ensure("t", {"a" * 32: []})["a" * 32]
    bare = Span("a" * 32, "b" * 16, "n", 1, 2)
    rng = random.Random(2)
    arrays = Tokens(tuple(rng.choices(range(50_000), k=tokens)), (5, 6, 7), (-0.5, -0.25, 0.0))
    text = vault.seal_span(key, "t", bare, bare, arrays).attributes["spanloop.sealed.tokens"]
    began = time.process_time()
    for _ in range(2_000):
        vault.open_tokens("t", text)
    return (time.process_time() - began) / 2_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=6_000)
    parser.add_argument("--text", type=int, default=1_200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spans = made(options.spans, options.text)
    modes = ("without content", "in the clear", "under keys, in memory", "under keys, on disk")
    found: dict[str, dict[str, float]] = {}
    for mode in modes:
        runs = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(mode, spans, Path(folder)))
        found[mode] = {name: round(statistics.median(r[name] for r in runs), 2) for name in runs[0]}
    result = {
        "spans": options.spans, "text_bytes": options.text, "spans_per_request": REQUEST, "spans_per_trace": TRACE,
        "repeats": options.repeats, "intake": found,
        "open_tokens_us": {str(n): round(opening(n), 2) for n in (20, 1_000)},
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
