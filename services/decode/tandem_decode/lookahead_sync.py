"""Connects the pod to the lookahead service: one mirror of the shared text and one stream per tenant.

A tenant's mirror is attached to the drafter before its first request reaches the engine, and serves only its
requests. Without the service drafts come from the requests themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem_drafting.drafter import Drafter
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror

#: tenant, its mirror -> a started client.
MakeClient = Callable[[str, GlobalMirror], LookaheadClient]


class LookaheadSync:
    """Used from the event loop. `make_client` None: the pod runs without a lookahead service."""

    def __init__(self, drafter: Drafter, make_client: MakeClient | None, vocab_size: int) -> None:
        self._drafter = drafter
        self._make_client = make_client
        self._vocab_size = vocab_size
        self._clients: dict[str, LookaheadClient] = {}

    def open(self, tenant: str) -> None:
        """Connects the tenant, if it is not connected yet."""
        if self._make_client is None or tenant in self._clients:
            return
        mirror = GlobalMirror(tenant=tenant, vocab_size=self._vocab_size)
        self._drafter.attach(mirror)
        self._clients[tenant] = self._make_client(tenant, mirror)

    def push(self, tenant: str, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Reports tokens of a request's output, from `offset` on."""
        client = self._clients.get(tenant)
        if client is not None:
            client.push(request_id, offset, token_ids)

    def push_prompt(self, tenant: str, request_id: str, token_ids: Sequence[int]) -> None:
        """Reports a request's prompt, if the tenant shares its prompts."""
        client = self._clients.get(tenant)
        if client is not None:
            client.push_prompt(request_id, token_ids)

    @property
    def connected(self) -> int:
        """Number of open streams."""
        return sum(client.connected for client in self._clients.values())

    @property
    def dropped_spans(self) -> int:
        return sum(client.dropped for client in self._clients.values())

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
