"""tau-bench's tries of one task (shared/corpora, where it stands beside the checkout) as groups: what has no variance says so."""

from __future__ import annotations

from collections import Counter

import pytest
from made_spans import SHARED

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.credit.estimators.groups import Advantage, agent_wise, group_stats, grpo, rloo
from spanloop.pipeline.formats.reading import read_files
from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.samples import group_of


def groups() -> dict[str, list[int]]:
    """Micro-rewards of the tries of each group as `spanloop explain credit` forms it, through the product's own importer and
    assembler."""
    folder = SHARED / "corpora" / "tau-bench"
    if not folder.exists():
        pytest.skip("no shared/corpora/tau-bench beside this checkout")
    (path,) = folder.glob("*.json")
    found = Read([], [])
    for part in read_files(path):
        found.spans.extend(part.read.spans)
        found.feedback.extend(part.read.feedback)
    rewards = {f["trace_id"]: round(f["value"] * 1_000_000) for f in found.feedback}
    tries: dict[str, list[int]] = {}
    for content in assemble_spans(found.spans, "t"):
        key, _ = group_of(content)
        tries.setdefault(key, []).append(rewards[content.trace_ids[0]])
    return tries


def test_groups_without_variance_have_zero_advantage_and_say_so():
    tries = groups()
    silent = Counter()
    for rewards in tries.values():
        group = group_stats(rewards)
        for advantages in (
            [grpo(r, group) for r in rewards],
            [rloo(r, group) for r in rewards],
            agent_wise([("agent", r) for r in rewards]),
        ):
            if len(set(rewards)) == 1:
                assert advantages == [Advantage(0.0, "no_variance")] * 4
            else:
                assert {a.status for a in advantages} == {"ok"}
                assert any(a.value > 0 for a in advantages)
                assert sum(a.value for a in advantages) == pytest.approx(0.0, abs=1e-12)
        silent[group.status] += 1
    assert silent == {"no_variance": 16, "ok": 14}
