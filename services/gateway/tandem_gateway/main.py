"""`tandem-gateway`: assembles the gateway process, starts both servers and drains them after a signal.

GatewayProcess(settings)  reads model folder and keys; raises ModelLoadError, KeyFileError, SloFileError
await start()             both ports are bound, pods are polled
await serve_until_signal()
    ready at once, SERVING while a decode pod is healthy; SIGTERM drains gRPC and HTTP concurrently
"""

from __future__ import annotations

import asyncio
import math
import sys
import time

import structlog
from starlette.datastructures import Headers
from tandem_core.errors import ModelLoadError
from tandem_core.model.tokenizer import Tokenizer
from tandem_proto.v1 import gateway_pb2_grpc
from tandem_service import logs
from tandem_service.descriptors import raise_descriptor_limit
from tandem_service.discovery import Discovery
from tandem_service.interceptors import Gate
from tandem_service.priority import change_nice, wait_for_offers
from tandem_service.server import PodServer
from tandem_service.settings import load
from tandem_service.slo_file import SloFileError, load_slo_classes
from tandem_service.tasks import end_tasks
from tandem_service.tls import is_loopback

from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.admission.quotas import OpenCalls
from tandem_gateway.answers.answer_store import AnswerStore, model_key
from tandem_gateway.answers.answers import Answers
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_gateway.auth import ApiKeys, KeyFileError, authorization
from tandem_gateway.call.gateway import Gateway, max_message_bytes
from tandem_gateway.call.relay import Relay
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.sampler import Sampler
from tandem_gateway.edge.grpc_api import SERVICE_NAME, STATUS_CODES, GatewayServicer, caller_of
from tandem_gateway.edge.http_app import make_app
from tandem_gateway.edge.http_server import HttpServer
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Fleet, Role
from tandem_gateway.fleet.routing import Router
from tandem_gateway.fleet.unloaded import kept_unloaded
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.settings import GatewaySettings

#: Reserved at the end of a drain for the last events of streams that did not finish.
_LAST_EVENTS_S = 1.0
#: Open files in addition to the connections of clients: pods, Redis, the metrics port, the model.
_OTHER_DESCRIPTORS = 72
#: Shortest time between two updates of the predicted TTFT in the metrics.
_SHOW_EVERY_S = 1.0


class GatewayProcess:
    """Create it inside a running event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        tokenizer = Tokenizer(settings.model, settings.chat_template)
        tokenizer.manifest = tokenizer.manifest.limited_to(settings.max_model_len)
        tokenizer.prepare_to_encode()
        keys = ApiKeys.load(settings.api_keys_file, load_slo_classes(settings.slo_classes_file))
        self._keys = keys
        calls = OpenCalls(settings)
        max_connections = _within_descriptors(settings.max_connections)
        tls = settings.public_tls()
        if tls is None and settings.api_keys_file is not None and not is_loopback(settings.host):
            structlog.get_logger("tandem.gateway").warning(
                "keys and texts are sent unencrypted unless a proxy on this machine terminates TLS; "
                "give --tls-cert and --tls-key",
                host=settings.host,
            )
        self.server = PodServer(
            settings,
            role="gateway",
            service_names=[SERVICE_NAME],
            status_codes=STATUS_CODES,
            max_request_bytes=min(settings.max_body_bytes, max_message_bytes(tokenizer, is_json=False)),
            gate=Gate(lambda metadata: calls.hold(caller_of(keys, metadata)), settings.read_timeout_s),
            credentials=None if tls is None else tls.server_credentials(),
            max_connections=max_connections,
            max_connection_age_s=settings.max_connection_age_s,
        )
        # It is ready without pods: it queues requests, or refuses them with a retry-after.
        self.server.is_ready = lambda: not self.server.draining.is_set()
        metrics = GatewayMetrics(
            self.server.registry, model_name=tokenizer.manifest.name, slo_classes=keys.slo_classes
        )
        self.fleet = Fleet(
            {Role.DECODE: Discovery(settings.decode), Role.PREFILL: Discovery(settings.prefill)},
            model_revision=tokenizer.manifest.revision,
            pod_tls=settings.pod_tls(),
            poll_interval_s=settings.poll_interval_s,
        )
        lengths = OutputLengths()
        router = Router(self.fleet, lengths)
        admission = Admission(
            Forecaster(
                router,
                lengths,
                first_confidence=settings.slo_ttft_confidence,
                end_confidence=settings.slo_end_confidence,
            ),
            max_in_flight=settings.max_in_flight,
            max_queue=settings.max_queue,
            slack=settings.slo_slack,
        )
        metrics.watch(admission, self.fleet)
        self.metrics, self._admission = metrics, admission
        self._max_tokens = tokenizer.manifest.max_model_len
        #: Roles that had healthy pods when objectives without load were last logged.
        self._logged_roles: set[Role] = set()
        history, ended = History(), EndedRequests()
        self._sampler = Sampler(history, metrics, admission, self.fleet, ended)
        self.gateway = Gateway(
            tokenizer=tokenizer,
            fleet=self.fleet,
            admission=admission,
            relay=Relay(self.fleet, router, metrics, failover_wait_s=settings.failover_wait_s),
            metrics=metrics,
            ended=ended,
            settings=settings,
            tracing=self.server.tracing,
        )
        keys.on_refusal = self.gateway.turned_away
        address = settings.redis_address() if settings.resume_ttl_s else None
        self.store = None
        if address is not None:
            self.store = AnswerStore(
                address,
                model=model_key(tokenizer.manifest),
                ttl_s=settings.resume_ttl_s,
                longest_s=settings.request_timeout_s,
            )
            metrics.watch_redis(lambda: self.store is not None and self.store.is_connected)
        self._answers = Answers(
            self.gateway.run,
            metrics,
            self.store,
            kept=KeptAnswers(
                ttl_s=settings.resume_ttl_s,
                max_bytes=settings.resume_max_bytes,
                tenant_bytes=settings.tenant_answer_bytes(),
            ),
            request_timeout_s=settings.request_timeout_s,
        )
        self._answers_ended = asyncio.Event()
        self.server.hand_over = self._end_answers
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(  # type: ignore[no-untyped-call]
            GatewayServicer(self.gateway, self._answers, keys), self.server.grpc_server
        )
        app = make_app(self.gateway, self._answers, keys, calls, history, self.server.registry)
        self._http = HttpServer(
            app,
            settings.host,
            settings.http_port,
            is_known=lambda scope: (
                scope["method"] == "POST" and keys.is_known(authorization(Headers(scope=scope)))
            ),
            max_connections=max_connections,
            max_connection_age_s=settings.max_connection_age_s,
            header_timeout_s=settings.read_timeout_s,
            tls=None if tls is None else tls.http_context(),
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def grpc_port(self) -> int:
        return self.server.port

    @property
    def http_port(self) -> int:
        return self._http.port

    @property
    def metrics_port(self) -> int | None:
        return self.server.metrics_port

    async def start(self) -> None:
        """Raises OSError, with the remedy, when a port is taken."""
        structlog.get_logger("tandem.gateway").info("who may call", keys=self._keys.described())
        await self.fleet.start()
        await self._answers.start()
        await self.server.start()
        await self._http.start()
        self._tasks = [asyncio.create_task(self._follow_fleet()), asyncio.create_task(self._stop_http())]
        self._background = [
            asyncio.create_task(self._sampler.run()),
            asyncio.create_task(self._keys.follow()),
        ]

    async def serve_until_signal(self) -> None:
        await self.server.serve_until_signal()
        await self._close()

    async def stop(self) -> None:
        """Stops as after a signal."""
        await self.server.stop()
        await self._close()

    async def _follow_fleet(self) -> None:
        """Updates the health check, and the predictions in metrics and log."""
        log = structlog.get_logger("tandem.gateway")
        shown_at = -math.inf
        while not self.server.draining.is_set():
            try:
                self.server.set_serving(bool(self.fleet.healthy(Role.DECODE)))
                # Pods report after each step, and a prediction takes up to a millisecond.
                if (now := time.monotonic()) >= shown_at + _SHOW_EVERY_S:
                    shown_at = now
                    self.metrics.show_prediction(self._admission)
                self._log_unloaded(log)
            except Exception:
                # Without this the health check would keep its last answer forever.
                log.exception("the state of the fleet could not be shown")
            await self.fleet.wait_for_change(self._settings.poll_interval_s)

    def _log_unloaded(self, log: structlog.stdlib.BoundLogger) -> None:
        """Logs which objectives can be met without load, once all listed roles have healthy pods."""
        roles = {role for role in Role if self.fleet.healthy(role)}
        if roles != {pod.role for pod in self.fleet.pods()} or roles <= self._logged_roles:
            return
        kept = kept_unloaded(self.fleet, self.metrics.slo_classes, self._max_tokens)
        if kept is not None:
            self._logged_roles = roles
            for name, objectives in kept.items():
                log.info("objectives without load", slo_class=name, **objectives)

    async def _stop_http(self) -> None:
        await self.server.draining.wait()
        self._http.close_after_responses()
        deadline = time.monotonic() + self._settings.drain_s
        # Until then new requests get a 503, which clients can distinguish from an outage.
        await self._answers_ended.wait()
        await self._http.stop(max(0.0, deadline - time.monotonic()))

    async def _end_answers(self) -> None:
        """Waits for running answers. Those that still run shortly before the end of the drain, or at a second
        signal, end with an error that names the remedy."""
        try:
            drain_s = self._settings.drain_s
            async with asyncio.timeout(max(0.0, drain_s - min(_LAST_EVENTS_S, drain_s / 2))):
                await self._answers.drain()
        except TimeoutError:
            pass
        finally:
            self._answers.stop()
            self._answers_ended.set()

    async def _close(self) -> None:
        await end_tasks(self._background)
        await asyncio.gather(*self._tasks)
        await self._answers.close()
        await self.fleet.close()
        await self.server.tracing.close()


def _within_descriptors(max_connections: int) -> int:
    """The limit of connections of each public port, lower than the setting where the process may open too few
    files."""
    free = raise_descriptor_limit() - _OTHER_DESCRIPTORS
    # A quarter more for health checks on the HTTP port: nine quarters of the limit.
    limit = max(min(max_connections, free * 4 // 9), 1)
    if limit < max_connections:
        structlog.get_logger("tandem.gateway").warning(
            "this process may open too few files for --max-connections; raise the limit (ulimit -n)",
            max_connections=limit,
        )
    return limit


async def _serve(settings: GatewaySettings) -> None:
    process = GatewayProcess(settings)
    await process.start()
    await process.serve_until_signal()


def main() -> None:
    """Exit codes: 0 after a signal, 2 when a setting, the model folder, the keys or a port is wrong."""
    settings = load(GatewaySettings)
    logs.configure(settings, "gateway")
    change_nice(settings.nice)
    if settings.nice:
        wait_for_offers()
    try:
        asyncio.run(_serve(settings))
    except (ModelLoadError, KeyFileError, SloFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
