"""A decode process killed inside of JSON, of a beam search and of n choices: the answers are those without
faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import guided_models
import pytest
from api_schemas import BY_HAND
from guide_schemas import fault
from pod_usage import held
from tandem_chaos.load import Client
from tandem_chaos.system import ChaosSystem, ChaosSystemOptions, running_system
from tandem_cli.up.options import PodFlag
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_channel
from toy_models import prompt_of
from waiting import until

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]

NUM_DECODE = 3
#: A second or more of text.
SCHEMA = {"type": "array", "items": BY_HAND["exchange items"], "minItems": 12, "maxItems": 12}
GUIDE = common_pb2.Guide(json_schema=json.dumps(SCHEMA))
SAMPLINGS = {
    "JSON": {"guide": GUIDE, "max_tokens": 3000, "temperature": 0.8, "frequency_penalty": 0.2},
    "beams": {"beam_search": common_pb2.BeamSearch(width=8), "max_tokens": 300, "ignore_eos": True},
    "choices": {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True},
    "choices of JSON": {"guide": GUIDE, "max_tokens": 3000, "temperature": 1.0, "frequency_penalty": 0.2},
}
NUM_CHOICES = {"JSON": 1, "beams": 3, "choices": 2, "choices of JSON": 2}
#: Of the first text, before a pod is killed; a search sends nothing before its end.
BEFORE_KILL = (1, 40, 200)


@dataclass
class Answer:
    """Of one call; by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    num_retries: int = field(default=0, compare=False)

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        if response.HasField("end"):
            self.reasons[response.end.choice] = response.end.reason
            self.num_retries += response.end.receipt.decode_retries
            return
        chunk = response.chunk
        self.token_ids.setdefault(chunk.choice, []).extend(chunk.token_ids)
        self.texts[chunk.choice] = self.texts.get(chunk.choice, "") + chunk.text

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids.get(0, ()))


class Calls:
    """To the gateway of a fleet."""

    def __init__(self, fleet: ChaosSystem) -> None:
        self.fleet = fleet
        ((name, target),) = fleet.gateways.items()
        self.client = Client(name, target)
        self._channel = open_public_channel(target)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def close(self) -> None:
        await self.client.close()
        await self._channel.close(None)

    async def answer(self, message: gateway_pb2.GenerateRequest, into: Answer) -> None:
        async for response in self._stub.Generate(message, timeout=120.0):
            into.add(response)

    async def until_all_serve(self) -> None:
        await self.fleet.until_serving([self.client], {"decode": NUM_DECODE, "prefill": 1})

    async def kill_busy(self) -> str:
        """A decode pod that computes; "": none does."""
        usages = await self.fleet.usages()
        pids = self.fleet.pids()
        for name, usage in usages.items():
            if name.startswith("decode") and usage.requests_running:
                os.kill(pids[name], signal.SIGKILL)
                return name
        return ""

    async def assert_idle(self) -> None:
        async def is_idle() -> bool:
            return not any(held(usage) for usage in (await self.fleet.usages()).values())

        await self.fleet.until("idle pods", is_idle)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guided_models.save_model(tmp_path_factory.mktemp("guided"), guided_models.byte_level(), seed=3)


@pytest.fixture
async def calls(model: Path, tmp_path: Path) -> AsyncIterator[Calls]:
    flags = tuple(PodFlag(role, "num-blocks", "512") for role in ("decode", "prefill"))
    options = ChaosSystemOptions(
        model, tmp_path, num_prefill=1, num_decode=NUM_DECODE, num_gateways=1, pod_flags=flags
    )
    async with running_system(options) as fleet:
        calls = Calls(fleet)
        await calls.until_all_serve()
        yield calls
        await calls.close()


async def test_no_answer_changes(calls: Calls) -> None:
    for case, sampling in SAMPLINGS.items():
        num_killed = 0
        for seed, num_before in enumerate(BEFORE_KILL):
            message = gateway_pb2.GenerateRequest(
                token_ids=common_pb2.TokenIds(ids=prompt_of(200, seed)),
                sampling=common_pb2.SamplingParams(**sampling, seed=seed),
                n=NUM_CHOICES[case],
                slo_class="batch",
                # Drafts of the text that the first call has stored would end the second one too soon.
                speculation="local",
            )
            expected, found = Answer(), Answer()
            await calls.answer(message, expected)
            call = asyncio.create_task(calls.answer(message, found))
            if case != "beams":
                await until(lambda found=found, num=num_before: found.num_tokens >= num, limit_s=60.0)
            killed = ""
            while not killed and not call.done():
                killed = await calls.kill_busy()
            await call
            assert found == expected, case
            assert len(found.reasons) == NUM_CHOICES[case]
            if "JSON" in case:
                assert all(fault(SCHEMA, text) == "" for text in found.texts.values())
            num_killed += found.num_retries > 0
            await calls.until_all_serve()
            await calls.assert_idle()
        assert num_killed == len(BEFORE_KILL), f"{case}: kills that met the answer"
