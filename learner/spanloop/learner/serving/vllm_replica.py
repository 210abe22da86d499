"""One vLLM server: its calls, and what its answers mean for a version.

Place: under ``vllm.VllmServing``, which makes several of these act as one. Errors say whom they concern: SchemaError the artifact,
StaleError the name, TransientError the server, also where it lacks a flag: an operator may restart it while the learner goes on
trying.

Prompts are scored position by position through the sampler (one token asked for after each prefix, with the log-probability of the
token that the prompt has there), never with ``prompt_logprobs``: in vLLM 0.32 these take the adapter's rows of another request where
the output head has LoRA layers, and on a CPU that ends the engine. Scored this way, the probe goes the way that answers go.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from spanloop.learner.serving.calls import LOAD, UNLOAD, Answer, ServerCalls
from spanloop.schemas.errors import SchemaError, SpanloopError, StaleError, TransientError

__all__ = ["PROBE", "Replica", "running_loras", "taken"]

_T = TypeVar("_T")

RETRY_S = 2.0
"""Calls that fail within this time of the first try are tried again; afterwards it is for the learner to come back."""
POSITIONS = 64
"""Positions of a prompt that are scored by one call; vLLM takes 128 token ids to report."""
PROBE = ((1, 2, 3, 4, 5, 6, 7, 8), (8, 6, 4, 2, 7, 5, 3, 1))
"""Token ids that any vocabulary has."""
_INFO = re.compile(r"^vllm:lora_requests_info\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)")
_LABEL = re.compile(r'(running|waiting)_lora_adapters="([^"]*)"')
_BUSY = ("out of memory", "EngineCore", "EngineDead", "free lora slots")
"""Words of a failed load that concern the server, not the artifact."""


def running_loras(metrics: str) -> frozenset[str] | None:
    """Adapters with running or waiting requests, from vLLM's Prometheus text; None when it does not say.

    vLLM writes one sample for each combination it has seen, with the time as its value: the newest one holds.

    >>> one = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="p@v1",waiting_lora_adapters=""} 1.8e+09'
    >>> two = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09'
    >>> sorted(running_loras(one + chr(10) + two)), running_loras("")
    (['p@v1'], None)
    """
    newest, found = -math.inf, None
    for line in metrics.splitlines():
        match = _INFO.match(line)
        if match is None or float(match["value"]) < newest:
            continue
        newest = float(match["value"])
        names = ",".join(value for _, value in _LABEL.findall(match["labels"]))
        found = frozenset(name for name in names.split(",") if name)
    return found


class Replica:
    """One vLLM server."""

    def __init__(self, url: str, *, timeout_s: float, key: str, sleep: Callable[[float], None]) -> None:
        self._calls = ServerCalls(url, timeout_s=timeout_s, key=key)
        self._sleep = sleep
        self._processed = False
        self.url = self._calls.url

    def again(self, call: Callable[[], _T]) -> _T:
        """``call``, once more where it failed quickly."""
        pause_s, started = 0.1, time.monotonic()
        while True:
            try:
                return call()
            except TransientError:
                if time.monotonic() - started + pause_s > RETRY_S:
                    raise
                self._sleep(pause_s)
                pause_s *= 2

    def versions(self) -> dict[str, str]:
        """Path of each adapter by name; base models are not versions."""
        cards = self.again(self._calls.cards)
        return {card["id"]: card["root"] for card in cards if card["parent"]}

    def load(self, name: str, path: Path) -> None:
        """Ask for the load, once. Raises SchemaError, StaleError, TransientError."""
        answer = self._calls.ask("POST", LOAD, {"lora_name": name, "lora_path": str(path)})
        if answer.status == 200:
            return
        served = self.versions().get(name)  # a request for the name was quicker (vLLM's resolver)
        if served is None:
            raise self._refusal(name, path, answer)
        if Path(served) != path:
            raise taken(name, served, path, self.url)

    def fetch(self, name: str) -> None:
        """Ask for the version by its name, which the server's resolver fetches. Raises SchemaError, TransientError."""
        body = {"model": name, "prompt": [list(PROBE[0])], "max_tokens": 1}
        answer = self.again(lambda: self._calls.call("POST", "/v1/completions", body))
        if answer.status == 200:
            return
        if answer.status == 400:
            raise SchemaError(f"the server {self.url} refuses {name}: {answer.body}", status=answer.status)
        raise TransientError(
            f"the server {self.url} does not get {name} from MLflow ({answer.status}): {answer.body}; its log says why. It needs "
            "VLLM_PLUGINS=spanloop_mlflow and SPANLOOP_MLFLOW_URI (docs/serving.md)",
            status=answer.status,
        )

    def _refusal(self, name: str, path: Path, answer: Answer) -> SpanloopError:
        told = str(answer.body)
        if answer.status == 404 and not answer.told:
            return TransientError(
                f"the server {self.url} does not load adapters: start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                "--enable-lora (`python -m spanloop.learner.serving.vllm_server` does)"
            )
        if "not enabled" in told:
            return TransientError(f"the server {self.url} runs without LoRA: start vLLM with --enable-lora")
        if answer.status in (401, 403):
            return TransientError(
                f"the server {self.url} refuses our key ({answer.status}): set gateway.upstream_key to its --api-key"
            )
        if answer.status == 404:
            return SchemaError(
                f"the server {self.url} finds no adapter at {path}: it must see the workspace under the same path"
            )
        match = re.search(r"failed with error '(.*)', please check", told)
        if answer.status >= 500 and (match is None or any(word in told for word in _BUSY)):
            return TransientError(
                f"the server {self.url} failed to load {name} ({answer.status}): {told}; its log says more"
            )
        hint = ": start it with a larger --max-lora-rank" if "max_lora_rank" in told else ""
        return SchemaError(
            f"the server {self.url} refuses {name}: {match[1] if match else told}{hint}", status=answer.status
        )

    def unload(self, name: str, grace_s: float) -> None:
        """Wait until nothing runs on the version, then unload it. Raises SchemaError, TransientError."""
        deadline = time.monotonic() + grace_s
        while name in (self._running() or ()) and time.monotonic() < deadline:
            self._sleep(0.05)
        answer = self.again(lambda: self._calls.call("POST", UNLOAD, {"lora_name": name}))
        if answer.status not in (200, 404) and name in self.versions():
            raise SchemaError(
                f"the server {self.url} does not unload {name}: {answer.body}", status=answer.status
            )

    def _running(self) -> frozenset[str] | None:
        answer = self._calls.ask("GET", "/metrics")
        return running_loras(str(answer.body)) if answer.status == 200 else None

    def scores(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the prompts' tokens after the first. Raises SchemaError when one is not finite."""
        found = [
            [
                score
                for start in range(1, len(prompt), POSITIONS)
                for score in self._scores(name, prompt, range(start, min(start + POSITIONS, len(prompt))))
            ]
            for prompt in prompts
        ]
        if not all(math.isfinite(score) for scores in found for score in scores):
            raise SchemaError(f"the server {self.url} scores with {name} what is not finite")
        return found

    def _scores(self, name: str, prompt: Sequence[int], positions: range) -> list[float]:
        wanted = sorted({prompt[at] for at in positions})
        body = {
            "model": name,
            "prompt": [list(prompt[:at]) for at in positions],
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": len(wanted),
            "logprob_token_ids": wanted,
            "return_tokens_as_token_ids": True,
        }
        answer = self.again(lambda: self._calls.call("POST", "/v1/completions", body))
        if answer.status != 200:
            raise SchemaError(
                f"the server {self.url} does not score prompts with {name}: {answer.body}",
                status=answer.status,
            )
        try:
            choices = sorted(answer.body["choices"], key=lambda choice: choice["index"])
            return [
                float(choice["logprobs"]["top_logprobs"][0][f"token_id:{prompt[at]}"])
                for at, choice in zip(positions, choices, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise SchemaError(
                f"the scores of {name} from {self.url} are not in vLLM's shape (0.32 or newer): {exc!r}"
            ) from exc

    def check_behaviour(self, name: str) -> None:
        """The log-probabilities of samples must be those of the distribution that was sampled from: with one token
        allowed they are 0. Raises TransientError; asked once a server."""
        if self._processed:
            return
        body = {
            "model": name,
            "prompt": [list(PROBE[0])],
            "max_tokens": 1,
            "allowed_token_ids": [2],
            "logprobs": 0,
        }
        answer = self.again(lambda: self._calls.call("POST", "/v1/completions", body))
        try:
            logprob = float(answer.body["choices"][0]["logprobs"]["token_logprobs"][0])
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise SchemaError(
                f"the server {self.url} does not answer with {name} in vLLM's shape ({answer.status}): "
                f"{str(answer.body)[:300]}"
            ) from exc
        if abs(logprob) > 1e-6:
            raise TransientError(
                f"the server {self.url} reports log-probabilities before temperature and masks (a forced token has "
                f"{logprob:.3g} instead of 0), which would be learned from as if they were the policy's: start vLLM with "
                "--logprobs-mode processed_logprobs"
            )
        self._processed = True


def taken(name: str, served: str, path: Path, url: str) -> StaleError:
    return StaleError(f"{name} serves {served} on {url}, it cannot become {path}: use a new name")
