"""No message to the gateway causes an internal error."""

import grpc
import pytest
from rpc_fuzz import call_all
from tandem_proto.v1 import common_pb2, gateway_pb2

SAMPLING = common_pb2.SamplingParams(max_tokens=4, temperature=0.5, seed=1)
HONEST = {
    "Chat": gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")], sampling=SAMPLING
    ),
    "Generate": gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5, 6, 7]), sampling=SAMPLING),
}


async def fuzz(pods, gateway, number: int, seed: int) -> None:
    front = await gateway(await pods())
    service = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
    codes = await call_all(front.channel, service, HONEST, number, seed)
    assert codes[grpc.StatusCode.OK], codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT], codes
    await front.until_metric("tandem_requests_in_flight", 0)


async def test_random_messages_to_the_gateway_cause_no_internal_error(pods, gateway):
    await fuzz(pods, gateway, 100, seed=0)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 5))
async def test_many_random_messages_to_the_gateway_cause_no_internal_error(pods, gateway, seed: int):
    await fuzz(pods, gateway, 3000, seed)
