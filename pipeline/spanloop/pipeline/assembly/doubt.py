"""Events that rest on guesses say so: what comes from spans of no known dialect has little confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.dialects.unknown import FLAG

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["GUESSED", "lower_confidence"]

GUESSED = 0.5
"""Confidence of an event whose evidence was read by the words in span names only."""


def lower_confidence(work: Inference) -> None:
    """Cap the confidence of the events that have a guessed span among their evidence."""
    tree = work.tree
    guessed = {op.span_id for i in tree.census.flagged if FLAG in (op := tree.ops[i]).flags}
    if not guessed:
        return
    work.events[:] = [
        msgspec.structs.replace(event, confidence=min(event.confidence, GUESSED))
        if not guessed.isdisjoint(event.evidence)
        else event
        for event in work.events
    ]
