"""Exploration floor inside vLLM: the same mixture that the embedded server samples from (``serving/sampling.py``).

    mu = (1 - eps) * softmax(logits of the open options) + eps * uniform(open options)

Place: a logits processor of the vLLM process (``--logits-processors spanloop_exploration:ExplorationFloor``), which has this
folder on its path and knows nothing else of spanloop: imports torch and vllm only. ``vllm_xargs.exploration`` of a request is eps;
the gateway sends it. Masks (allowed tokens, structured outputs) are applied before it, temperature after it, and with
``--logprobs-mode processed_logprobs`` what vLLM reports is the logarithm of mu.
Invariants: at temperature 1 mu is exact, at others the mixture is tempered as a whole; greedy requests and those without
exploration are left alone; a closed option stays closed; where the request leaves the answer open (more than ``OPTIONS_MAX``
options, or the whole vocabulary), nothing is mixed in: uniform text is not exploration.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

__all__ = ["ExplorationFloor"]

MAX = 0.5
OPTIONS_MAX = 256


class ExplorationFloor(LogitsProcessor):
    """Mixes the uniform distribution into rows that ask for it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError (answered as 400) for an exploration outside 0 to 0.5."""
        asked = (sampling_params.extra_args or {}).get("exploration", 0.0)
        number = isinstance(asked, int | float) and not isinstance(asked, bool)
        if not number or not math.isfinite(asked) or not 0.0 <= asked <= MAX:
            raise ValueError(f"vllm_xargs.exploration = {asked!r} is out of range, expected 0 to {MAX}")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._floors: dict[int, float] = {}
        self._rows = torch.zeros(0, dtype=torch.long, device=device)
        self._floors_R1 = torch.zeros(0, 1, device=device)

    def is_argmax_invariant(self) -> bool:
        """It runs before sampling splits into greedy and random. (The order of the options does not change.)"""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests as they enter, leave and move in the batch."""
        if not process_dict_updates(self._floors, batch_update, self._floor_of):
            return
        rows = sorted(self._floors)
        self._rows = torch.tensor(rows, dtype=torch.long, device=self._device)
        floors = [[self._floors[row]] for row in rows]
        self._floors_R1 = torch.tensor(floors, dtype=torch.float32, device=self._device)

    @staticmethod
    def _floor_of(params: Any, prompt: Any, output: Any) -> float | None:
        return float((params.extra_args or {}).get("exploration", 0.0)) or None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace the rows' logits by the logarithm of their mixture."""
        if not len(self._rows):
            return logits
        asked_RV = logits[self._rows]
        open_RV = asked_RV > -math.inf
        count_R1 = open_RV.sum(-1, keepdim=True).clamp_min(1)
        mixed_RV = (1.0 - self._floors_R1) * asked_RV.softmax(-1) + self._floors_R1 / count_R1
        mixed_RV = mixed_RV.log().masked_fill_(~open_RV, -math.inf)
        menu_R1 = (count_R1 <= OPTIONS_MAX) & (count_R1 < logits.shape[-1])
        logits[self._rows] = torch.where(menu_R1, mixed_RV, asked_RV)
        return logits
