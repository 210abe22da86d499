"""Credit of large orchestrations: from scratch, and for one more span.

Two shapes of 33,000 spans: 300 roles under one orchestrator that delegates 4,000 times, and 300 agents that live on and write to each
other; and one of 18,000 delegations (assembly keeps 20,000 agents at most). Measured is the credit alone, in CPU time: cast, estimates under a value model, settled
ledger. Beside it what the stage does with the whole event afterwards: canonical JSON and its hash. "One more span" is a model call of
a sub-agent near the end that comes late, its orchestration otherwise the same objects; "decoded" the same where everything came
anew off the log.
Run: .venv/bin/python benchmarks/credit_scale.py
Expected: from scratch below 2 s at 33,000 spans, one more span below 20 ms for the hub.
"""

from __future__ import annotations

import gc
import statistics
import time

import msgspec
from _harness import write
from _shapes import SHAPES

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.credit.anchors import DEFAULT
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import lessons
from spanloop.pipeline.credit.ledger import Ledger, check_ledger
from spanloop.pipeline.credit.live import LiveLedger
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.schemas.canonical import bytes_hash, canonical_json
from spanloop.schemas.orchestration import OrchestrationContent

REWARD = 700_000
COMMAND = ".venv/bin/python benchmarks/credit_scale.py"
SIZES = (("hub", 3_300), ("hub", 33_000), ("team", 33_000), ("hub", 150_000))


def timed(live: LiveLedger, content: OrchestrationContent, asking: Asking) -> tuple[Ledger, float]:
    """A revision's ledger and its CPU seconds."""
    began = time.process_time()
    live.cast(content)
    misses = asking.misses
    found = live.estimate(REWARD, asking, choice=DEFAULT)
    if asking.misses > misses:
        asking.answer()
        found = live.estimate(REWARD, asking, choice=DEFAULT)
    return live.ledger(found, REWARD), time.process_time() - began


def measured(shape: str, size: int) -> dict:
    """Figures of one orchestration."""
    spans = SHAPES[shape](1, size)
    (content,) = assemble_spans(spans, "bench")
    cast = cast_of(content)
    trainer = ValueTrainer.fresh(2048)
    learned = lessons(cast)
    trainer.update([Example("o", tuple(learned[:: max(1, len(learned) // 64)]), REWARD)], steps=10)
    lead = {agent.id for agent in cast.orchestrators}
    late = [call for call in content.calls if call.agent_id not in lead][-2]
    before = msgspec.structs.replace(content, calls=tuple(call for call in content.calls if call is not late))
    gc.collect()
    gc.freeze()
    gc.disable()
    live, asking = LiveLedger(), Asking(trainer.model)
    _, scratch = timed(live, before, asking)
    more = [timed(live, revision, asking)[1] for revision in (content, before) * 5]
    again = msgspec.json.decode(msgspec.json.encode(before), type=OrchestrationContent)
    _, decoded = timed(live, again, asking)
    ledger, _ = timed(live, content, asking)
    began = time.process_time()
    data = canonical_json(ledger.nodes)
    bytes_hash(data)
    written = time.process_time() - began
    gc.enable()
    gc.unfreeze()
    return {
        "spans": len(spans),
        "agents": len(content.agents),
        "model_calls": len(content.calls),
        "accounts": len(ledger.nodes),
        "problems": len(check_ledger(ledger.nodes, REWARD, ledger.baseline)),
        "from_scratch_s": round(scratch, 3),
        "per_second": round(1 / scratch, 2),
        "one_more_span_ms": round(1e3 * statistics.median(more), 1),
        "one_more_span_decoded_ms": round(1e3 * decoded, 1),
        "event_json_and_hash_ms": round(1e3 * written, 1),
        "event_mib": round(len(data) / 2**20, 1),
    }


def main() -> None:
    """All shapes."""
    write("credit_scale", COMMAND, {f"{shape}_{size}": measured(shape, size) for shape, size in SIZES})


if __name__ == "__main__":
    main()
