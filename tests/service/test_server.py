# ruff: noqa: N802  (the methods are named by the .proto)
"""The pod's server: health, reflection, drain, metrics, request ids, exceptions as statuses.

A real server on loopback; its one servicer is GatewayService, of which a unary and a streaming method do.
"""

import asyncio
import gc
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tandem_proto.v1 import gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.health import HealthServicer
from tandem_service.interceptors import REQUEST_ID_KEY, current_request_id
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings
from waiting import pause_async, run_ready_tasks, until

SERVICE = "tandem.v1.GatewayService"


class BaseError(Exception):
    pass


class NarrowError(BaseError):
    pass


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Chat streams `chunks` texts, one per `interval_s`; ListModels raises `error` or names the request.

    `ended` is set when nothing of a Chat is left. Not FakeGateway: the server under test runs coroutines.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.chunks = 3
        self.interval_s = 0.0
        self.text = ""
        self.num_sent = 0
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def ListModels(self, request, context):
        if self.error is not None:
            raise self.error
        model = gateway_pb2.ModelInfo(name=current_request_id())
        return gateway_pb2.ListModelsResponse(models=[model])

    async def GetFleetStatus(self, request, context):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "said by the handler")

    async def Chat(self, request, context):
        if self.error is not None:
            raise self.error
        self.started.set()
        try:
            for index in range(self.chunks):
                await pause_async(self.interval_s)
                self.num_sent = index
                yield gateway_pb2.ChatResponse(chunk=gateway_pb2.GeneratedChunk(text=self.text or str(index)))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.ended.set()


class Running:
    def __init__(self, server: PodServer, servicer: ScriptedGateway, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.servicer = servicer
        self.channel = channel
        self.stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def status(self, service: str = SERVICE) -> str:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[Running]:
    server = PodServer(
        PodSettings(**{"drain_s": 0.0, **settings}),
        role="gateway",
        service_names=[SERVICE],
        status_codes={BaseError: grpc.StatusCode.INVALID_ARGUMENT},
    )
    servicer = ScriptedGateway()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    try:
        yield Running(server, servicer, channel)
    finally:
        await channel.close()
        await server.stop()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def scrape(pod: Running) -> str:
    return (await asyncio.to_thread(get, pod, "/metrics"))[1]


def get(pod: Running, path: str) -> tuple[int, str]:
    """GET from the metrics port."""
    url = f"http://127.0.0.1:{pod.server.metrics_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_health_starts_not_serving_and_follows_set_serving():
    async with running() as pod:
        assert await pod.status() == "NOT_SERVING"
        assert await pod.status("") == "NOT_SERVING"
        pod.server.set_serving(True)
        assert await pod.status() == "SERVING"
        assert await pod.status("") == "SERVING"
        listed = await pod.health.List(health_pb2.HealthListRequest())
        assert {name: reply.status for name, reply in listed.statuses.items()} == {"": 1, SERVICE: 1}
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await pod.status("no.such.Service")
        assert info.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_health_watcher_gets_each_change_and_the_end():
    async with running(drain_s=5.0) as pod:
        watch = pod.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        seen = [(await watch.read()).status]
        pod.server.set_serving(True)
        seen.append((await watch.read()).status)
        started = time.monotonic()
        stopping = asyncio.create_task(pod.server.stop())
        seen.append((await watch.read()).status)
        assert await watch.read() is grpc.aio.EOF
        await stopping
        status = health_pb2.HealthCheckResponse
        assert seen == [status.NOT_SERVING, status.SERVING, status.NOT_SERVING]
        assert time.monotonic() - started < 3.0, "a watcher must not hold up the drain"


async def test_a_health_watcher_gets_an_end_that_occurs_during_another_message():
    health = HealthServicer([SERVICE])
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), None)
    status = health_pb2.HealthCheckResponse
    assert (await anext(watch)).status == status.NOT_SERVING
    health.set_serving(True)
    assert (await anext(watch)).status == status.SERVING
    health.close()
    assert [answer.status async for answer in watch] == [status.NOT_SERVING]


async def test_reflection_lists_the_services():
    async with running() as pod:
        stub = reflection_pb2_grpc.ServerReflectionStub(pod.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_sigterm_lets_a_running_stream_finish():
    async with running(drain_s=5.0) as pod:
        pod.servicer.interval_s = 0.1
        serving = asyncio.create_task(pod.server.serve_until_signal())
        call = pod.stub.Chat(gateway_pb2.ChatRequest())
        await pod.servicer.started.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert [message.chunk.text async for message in call] == ["0", "1", "2"]
        await asyncio.wait_for(serving, 3.0)
        assert not pod.servicer.cancelled.is_set()


async def test_a_stream_longer_than_the_drain_is_cancelled():
    async with running(drain_s=0.2) as pod:
        pod.servicer.interval_s = 30.0
        call = pod.stub.Chat(gateway_pb2.ChatRequest())
        await pod.servicer.started.wait()
        started = time.monotonic()
        await pod.server.stop()
        assert 0.15 < time.monotonic() - started < 3.0
        await asyncio.wait_for(pod.servicer.cancelled.wait(), 1.0)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()


async def test_a_second_signal_ends_the_drain():
    async with running(drain_s=30.0) as pod:
        pod.servicer.interval_s = 30.0
        serving = asyncio.create_task(pod.server.serve_until_signal())
        call = pod.stub.Chat(gateway_pb2.ChatRequest())
        await pod.servicer.started.wait()
        pod.server.request_stop()
        await pod.server.draining.wait()
        pod.server.request_stop()
        await asyncio.wait_for(serving, 3.0)
        assert pod.servicer.cancelled.is_set()
        call.cancel()


@pytest.mark.parametrize("error", [BaseError("top_p: 3 is out of range"), NarrowError("top_p: narrow")])
async def test_a_mapped_exception_becomes_its_status_with_its_message(error: Exception):
    async with running() as pod:
        pod.servicer.error = error
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await pod.stub.ListModels(gateway_pb2.ListModelsRequest())
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info.value.details() == str(error)


@pytest.mark.parametrize("method", ["a call", "a stream"])
async def test_an_exception_that_ends_a_call_is_freed_without_garbage_collection(
    method: str, no_garbage_collection: None
):
    async with running() as pod:
        pod.servicer.error = NarrowError("no")
        freed = weakref.ref(pod.servicer.error)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            if method == "a call":
                await pod.stub.ListModels(gateway_pb2.ListModelsRequest())
            else:
                await anext(aiter(pod.stub.Chat(gateway_pb2.ChatRequest())))
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info.value.details() == "no"
        pod.servicer.error = None
        await until(lambda: freed() is None)


async def test_an_unknown_exception_is_logged_with_its_traceback_and_not_sent():
    async with running() as pod:
        pod.servicer.error = RuntimeError("the secret path")
        with structlog.testing.capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as info:
            await pod.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=((REQUEST_ID_KEY, "req-7"),))
        assert info.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in info.value.details()
        assert "req-7" in info.value.details()
        logged = [entry for entry in logs if isinstance(entry.get("exc_info"), RuntimeError)]
        assert [str(entry["exc_info"]) for entry in logged] == ["the secret path"]


async def test_a_status_set_by_the_handler_is_sent():
    async with running() as pod:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await pod.stub.GetFleetStatus(gateway_pb2.GetFleetStatusRequest())
        assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert info.value.details() == "said by the handler"


async def test_cancellation_reaches_the_handler():
    async with running() as pod:
        pod.servicer.interval_s = 30.0
        call = pod.stub.Chat(gateway_pb2.ChatRequest())
        await pod.servicer.started.wait()
        call.cancel()
        await asyncio.wait_for(pod.servicer.cancelled.wait(), 1.0)


@pytest.mark.parametrize("ending", ["the client cancels", "the client's connection ends", "the pod stops"])
async def test_a_call_that_ends_while_a_response_waits_is_freed(ending: str, no_garbage_collection: None):
    """gRPC does not close the generator then, and an except clause of the handler sees no cancellation."""
    async with running() as pod:
        pod.servicer.chunks, pod.servicer.text = 1000, 500_000 * "x"
        with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
            call = pod.stub.Chat(gateway_pb2.ChatRequest(), metadata=((REQUEST_ID_KEY, "unread"),))
            await call.read()
            seen = -1
            while seen != pod.servicer.num_sent:
                seen = pod.servicer.num_sent
                await pause_async(0.1)
            assert 0 < seen < 999
            if ending == "the client cancels":
                call.cancel()
            elif ending == "the pod stops":
                await pod.server.stop()
            else:
                await pod.channel.close(None)
            await asyncio.wait_for(pod.servicer.ended.wait(), 1.0)
            await run_ready_tasks()
        assert not pod.servicer.cancelled.is_set()
        assert [(entry["code"], entry["request_id"]) for entry in logs if entry["event"] == "call"] == [
            ("CANCELLED", "unread")
        ]


#: Field 1 of ChatRequest, a string: three bytes that are no UTF-8.
NOT_UTF8 = b"\x0a\x03\xff\xfe\xfd"
#: Field 1 announces 127 bytes and has one.
CUT_SHORT = b"\x0a\x7fx"


@pytest.mark.parametrize(
    ("method", "raw"), [("Chat", NOT_UTF8), ("Chat", CUT_SHORT), ("ListModels", CUT_SHORT)]
)
async def test_an_undecodable_message_is_invalid_argument_and_counted(method: str, raw: bytes):
    async with running(metrics_port=0) as pod:
        path = f"/{SERVICE}/{method}"
        with structlog.testing.capture_logs() as logs:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                if method == "Chat":
                    async for _ in pod.channel.unary_stream(path)(raw):
                        pass
                else:
                    await pod.channel.unary_unary(path)(raw)
            # The client may receive the status before the server logs the call.
            await until(lambda: any(entry["event"] == "call" for entry in logs))
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info.value.details().startswith("the request is not a valid protobuf message")
        assert "UTF-8" in info.value.details()
        assert not pod.servicer.started.is_set(), "the handler must not see it"
        assert [entry["code"] for entry in logs if entry["event"] == "call"] == ["INVALID_ARGUMENT"]
        assert f'tandem_grpc_calls_total{{code="INVALID_ARGUMENT",method="{path}"}} 1.0' in await scrape(pod)
        assert len((await pod.stub.ListModels(gateway_pb2.ListModelsRequest())).models) == 1


async def test_an_undecodable_message_ends_a_request_stream():
    async with running() as pod:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = pod.channel.stream_stream(method)(iter([CUT_SHORT]))
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await call.read()
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await pod.status() == "NOT_SERVING", "the server goes on"


async def test_a_request_id_is_kept_or_created_and_returned():
    async with running() as pod:
        call = pod.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=((REQUEST_ID_KEY, "abc-1"),))
        assert (await call).models[0].name == "abc-1"
        assert dict(await call.initial_metadata())[REQUEST_ID_KEY] == "abc-1"
        for given in ((), ((REQUEST_ID_KEY, 'forged" level=error'),)):
            call = pod.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=given)
            made = (await call).models[0].name
            assert len(made) == 32
            assert dict(await call.initial_metadata())[REQUEST_ID_KEY] == made


async def test_metrics_are_served_and_count_calls_by_status():
    async with running(metrics_port=0) as pod:
        await pod.stub.ListModels(gateway_pb2.ListModelsRequest())
        pod.servicer.error = BaseError("no")
        with pytest.raises(grpc.aio.AioRpcError):
            await pod.stub.ListModels(gateway_pb2.ListModelsRequest())
        text = await scrape(pod)
        method = 'method="/tandem.v1.GatewayService/ListModels"'
        assert f'tandem_grpc_calls_total{{code="OK",{method}}} 1.0' in text
        assert f'tandem_grpc_calls_total{{code="INVALID_ARGUMENT",{method}}} 1.0' in text
        assert f'le="2.5",{method}}}' in text
        assert "process_cpu_seconds_total" in text


async def test_a_pod_reports_readiness_and_liveness_over_http():
    async with running(metrics_port=0) as pod:
        assert await asyncio.to_thread(get, pod, "/readyz") == (503, "503 Service Unavailable\n")
        assert await asyncio.to_thread(get, pod, "/livez") == (200, "200 OK\n")
        pod.server.set_serving(True)
        assert await asyncio.to_thread(get, pod, "/readyz") == (200, "200 OK\n")
        hanging = threading.Event()
        asking = asyncio.create_task(
            asyncio.to_thread(lambda: hanging.wait() and [get(pod, path) for path in ("/livez", "/readyz")])
        )
        await asyncio.sleep(0.05)
        hanging.set()
        time.sleep(3.0)  # noqa: ASYNC251  (the event loop hangs)
        assert [status for status, _ in await asking] == [503, 503]
        assert (await asyncio.to_thread(get, pod, "/livez"))[0] == 200


async def test_a_taken_port_is_an_error_with_a_remedy():
    async with running() as pod:
        second = PodServer(
            PodSettings(port=pod.server.port), role="gateway", service_names=[], status_codes={}
        )
        with pytest.raises(OSError, match="--port"):
            await second.start()


async def test_probes_are_answered_while_idle_connections_to_the_metrics_port_come() -> None:
    async with running(metrics_port=0) as pod:
        before = threading.active_count()
        strangers = [socket.create_connection(("127.0.0.1", pod.server.metrics_port)) for _ in range(100)]
        try:
            assert (await asyncio.to_thread(get, pod, "/livez"))[0] == 200
            assert threading.active_count() - before <= 40
        finally:
            for stranger in strangers:
                stranger.close()
