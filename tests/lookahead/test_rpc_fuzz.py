"""No message to the lookahead service is a bug."""

import grpc
import grpc.aio
import pytest
from rpc_fuzz import call_all
from tandem_proto.v1 import lookahead_pb2 as pb

NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")
HONEST = {
    "Sync": pb.SyncRequest(hello=pb.SyncHello(namespace=NAMESPACE, pod_id="p")),
    "ExportNamespace": pb.ExportNamespaceRequest(namespace=NAMESPACE),
    "PurgeTenant": pb.PurgeTenantRequest(tenant="t"),
}


async def fuzz(fleet, number: int, seed: int) -> None:
    service = await fleet.service()
    descriptor = pb.DESCRIPTOR.services_by_name["LookaheadService"]
    async with grpc.aio.insecure_channel(service.target) as channel:
        codes = await call_all(channel, descriptor, HONEST, number, seed, endless=["Sync"])
    assert codes[grpc.StatusCode.OK], codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT], codes


async def test_no_message_to_the_lookahead_service_is_a_bug(fleet):
    await fuzz(fleet, 60, seed=0)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 9))
async def test_none_of_many_messages_to_the_lookahead_service_is_a_bug(fleet, seed: int):
    await fuzz(fleet, 500, seed)
