"""docs/sdk.md and the example run as they stand, and name what exists."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from sdk_support import assembled, recording

from spanloop.collectors import sdk

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/sdk.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if "sdk.instrument()" not in b], ids=lambda b: b.split("\n")[2][:20]
)
def test_blocks_run_and_assemble(block, monkeypatch):
    monkeypatch.setattr(sdk, "feedback", lambda *args, **kwargs: "")
    with recording() as exporter:
        names: dict[str, object] = {}
        with sdk.agent("reader"):
            exec(compile(block, "docs/sdk.md", "exec"), names)  # noqa: S102
            if "desk" in names:
                assert asyncio.run(names["desk"]("tides")) == "a page about tides"  # type: ignore[operator]
            if "on_the_other_side" in names:
                names["on_the_other_side"](names["headers"])  # type: ignore[operator]
    (content,) = assembled(exporter)
    assert content.flags == ()
    assert any(event.rule == "said" for event in content.events)


def test_what_the_page_names_exists():
    for name in set(re.findall(r"sdk\.(\w+)", TEXT)) - {"md", "py"}:
        assert name in sdk.__all__, name
