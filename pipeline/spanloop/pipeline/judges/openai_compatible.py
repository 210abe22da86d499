"""A judge behind an OpenAI-compatible chat endpoint. It gets no tools, and answers in at most a few dozen tokens."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import msgspec

from spanloop.schemas.errors import ConfigError, TransientError

__all__ = ["OpenAIJudge"]

_ANSWER_BYTES_MAX = 64 * 2**10


class OpenAIJudge:
    """Adapter of ``port.Judge``.

    Args:
        name: NAME/VERSION; a judge with another model or other words is another version.
        url: Base URL up to and with /v1.
        model: As the server names it.
        key: Its key; empty: none is sent.
        timeout_s: For each wait on the connection.
    """

    def __init__(self, name: str, url: str, model: str, *, key: str = "", timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"judge {name}: {url!r} is no URL such as https://HOST/v1")
        try:
            _ = parts.port
        except ValueError as exc:
            raise ConfigError(f"judge {name}: {url!r} has no port from 0 to 65535") from exc
        if not (key.isascii() and (not key or key.isprintable())):
            raise ConfigError(
                f"judge {name}: its key holds a line break or another character that no header takes"
            )
        self.name = name
        self._parts, self._model, self._key, self._timeout_s = parts, model, key, timeout_s

    def _refused(self, status: int) -> TransientError | ConfigError:
        if status in (408, 409, 429) or status >= 500:
            return TransientError(
                f"judge {self.name}: status {status}: the server is busy or failing, try later"
            )
        hints = {
            401: "set the judge's key", 403: "the judge's key may not ask this model", 404: f"it knows no model {self._model!r} at this url",
            400: f"it does not take response_format json_object or max_tokens for {self._model!r}",
        }  # fmt: skip
        return ConfigError(
            f"judge {self.name}: status {status}, expected 200: {hints.get(status, 'is it a chat server?')}"
        )

    def __call__(self, system: str, data: str) -> bytes:
        """The message's content as it came."""
        body: dict[str, Any] = {
            "model": self._model, "temperature": 0, "max_tokens": 32, "response_format": {"type": "json_object"},
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": data}],
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        try:
            path = f"{self._parts.path.rstrip('/')}/chat/completions"
            connection.request("POST", path, msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            raw = answer.read(_ANSWER_BYTES_MAX)
            if answer.status != 200:
                raise self._refused(answer.status)
            try:
                said = msgspec.json.decode(raw)["choices"][0]["message"]["content"]
            except (ValueError, KeyError, IndexError, TypeError) as exc:
                raise TransientError(
                    f"judge {self.name}: the server answers, but with no chat completion: is the url one of a chat server, up to and with /v1?"
                ) from exc
            return said.encode() if isinstance(said, str) else b""
        except (OSError, http.client.HTTPException) as exc:
            where = self._parts._replace(query="", fragment="").geturl()
            raise TransientError(
                f"judge {self.name}: {where} does not answer ({type(exc).__name__}): does the server run, and is the judge's url right?"
            ) from exc
        finally:
            connection.close()
