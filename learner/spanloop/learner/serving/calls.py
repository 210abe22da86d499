"""The calls that every server of versions understands, in vLLM's routes: one short connection each, blocking.

Place: under ``http.HttpServing`` (the embedded server) and ``vllm.VllmServing`` (vLLM replicas), which differ in what an
answer means, not in how it is asked for. The learner calls a few times an update.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from spanloop.schemas.errors import ConfigError, SchemaError, TransientError

__all__ = ["LOAD", "UNLOAD", "Answer", "ServerCalls"]

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class Answer(msgspec.Struct, frozen=True):
    """What came back: the JSON value (or the text) of a 200, else the error's message."""

    status: int
    body: Any
    told: bool = True
    """Whether an error came as an error object, that is: from a route that exists."""


class ServerCalls:
    """A server at ``url`` (``http://host:port``, with or without /v1).

    Args:
        url: Base URL.
        timeout_s: For one call; loading a version may take that long.
        key: Sent as a bearer token; empty: none.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, key: str = "") -> None:
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise ConfigError(f"the serving URL {url!r} is not http://host:port")
        self._host, self._port = split.hostname, split.port or 80
        self.url = f"http://{split.netloc}"
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """One call, whatever its status. Raises TransientError when there is no answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            data = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, body=data, headers=self._headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise TransientError(
                f"serving at {self.url} cannot be reached: {exc or type(exc).__name__}; is it running?"
            ) from exc
        finally:
            connection.close()
        return _answer(status, data)

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        """``ask``, where a status from 500 on means that it is worth another try. Raises TransientError."""
        answer = self.ask(method, path, body)
        if answer.status >= 500:
            raise TransientError(
                f"serving at {self.url} failed on {path} with {answer.status}: {answer.body}",
                status=answer.status,
            )
        return answer

    def roots(self) -> dict[str, str]:
        """Path of each model that is served, by name. Raises SchemaError, TransientError."""
        return {card["id"]: card["root"] for card in self.cards()}

    def cards(self) -> list[dict[str, str]]:
        """``id``, ``root`` and ``parent`` (the base model, empty for itself) of each model. Raises SchemaError,
        TransientError."""
        answer = self.call("GET", "/v1/models")
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise SchemaError(f"serving does not list its models: {answer.body}", status=answer.status)
        return [
            {key: str(model.get(key) or "") for key in ("id", "root", "parent")}
            for model in answer.body.get("data") or ()
        ]

    def scores(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the prompts' tokens after the first: /v1/completions with ``prompt_logprobs``.

        Raises SchemaError (no such model, odd answer), TransientError."""
        body = {
            "model": name,
            "prompt": [list(p) for p in prompts],
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 0,
        }
        answer = self.call("POST", "/v1/completions", body)
        if answer.status != 200:
            raise SchemaError(
                f"serving does not score prompts with {name}: {answer.body}", status=answer.status
            )
        try:
            choices = sorted(answer.body["choices"], key=lambda choice: choice["index"])
            return [
                [
                    float(at[str(token)]["logprob"])
                    for token, at in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                for prompt, choice in zip(prompts, choices, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise SchemaError(f"serving's scores of {name} are not in vLLM's shape: {exc!r}") from exc


def _answer(status: int, data: bytes) -> Answer:
    try:
        body: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = data.decode("utf-8", "replace")
    if status == 200:
        return Answer(status, body)
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and "message" in error:
        return Answer(status, str(error["message"]))
    return Answer(status, data[:500].decode("utf-8", "replace"), told=False)
