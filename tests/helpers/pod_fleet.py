"""A prefill pod and a decode pod in this process, over real gRPC and ZeroMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from pod_usage import held
from prometheus_client import CollectorRegistry
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.transport.layout import KVLayout
from tandem_prefill.main import open_pod as open_prefill
from tandem_prefill.settings import PrefillSettings
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from toy_models import SIZES
from waiting import until_async


@dataclass(frozen=True)
class Fleet:
    decode: decode_pb2_grpc.DecodeServiceStub
    prefill: prefill_pb2_grpc.PrefillServiceStub
    prefill_target: str
    decode_target: str
    layout: KVLayout
    #: Metrics of the decode and of the prefill pod.
    registries: tuple[CollectorRegistry, CollectorRegistry]

    async def usage(self) -> tuple[common_pb2.ResourceUsage, common_pb2.ResourceUsage]:
        decode = await self.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
        prefill = await self.prefill.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
        return decode.status.usage, prefill.status.usage

    async def assert_idle(self) -> None:
        """Both pods free everything within five seconds."""
        kept: list[dict[str, object]] = []

        async def is_idle() -> bool:
            kept[:] = [held(usage) for usage in await self.usage()]
            return kept == [{}, {}]

        try:
            await until_async(is_idle, limit_s=5.0)
        except AssertionError:
            raise AssertionError(f"still held: {kept}") from None


@asynccontextmanager
async def run_fleet(
    tiny_model: Path,
    *,
    decode_blocks: int = 64,
    idle_prefill_tokens: int = 0,
    speculation: str = "local",
    lookahead: str = "",
    **prefill_options: object,
) -> AsyncIterator[Fleet]:
    prefill = PrefillSettings(**{"model": tiny_model, "pod_id": "p0", **SIZES, **prefill_options})
    decode = DecodeSettings(
        model=tiny_model,
        pod_id="d0",
        local_prefill_tokens=32,
        idle_prefill_tokens=idle_prefill_tokens,
        speculation=speculation,
        lookahead=lookahead,
        **{**SIZES, "num_blocks": decode_blocks},
    )
    async with open_prefill(prefill) as p, open_decode(decode) as d:
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") for server in (d, p)]
        yield Fleet(
            decode_pb2_grpc.DecodeServiceStub(channels[0]),
            prefill_pb2_grpc.PrefillServiceStub(channels[1]),
            f"127.0.0.1:{p.port}",
            f"127.0.0.1:{d.port}",
            assemble(EngineConfig(model=tiny_model, **SIZES)).layout,
            (d.registry, p.registry),
        )
        for channel in channels:
            await channel.close(None)


def request(request_id: str, prompt: list[int], targets: list[str], **sampling: object):
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    return decode_pb2.DecodeRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(**options),
        prefill_targets=targets,
    )
