# ruff: noqa: N802  (the methods are named by the .proto)
"""A tiny model folder, scripted decode and prefill pods on loopback, and whole gateways in this process.

The pods implement the real DecodeService and PrefillService, so the gateway under test is entirely its own.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
import toy_tokenizers
from model_folders import make_folder
from tandem_gateway.process import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tandem_service.channels import open_channel
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings

MODEL = "tiny-chat"
REVISION = "ab" * 32
MAX_MODEL_LEN = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json (byte-level BPE) and tandem.json, as `tandem model pull` writes them."""
    tokenizer = toy_tokenizers.trained(
        ["the order of the customer has not arrived yet"] * 20,
        400,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    return make_folder(
        tmp_path_factory.mktemp("model"),
        tokenizer,
        name=MODEL,
        revision=REVISION,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


@dataclass
class FakePod(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Streams `words`, one chunk each, pausing before each; or fails as told."""

    name: str
    words: tuple[str, ...] = ("Hello", " there", "!")
    pause_s: float = 0.0
    #: Refuse with this status instead of, or after `fail_after` chunks of, an answer.
    fail_with: grpc.StatusCode | None = None
    fail_after: int = 0
    total_blocks: int = 100
    free_blocks: int = 100
    num_running: int = 0
    revision: str = REVISION
    target: str = ""
    requests: list[decode_pb2.DecodeRequest] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: PodServer | None = None

    async def start(self, port: int = 0) -> None:
        services = ["tandem.v1.DecodeService", "tandem.v1.PrefillService"]
        settings = PodSettings(drain_s=0.0, pod_id=self.name, port=port)
        self.server = PodServer(settings, role="decode", service_names=services, status_codes={})
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server.grpc_server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server.grpc_server)
        await self.server.start()
        self.server.set_serving(True)
        self.target = f"127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None

    async def Decode(self, request, context):
        self.requests.append(request)
        self.started.set()
        wants_logprobs = request.sampling.HasField("logprobs")
        try:
            for index, word in enumerate(self.words):
                if self.fail_with is not None and index >= self.fail_after:
                    await context.abort(self.fail_with, f"prompt: {self.name} says no")
                await asyncio.sleep(self.pause_s)
                logprobs = []
                if wants_logprobs:
                    token = common_pb2.TokenLogprob(
                        token_id=10 + index, logprob=-0.5, token_bytes=word.encode()
                    )
                    other = common_pb2.TokenLogprob(token_id=99, logprob=-1.5, token_bytes=b"\xe2\x82")
                    top = [token, other][: request.sampling.logprobs]
                    logprobs = [common_pb2.PositionLogprobs(chosen=token, top=top)]
                yield decode_pb2.DecodeResponse(
                    chunk=decode_pb2.DecodeChunk(text=word, token_ids=[10 + index], logprobs=logprobs)
                )
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        receipt = common_pb2.Receipt(
            request_id=request.request_id,
            queue_ns=1000,
            prefill_ns=2000,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(self.words),
            decode_pod=self.name,
            accepted_by_source={"prompt": 2},
        )
        yield decode_pb2.DecodeResponse(
            finished=decode_pb2.DecodeFinished(
                reason=common_pb2.FINISH_REASON_STOP, stop_reason="<|im_end|>", receipt=receipt
            )
        )

    async def GetDecodeStatus(self, request, context):
        return decode_pb2.GetDecodeStatusResponse(status=self._status("decode"))

    async def GetPrefillStatus(self, request, context):
        return prefill_pb2.GetPrefillStatusResponse(status=self._status("prefill"))

    def _status(self, role: str) -> common_pb2.PodStatus:
        usage = common_pb2.ResourceUsage(
            blocks_total=self.total_blocks, blocks_free=self.free_blocks, requests_running=self.num_running
        )
        return common_pb2.PodStatus(
            pod_id=self.name, role=role, model=MODEL, model_revision=self.revision, block_size=64, usage=usage
        )


class Front:
    """A running gateway and clients of both its faces."""

    def __init__(self, process: GatewayProcess) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{process.http_port}"
        self.channel = open_channel(f"127.0.0.1:{process.grpc_port}")
        self.grpc = gateway_pb2_grpc.GatewayServiceStub(self.channel)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False)
        self.openai = self.openai_client("none")

    def openai_client(self, key: str) -> openai.AsyncOpenAI:
        http_client = httpx.AsyncClient(trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10.0, http_client=http_client
        )

    async def metric(self, sample: str) -> float:
        """The value of one line of /metrics, such as `tandem_requests_total{outcome="ok"}`."""
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no sample {sample}")

    async def until_metric(self, sample: str, value: float) -> None:
        async with asyncio.timeout(1.0):
            while await self.metric(sample) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_healthy(self, num_pods: int) -> None:
        async with asyncio.timeout(5.0):
            while (await self.http.get("/health")).json()["decode_pods"] != num_pods:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.openai.close()
        await self.http.aclose()
        await self.channel.close()
        await self.process.stop()


@pytest.fixture
async def pods() -> AsyncIterator[Callable]:
    """`await pods(name, **script)` starts a fake pod that ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(name: str = "d-0", **script: object) -> FakePod:
            pod = FakePod(name, **script)
            await pod.start()
            stack.push_async_callback(pod.stop)
            return pod

        yield start


@pytest.fixture
async def gateway(model_folder: Path) -> AsyncIterator[Callable]:
    """`await gateway(decode_pod, ..., setting=value)` starts a gateway over these pods and waits for them."""
    async with AsyncExitStack() as stack:

        async def start(*decode: FakePod, **settings: object) -> Front:
            defaults = {
                "model": model_folder,
                "decode": tuple(pod.target for pod in decode),
                "grpc_port": 0,
                "http_port": 0,
                "drain_s": 0.0,
                "poll_interval_s": 0.1,
                "failover_wait_s": 2.0,
            }
            process = GatewayProcess(GatewaySettings(**{**defaults, **settings}))
            await process.start()
            front = Front(process)
            stack.push_async_callback(front.close)
            await front.until_healthy(len(decode))
            return front

        yield start


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Two tenants: `acme-key` may do anything, `slow-key` only batch."""
    lines = [
        {"key_sha256": hashlib.sha256(b"acme-key").hexdigest(), "tenant": "acme"},
        {"key_sha256": hashlib.sha256(b"slow-key").hexdigest(), "tenant": "slow", "slo_classes": ["batch"]},
    ]
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
