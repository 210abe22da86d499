"""What every embedded server of versions does: load, unload, list, and say errors, in vLLM's routes and shapes.

Place: under ``embedded`` (the small policy of text) and ``decisions`` (the decision policy), which differ in what they answer. Invariant:
a version is read once, however many requests ask for it at the same time; one that is not loaded is loaded on first use from
``WORKSPACE/policies/NAME``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from spanloop.learner.serving.adapters import Adapter, Adapters, AlreadyLoaded, NotFound
from spanloop.learner.serving.shapes import error_body
from spanloop.schemas.errors import SchemaError, SpanloopError, TransientError

__all__ = ["MAX_BODY_BYTES", "PROMPTS_MAX", "VersionServer", "body_of", "errors", "json_answer"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

MAX_BODY_BYTES = 4 * 2**20
PROMPTS_MAX = 1024
"""Prompts a scoring request."""


class _LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str


class _UnloadRequest(msgspec.Struct):
    lora_name: str


class VersionServer:
    """Loaded versions behind HTTP.

    Args:
        adapters: The versions.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._loading: dict[str, asyncio.Task[Adapter]] = {}
        self._process = secrets.token_hex(8)
        self._num_ids = 0

    def versions_application(self) -> web.Application:
        """An application with the routes of versions."""
        app = web.Application(middlewares=[errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_get("/health", self.health)
        return app

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models: the loaded versions."""
        cards = [
            {"id": a.name, "object": "model", "created": a.created_s, "owned_by": "spanloop", "root": str(a.path),
             "parent": None, "max_model_len": a.artifact.net.config.context}
            for a in self.adapters.all()
        ]  # fmt: skip
        return json_answer({"object": "list", "data": cards})

    async def load(self, request: web.Request) -> web.Response:
        """POST /v1/load_lora_adapter."""
        body = body_of(msgspec.json.Decoder(_LoadRequest), await request.read())
        if self.adapters.get(body.lora_name) is not None or body.lora_name in self._loading:
            raise AlreadyLoaded(
                f"The lora adapter '{body.lora_name}' has already been loaded; versions are immutable: use a new name."
            )
        await self._load(body.lora_name, Path(body.lora_path))
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """POST /v1/unload_lora_adapter."""
        body = body_of(msgspec.json.Decoder(_UnloadRequest), await request.read())
        self.adapters.remove(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 while the process serves."""
        return web.Response()

    async def adapter(self, name: str) -> Adapter:
        """A version, loaded on first use. Raises NotFound, SchemaError, TransientError."""
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

    def new_id(self, request: web.Request) -> str:
        """The client's X-Request-Id as vLLM does it, else 32 hex digits that no other process gives (one system call
        a process, not one a request)."""
        self._num_ids += 1
        return _request_id(request) or f"{self._process}{self._num_ids:016x}"


def _request_id(request: web.Request) -> str | None:
    given = request.headers.get("X-Request-Id", "")
    return given if 0 < len(given) <= 128 and given.isprintable() else None


def body_of(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """A request's body. Raises SchemaError."""
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SchemaError(f"the request body is not valid: {exc}") from exc


def json_answer(content: Any) -> web.Response:
    """A 200."""
    return web.Response(body=_encode(content), content_type="application/json")


@web.middleware
async def errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Failures as OpenAI's error objects."""
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
