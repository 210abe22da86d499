"""The serving port over HTTP, in vLLM's routes: the embedded server and vLLM take the same calls.

``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``, ``/v1/models`` and, for probes, ``/v1/completions`` with
``prompt_logprobs``. Blocking, one short connection a call: the learner calls a few times an update.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from spanloop.schemas.errors import ConfigError, SchemaError, StaleError, TransientError

__all__ = ["HttpServing"]


class HttpServing:
    """A server at ``url`` (``http://host:port``, with or without /v1).

    Args:
        url: Base URL.
        timeout_s: For one call; loading a version may take that long.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise ConfigError(f"the serving URL {url!r} is not http://host:port")
        self._host, self._port = split.hostname, split.port or 80
        self._url = f"http://{split.netloc}"
        self._timeout_s = timeout_s

    def load(self, name: str, path: Path) -> None:
        """POST /v1/load_lora_adapter; a name that already serves this path is left alone."""
        root = str(path.absolute())
        served = self._roots().get(name)
        if served is None:
            status, message = self._call(
                "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": root}
            )
            if status == 200:
                return
            served = self._roots().get(name)  # somebody else, or a request for the name, was quicker
            if served is None:
                raise SchemaError(f"serving refuses {name}: {message}", status=status)
        if Path(served).absolute() != path.absolute():
            raise StaleError(f"{name} serves {served}, it cannot become {path}: use a new name")

    def unload(self, name: str) -> None:
        """POST /v1/unload_lora_adapter."""
        status, message = self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404) and name in self._roots():
            raise SchemaError(f"serving does not unload {name}: {message}", status=status)

    def loaded(self) -> list[str]:
        """GET /v1/models."""
        return sorted(self._roots())

    def probe(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """POST /v1/completions with the prompts as token ids."""
        body = {
            "model": name,
            "prompt": [list(p) for p in prompts],
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 0,
        }
        status, answer = self._call("POST", "/v1/completions", body)
        if status != 200:
            raise SchemaError(f"serving does not score prompts with {name}: {answer}", status=status)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return [
                [
                    float(at[str(token)]["logprob"])
                    for token, at in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                for prompt, choice in zip(prompts, choices, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise SchemaError(f"serving's scores of {name} are not in vLLM's shape: {exc!r}") from exc

    def _roots(self) -> dict[str, str]:
        status, answer = self._call("GET", "/v1/models", None)
        if status != 200 or not isinstance(answer, dict):
            raise SchemaError(f"serving does not list its models: {answer}", status=status)
        return {str(m.get("id")): str(m.get("root")) for m in answer.get("data") or ()}

    def _call(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON body (errors: the message). Raises TransientError when it is worth another try."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            data = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise TransientError(
                f"serving at {self._url} cannot be reached: {exc or type(exc).__name__}; is it running?"
            ) from exc
        finally:
            connection.close()
        if status >= 500:
            raise TransientError(
                f"serving at {self._url} failed on {path} with {status}: {_message(data)}", status=status
            )
        if status != 200:
            return status, _message(data)
        return status, msgspec.json.decode(data) if data[:1] in (b"{", b"[") else data.decode(
            "utf-8", "replace"
        )


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return data[:500].decode("utf-8", "replace")
