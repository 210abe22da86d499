"""The serving process of a decision policy: which option to take, with the probability of each.

Place: the gateway forwards /v1/decide here, the learner loads, probes and unloads versions by the same routes as any policy's
(``versions``). Invariants: an answer is a function of (version, seed, request): chance is a hash of the seed, and one request is one
pass over its own options, so company in the queue changes no bit; every option that is open has at least its share of the
exploration floor.
Run: ``python -m spanloop.learner.serving.decisions [--config TOML]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from spanloop.learner.decision_features import DecisionRequest, decision_ids
from spanloop.learner.decision_policy import DecisionNet, Scorer, load_artifact
from spanloop.learner.serving.adapters import Adapters
from spanloop.learner.serving.sampling import MASKED_LOGPROB, behaviour, draw, log_behaviour
from spanloop.learner.serving.shapes import CompletionRequest
from spanloop.learner.serving.versions import PROMPTS_MAX, VersionServer, body_of, json_answer
from spanloop.learner.signing import Trust, trust_of
from spanloop.schemas.canonical import digest
from spanloop.schemas.decision_tokens import TEMPERATURE_MAX, written
from spanloop.schemas.errors import SchemaError, TerminalError
from spanloop.schemas.settings import Settings

__all__ = ["Asked", "DecisionServer", "answer", "luck_of", "main"]


class Asked(DecisionRequest, frozen=True, kw_only=True):
    """The body of a request."""

    model: str
    """The version."""
    seed: str
    """Names the decision: the same seed draws the same number."""
    temperature: float = 1.0
    exploration: float | None = None
    """Floor; None: ``serving.exploration``."""


class Served(msgspec.Struct, frozen=True):
    """A loaded version."""

    net: DecisionNet
    scorer: Scorer


_asked = msgspec.json.Decoder(Asked)
_completion = msgspec.json.Decoder(CompletionRequest)


def luck_of(seed: str) -> float:
    """The uniform number in [0, 1) of a decision.

    >>> 0.0 <= luck_of("decision-1") < 1.0
    True
    """
    return int(digest("decide", seed)[:13], 16) / 16**13


def answer(asked: Asked, scorer: Scorer, exploration: float) -> dict[str, Any]:
    """The choice, and beside it the tokens of a call of a policy, as vLLM reports them.

    Raises:
        SchemaError: the request is none.
    """
    if not 0.0 <= asked.temperature <= TEMPERATURE_MAX:
        raise SchemaError(
            f"temperature = {asked.temperature} is out of range, expected 0 to {TEMPERATURE_MAX:g}"
        )
    if not 0.0 <= exploration < 1.0:
        raise SchemaError(f"exploration = {exploration} is out of range, expected 0 to 1")
    decision, places = decision_ids(asked)
    scores = scorer.scores(decision)
    if not np.isfinite(scores).all():
        raise TerminalError(f"{asked.model} gives scores that are not finite")
    mu = behaviour(scores, temperature=asked.temperature, exploration=exploration)
    chosen = draw(mu, luck_of(asked.seed))
    logprobs = log_behaviour(mu)
    names = [item.name for item in asked.items()]
    propensities = [0.0] * len(names)
    for place, share in zip(places, mu.tolist(), strict=True):
        propensities[place] = share
    menu = [
        {"token": f"token_id:{option}", "logprob": logprob}
        for option, logprob in zip(decision.options, logprobs, strict=True)
        if logprob > MASKED_LOGPROB
    ]
    token = {
        "token": f"token_id:{decision.options[chosen]}",
        "logprob": logprobs[chosen],
        "top_logprobs": menu,
    }
    return {
        "object": "decision",
        "model": asked.model,
        "chosen": names[places[chosen]],
        "propensity": propensities[places[chosen]],
        "options": names,
        "propensities": propensities,
        "exploration": exploration,
        "prompt_token_ids": list(written(decision)),
        "choices": [
            {"index": 0, "finish_reason": "stop", "token_ids": [decision.options[chosen]], "logprobs": {"content": [token]}}
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }  # fmt: skip


class DecisionServer(VersionServer):
    """The application and what it holds; a decision takes a fraction of a millisecond on the event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        super().__init__(
            Adapters(
                settings.workspace / "policies",
                load=_served,
                limit=settings.serving.max_adapters,
                now_s=now_s,
                wall_s=wall_s,
                trust=lambda: trust_of(settings.workspace),
            )
        )

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = self.versions_application()
        app.router.add_post("/v1/decide", self.decide)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def decide(self, request: web.Request) -> web.Response:
        """POST /v1/decide."""
        asked = body_of(_asked, await request.read())
        adapter = await self.adapter(asked.model)
        floor = self.settings.serving.exploration if asked.exploration is None else asked.exploration
        return json_answer({"id": asked.seed, **answer(asked, adapter.artifact.scorer, floor)})

    async def completions(self, request: web.Request) -> web.Response:
        """POST /v1/completions: the learner's probe, in vLLM's shape of prompt log-probabilities."""
        body = body_of(_completion, await request.read())
        adapter = await self.adapter(body.model)
        prompts = body.prompts()
        if len(prompts) > PROMPTS_MAX:
            raise SchemaError(f"{len(prompts)} prompts in one request, at most {PROMPTS_MAX}")
        config = adapter.artifact.net.config
        for prompt in prompts:
            if not 1 <= len(prompt) <= config.context or not all(
                0 <= i < config.vocabulary_size for i in prompt
            ):
                raise SchemaError(f"a prompt has 1 to {config.context} ids below {config.vocabulary_size}")
        choices = [
            {"index": k, "text": "", "prompt_logprobs": [None, *_positions(prompt, adapter.artifact.scorer)]}
            for k, prompt in enumerate(prompts)
        ]
        return json_answer({"object": "text_completion", "model": body.model, "choices": choices})


def _positions(prompt: list[int], scorer: Scorer) -> list[dict[str, Any]]:
    found = zip(prompt[1:], scorer.probe(prompt), strict=True)
    return [{str(token): {"logprob": logprob, "rank": 1}} for token, logprob in found]


def _served(path: Path, *, trust: Trust | None = None) -> Served:
    net = load_artifact(path, trust=trust).net
    return Served(net, Scorer(net))


def main() -> None:
    """Run the process until SIGTERM or SIGINT."""
    import argparse

    from spanloop.pipeline.process import serve
    from spanloop.schemas.settings import load_settings

    parser = argparse.ArgumentParser(prog="python -m spanloop.learner.serving.decisions", description=__doc__)
    parser.add_argument("--config", type=Path)
    settings = load_settings(parser.parse_args().config)
    serve("serving", DecisionServer(settings).application(), settings.serving.host, settings.serving.port)


if __name__ == "__main__":
    main()
