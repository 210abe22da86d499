"""Dynamic batching: one worker thread that owns torch and serves many rows, of several versions, token by token.

Place: the embedded server submits a ``Row`` for each request and awaits its future. Rows join and leave between
steps; a step runs one forward pass a version over the rows that have a choice to make. A forced word (one open
option) is taken without a pass. Invariants: at most ``max_batch`` rows a step; what a row answers does not depend
on its neighbours (beyond float32 rounding); a failure of one step fails its rows, never the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spanloop.learner.grammar import Node
from spanloop.learner.policy import PolicyNet
from spanloop.learner.serving.sampling import behaviour, draw, log_behaviour
from spanloop.schemas.errors import TerminalError

__all__ = ["Batcher", "Row", "Step", "score_prompts"]

_log = logging.getLogger(__name__)


class Step:
    """One generated token: its id, the open options in menu order and their behaviour log-probabilities."""

    __slots__ = ("logprob", "menu", "menu_logprobs", "token_id")

    def __init__(
        self, token_id: int, logprob: float, menu: Sequence[int], menu_logprobs: Sequence[float]
    ) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.menu = menu
        self.menu_logprobs = menu_logprobs


class Row:
    """A request in the batch.

    Args:
        net: Network of the version that answers.
        prompt_ids: Ids, at least one.
        node: Root of the grammar.
        uniform: Uniform numbers in [0, 1), one for each token that may be asked for.
    """

    __slots__ = (
        "exploration",
        "future",
        "ids",
        "net",
        "node",
        "nodes",
        "steps",
        "temperature",
        "top_p",
        "uniform",
    )

    def __init__(
        self,
        net: PolicyNet,
        prompt_ids: Sequence[int],
        node: Node,
        uniform: Sequence[float],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        exploration: float = 0.0,
    ) -> None:
        self.net = net
        self.ids = list(prompt_ids)
        self.node = node
        self.uniform = uniform
        self.temperature = temperature
        self.top_p = top_p
        self.exploration = exploration
        self.steps: list[Step] = []
        self.nodes: list[Node] = []
        self.future: asyncio.Future[Row] | None = None

    def advance_forced(self) -> bool:
        """Take forced words; True when the row is done."""
        while len(self.node.options) == 1:
            self._take(0, self.node.options, (0.0,))
        return not self.node.options

    def choose(self, logits_V: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Sample one of the open options from the logits over the whole vocabulary."""
        options = self.node.options
        mu = behaviour(
            logits_V[list(options)],
            temperature=self.temperature,
            top_p=self.top_p,
            exploration=self.exploration,
        )
        self._take(draw(mu, self.uniform[len(self.steps)]), options, log_behaviour(mu))

    def _take(self, index: int, options: Sequence[int], logprobs: Sequence[float]) -> None:
        self.steps.append(Step(options[index], logprobs[index], options, logprobs))
        self.node = self.node.children[index]
        self.nodes.append(self.node)
        self.ids.append(options[index])


class Batcher:
    """Owner of the worker thread; ``submit`` from the event loop."""

    def __init__(self, *, max_batch: int, max_wait_s: float, threads: int = 1) -> None:
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._threads = threads
        self._waiting: deque[Row] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_steps = 0
        self.num_rows = 0
        self.num_passes = 0

    def start(self) -> None:
        """Start the worker; call inside the running event loop that will await the rows."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="spanloop-torch", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Rows that wait to join the batch."""
        return len(self._waiting)

    async def submit(self, row: Row) -> Row:
        """Generate a row to its end. A row without any choice never leaves the event loop."""
        if row.advance_forced():
            return row
        if self._loop is None or self._closing:
            raise TerminalError("the serving batch is not running")
        row.future = self._loop.create_future()
        with self._changed:
            self._waiting.append(row)
            self._changed.notify()
        return await row.future

    def close(self) -> None:
        """Finish the rows that are in, then stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)
        active: list[Row] = []
        with torch.inference_mode():
            while self._admit(active):
                try:
                    done, active = self._step(active)
                except Exception as exc:  # a bad row must not end serving
                    _log.exception("a batch of %d rows failed", len(active))
                    self._deliver(active, exc)
                    active = []
                    continue
                if done:
                    self._deliver(done, None)

    def _admit(self, active: list[Row]) -> bool:
        """Move waiting rows into the batch; wait for some when it is empty. False: closing and empty."""
        with self._changed:
            if not active:
                while not self._waiting:
                    if self._closing:
                        return False
                    self._changed.wait()
                until = time.monotonic() + self._max_wait_s
                while len(self._waiting) < self._max_batch and not self._closing:
                    left = until - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            while self._waiting and len(active) < self._max_batch:
                active.append(self._waiting.popleft())
        return True

    def _step(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        by_net: dict[int, list[Row]] = {}
        for row in rows:
            by_net.setdefault(id(row.net), []).append(row)
        done: list[Row] = []
        open_: list[Row] = []
        for group in by_net.values():
            logits_BV = _last_logits(group[0].net, [row.ids for row in group])
            self.num_passes += 1
            for row, logits_V in zip(group, logits_BV, strict=True):
                row.choose(logits_V)
                (done if row.advance_forced() else open_).append(row)
        self.num_steps += 1
        self.num_rows += len(rows)
        return done, open_

    def _deliver(self, rows: list[Row], error: Exception | None) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_resolve, list(rows), error)
        except RuntimeError:
            _log.warning("%d rows finished after the event loop had closed", len(rows))


def _resolve(rows: list[Row], error: Exception | None) -> None:
    for row in rows:
        if row.future is None or row.future.done():
            continue
        if error is None:
            row.future.set_result(row)
        else:
            row.future.set_exception(TerminalError(f"the model failed on this batch: {error}"))


def _last_logits(net: PolicyNet, ids: list[list[int]]) -> Any:
    lengths = [len(row) for row in ids]
    longest = max(lengths)
    padded_BT = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    return net.last_logits(padded_BT, torch.tensor(lengths)).numpy()


def score_prompts(net: PolicyNet, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Log-probabilities (float32, nats, whole vocabulary, no mask, no mixture) at each position of each prompt.

    Entry [i][t] is the distribution of token t + 1 of prompt i; there are ``len(prompt) - 1`` of them.
    """
    scored: list[list[list[float]]] = []
    with torch.inference_mode():
        for prompt in prompts:
            logits_TV = net(torch.tensor([list(prompt)]))[0]
            scored.append(torch.log_softmax(logits_TV[:-1], dim=-1).tolist())
    return scored
