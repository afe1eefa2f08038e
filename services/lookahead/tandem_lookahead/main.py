"""Entry point of the lookahead service: `tandem-lookahead`.

It serves as soon as it can answer a pod. Redis may start later, stop and return.
"""

from __future__ import annotations

import asyncio

import structlog
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service import logs, settings
from tandem_service.server import PodServer
from tandem_service.tls import Role

from tandem_lookahead.hub import LookaheadHub
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.servicer import SERVICE_NAME, STATUS_CODES, LookaheadServicer
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import RedisStore

CALLERS = {
    "Sync": (Role.DECODE,),
    "GetLookaheadStatus": (Role.DECODE, Role.GATEWAY, Role.OPERATOR),
    "ExportNamespace": (Role.OPERATOR,),
    "ImportNamespace": (Role.OPERATOR,),
    "PurgeTenant": (Role.OPERATOR,),
}


class LookaheadPod:
    """Store, hub and gRPC server. Create it inside a running event loop."""

    def __init__(self, options: LookaheadSettings) -> None:
        self.server = PodServer(
            options,
            role="lookahead",
            service_names=[SERVICE_NAME],
            status_codes=STATUS_CODES,
            callers=CALLERS,
        )
        address = options.redis_address()
        assert address is not None  # checked in main
        metrics = LookaheadMetrics(self.server.registry)
        self._store = RedisStore(
            address,
            stream_length=options.stream_length,
            stream_bytes=options.stream_bytes,
            ttl_s=options.redis_ttl_s,
        )
        self._hub = LookaheadHub(self._store, options, metrics)
        servicer = LookaheadServicer(self._hub, metrics, self.server.tracing, pod_id=options.pod_id)
        lookahead_pb2_grpc.add_LookaheadServiceServicer_to_server(  # type: ignore[no-untyped-call]
            servicer, self.server.grpc_server
        )

    async def start(self) -> None:
        """Starts hub and server. Raises OSError if the port is taken."""
        await self._hub.start()
        await self.server.start()
        self.server.set_serving(True)

    async def run(self) -> None:
        """Serves until a signal (or `server.request_stop`), then ends the pods' streams and drains."""
        ending = asyncio.create_task(self._end_streams())
        await self.server.serve_until_signal()
        await ending

    async def close(self) -> None:
        """Releases what `start` took, also when that failed."""
        await self._hub.stop()
        await self._store.close()
        await self.server.tracing.close()

    async def _end_streams(self) -> None:
        """Sync streams do not end by themselves; without this a drain would take its full limit."""
        await self.server.draining.wait()
        await self._hub.stop()


async def serve(options: LookaheadSettings) -> None:
    """Runs until SIGTERM or SIGINT."""
    pod = LookaheadPod(options)
    try:
        await pod.start()
        await pod.run()
    finally:
        await pod.close()


def main() -> None:
    options = settings.load(LookaheadSettings)
    logs.configure(options, "lookahead")
    log = structlog.get_logger("tandem.lookahead")
    if options.redis_address() is None:
        log.error("cannot start: no Redis; name one with --redis-url or REDIS_URL (`tandem up` runs one)")
        raise SystemExit(2)
    try:
        asyncio.run(serve(options))
    except OSError as error:
        log.error("cannot start", reason=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
