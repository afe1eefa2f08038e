"""Connects the pod to the lookahead service: one mirror of the shared text and one stream per tenant.

A tenant's mirror is attached to the drafter before its first request reaches the engine, and serves only its
requests. Without the service drafts come from the requests themselves.

    begin(tenant)   connects the tenant, if it is not connected
    end(tenant)     after its last running request the tenant may be evicted
    too many        the least recently used tenants without requests lose their stream, their mirror and what
                    the drafter learned from them; if the mirrors still have too many bytes, each keeps an
                    equal part
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from tandem_drafting.drafter import Drafter
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import BYTES_PER_TOKEN, DEFAULT_MAX_TOKENS, GlobalMirror

#: tenant, its mirror -> a started client.
MakeClient = Callable[[str, GlobalMirror], LookaheadClient]
#: Runs a function on the thread that uses the drafter.
OnEngineThread = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass
class _Tenant:
    #: None: the pod runs without a lookahead service.
    client: LookaheadClient | None = None
    mirror: GlobalMirror | None = None
    num_requests: int = 0


class LookaheadSync:
    """Used from the event loop. `make_client` None: the pod runs without a lookahead service.

    At most `max_tenants` tenants, or as many as have running requests, hold memory here, and their mirrors
    about `max_bytes`.
    """

    def __init__(
        self,
        drafter: Drafter,
        make_client: MakeClient | None,
        vocab_size: int,
        on_engine_thread: OnEngineThread,
        max_tenants: int,
        max_bytes: int,
    ) -> None:
        self._drafter = drafter
        self._make_client = make_client
        self._vocab_size = vocab_size
        self._on_engine_thread = on_engine_thread
        self._max_tenants = max_tenants
        self._max_bytes = max_bytes
        #: The least recently used first.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._evictions: set[asyncio.Task[None]] = set()
        self._dropped_by_evicted = 0

    def open(self, tenant: str) -> None:
        """Connects the tenant, if it is not connected yet."""
        if tenant not in self._tenants:
            state = self._tenants[tenant] = _Tenant()
            if self._make_client is not None:
                state.mirror = GlobalMirror(tenant=tenant, vocab_size=self._vocab_size)
                self._drafter.attach(state.mirror)
                state.client = self._make_client(tenant, state.mirror)
        self._tenants.move_to_end(tenant)

    def begin(self, tenant: str) -> None:
        """A request of the tenant begins; it connects the tenant."""
        self.open(tenant)
        self._tenants[tenant].num_requests += 1
        self._evict()

    def end(self, tenant: str) -> None:
        """A request that `begin` announced has ended."""
        self._tenants[tenant].num_requests -= 1
        self._evict()

    def push(self, tenant: str, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Reports tokens of a running request's output, from `offset` on."""
        client = self._tenants[tenant].client
        if client is not None:
            client.push(request_id, offset, token_ids)

    def push_prompt(self, tenant: str, request_id: str, token_ids: Sequence[int]) -> None:
        """Reports a running request's prompt, if the tenant shares its prompts."""
        client = self._tenants[tenant].client
        if client is not None:
            client.push_prompt(request_id, token_ids)

    def push_trace(self, tenant: str, traceparent: str) -> None:
        """Reports the last token of a traced request, which still counts as running."""
        client = self._tenants[tenant].client
        if client is not None:
            client.push_trace(traceparent)

    @property
    def num_tenants(self) -> int:
        """Tenants that hold memory here."""
        return len(self._tenants)

    @property
    def num_bytes(self) -> int:
        """Memory of all mirrors."""
        mirrors = (state.mirror for state in self._tenants.values())
        return sum(mirror.memory_bytes for mirror in mirrors if mirror is not None)

    @property
    def connected(self) -> int:
        """Number of open streams."""
        return sum(client.connected for client in self._clients())

    @property
    def dropped_spans(self) -> int:
        return self._dropped_by_evicted + sum(client.dropped for client in self._clients())

    async def close(self) -> None:
        await asyncio.gather(*self._evictions, *(client.close() for client in self._clients()))

    def _clients(self) -> list[LookaheadClient]:
        return [state.client for state in self._tenants.values() if state.client is not None]

    def _evict(self) -> None:
        for tenant in [name for name, state in self._tenants.items() if state.num_requests == 0]:
            if len(self._tenants) <= self._max_tenants and self.num_bytes <= self._max_bytes:
                break
            self._do(self._free(tenant, self._tenants.pop(tenant)))
        mirrors = [state.mirror for state in self._tenants.values() if state.mirror is not None]
        part = self._max_bytes // max(1, len(mirrors)) // BYTES_PER_TOKEN
        for mirror in mirrors:
            if mirror.max_tokens != min(part, DEFAULT_MAX_TOKENS):
                self._do(asyncio.to_thread(mirror.limit, min(part, DEFAULT_MAX_TOKENS)))

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _free(self, tenant: str, state: _Tenant) -> None:
        await self._on_engine_thread(lambda: self._drafter.detach(tenant, state.mirror))
        if state.client is not None:
            self._dropped_by_evicted += state.client.dropped
            await state.client.close()
