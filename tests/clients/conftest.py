"""One system for all clients: a decode pod with a random model and a gateway, in a thread of this process.

The gateway has the settings of `tandem up`. The model knows every byte and a chat template; its answers are
nonsense, and what a grammar holds it to is right.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
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
#: Codex sends 40 kB, and each byte is a token here.
CONTEXT = 65536


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2,
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


@pytest.fixture(scope="module")
def system(chat_model: Path) -> Iterator[Mapping[str, str]]:
    """What `client_programs.run` tells the programs."""
    started, stop = threading.Event(), asyncio.Event()
    found: dict[str, str] = {"MODEL": chat_model.name, "MODEL_FOLDER": str(chat_model)}
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        sizes = SIZES | {"num_blocks": 4 * CONTEXT // SIZES["block_size"], "chunk_size": 512}
        decode = DecodeSettings(model=chat_model, pod_id="d0", speculation="local", **sizes)
        async with open_pod(decode) as pod:
            settings = GatewaySettings(
                model=chat_model, decode=f"127.0.0.1:{pod.port}", grpc_port=0, http_port=0, drain_s=0.0
            )
            gateway = GatewayProcess(settings)
            await gateway.start()
            try:
                found["URL"] = f"http://127.0.0.1:{gateway.http_port}"
                found["GRPC_URL"] = f"http://127.0.0.1:{gateway.grpc_port}"
                started.set()
                await stop.wait()
            finally:
                await gateway.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(_START_LIMIT_S), "the system does not start"
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join(_START_LIMIT_S)
