"""An ``AsyncOpenAI`` whose chat completions take a short path: one JSON body out, one validated ``ChatCompletion`` back.

The SDK walks every request against its type hints, which costs a quarter of this process's time; the desk makes hundreds of small calls a
second on two cores that it shares with everything that it is to show. What goes over the wire is the same. Use the SDK itself
(``--sdk``) wherever calls are not that small.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

__all__ = ["ShortPathClient"]


class _Completions:
    def __init__(self, url: str, headers: dict[str, str], session: aiohttp.ClientSession) -> None:
        self._url = url
        self._headers = headers
        self._session = session

    async def create(self, *, extra_headers: dict[str, str] | None = None, **body: Any) -> ChatCompletion:
        unset = (openai.omit, openai.not_given)
        data = {
            k: v
            for k, v in body.items()
            if k not in ("timeout", "extra_body") and all(v is not u for u in unset)
        }
        headers = {**self._headers, **(extra_headers or {})}
        async with self._session.post(self._url, json=data, headers=headers) as response:
            text = await response.read()
        if response.status != 200:
            raise openai.OpenAIError(f"{self._url} answered {response.status}: {text[:300]!r}")
        return ChatCompletion.model_validate_json(text)


class _Chat:
    def __init__(self, completions: _Completions) -> None:
        self.completions = completions


class ShortPathClient(AsyncOpenAI):
    """A client for one thing: chat completions that are not streamed.

    Args:
        session: Where requests go out; the caller closes it.
    """

    def __init__(self, session: aiohttp.ClientSession, *, api_key: str) -> None:
        super().__init__(api_key=api_key)
        url = f"{str(self.base_url).rstrip('/')}/chat/completions"
        self._short = _Chat(_Completions(url, {"Authorization": f"Bearer {api_key}"}, session))

    @property
    def chat(self) -> Any:
        """Only ``completions.create``."""
        return self._short
