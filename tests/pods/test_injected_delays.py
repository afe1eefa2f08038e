"""A delay is injected into one stage of real pods; the receipt of the request that missed its SLO names it.

For each stage some requests to a gateway, a decode pod and a prefill pod, over gRPC and ZeroMQ. `-s` shows
what was found.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from front_doors import front_door
from pod_fleet import Fleet, request, run_fleet
from processes import free_port
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_engine.engine import Engine
from tandem_engine.transport.outgoing import KVSender
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.server import PodServer
from toy_models import SIZES, prompt_of
from waiting import until_async

NUM_FAILOVERS = 5
#: Longer than a request takes without it, shorter than the second after which a pod is given up.
DELAY_S = 0.5
OBJECTIVES = common_pb2.SloTarget(e2e_ns=350_000_000)
EOS = 2
_NUM_TOKENS = 8


def generate(prompt: list[int], num_output: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        # Without EOS and without ignore_eos, whose length is known beforehand.
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=num_output, logit_bias={EOS: -100.0}),
        slo_class="batch",
        slo=OBJECTIVES,
    )


def decode_pod(model: Path, port: int) -> AbstractAsyncContextManager[PodServer]:
    return open_decode(DecodeSettings(model=model, port=port, drain_s=0.0, speculation="off", **SIZES))


@dataclass
class Delays:
    """What the patched parts of the pods read. Engines by whether they decode."""

    engines: dict[bool, Engine] = field(default_factory=dict)
    #: Engines whose next step takes DELAY_S longer.
    slow: set[Engine] = field(default_factory=set)
    #: Until then, no KV leaves the prefill pod.
    hold_until: float = 0.0

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measure_costs, step, take_frame = Engine.measure_costs, Engine.step, KVSender.take_frame

        def measure(engine: Engine, *, decodes: bool, slowed_by: float) -> None:
            self.engines[decodes] = engine
            measure_costs(engine, decodes=decodes, slowed_by=slowed_by)

        def slow_step(engine: Engine) -> object:
            is_slow = engine in self.slow and engine.has_work()
            self.slow -= {engine} if is_slow else set()
            outputs = step(engine)
            time.sleep(DELAY_S * is_slow)
            return outputs

        def held_frame(sender: KVSender, *arguments: object, **options: object) -> object:
            if time.monotonic() < self.hold_until:
                return None
            return take_frame(sender, *arguments, **options)

        monkeypatch.setattr(Engine, "measure_costs", measure)
        monkeypatch.setattr(Engine, "step", slow_step)
        monkeypatch.setattr(KVSender, "take_frame", held_frame)


@dataclass
class System:
    fleet: Fleet
    gateway: gateway_pb2_grpc.GatewayServiceStub
    delays: Delays
    rng: random.Random

    def prompt(self, num_tokens: int) -> list[int]:
        """A new one, which no cache holds."""
        tokens = list(prompt_of(num_tokens))
        self.rng.shuffle(tokens)
        return tokens

    async def ask(
        self, num_output: int = _NUM_TOKENS, on_first: Callable[[], None] | None = None
    ) -> common_pb2.Receipt:
        call = self.gateway.Generate(generate(self.prompt(96), num_output))
        async for response in call:
            if response.HasField("end"):
                return response.end.receipt
            if on_first is not None:
                on_first()
                on_first = None
        raise AssertionError("no end")


async def delay_queue(system: System) -> common_pb2.Receipt:
    """A prompt of another client, which this gateway does not know of, is computed first."""
    system.delays.slow.add(system.delays.engines[False])
    neighbour = system.fleet.decode.Decode(
        request(f"n{system.rng.random()}", system.prompt(96), [system.fleet.prefill_target], max_tokens=2)
    )

    async def is_computed() -> bool:
        return not system.delays.slow

    await until_async(is_computed)
    receipt = await system.ask()
    async for _ in neighbour:
        pass
    return receipt


async def delay_prefill(system: System) -> common_pb2.Receipt:
    system.delays.slow.add(system.delays.engines[False])
    return await system.ask()


async def delay_transfer(system: System) -> common_pb2.Receipt:
    system.delays.hold_until = time.monotonic() + DELAY_S
    return await system.ask()


async def delay_decode(system: System) -> common_pb2.Receipt:
    engine = system.delays.engines[True]
    return await system.ask(80, on_first=lambda: system.delays.slow.add(engine))


INJECTED: dict[str, Callable[[System], Awaitable[common_pb2.Receipt]]] = {
    "queue": delay_queue,
    "prefill": delay_prefill,
    "transfer": delay_transfer,
    "decode": delay_decode,
}


@pytest.mark.parametrize(
    ("num_delays", "least_found"), [(4, 3), pytest.param(20, 19, marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("stage", INJECTED)
async def test_the_receipt_names_the_stage_that_was_delayed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stage: str, num_delays: int, least_found: int
) -> None:
    delays = Delays()
    delays.patch(monkeypatch)
    async with (
        # Drafts make some of the random model's texts several times as fast as others.
        run_fleet(tiny_model, speculation="off") as fleet,
        # Admission judges ends by the median: beside another client's prompt it would refuse what is delayed.
        front_door(tiny_model, (fleet.decode_target,), (fleet.prefill_target,), slo_end_confidence=0.5) as (
            _,
            gateway,
        ),
    ):
        system = System(fleet, gateway, delays, random.Random(5))
        for _ in range(20):
            receipt = await system.ask()
        assert receipt.slo_met, "without a delay"
        causes: Counter[str] = Counter()
        while causes.total() < num_delays:
            receipt = await INJECTED[stage](system)
            causes[receipt.slo_miss_cause or "met"] += 1
            # A request in the queue is admitted by prediction, so less than a twentieth may be late.
            for _ in range(24 if stage == "queue" else 3):
                await system.ask()
    print(f"injected {stage}: found {dict(causes)}")
    assert causes[stage] >= least_found, causes


async def test_the_receipt_names_a_failover(tiny_model: Path) -> None:
    """The decode pod dies within the answer, and its successor is there DELAY_S later."""
    ports = [free_port(), free_port()]
    causes: Counter[str] = Counter()
    targets = tuple(f"127.0.0.1:{port}" for port in ports)
    async with (
        front_door(tiny_model, targets, waits=False) as (http, gateway),
        AsyncExitStack() as pods,
    ):

        async def serves() -> bool:
            return (await http.get("/health")).status_code == 200

        pod = await pods.enter_async_context(decode_pod(tiny_model, ports[0]))
        for number in range(NUM_FAILOVERS):
            await until_async(serves)
            call = gateway.Generate(generate(prompt_of(40), 120))
            answer = aiter(call)
            assert (await anext(answer)).HasField("chunk")
            await pod.grpc_server.stop(None)
            await asyncio.sleep(DELAY_S)
            pod = await pods.enter_async_context(decode_pod(tiny_model, ports[(number + 1) % 2]))
            end = [response.end async for response in answer if response.HasField("end")]
            causes[end[0].receipt.slo_miss_cause or "met"] += 1
    print(f"injected failover: found {dict(causes)}")
    assert causes == {"failover": NUM_FAILOVERS}
