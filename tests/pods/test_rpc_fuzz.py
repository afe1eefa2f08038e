"""No message to a pod is a bug, ends the pod, or leaves something held."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from pod_fleet import Fleet, request, run_fleet
from rpc_fuzz import call_all
from tandem_proto.v1 import common_pb2, decode_pb2, prefill_pb2
from toy_models import prompt_of


def prefill_request(fleet: Fleet) -> prefill_pb2.PrefillRequest:
    """Its KV goes nowhere, as no block is wanted."""
    ticket = prefill_pb2.KvTicket(
        transfer_id=bytes(16),
        epoch=1,
        endpoint="tcp://127.0.0.1:9",
        public_key="x" * 40,
        layout_fingerprint=fleet.layout.fingerprint,
        layout_description=fleet.layout.description,
        credit_bytes=1 << 20,
    )
    return prefill_pb2.PrefillRequest(request_id="p", prompt_token_ids=prompt_of(50), ticket=ticket)


def services_of(module: ModuleType) -> list[ServiceDescriptor]:
    return list(module.DESCRIPTOR.services_by_name.values())


async def fuzz(tiny_model: Path, number: int, seed: int) -> None:
    async with run_fleet(tiny_model) as fleet:
        honest = {
            "Decode": request("d", prompt_of(50), [fleet.prefill_target], max_tokens=4),
            "Prefill": prefill_request(fleet),
        }
        for target, services in (
            (fleet.decode_target, (*services_of(decode_pb2), *services_of(health_pb2))),
            (fleet.prefill_target, (*services_of(prefill_pb2), *services_of(reflection_pb2))),
        ):
            for service in services:
                async with grpc.aio.insecure_channel(target) as channel:
                    codes = await call_all(channel, service, honest, number, seed, endless=["Watch"])
                assert codes[grpc.StatusCode.OK], codes
                assert codes[grpc.StatusCode.INVALID_ARGUMENT], codes
        await fleet.assert_idle()


async def test_no_message_to_a_pod_is_a_bug(tiny_model: Path) -> None:
    await fuzz(tiny_model, 40, seed=0)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 9))
async def test_none_of_many_messages_to_a_pod_is_a_bug(tiny_model: Path, seed: int) -> None:
    await fuzz(tiny_model, 400, seed)


async def test_a_limit_of_tokens_may_be_larger_than_any_context(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        call = fleet.decode.Decode(request("d", prompt_of(50), [], max_tokens=2**32 - 1))
        responses = [response async for response in call]
        assert responses[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
        await fleet.assert_idle()
