"""Which server answers for a model: the deployment's own, or one of ``gateway.upstreams`` by the model's name. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec

from spanloop.schemas.settings import Settings

__all__ = ["Target", "Targets", "upstream_urls"]


class Target(msgspec.Struct, frozen=True):
    """Servers that answer alike."""

    urls: tuple[str, ...]
    """Base URLs, each ending in /v1 or whatever the provider has there."""
    key: str = ""
    """Sent as the bearer; empty: the client's own Authorization goes on."""
    tokens: bool = False
    """They are vLLM's: token ids and log-probabilities may be asked for."""
    models: tuple[str, ...] = ("*",)


def upstream_urls(settings: Settings) -> tuple[str, ...]:
    """Base URLs of the deployment's own servers, each ending in /v1: ``gateway.upstream``, else ``serving.urls``, else our own."""
    if settings.gateway.upstream:
        return (settings.gateway.upstream.rstrip("/"),)
    if settings.serving.engine == "vllm" and settings.serving.urls:
        return tuple(url.rstrip("/").removesuffix("/v1") + "/v1" for url in settings.serving.urls)
    host = settings.serving.host
    return (f"http://{f'[{host}]' if ':' in host else host}:{settings.serving.port}/v1",)


class Targets:
    """All servers of a deployment."""

    def __init__(self, settings: Settings) -> None:
        self.own = Target(upstream_urls(settings), settings.gateway.upstream_key.get_secret_value())
        self.others = tuple(
            Target((u.url.rstrip("/"),), u.key.get_secret_value(), u.tokens, u.models)
            for u in settings.gateway.upstreams
        )

    def of(self, model: str) -> Target:
        """The first of ``gateway.upstreams`` that names the model, else the deployment's own servers. The policy and its versions
        never come here."""
        for target in self.others:
            if any(fnmatchcase(model, pattern) for pattern in target.models):
                return target
        return self.own
