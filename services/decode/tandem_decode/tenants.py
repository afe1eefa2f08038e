"""One drafter and one mirror of the global forest per tenant: drafts never cross tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_engine.drafts.drafter import Drafter
from tandem_engine.drafts.tree import DraftTree
from tandem_engine.request import Request

from tandem_decode.lookahead_client import LookaheadClient


@dataclass(frozen=True)
class TenantDrafts:
    drafter: Drafter
    #: None when the pod runs without a lookahead service.
    client: LookaheadClient | None


class TenantDrafters:
    """The engine's drafter: sends each request to its tenant's.

    `open` is called on the event loop before a tenant's first request reaches the engine; the rest is
    called on the engine's thread.
    """

    def __init__(self, make: Callable[[str], TenantDrafts]) -> None:
        self.row_cost = 0.0
        self._make = make
        self._tenants: dict[str, TenantDrafts] = {}
        self._tenant_of: dict[str, str] = {}

    def open(self, tenant: str) -> None:
        if tenant not in self._tenants:
            self._tenants[tenant] = self._make(tenant)

    def clients(self) -> list[LookaheadClient]:
        return [t.client for t in self._tenants.values() if t.client is not None]

    def push(self, tenant: str, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Offers accepted text to the tenant's global forest."""
        client = self._tenants[tenant].client
        if client is not None:
            client.push(request_id, offset, token_ids)

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        by_tenant: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_tenant.setdefault(request.tenant, []).append(i)
        trees: list[DraftTree | None] = [None] * len(requests)
        for tenant, indices in by_tenant.items():
            drafter = self._tenants[tenant].drafter
            drafter.row_cost = self.row_cost
            proposed = drafter.propose([requests[i] for i in indices], max_nodes)
            for i, tree in zip(indices, proposed, strict=True):
                trees[i] = tree
        return trees

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        self._tenant_of[request.request_id] = request.tenant
        self._tenants[request.tenant].drafter.extend(request, token_ids)

    def feedback(self, request: Request, tree: DraftTree, accepted: Sequence[int]) -> None:
        self._tenants[request.tenant].drafter.feedback(tree, accepted)

    def forget(self, request_id: str) -> None:
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is not None:
            self._tenants[tenant].drafter.forget(request_id)
