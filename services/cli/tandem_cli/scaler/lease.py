"""Leader election between scalers: the holder of a Lease of the API server decides.

    renewed      every `renew_s` by its holder, with the version that it has read: of two writers one gets 409
    expired      not renewed for `lease_s` since this process saw it change; remote clocks do not matter
    leads        for two thirds of `lease_s` from the time before a renewal was sent, so that the holder stops
                 before another scaler may start, even if its requests hang
    released     at a normal end, so that the next leader need not wait

The client library's election has no timeouts: a request that hangs would let two processes lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime

import structlog
from kubernetes.aio import client

_TIMEOUT_S = 5.0


class Leadership:
    """Leadership of one candidate. `run` renews the lease until cancelled."""

    def __init__(
        self, api: client.ApiClient, namespace: str, name: str, identity: str, *, lease_s: float = 15.0
    ) -> None:
        self._api = client.CoordinationV1Api(api)
        self._namespace, self._name, self._identity = namespace, name, identity
        self._lease_s, self._renew_s = lease_s, lease_s / 5
        self._valid_until = 0.0
        #: The renewal time of another holder's lease, and when this process first saw it.
        self._seen: tuple[str, datetime | None] | None = None
        self._seen_at = 0.0
        self._log = structlog.get_logger("tandem.scaler")

    @property
    def leads(self) -> bool:
        return time.monotonic() < self._valid_until

    async def run(self) -> None:
        """Renews the lease until cancelled. Logs each kind of failure once."""
        trouble = ""
        try:
            while True:
                led = self.leads
                try:
                    await self.try_once()
                    trouble = ""
                except Exception as error:
                    if (reason := explain(error, f"leases.coordination.k8s.io/{self._name}")) != trouble:
                        trouble = reason
                        self._log.warning("the lease cannot be renewed", error=reason)
                if led != self.leads:
                    self._log.info("leads" if self.leads else "leads no longer", identity=self._identity)
                await asyncio.sleep(self._renew_s)
        finally:
            await self._release()

    async def try_once(self) -> None:
        """Takes or renews the lease if that is allowed. Raises ApiException and connection errors."""
        began = time.monotonic()
        lease = await self._read()
        spec = lease.spec or client.V1LeaseSpec()
        holder = spec.holder_identity or ""
        if holder not in ("", self._identity):
            seen = (holder, spec.renew_time)
            if seen != self._seen:
                self._seen, self._seen_at = seen, began
            if began < self._seen_at + self._lease_s:
                return
        now = datetime.now(UTC)
        # The server requires six digits of a second; the client omits them for 0.
        now = now.replace(microsecond=max(now.microsecond, 1))
        if holder != self._identity:
            spec.acquire_time = now
            spec.lease_transitions = (spec.lease_transitions or 0) + 1
        spec.holder_identity, spec.renew_time = self._identity, now
        spec.lease_duration_seconds = max(round(self._lease_s), 1)
        lease.spec = spec
        try:
            await self._write(lease)
        except client.ApiException as error:
            if error.status == 409:  # another candidate wrote first
                return
            raise
        self._valid_until = began + self._lease_s * 2 / 3

    async def _release(self) -> None:
        """Releases the lease; if this fails, it expires."""
        if not self.leads:
            return
        self._valid_until = 0.0
        with contextlib.suppress(Exception):
            lease = await self._read()
            if lease.spec is not None and lease.spec.holder_identity == self._identity:
                lease.spec.holder_identity = ""
                await self._write(lease)

    async def _read(self) -> client.V1Lease:
        return await self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=_TIMEOUT_S)

    async def _write(self, lease: client.V1Lease) -> None:
        await self._api.replace_namespaced_lease(
            self._name, self._namespace, lease, _request_timeout=_TIMEOUT_S
        )


def explain(error: Exception, what: str) -> str:
    """The error and its remedy in one sentence."""
    if isinstance(error, client.ApiException):
        if error.status == 403:
            return f"the service account may not get and update {what}; give it the Role of components/scaler"
        if error.status == 404:
            return f"there is no {what}; apply components/scaler, or name another one"
        return f"{what}: the API server answers {error.status} {error.reason}"
    return f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
