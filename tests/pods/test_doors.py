"""What pods refuse: callers of the wrong role, tickets that lead elsewhere, other tenants' cached prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from pod_fleet import request, run_fleet
from tandem_cli.up.up_plan import certificate_files
from tandem_core.model.manifest import ModelManifest
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_prefill.main import open_pod as open_prefill
from tandem_prefill.settings import PrefillSettings
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.tls import PodTls, Role
from toy_models import SIZES, prompt_of


async def receipt_of(decode: decode_pb2_grpc.DecodeServiceStub, message) -> common_pb2.Receipt:
    async for response in decode.Decode(message):
        if response.HasField("finished"):
            return response.finished.receipt
    raise AssertionError("the stream ended without a receipt")


def of_tenant(tenant: str, request_id: str, targets: list[str]) -> decode_pb2.DecodeRequest:
    message = request(request_id, prompt_of(200), targets, max_tokens=2)
    message.tenant = tenant
    return message


@pytest.mark.parametrize("computed_on", ["decode", "prefill"])
async def test_a_tenant_cannot_tell_what_another_has_sent(tiny_model: Path, computed_on: str) -> None:
    """The probe of a timing attack is whether the prompt is cached; no cached token, no lead."""
    async with run_fleet(tiny_model) as fleet:
        targets = [fleet.prefill_target] if computed_on == "prefill" else []
        seen = {}
        for tenant, request_id in (("victim", "a"), ("attacker", "b"), ("victim", "c")):
            receipt = await receipt_of(fleet.decode, of_tenant(tenant, request_id, targets))
            seen[request_id] = receipt.cached_tokens
            assert bool(receipt.prefill_pod) == (computed_on == "prefill" and request_id != "c")
        assert seen["a"] == seen["b"] == 0
        assert seen["c"] >= 192, "the tenant's own prompt is cached"
        assert await cached_on_prefill_pod(fleet.prefill, fleet.layout, "attacker") == (
            192 if computed_on == "prefill" else 0
        )
        assert await cached_on_prefill_pod(fleet.prefill, fleet.layout, "third") == 0


@pytest.mark.parametrize("computed_on", ["decode", "prefill"])
async def test_requests_with_another_cache_salt_share_no_prefix(tiny_model: Path, computed_on: str) -> None:
    async with run_fleet(tiny_model) as fleet:
        targets = [fleet.prefill_target] if computed_on == "prefill" else []
        seen = {}
        for salt, request_id in (("", "a"), ("s", "b"), ("t", "c"), ("s", "d"), ("", "e")):
            message = of_tenant("t", request_id, targets)
            message.cache_salt = salt
            receipt = await receipt_of(fleet.decode, message)
            seen[request_id] = receipt.cached_tokens
        assert [seen[name] >= 192 for name in "abcde"] == [False, False, False, True, True], seen


async def cached_on_prefill_pod(prefill: prefill_pb2_grpc.PrefillServiceStub, layout, tenant: str) -> int:
    """Cached tokens that a Prefill call of the tenant reports; the KV goes nowhere, as no block is wanted."""
    ticket = prefill_pb2.KvTicket(
        transfer_id=tenant.encode().ljust(16),
        epoch=1,
        endpoint="tcp://127.0.0.1:9",
        public_key="x" * 40,
        layout_fingerprint=layout.fingerprint,
        layout_description=layout.description,
        credit_bytes=1 << 20,
    )
    message = prefill_pb2.PrefillRequest(
        request_id=tenant, tenant=tenant, prompt_token_ids=prompt_of(200), ticket=ticket
    )
    async for response in prefill.Prefill(message):
        if response.HasField("finished"):
            return int(response.finished.cached_tokens)
    raise AssertionError("no first token")


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.7:9", "tcp://metadata.example:80"])
async def test_kv_goes_to_the_callers_host_only(tiny_model: Path, endpoint: str) -> None:
    async with run_fleet(tiny_model) as fleet:
        ticket = prefill_pb2.KvTicket(
            transfer_id=bytes(16),
            epoch=1,
            endpoint=endpoint,
            public_key="x" * 40,
            layout_fingerprint=fleet.layout.fingerprint,
            layout_description=fleet.layout.description,
            wanted_blocks=[prefill_pb2.KvBlocks(blocks=[0])],
            credit_bytes=1 << 20,
        )
        message = prefill_pb2.PrefillRequest(request_id="r", prompt_token_ids=prompt_of(200), ticket=ticket)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for _ in fleet.prefill.Prefill(message):
                pass
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ticket.endpoint" in info.value.details()
        assert "is not on the caller's host" in info.value.details()
        await fleet.assert_idle()


async def test_a_pod_copies_no_more_than_a_context_has(tiny_model: Path) -> None:
    """A ticket of 8 million blocks, 28 MB, silenced a prefill pod until its watchdog killed it."""
    async with run_fleet(tiny_model) as fleet:
        most = ModelManifest.read(tiny_model).max_model_len
        ticket = prefill_pb2.KvTicket(
            transfer_id=bytes(16),
            epoch=1,
            endpoint="tcp://127.0.0.1:9",
            public_key="x" * 40,
            layout_fingerprint=fleet.layout.fingerprint,
            layout_description=fleet.layout.description,
            wanted_blocks=[prefill_pb2.KvBlocks(blocks=range(most))],
            credit_bytes=1 << 20,
        )
        many_blocks = prefill_pb2.PrefillRequest(request_id="r", prompt_token_ids=[5], ticket=ticket)
        del ticket.wanted_blocks[:]
        long_prompt = prefill_pb2.PrefillRequest(prompt_token_ids=[5] * (most + 1), ticket=ticket)
        ticket.layout_fingerprint, ticket.layout_description = "x" * 100_000, "x=;" * 100_000
        other_layout = prefill_pb2.PrefillRequest(prompt_token_ids=[5], ticket=ticket)
        for message, named in (
            (many_blocks, "ticket.wanted_blocks"),
            (long_prompt, "prompt: has"),
            (other_layout, "layouts differ"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=named) as info:
                await anext(aiter(fleet.prefill.Prefill(message)))
            assert len(info.value.details()) < 10_000
        with pytest.raises(grpc.aio.AioRpcError, match="prompt: has"):
            await anext(aiter(fleet.decode.Decode(request("r", [5] * (most + 1), [], max_tokens=2))))
        await fleet.assert_idle()


@asynccontextmanager
async def stub_of(stub, port: int, folder: Path, caller: Role, role: Role) -> AsyncIterator:
    tls = PodTls(certificate_files(folder, caller))
    async with open_channel(f"127.0.0.1:{port}", tls, role) as channel:
        yield stub(channel)


async def test_with_tls_a_prompt_travels_and_only_the_right_roles_may_send_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    from tandem_cli.up import certificates

    certificates.prepare(tmp_path)

    def flags(role: Role) -> dict[str, object]:
        files = certificate_files(tmp_path, role)
        names = {"pod_tls_cert": files.cert, "pod_tls_key": files.key, "pod_tls_ca": files.ca}
        return {**SIZES, **names, "model": tiny_model}

    decode = DecodeSettings(
        local_prefill_tokens=32, idle_prefill_tokens=0, speculation="local", **flags(Role.DECODE)
    )
    async with open_prefill(PrefillSettings(**flags(Role.PREFILL))) as p, open_decode(decode) as d:
        message = of_tenant("t", "a", [f"127.0.0.1:{p.port}"])
        decode_stub, prefill_stub = decode_pb2_grpc.DecodeServiceStub, prefill_pb2_grpc.PrefillServiceStub
        async with stub_of(decode_stub, d.port, tmp_path, Role.GATEWAY, Role.DECODE) as stub:
            receipt = await receipt_of(stub, message)
            assert receipt.prefill_pod
            assert receipt.prefill_retries == 0
        async with stub_of(decode_stub, d.port, tmp_path, Role.PREFILL, Role.DECODE) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await receipt_of(stub, message)
            assert info.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with stub_of(prefill_stub, p.port, tmp_path, Role.GATEWAY, Role.PREFILL) as stub:
            await stub.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
            with pytest.raises(grpc.aio.AioRpcError) as info:
                async for _ in stub.Prefill(prefill_pb2.PrefillRequest()):
                    pass
            assert info.value.code() is grpc.StatusCode.PERMISSION_DENIED
