"""The embedded serving process: a torch server for the small policy, with vLLM's JSON shapes.

Place: the gateway sends it chat requests, the learner loads, probes and unloads versions. Same routes as vLLM, so
that the two can be exchanged: /v1/chat/completions, /v1/completions (scoring of prompts), /v1/models,
/v1/load_lora_adapter, /v1/unload_lora_adapter, /health. A version that is not loaded is loaded on first use from
``WORKSPACE/policies/NAME``. Run: ``python -m spanloop.learner.serving.embedded [--config TOML]``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from spanloop.learner.grammar import Grammar, compile_grammar
from spanloop.learner.serving.adapters import Adapter, Adapters
from spanloop.learner.serving.batching import Batcher, Row, score_prompts
from spanloop.learner.serving.shapes import (
    ChatRequest,
    CompletionRequest,
    chat_chunks,
    chat_response,
    check_chat,
    completion_response,
)
from spanloop.learner.serving.versions import PROMPTS_MAX, VersionServer, body_of, json_answer
from spanloop.learner.signing import trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import Settings

__all__ = ["EmbeddedServer", "main"]

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode

GRAMMARS_MAX = 512
"""Compiled grammars kept; a game has few."""


class EmbeddedServer(VersionServer):
    """The application and what it holds. Requests run on the event loop, the model in the batcher's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        words = settings.learner.vocabulary
        adapters = Adapters(
            settings.workspace / "policies",
            limit=settings.serving.max_adapters,
            now_s=now_s,
            wall_s=wall_s,
            vocabulary=Tokenizer(words) if words else None,
            trust=lambda: trust_of(settings.workspace),
        )
        super().__init__(adapters)
        self.batcher = Batcher(
            max_batch=settings.serving.max_batch,
            max_wait_s=settings.serving.max_wait_ms / 1000,
            threads=settings.serving.threads,
        )
        self._wall_s = wall_s
        self._random = random.Random(settings.learner.seed)  # noqa: S311 - sampling
        self._grammars: dict[tuple[str, bytes, bytes], Grammar] = {}

    def application(self) -> web.Application:
        """The aiohttp application; its start-up starts the batcher, its clean-up stops it."""
        app = self.versions_application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)

        async def started(_: web.Application) -> None:
            self.batcher.start()

        async def stopped(_: web.Application) -> None:
            await asyncio.to_thread(self.batcher.close)

        app.on_startup.append(started)
        app.on_cleanup.append(stopped)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = body_of(_chat, await request.read())
        check_chat(body)
        adapter = await self.adapter(body.model)
        tokenizer = adapter.artifact.tokenizer
        grammar = self._grammar(body, tokenizer)
        prompt_ids = tokenizer.prompt_ids(body.messages)
        self._check_lengths(body, adapter, len(prompt_ids), grammar.max_tokens)
        source = random.Random(body.seed) if body.seed is not None else self._random  # noqa: S311
        row = Row(
            adapter.artifact.net,
            prompt_ids,
            grammar.root,
            [source.random() for _ in range(grammar.max_tokens)],
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            exploration=body.exploration(self.settings.serving.exploration),
        )
        row = await self.batcher.submit(row)
        response_id = "chatcmpl-" + self.new_id(request)
        created = int(self._wall_s())
        if not body.stream:
            content = chat_response(
                body,
                row,
                response_id=response_id,
                created=created,
                tokenizer=tokenizer,
                num_prompt=len(prompt_ids),
            )
            return json_answer(content)
        stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await stream.prepare(request)
        for chunk in chat_chunks(
            body,
            row,
            response_id=response_id,
            created=created,
            tokenizer=tokenizer,
            num_prompt=len(prompt_ids),
        ):
            await stream.write(b"data: " + _encode(chunk) + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    async def completions(self, request: web.Request) -> web.Response:
        """POST /v1/completions: log-probabilities of prompts given as token ids (the learner's probe)."""
        body = body_of(_completion, await request.read())
        if body.max_tokens > 1:
            raise SchemaError(
                "the embedded server's /v1/completions scores prompts (prompt_logprobs); "
                f"max_tokens = {body.max_tokens} is not supported, use 0 or 1, or ask /v1/chat/completions"
            )
        adapter = await self.adapter(body.model)
        prompts = body.prompts()
        context, size = adapter.artifact.net.config.context, adapter.artifact.tokenizer.size
        if len(prompts) > PROMPTS_MAX:
            raise SchemaError(f"{len(prompts)} prompts in one request, at most {PROMPTS_MAX}")
        for prompt in prompts:
            if not 1 <= len(prompt) <= context:
                raise SchemaError(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {context} (learner.context)"
                )
            if not all(0 <= token_id < size for token_id in prompt):
                raise SchemaError(f"a prompt has a token id outside the vocabulary of {size}")
        scores = await asyncio.to_thread(score_prompts, adapter.artifact.net, prompts)
        content = completion_response(
            body,
            prompts,
            scores,
            response_id="cmpl-" + self.new_id(request),
            created=int(self._wall_s()),
            tokenizer=adapter.artifact.tokenizer,
        )
        return json_answer(content)

    def _grammar(self, body: ChatRequest, tokenizer: Tokenizer) -> Grammar:
        key = (tokenizer.hash, bytes(body.tools), bytes(body.tool_choice))
        grammar = self._grammars.get(key)
        if grammar is None:
            grammar = compile_grammar(
                msgspec.json.decode(body.tools), msgspec.json.decode(body.tool_choice), tokenizer
            )
            if len(self._grammars) >= GRAMMARS_MAX:
                self._grammars.pop(next(iter(self._grammars)))
            self._grammars[key] = grammar
        return grammar

    def _check_lengths(self, body: ChatRequest, adapter: Adapter, num_prompt: int, num_response: int) -> None:
        context = adapter.artifact.net.config.context
        if num_prompt + num_response > context:
            raise SchemaError(
                f"the prompt has {num_prompt} tokens and the longest response {num_response}, together more than the "
                f"{context} of the context (learner.context)"
            )
        limits = [m for m in (body.max_completion_tokens, body.max_tokens) if m is not None]
        if limits and min(limits) < num_response:
            raise SchemaError(
                f"max_tokens = {min(limits)} cannot hold the longest response of {num_response} tokens"
            )


def main() -> None:
    """Run the process until SIGTERM or SIGINT."""
    import argparse

    from spanloop.pipeline.process import serve
    from spanloop.schemas.settings import load_settings

    parser = argparse.ArgumentParser(prog="python -m spanloop.learner.serving.embedded", description=__doc__)
    parser.add_argument("--config", type=Path)
    settings = load_settings(parser.parse_args().config)
    server = EmbeddedServer(settings)
    serve("serving", server.application(), settings.serving.host, settings.serving.port)


if __name__ == "__main__":
    main()
