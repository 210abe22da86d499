"""Responses that were given: whose they are and which server has them.

The Responses API refers to earlier answers by id, and a server keeps them in its own memory: a request with
``previous_response_id`` belongs to the conversation, the version and the server of that answer. Ids may be guessable, so with
several tenants an answer is reachable only for the tenant it was given to.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from spanloop.collectors.routing import StickyKey

__all__ = ["Chains", "Given"]

CHAINS_MAX = 100_000
"""Answers remembered; the oldest go first."""


class Given(msgspec.Struct, frozen=True):
    """An answer that was given."""

    tenant: str
    key: StickyKey
    model: str
    url: str
    """Base URL of the server that gave it."""


class Chains:
    """The answers that are remembered, by id.

    Args:
        private: Several tenants share the gateway: an unknown id belongs to nobody.
    """

    def __init__(self, *, private: bool, limit: int = CHAINS_MAX) -> None:
        self.private = private
        self._limit = limit
        self._given: OrderedDict[str, Given] = OrderedDict()

    def add(self, response_id: str, given: Given) -> None:
        """Remember an answer."""
        self._given[response_id] = given
        self._given.move_to_end(response_id)
        while len(self._given) > self._limit:
            self._given.popitem(last=False)

    def get(self, tenant: str, response_id: str) -> Given | None:
        """The answer, if it is this tenant's; None: unknown."""
        found = self._given.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def may_ask(self, tenant: str, response_id: str) -> bool:
        """Whether a tenant may refer to an answer."""
        found = self._given.get(response_id)
        return found.tenant == tenant if found is not None else not self.private
