"""The embedded serving process: a torch server for the small policy, with vLLM's JSON shapes.

Place: the gateway sends it chat requests, the learner loads, probes and unloads versions. Same routes as vLLM, so
that the two can be exchanged: /v1/chat/completions, /v1/completions (scoring of prompts), /v1/models,
/v1/load_lora_adapter, /v1/unload_lora_adapter, /health. A version that is not loaded is loaded on first use from
``WORKSPACE/policies/NAME``. Run: ``python -m spanloop.learner.serving.embedded [--config TOML]``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from spanloop.learner.grammar import Grammar, compile_grammar
from spanloop.learner.serving.adapters import Adapter, Adapters, AlreadyLoaded, NotFound
from spanloop.learner.serving.batching import Batcher, Row, score_prompts
from spanloop.learner.serving.shapes import (
    ChatRequest,
    CompletionRequest,
    chat_chunks,
    chat_response,
    check_chat,
    completion_response,
    error_body,
)
from spanloop.learner.signing import trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError, SpanloopError, TransientError
from spanloop.schemas.settings import Settings

__all__ = ["EmbeddedServer", "main"]

_log = logging.getLogger(__name__)
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode

MAX_BODY_BYTES = 4 * 2**20
PROMPTS_MAX = 1024
"""Prompts a scoring request."""
GRAMMARS_MAX = 512
"""Compiled grammars kept; a game has few."""


class _LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str


class _UnloadRequest(msgspec.Struct):
    lora_name: str


class EmbeddedServer:
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
        self.adapters = Adapters(
            settings.workspace / "policies",
            limit=settings.serving.max_adapters,
            now_s=now_s,
            wall_s=wall_s,
            vocabulary=Tokenizer(words) if words else None,
            trust=lambda: trust_of(settings.workspace),
        )
        self.batcher = Batcher(
            max_batch=settings.serving.max_batch,
            max_wait_s=settings.serving.max_wait_ms / 1000,
            threads=settings.serving.threads,
        )
        self._wall_s = wall_s
        self._random = random.Random(settings.learner.seed)  # noqa: S311 - sampling
        self._grammars: dict[tuple[str, bytes, bytes], Grammar] = {}
        self._loading: dict[str, asyncio.Task[Adapter]] = {}
        self._process = secrets.token_hex(8)
        self._num_ids = 0

    def application(self) -> web.Application:
        """The aiohttp application; its start-up starts the batcher, its clean-up stops it."""
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_get("/health", self.health)

        async def started(_: web.Application) -> None:
            self.batcher.start()

        async def stopped(_: web.Application) -> None:
            await asyncio.to_thread(self.batcher.close)

        app.on_startup.append(started)
        app.on_cleanup.append(stopped)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = _decode(_chat, await request.read())
        check_chat(body)
        adapter = await self._adapter(body.model)
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
        response_id = "chatcmpl-" + self._new_id(request)
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
            return web.Response(body=_encode(content), content_type="application/json")
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
        body = _decode(_completion, await request.read())
        if body.max_tokens > 1:
            raise SchemaError(
                "the embedded server's /v1/completions scores prompts (prompt_logprobs); "
                f"max_tokens = {body.max_tokens} is not supported, use 0 or 1, or ask /v1/chat/completions"
            )
        adapter = await self._adapter(body.model)
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
            response_id="cmpl-" + self._new_id(request),
            created=int(self._wall_s()),
            tokenizer=adapter.artifact.tokenizer,
        )
        return web.Response(body=_encode(content), content_type="application/json")

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models: the loaded versions."""
        cards = [
            {"id": a.name, "object": "model", "created": a.created_s, "owned_by": "spanloop", "root": str(a.path),
             "parent": None, "max_model_len": a.artifact.net.config.context}
            for a in self.adapters.all()
        ]  # fmt: skip
        return web.Response(body=_encode({"object": "list", "data": cards}), content_type="application/json")

    async def load(self, request: web.Request) -> web.Response:
        """POST /v1/load_lora_adapter."""
        body = _decode(msgspec.json.Decoder(_LoadRequest), await request.read())
        if self.adapters.get(body.lora_name) is not None or body.lora_name in self._loading:
            raise AlreadyLoaded(
                f"The lora adapter '{body.lora_name}' has already been loaded; versions are immutable: use a new name."
            )
        await self._load(body.lora_name, Path(body.lora_path))
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """POST /v1/unload_lora_adapter."""
        body = _decode(msgspec.json.Decoder(_UnloadRequest), await request.read())
        self.adapters.remove(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 while the process serves."""
        return web.Response()

    async def _adapter(self, name: str) -> Adapter:
        return self.adapters.get(name) or await self._load(name, self.adapters.path_of(name))

    async def _load(self, name: str, path: Path) -> Adapter:
        """Load once, however many requests ask for it at the same time."""
        task = self._loading.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._read(name, path))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(task)

    async def _read(self, name: str, path: Path) -> Adapter:
        artifact = await asyncio.to_thread(self.adapters.read, path)
        return self.adapters.get(name) or self.adapters.add(name, path, artifact)

    def _new_id(self, request: web.Request) -> str:
        """The client's X-Request-Id as vLLM does it, else 32 hex digits that no other process gives (one system call
        a process, not one a request)."""
        self._num_ids += 1
        return _request_id(request) or f"{self._process}{self._num_ids:016x}"

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


def _request_id(request: web.Request) -> str | None:
    given = request.headers.get("X-Request-Id", "")
    return given if 0 < len(given) <= 128 and given.isprintable() else None


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SchemaError(f"the request body is not valid: {exc}") from exc


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:
        status, message = exc.status, f"{exc.reason}: {request.method} {request.path}"
    except NotFound as exc:
        status, message = 404, exc.message
    except TransientError as exc:
        status, message = 503, exc.message
    except (SchemaError, AlreadyLoaded) as exc:
        status, message = 400, exc.message
    except SpanloopError as exc:
        status, message = 500, exc.message
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        status, message = 500, "internal error; the server's log has the traceback"
    return web.Response(
        status=status, body=_encode(error_body(status, message)), content_type="application/json"
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
