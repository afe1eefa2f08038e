"""The life of a pod's gRPC server.

PodServer(...)            NOT_SERVING; add servicers to `.grpc_server`
await start()             bound: `.port`, `.metrics_port` are known; health and reflection answer
set_serving(True)         when the model is loaded
await serve_until_signal()
    SIGTERM / SIGINT      NOT_SERVING, `.draining` is set, `.hand_over` runs if there is one;
                          then no new calls, and running streams finish. Both together take at most `drain_s`;
                          what still runs is cancelled
    a second signal       cancels them at once
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from tandem_service.channels import MAX_MESSAGE_BYTES, server_options
from tandem_service.descriptors import raise_descriptor_limit
from tandem_service.discovery import Target
from tandem_service.health import HealthServicer
from tandem_service.interceptors import CallInterceptor, Gate
from tandem_service.metrics import MetricsServer, new_registry
from tandem_service.settings import CommonSettings
from tandem_service.tls import Role
from tandem_service.tracing import start_tracing


class PodServer:
    """A grpc.aio server with health, reflection, metrics, request ids and a graceful stop.

    `service_names` are full names such as "tandem.v1.DecodeService". `status_codes` maps the service's
    exceptions to gRPC statuses, by nearest base class; see `interceptors`. A request of more than
    `max_request_bytes` fails with RESOURCE_EXHAUSTED. Create and use it inside one running event loop.

    `callers` are the roles that may call each method ("Decode"), where the settings name certificates; health
    and reflection answer every holder of one. None: a public server, which pods' certificates do not concern;
    `credentials` are those of its own TLS, and `gate` decides which calls it receives.
    """

    def __init__(
        self,
        settings: CommonSettings,
        *,
        role: str,
        service_names: Sequence[str],
        status_codes: Mapping[type[Exception], grpc.StatusCode],
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        callers: Mapping[str, Collection[Role]] | None = None,
        gate: Gate | None = None,
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int | None = None,
        max_connection_age_s: float = 0.0,
    ) -> None:
        raise_descriptor_limit()
        self._settings = settings
        self._tls = settings.pod_tls() if callers is not None else None
        self._credentials = credentials if self._tls is None else self._tls.server_credentials()
        self._log = structlog.get_logger("tandem.server").bind(role=role)
        #: Register the role's metrics here.
        self.registry: CollectorRegistry = new_registry()
        self.grpc_server: grpc.aio.Server = grpc.aio.server(
            interceptors=(
                CallInterceptor(
                    status_codes, self.registry, callers if self._tls is not None else None, gate
                ),
            ),
            options=server_options(max_request_bytes, max_connections, max_connection_age_s),
        )
        #: Begins the traces of this process; `close` it after the last request.
        self.tracing = start_tracing(role, settings.pod_id)
        #: Set when the drain begins; a servicer with endless streams must end them then.
        self.draining = asyncio.Event()
        #: What /readyz says: whether this process should be sent calls.
        self.is_ready: Callable[[], bool] = lambda: self._health.is_serving
        #: Awaited first in a drain, while new calls are still taken: other pods fetch what this one holds.
        self.hand_over: Callable[[], Awaitable[None]] | None = None
        #: Bound ports, known after `start`.
        self.port = 0
        self.metrics_port: int | None = None
        self._metrics_server: MetricsServer | None = None
        self._stop_requested = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._health = HealthServicer(service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc_server
        )

    async def start(self) -> None:
        """Binds the ports and starts serving. Raises OSError, with the remedy, when a port is taken."""
        settings = self._settings
        address = str(Target(settings.host, settings.listen_port()))
        try:
            if self._credentials is None:
                self.port = self.grpc_server.add_insecure_port(address)
            else:
                self.port = self.grpc_server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: the port is taken or the address is not this machine's; "
                "choose another with --port or --host"
            ) from error
        if settings.metrics_port is not None:
            try:
                self._metrics_server = MetricsServer(
                    self.registry,
                    settings.host,
                    settings.metrics_port,
                    is_ready=lambda: self.is_ready(),
                    is_serving=lambda: self._health.is_serving,
                )
            except OSError as error:
                raise OSError(
                    f"cannot serve metrics on {settings.host}:{settings.metrics_port} ({error.strerror}); "
                    "choose another port with --metrics-port"
                ) from error
            self.metrics_port = self._metrics_server.port
        await self.grpc_server.start()
        self._log.info("listening", host=settings.host, port=self.port, metrics_port=self.metrics_port)

    def set_serving(self, serving: bool) -> None:
        """Sets what grpc.health.v1 answers, for the server and for each of its services."""
        self._health.set_serving(serving)

    def request_stop(self) -> None:
        """Signal handler: the first call begins the drain, the second ends it at once."""
        if self._stop_requested.is_set():
            self._stop_at_once.set()
        self._stop_requested.set()

    async def serve_until_signal(self) -> None:
        """Waits for SIGTERM, SIGINT or `request_stop`, then drains and stops."""
        # Objects loaded by now stay alive; full collections that traverse them stop streams for 25 ms.
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for signum in signals:
            loop.add_signal_handler(signum, self.request_stop)
        try:
            await self._stop_requested.wait()
            await self.stop()
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)

    async def stop(self) -> None:
        """Reports NOT_SERVING, lets running calls finish for at most `drain_s` seconds, cancels the rest
        and closes. Does nothing when called again."""
        if self.draining.is_set():
            return
        self._stop_requested.set()
        self._health.close()
        self.draining.set()
        self._log.info("draining", drain_s=self._settings.drain_s)
        deadline = time.monotonic() + self._settings.drain_s
        hurry = asyncio.ensure_future(self._stop_at_once.wait())
        if self.hand_over is not None:
            handing_over = asyncio.ensure_future(self.hand_over())
            await asyncio.wait(
                (handing_over, hurry),
                timeout=self._settings.drain_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            handing_over.cancel()
        drained = asyncio.ensure_future(self.grpc_server.stop(max(0.0, deadline - time.monotonic())))
        try:
            await asyncio.wait((drained, hurry), return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                await self.grpc_server.stop(None)
            await drained
        finally:
            hurry.cancel()
            if self._metrics_server is not None:
                await asyncio.to_thread(self._metrics_server.close)
        self._log.info("stopped")
