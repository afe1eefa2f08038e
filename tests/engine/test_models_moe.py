"""Mixtures of experts compute what transformers computes, for every family with them.

Models are tiny and random, saved as Hugging Face checkpoints. Weights are about N(0, 1.44 / depth): with
transformers' own small ones routing and attention hardly matter.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import psutil
import pytest
import torch
import transformers as hf
from free_drafts import FreeDrafts
from gguf import GGMLQuantizationType as Kind
from greedy import assert_same
from native_libraries import NATIVE, native_library
from paged_model import PagedModel
from safetensors.torch import load_file, save_file
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import Activation, Mlp, Moe, Router
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.llm import LLM
from tandem_engine.memory import experts_bytes
from tandem_engine.model_loader import DEFAULT_MODEL, load_decoder, pull
from tandem_engine.model_loader.describing import describe
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.models import ModelConfig, Quantization
from tandem_kernels import (
    DecoderLayers,
    ExpertProjection,
    MoeWeights,
    PackedExperts,
    RouterScore,
    Routing,
    moe,
    pack_weight,
)
from torch import Tensor
from toy_models import SIZES as ENGINE_SIZES
from toy_models import prompt_of, save_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 8}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {
            "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True,
            "head_dim": 32, "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        hf.Qwen2MoeConfig,
        {"num_experts": 12, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 16, "num_experts_per_tok": 3}),
    "glm4_moe": (
        hf.Glm4MoeConfig,
        {
            "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
            "head_dim": 32, "n_shared_experts": 2,
        },
    ),
    "minimax_m2": (
        hf.MiniMaxM2Config,
        {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 32, "rotary_dim": 16},
    ),
    "ernie4_5": (hf.Ernie4_5Config, {"head_dim": 32}),
    "ernie4_5_moe": (
        hf.Ernie4_5_MoeConfig,
        {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    ),
    "granitemoe": (
        hf.GraniteMoeConfig,
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        },
    ),
}  # fmt: skip
#: By llama.cpp's names.
ARCHS = {"qwen3moe": gguf.MODEL_ARCH.QWEN3MOE, "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """family -> (transformers' model, its checkpoint)"""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))

    def make(family: str, **more: object) -> tuple[hf.PreTrainedModel, Path]:
        kind, changes = FAMILIES[family]
        model = hf.AutoModelForCausalLM.from_config(kind(**SIZES | changes | more))
        randomize(model)
        save_checkpoint(model, tmp_path / family)
        return model, tmp_path / family

    return make


def randomize(model: hf.PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in named:
            noise = torch.randn(tensor.shape, generator=generator)
            if "correction" in name:
                tensor.copy_(noise / 8)
            elif tensor.ndim > 1:
                tensor.copy_(noise * 1.2 / tensor.shape[-1] ** 0.5)
            elif "inv_freq" not in name:
                tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    model.eval()


def reference_logits(model: hf.PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    "family, library", [*((family, None) for family in FAMILIES), ("qwen2_moe", "off"), ("granitemoe", "off")]
)
def test_logits_equal_transformers(stored, family: str, library: str | None) -> None:
    """Two sequences of unequal length, in chunks, then one token at a time."""
    model, checkpoint = stored(family)
    with native_library(library):
        paged = PagedModel(load_decoder(pull(str(checkpoint)), torch.float32), num_sequences=2)
        first, second = prompts(40, 25)
        steps = [
            paged.step([first[:23], second[:5]]),
            paged.step([first[23:39], second[5:24]]),
            paged.step([first[39:], second[24:]]),
        ]
    for b, prompt in enumerate((first, second)):
        ours, theirs = torch.cat([step[b] for step in steps]), reference_logits(model, prompt)
        assert theirs.std() > 0.1, "logits this flat would agree by accident"
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def run(folder: Path, quantization: Quantization = Quantization.NONE) -> Tensor:
    """Logits of 30 tokens."""
    return PagedModel(load_decoder(folder, torch.float32, quantization=quantization), 1).step(prompts(30))[0]


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels here")
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.W8A8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_compiled_call_has_the_bits_of_the_operators(
    stored, family: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(str(stored(family)[1]))
    compiled = load_decoder(folder, torch.float32, quantization=quantization)
    assert compiled.is_batch_invariant
    monkeypatch.setattr(DecoderLayers, "supports", staticmethod(lambda *_: False))
    interpreted = load_decoder(folder, torch.float32, quantization=quantization)
    assert not interpreted.is_compiled
    first, second = prompts(33, 20)
    results = []
    for decoder in (compiled, interpreted):
        paged = PagedModel(decoder, 2)
        results.append([*paged.step([first[:30], second[:9]]), *paged.step([first[30:], second[9:]])])
    assert all(map(torch.equal, *results))


def test_a_token_reads_the_chosen_experts_only(stored) -> None:
    _, checkpoint = stored("mixtral")
    shown = describe(pull(str(checkpoint)))
    one = 3 * SIZES["intermediate_size"] * SIZES["hidden_size"] * getattr(torch, shown.dtype).itemsize
    others = 6 * one * SIZES["num_hidden_layers"]  # 2 of 8 are chosen
    embedding = SIZES["vocab_size"] * SIZES["hidden_size"] * getattr(torch, shown.dtype).itemsize
    assert shown.step_bytes == shown.weight_bytes - others - embedding


def test_stacked_experts_are_those_of_separate_tensors(stored, tmp_path: Path) -> None:
    """Files may hold all experts of a layer in one tensor, as transformers has them in memory."""
    _, checkpoint = stored("qwen3_moe")
    expected = run(pull(str(checkpoint)))
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in (0, 2):  # layer 1 is dense
        base = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{base}.{e}.{role}_proj.weight") for e in range(16)])
            for role in ("gate", "up", "down")
        )
        tensors |= {f"{base}.gate_up_proj": torch.cat([gate, up], 1), f"{base}.down_proj": down}
    other = tmp_path / "stacked"
    checkpoint.rename(other)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert torch.equal(run(pull(str(other))), expected)


def test_experts_of_8_bits_are_close(stored) -> None:
    model, checkpoint = stored("glm4_moe")
    ours, theirs = run(pull(str(checkpoint)), Quantization.W8A8), reference_logits(model, *prompts(30))
    # A near tie may choose another expert, which changes its row much.
    assert (ours - theirs).abs().median() < 0.06 * theirs.std()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is '9', but there are 8 experts to choose from"),
        ({"num_local_experts": 1 << 20}, "num_local_experts is '1048576', but must be from 1 to 4096"),
        ({"num_local_experts": 0}, "num_local_experts is '0', but must be from 1 to 4096"),
        ({"num_local_experts": 4096, "num_hidden_layers": 100}, "409600 experts in all layers"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(hf.MixtralConfig(**SIZES).to_dict() | {"num_local_experts": 8} | changes)


def test_lacking_and_misshapen_experts_are_named(stored) -> None:
    _, checkpoint = stored("mixtral")
    file = checkpoint / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    for changed, message in (
        ({n: t for n, t in whole.items() if n != name}, f"the weights lack {name}"),
        (whole | {name: whole[name].t().contiguous()}, rf"{name} has shape \(96, 64\), but the config asks"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=message):
            load_decoder(pull(str(checkpoint)), torch.float32)


def write_gguf(path: Path, arch: str, model: hf.PreTrainedModel, kind: Kind) -> dict[str, Tensor]:
    """The model as llama.cpp's converter writes it, matrices in this format; returns what it then holds."""
    c = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(c.vocab_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim if arch == "qwen3moe" else c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    table = gguf.get_tensor_name_map(ARCHS[arch], c.num_hidden_layers)
    held = {}
    for name, tensor in model.state_dict().items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        for part_name, part in parts.items():
            plain = part.ndim == 1 or part_name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
            data = gguf.quantize(part.squeeze(0).numpy(), Kind.F32 if plain else kind)
            base, _, suffix = part_name.rpartition(".")
            name_in_file = (
                table.get_name(part_name) + ".weight"
                if "experts." in part_name and "shared" not in part_name
                else f"{table.get_name(base)}.{suffix}"
            )
            writer.add_tensor(name_in_file, data, raw_dtype=None if plain or kind is Kind.F32 else kind)
            values = part.numpy() if plain else gguf.dequantize(data, kind)
            held[part_name] = torch.from_numpy(values).view(part.shape)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(c.vocab_size)])
    writer.add_token_merges([])
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen2moe"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_experts_of_gguf_files_are_those_of_checkpoints(
    stored, tmp_path: Path, arch: str, kind: Kind
) -> None:
    """Quantised weights are taken as they are: they are what quantising their values to 8 bits gives."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []}
    model, _ = stored(arch.replace("moe", "_moe"), **sizes)
    held = write_gguf(tmp_path / "model.gguf", arch, model, kind)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                halves = [held[name.replace("gate_up", role)] for role in ("gate", "up")]
                tensor.copy_(torch.cat(halves, 1))
            else:
                tensor.copy_(held[name])
    other = tmp_path / "dequantised"
    save_checkpoint(model, other)
    quantization = Quantization.NONE if kind is Kind.F32 else Quantization.W8A8
    ours, theirs = (run(pull(str(p)), quantization) for p in (tmp_path / "model.gguf", other))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_transformers(stored, family: str) -> None:
    """64 tokens of three texts: prompts in chunks, all texts in one batch, with drafts."""
    model, checkpoint = stored(family)
    drafter = drafter_for("local")
    assert drafter is not None
    drafter.step_cost = FreeDrafts()
    llm = LLM(pull(str(checkpoint)), **ENGINE_SIZES | {"chunk_size": 16}, drafter=drafter)
    texts = [prompt_of(n, start) for n, start in ((40, 0), (23, 5), (31, 9))]
    results = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=2))
    model.generation_config.eos_token_id = None
    expected = [
        model.generate(torch.tensor([t]), max_new_tokens=64, do_sample=False)[0, len(t) :].tolist()
        for t in texts
    ]
    assert_same(results, expected, family)
    assert sum(r.stats.accepted_tokens for r in results) > 0, "nothing was speculated"


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels here")
def test_what_a_mixture_of_experts_takes_is_counted() -> None:
    hidden, inner, rows = 512, 128, 1500
    mixture = Moe(8, Mlp(inner, Activation.SILU), Router("softmax", 4))
    zeros = pack_weight(torch.zeros(2 * inner, hidden)), pack_weight(torch.zeros(hidden, inner))
    weights = MoeWeights(
        Routing(RouterScore.SOFTMAX, 4),
        torch.zeros(8, hidden),
        ExpertProjection(PackedExperts((zeros[0].repeat(8, 1, 1, 1, 1),), 2 * inner)),
        ExpertProjection(PackedExperts((zeros[1].repeat(8, 1, 1, 1, 1),), hidden)),
    )
    x = torch.zeros(rows, hidden)
    moe(x[:1], weights)
    before = psutil.Process().memory_full_info().uss
    moe(x, weights)
    taken = psutil.Process().memory_full_info().uss - before
    said = experts_bytes(mixture, hidden, 4, rows)
    assert 0.5 * said < taken < 1.1 * said + (4 << 20)


@pytest.mark.wide
def test_the_default_models_text_with_its_mlps_as_equal_experts(tmp_path: Path, monkeypatch) -> None:
    """A transplant into Mixtral's layout: with weights that sum to 1, equal experts are the MLP."""
    base = pull(DEFAULT_MODEL)
    source = GgufSource((base / ModelManifest.read(base).weights).resolve())
    config = json.loads((base / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in source.names():
        layer, found, role = name.partition(".mlp.")
        projection = {"g": "w1", "u": "w3", "d": "w2"}.get(role[:1], "")
        for expert in range(3 if found else 0):
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{projection}.weight"] = source.get(
                name
            ).clone()
        if not found:
            tensors[name] = source.get(name).clone()
    for n in range(config["num_hidden_layers"]):
        router = torch.randn(3, config["hidden_size"], generator=generator)
        tensors[f"model.layers.{n}.block_sparse_moe.gate.weight"] = router
    folder = tmp_path / "transplant"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    changes = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config | changes))
    for path in base.glob("*token*"):
        shutil.copy(path, folder)
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    texts = []
    for model in (base, pull(str(folder))):
        llm = LLM(model, dtype="float32", quantization="none", num_blocks=40, threads=1)
        prompts = [llm.tokenizer.encode(text) for text in ("The capital of France is", "def fibonacci(n):")]
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        texts.append([done.token_ids for done in llm.generate(prompts, sampling)])
    assert texts[0] == texts[1]
