"""Entry point of the lookahead service: `tandem-lookahead`.

Serves as soon as it can answer a pod; Redis may come later, go and return.
"""

from __future__ import annotations

import asyncio
import os

import structlog
from tandem_core.model.registry import cache_root
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service import logs, settings
from tandem_service.server import PodServer

from tandem_lookahead.connection import RedisAddress
from tandem_lookahead.hub import LookaheadHub
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.redis_process import RedisProcess
from tandem_lookahead.servicer import SERVICE_NAME, STATUS_CODES, LookaheadServicer
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import RedisStore


class LookaheadPod:
    """The whole service in one object: Redis (ours or given), hub and gRPC server."""

    def __init__(self, options: LookaheadSettings, *, redis_url: str) -> None:
        """`redis_url` empty: a server of our own is started. Make it inside a running event loop."""
        self.server = PodServer(
            options, role="lookahead", service_names=[SERVICE_NAME], status_codes=STATUS_CODES
        )
        #: None when Redis is somebody else's.
        self.redis = None if redis_url else RedisProcess(options.data_dir or cache_root() / "lookahead")
        self._options = options
        self._redis_url = redis_url
        self._hub: LookaheadHub | None = None
        self._store: RedisStore | None = None

    async def start(self) -> None:
        """Raises OSError, with the remedy, when the data folder or a port is taken."""
        if self.redis is not None:
            await self.redis.start()
        url = self._redis_url or (self.redis.url if self.redis is not None else "")
        metrics = LookaheadMetrics(self.server.registry)
        options = self._options
        address = RedisAddress(url, options.redis_ca_file, options.redis_cert_file, options.redis_key_file)
        self._store = RedisStore(address, stream_length=options.stream_length)
        self._hub = LookaheadHub(self._store, self._options, metrics)
        servicer = LookaheadServicer(
            self._hub,
            metrics,
            pod_id=self._options.pod_id,
            redis_kind="external" if self.redis is None else self.redis.kind,
        )
        lookahead_pb2_grpc.add_LookaheadServiceServicer_to_server(  # type: ignore[no-untyped-call]
            servicer, self.server.grpc_server
        )
        await self._hub.start()
        await self.server.start()
        self.server.set_serving(True)

    async def run(self) -> None:
        """Serves until a signal (or `server.request_stop`), then ends the pods' streams and drains."""
        ending = asyncio.create_task(self._end_streams())
        await self.server.serve_until_signal()
        await ending

    async def close(self) -> None:
        """Gives back what `start` took, also when that failed half-way."""
        if self._hub is not None:
            await self._hub.stop()
        if self._store is not None:
            await self._store.close()
        if self.redis is not None:
            await self.redis.stop()

    async def _end_streams(self) -> None:
        """Sync streams have no end of their own; without this a drain would last its full limit."""
        await self.server.draining.wait()
        if self._hub is not None:
            await self._hub.stop()


async def serve(options: LookaheadSettings) -> None:
    """Runs until SIGTERM or SIGINT."""
    pod = LookaheadPod(options, redis_url=options.redis_url or os.environ.get("REDIS_URL", ""))
    try:
        await pod.start()
        await pod.run()
    finally:
        await pod.close()


def main() -> None:
    options = settings.load(LookaheadSettings)
    logs.configure(options, "lookahead")
    try:
        asyncio.run(serve(options))
    except OSError as error:
        structlog.get_logger("tandem.lookahead").error("cannot start", reason=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
