"""A gateway with pods from the API server of Kubernetes."""

from __future__ import annotations

import time

import pytest
from fake_pods import FakePod
from kubelet.api_stub import ENDPOINT_SLICES, ApiStub, endpoint, endpoint_slice
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until_async

REQUEST = gateway_pb2.ChatRequest(
    messages=[gateway_pb2.ChatMessage(role="user", content="hi")],
    sampling=common_pb2.SamplingParams(max_tokens=100),
)


@pytest.fixture
async def api(tmp_path, monkeypatch):
    stub = ApiStub()
    await stub.start()
    monkeypatch.setenv("KUBECONFIG", str(stub.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield stub
    await stub.stop()


def list_pod(api: ApiStub, pod: FakePod, **conditions: object) -> None:
    """Each in a Service of its own, since all have one address and two ports."""
    api.put(ENDPOINT_SLICES, endpoint_slice(pod.name, endpoint("127.0.0.1", **conditions)))


def entry(pod: FakePod) -> str:
    return f"k8s://{pod.name}:{pod.target.rpartition(':')[2]}"


@pytest.mark.long_turns("a client of Kubernetes reads this machine's certificate authorities")
async def test_a_terminating_pod_gets_no_new_requests_within_half_a_second(pods, gateway, api):
    a, b = await pods("a"), await pods("b")
    for pod in (a, b):
        list_pod(api, pod)
    # Health is polled once a second, so that what is measured is the watch.
    front = await gateway(a, b, decode=(entry(a), entry(b)), poll_interval_s=1.0)
    took = []
    for _ in range(5):
        list_pod(api, a, terminating=True)
        told_at = time.monotonic()
        await front.until_healthy(1)
        took.append(time.monotonic() - told_at)
        num_before = len(a.requests)
        for _ in range(3):
            assert [response async for response in front.grpc.Chat(REQUEST)]
        assert len(a.requests) == num_before
        list_pod(api, a)  # a new pod with its address
        await front.until_healthy(2)
    assert max(took) < 0.5


async def test_answers_of_a_terminating_pod_continue(pods, gateway, api):
    a = await pods("a", words=("x",) * 20, pause_s=0.05)
    list_pod(api, a)
    front = await gateway(a, decode=(entry(a),))
    responses = aiter(front.grpc.Chat(REQUEST))
    assert (await anext(responses)).chunk.text == "x"
    list_pod(api, a, terminating=True)
    await front.until_healthy(0)
    assert len([response async for response in responses]) == 20
    assert len(a.requests) == 1


async def test_a_pod_that_is_not_ready_gets_no_requests(pods, gateway, api):
    a = await pods("a")
    list_pod(api, a, ready=False)
    front = await gateway(decode=(entry(a),))

    async def cause() -> str:
        status = await front.grpc.GetFleetStatus(gateway_pb2.GetFleetStatusRequest())
        return status.pods[0].cause if status.pods else "not listed"

    async def is_withheld() -> bool:
        return await cause() == "it is not ready"

    await until_async(is_withheld)
    list_pod(api, a, zone="zone-a")

    async def is_healthy() -> bool:
        return await cause() == ""

    await until_async(is_healthy)
    status = await front.grpc.GetFleetStatus(gateway_pb2.GetFleetStatusRequest())
    assert status.pods[0].zone == "zone-a"


async def test_a_role_scaled_to_zero_serves_again_when_a_pod_appears(pods, gateway, api):
    a = await pods("a")
    list_pod(api, a)
    front = await gateway(a, decode=(entry(a),))
    api.delete(ENDPOINT_SLICES, "default", f"{a.name}-abcde")
    await front.until_healthy(0)
    status = await front.grpc.GetFleetStatus(gateway_pb2.GetFleetStatusRequest())
    assert not status.pods
    list_pod(api, a)
    assert [response async for response in front.grpc.Chat(REQUEST)], "the request waited for the pod"
