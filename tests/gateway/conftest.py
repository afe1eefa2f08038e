"""A tiny model folder, fake pods on loopback, and whole gateways in this process."""

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import openai
import pytest
import toy_tokenizers
from fake_pods import MODEL, REVISION, FakePod
from loop_turns import watched_callbacks
from model_folders import make_folder
from prometheus_client.parser import text_string_to_metric_families
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from tandem_proto.v1 import gateway_pb2_grpc
from tandem_service.channels import open_public_channel
from waiting import until_async

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


@pytest.fixture(autouse=True)
def _no_long_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which the gateway keeps its event loop for longer than streams may wait, unless it is
    marked `long_turns(reason)`."""
    with watched_callbacks() as slow:
        yield
    assert not slow or request.node.get_closest_marker("long_turns"), "took too long on the event loop"


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


class Front:
    """A running gateway and clients of both its ports."""

    def __init__(self, process: GatewayProcess) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{process.http_port}"
        #: Needs no key.
        self.metrics_url = f"http://127.0.0.1:{process.metrics_port}/metrics"
        self.channel = open_public_channel(f"127.0.0.1:{process.grpc_port}")
        self.grpc = gateway_pb2_grpc.GatewayServiceStub(self.channel)
        json_type = {"content-type": "application/json"}
        self.http = httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False, headers=json_type)
        self.openai = self.openai_client("none")

    def openai_client(self, key: str) -> openai.AsyncOpenAI:
        http_client = httpx.AsyncClient(trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10.0, http_client=http_client
        )

    async def metric(self, sample: str) -> float:
        """The sum of the series with these labels, such as `tandem_requests_total{outcome="ok"}`."""
        name, _, labels = sample.partition("{")
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        families = text_string_to_metric_families((await self.http.get(self.metrics_url)).text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and wanted.items() <= sample.labels.items()
        ]
        assert found, f"no sample {sample}"
        return sum(found)

    async def until_metric(self, sample: str, value: float, *, at_least: bool = False) -> None:
        async def is_there() -> bool:
            now = await self.metric(sample)
            return now >= value if at_least else now == value

        await until_async(is_there)

    async def until_healthy(self, num_pods: int) -> None:
        async def are_healthy() -> bool:
            return (await self.http.get("/health")).json()["decode_pods"] == num_pods

        await until_async(are_healthy)

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
                "metrics_port": 0,
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
