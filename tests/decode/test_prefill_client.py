"""The client of prefill pods: one channel for all calls to a pod, closed when it is no longer used."""

from collections.abc import AsyncIterator

import grpc
import pytest
from fake_pods import FakePod
from tandem_decode.prefill_client import PrefillClient
from tandem_proto.v1 import prefill_pb2
from tandem_service.channels import open_channel
from waiting import pause_async, until

REQUEST = prefill_pb2.PrefillRequest(request_id="r")


class Channels:
    """Makes real channels and remembers them."""

    def __init__(self) -> None:
        self.made: list[grpc.aio.Channel] = []

    def __call__(self, target: str) -> grpc.aio.Channel:
        self.made.append(open_channel(target))
        return self.made[-1]

    def are_closed(self) -> list[bool]:
        return [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in self.made]


@pytest.fixture
async def pod() -> AsyncIterator[FakePod]:
    pod = FakePod()
    await pod.start()
    yield pod
    await pod.stop()


@pytest.fixture
def channels() -> Channels:
    return Channels()


@pytest.fixture
async def client(channels: Channels) -> AsyncIterator[PrefillClient]:
    client = PrefillClient(channels, idle_channel_s=0.5)
    yield client
    await client.close()
    assert all(channels.are_closed())


async def _to_end(call) -> list[str]:
    return [response.WhichOneof("event") async for response in call]


async def test_a_channel_is_used_again_and_closed_when_it_has_been_unused_for_long(pod, client, channels):
    pod.gate.set()
    for _ in range(3):
        assert await _to_end(client.prefill(pod.target, REQUEST)) == ["progress", "finished"]
        await pause_async(0.2)
    assert channels.are_closed() == [False], "0.6 s after the first call and 0.2 s after the last"
    await until(lambda: channels.are_closed() == [True])
    assert await _to_end(client.prefill(pod.target, REQUEST)) == ["progress", "finished"]
    assert channels.are_closed() == [True, False]


async def test_a_channel_is_not_closed_while_a_call_is_on_it(pod, client, channels):
    long = client.prefill(pod.target, REQUEST)
    assert (await long.read()).HasField("progress")
    short = client.prefill(pod.target, REQUEST)
    assert (await short.read()).HasField("progress")
    short.cancel()
    await pause_async(0.8)
    assert channels.are_closed() == [False]
    pod.gate.set()
    assert (await long.read()).HasField("finished")
    assert await long.code() is grpc.StatusCode.OK
    await until(lambda: channels.are_closed() == [True])


async def test_channels_to_pods_that_have_gone_are_closed_too(client, channels):
    for port in range(1, 5):
        with pytest.raises(grpc.aio.AioRpcError):
            await _to_end(client.prefill(f"127.0.0.1:{port}", REQUEST))
    await until(lambda: channels.are_closed() == [True] * 4)


async def test_a_call_that_is_dropped_before_it_begins_does_not_keep_its_channel(pod, client, channels):
    client.prefill(pod.target, REQUEST).cancel()
    await until(lambda: channels.are_closed() == [True])


async def test_closing_the_client_ends_its_calls(pod, client, channels):
    call = client.prefill(pod.target, REQUEST)
    await call.read()
    await client.close()
    assert call.done()
    assert channels.are_closed() == [True]


def test_a_pod_that_failed_comes_last_until_one_request_has_tried_it(client, monkeypatch):
    now = 100.0
    monkeypatch.setattr("tandem_decode.prefill_client.time.monotonic", lambda: now)
    client.failed("a")
    assert client.in_order(["a", "b", "c"]) == ["b", "c", "a"]
    now += 1.1
    assert client.in_order(["a", "b"]) == ["a", "b"], "one request tries it"
    assert client.in_order(["a", "b"]) == ["b", "a"], "the others wait for what becomes of that"
    client.failed("a")
    now += 1.1
    assert client.in_order(["a", "b"]) == ["b", "a"], "the second pause is longer"
    now += 1.0
    assert client.in_order(["a", "b"]) == ["a", "b"]
    client.succeeded("a")
    assert client.in_order(["a", "b"]) == client.in_order(["a", "b"]) == ["a", "b"]


def test_a_pod_that_fails_is_asked_twice_a_minute_at_last(client, monkeypatch):
    now, tries = 0.0, 0
    monkeypatch.setattr("tandem_decode.prefill_client.time.monotonic", lambda: now)
    for now in range(1000):  # noqa: B007  (read by the clock)
        if client.in_order(["broken", "good"])[0] == "broken":
            tries += 1
            client.failed("broken")
    assert 30 <= tries <= 40
