"""One system for all clients: a decode pod with a random model and a gateway, in a thread of this process.

The model knows every byte and a chat template; its answers are nonsense of as many tokens as are asked
for. docs/clients.md has a column for each file here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tandem_decode.main import open_pod
from tandem_decode.settings import DecodeSettings
from tandem_engine import model_loader
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from toy_models import SIZES, save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_START_LIMIT_S = 120.0


@dataclass(frozen=True)
class System:
    url: str
    grpc_url: str
    model: str

    @property
    def base_url(self) -> str:
        """Of OpenAI's clients."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoints") / "random-chat"
    save_checkpoint(
        LlamaForCausalLM(config),
        folder,
        more_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=_CHATML,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return model_loader.pull(str(folder))


# Not for the session: its calls would be in the logs that later tests of the same process read.
@pytest.fixture(scope="module")
def system(chat_model: Path) -> Iterator[System]:
    started, stop = threading.Event(), asyncio.Event()
    found: list[System] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        decode = DecodeSettings(model=chat_model, pod_id="d0", speculation="local", **SIZES)
        async with open_pod(decode) as pod:
            settings = GatewaySettings(
                model=chat_model, decode=f"127.0.0.1:{pod.port}", grpc_port=0, http_port=0, drain_s=0.0,
                poll_interval_s=0.1, slo_slack=0.0,
            )  # fmt: skip
            gateway = GatewayProcess(settings)
            await gateway.start()
            try:
                found.append(
                    System(
                        f"http://127.0.0.1:{gateway.http_port}",
                        f"http://127.0.0.1:{gateway.grpc_port}",
                        chat_model.name,
                    )
                )
                started.set()
                await stop.wait()
            finally:
                await gateway.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(_START_LIMIT_S), "the system does not start"
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(_START_LIMIT_S)
