"""Which operations of an orchestration carry what, looked up once: a rule for something rare costs nothing where there is none of it.

Only what no step of assembly adds later is counted (facts may be given to runs and kinds may change, so a rule still looks at what
it finds here). Indices are into ``Tree.ops``, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanloop.pipeline.dialects.operation import Operation

__all__ = ["Census"]


class Census:
    """Operations by what they carry."""

    def __init__(self, ops: Sequence[Operation]) -> None:
        self.calls: list[int] = []
        self.tools: list[int] = []
        self.handovers: list[int] = []
        self.messages: list[int] = []
        self.linked: list[int] = []
        self.flagged: list[int] = []
        self.pausing: list[int] = []
        """Runs that put tool calls off, or were resumed with some."""
        self.said: list[int] = []
        self.logged: list[int] = []
        self.nodes: list[int] = []
        self.of_kind: dict[str, list[int]] = {}
        """By the kind that the dialect gave."""
        kinds = self.of_kind
        for i, op in enumerate(ops):
            kind = op.kind
            if kind in kinds:
                kinds[kind].append(i)
            else:
                kinds[kind] = [i]
            if op.call is not None:
                self.calls.append(i)
            if op.tool is not None:
                self.tools.append(i)
            run = op.run
            if run is not None and (run.pending or run.resumed):
                self.pausing.append(i)
            if op.links:
                self.linked.append(i)
            if op.flags:
                self.flagged.append(i)
            if op.handover is not None:
                self.handovers.append(i)
            if op.message is not None:
                self.messages.append(i)
            if op.said is not None:
                self.said.append(i)
            if op.logged is not None:
                self.logged.append(i)
            if op.node is not None:
                self.nodes.append(i)

    def kind(self, name: str) -> list[int]:
        """Operations that the dialect called ``name``."""
        return self.of_kind.get(name, [])
