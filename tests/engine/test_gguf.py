"""GGUF files of every format: transformers reads the same numbers, and what is computed is close to them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    CONTEXT,
    FACTORS,
    FLOATS,
    HIDDEN,
    OTHERS,
    VOCABULARY,
    Kind,
    random_blocks,
    write_gguf,
)
from paged_model import PagedModel
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.llm import LLM
from tandem_engine.model_loader import describe, ensure_weights, load_decoder
from tandem_engine.model_loader.convert import quantized_bits
from tandem_engine.model_loader.gguf_formats import grid_of, stored_of, values_of
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.model_loader.stored import pack, pick_packing
from tandem_engine.models import ModelConfig, Quantization
from tandem_engine.models.linear import PackedLinear
from tandem_engine.models.rope import inverse_frequencies
from tandem_kernels import Packing, native
from toy_tokenizers import without_merges
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KINDS = [*FLOATS, *FACTORS, *OTHERS]
QUANTIZED = [*FACTORS, *OTHERS]
#: Added error beside the values, for formats whose grid the packing holds.
EXACT = {
    Kind.Q4_K,
    Kind.Q6_K,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q8_0,
    Kind.Q5_0,
    Kind.IQ4_NL,
    Kind.MXFP4,
    Kind.TQ1_0,
    Kind.TQ2_0,
}
compiled = pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def bits_of(source: GgufSource) -> int:
    return quantized_bits(ModelConfig.from_hf(source.hf_config()), source)


def folder_of(path: Path) -> Path:
    """A model folder around a GGUF file, as pull makes it, with a toy tokenizer."""
    folder = path.parent / f"{path.stem}-folder"
    folder.mkdir(exist_ok=True)
    source = GgufSource(path)
    (folder / "config.json").write_text(json.dumps(source.hf_config()))
    without_merges(VOCABULARY, ["<unk>", "<s>", "</s>"]).save(str(folder / "tokenizer.json"))
    ModelManifest(
        name="tiny", revision="ab" * 32, source="test", license="unknown", architecture=source.architecture,
        max_model_len=CONTEXT, vocab_size=VOCABULARY, eos_token_ids=(2,), bos_token="", eos_token="</s>",
        chat_template="", tokenizer_hash="", add_bos=False, weights=str(path),
        weight_bits=bits_of(source),
    ).write(folder)  # fmt: skip
    return folder


def prompt(length: int = 60) -> list[int]:
    return [3 + i * i % 97 for i in range(length)]


def logits_of(folder: Path, quantization: Quantization = Quantization.NONE) -> torch.Tensor:
    paged = PagedModel(load_decoder(folder, torch.float32, quantization=quantization), num_sequences=1)
    ids = prompt()
    return torch.cat([paged.step([ids[:41]])[0], paged.step([ids[41:]])[0]])


def transformers_logits(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_format_gives_transformers_logits(tmp_path: Path, kind: Kind) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: kind)
    folder = folder_of(path)
    theirs = transformers_logits(path)
    assert theirs.std() > 0.1
    torch.testing.assert_close(logits_of(folder), theirs, atol=1e-4, rtol=1e-5)
    bits = bits_of(GgufSource(path))
    grid = grid_of(kind)
    assert bits == (pick_packing(grid).bits if grid else 0)
    if bits:
        quantization = Quantization.W8A8 if bits == 8 else Quantization.W4A8
        ours = logits_of(folder, quantization)
        assert (ours - theirs).square().mean() < 5e-3 * theirs.square().mean()


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_packings_hold_the_values_of_each_format(kind: Kind) -> None:
    rows = random_blocks(kind, 40, 512, seed=1)
    values = torch.from_numpy(gguf.dequantize(rows, kind))
    assert torch.equal(values_of(kind, rows), values)
    grid = grid_of(kind)
    assert grid is not None
    packing = pick_packing(grid)
    error = (pack(stored_of(kind, rows), packing).dequantize() - values).square().mean().sqrt() / values.std()
    assert error < 1e-7 if kind in EXACT else error < (0.02 if packing.bits == 4 else 0.008)


@pytest.mark.parametrize("kind", [Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S], ids=lambda kind: kind.name)
def test_levels_of_two_bits_are_not_shifted(kind: Kind) -> None:
    rows = random_blocks(kind, 200, 512, seed=1, scale=1.0)
    values = torch.from_numpy(gguf.dequantize(rows, kind)).view(-1, 32)
    packed = pack(stored_of(kind, rows), Packing.INT8).dequantize().view(-1, 32)
    # Groups whose halves have one scale; in them the smallest level is 8 of 43 parts of the largest.
    lowest, highest = values.abs().amin(1), values.abs().amax(1)
    even = torch.isclose(lowest * 43, highest * 8) & torch.isclose(values.abs()[:, 16:].amax(1), highest)
    even &= torch.isclose(values.abs()[:, :16].amin(1), lowest) & torch.isclose(
        values.abs()[:, 16:].amin(1), lowest
    )
    assert even.sum() > 20
    torch.testing.assert_close(packed[even], values[even], rtol=1e-3, atol=0)


def test_a_packing_whose_factors_do_not_fit_float16_is_found_by_rounding() -> None:
    rows = random_blocks(Kind.IQ3_S, 2, 256, seed=1)
    rows[:, :2] = np.array([60000], dtype=np.float16).view(np.uint8)
    weight = pack(stored_of(Kind.IQ3_S, rows), Packing.INT4)
    values = torch.from_numpy(gguf.dequantize(rows, Kind.IQ3_S))
    assert (
        not weight.scales.isfinite().all()
        or (weight.dequantize() - values).abs().max() < values.abs().max() / 8
    )


MIXES = {
    "q4_k_m": lambda name: (
        Kind.Q6_K if "attn_v" in name or "down" in name or name == "output.weight" else Kind.Q4_K
    ),
    "gate in 8": lambda name: Kind.Q8_0 if "gate" in name or "attn_q" in name else Kind.Q4_1,
    "keys in float16": lambda name: Kind.F16 if "attn_k" in name or name == "output.weight" else Kind.Q4_0,
}


@pytest.mark.parametrize("mix", MIXES)
def test_each_part_of_a_projection_keeps_its_bits(tmp_path: Path, mix: str) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", MIXES[mix])
    folder = folder_of(path)
    theirs, ours = transformers_logits(path), logits_of(folder, Quantization.W4A8)
    assert (ours - theirs).square().mean() < 2e-3 * theirs.square().mean()
    decoder = load_decoder(folder, torch.float32, quantization=Quantization.W4A8)
    qkv = decoder._sublayers[0].branches[0].mixer.qkv
    if native.LIBRARY is not None:
        assert isinstance(qkv, PackedLinear)
        assert len(qkv.projection.weight.parts) == {"q4_k_m": 2, "gate in 8": 2, "keys in float16": 3}[mix]
        assert decoder.is_batch_invariant


@pytest.mark.parametrize("mix", MIXES)
def test_what_a_step_reads_is_known_before_the_conversion(tmp_path: Path, mix: str) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", MIXES[mix])
    folder = folder_of(path)
    before = describe(folder)
    assert not (folder / before.weight_file).exists()
    numerics = pick_numerics(folder)
    decoder = load_decoder(folder, numerics.dtype, quantization=numerics.quantization)
    after = describe(folder)
    assert after.weight_file == before.weight_file
    assert (folder / after.weight_file).exists()
    assert (before.weight_bytes, before.step_bytes) == (after.weight_bytes, after.step_bytes)
    assert before.weight_bytes == decoder.num_bytes
    assert before.step_bytes == decoder.num_bytes - decoder.embed_tokens.nbytes


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mix", MIXES)
def test_pieces_and_padding_do_not_depend_on_company_chunks_or_drafts(
    tmp_path: Path, mix: str, dtype: str
) -> None:
    """The vocabulary, 105, fills no panel."""
    (path,) = write_gguf(tmp_path / "model.gguf", MIXES[mix])
    folder = folder_of(path)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [prompt(90), prompt(33)[::-1], [7, 8, 9] * 20]
    options = {"quantization": "w4a8", "dtype": dtype, "num_blocks": 40, "deterministic": True}
    alone = [LLM(folder, chunk_size=512, **options).generate([p], greedy)[0] for p in prompts]
    together = LLM(folder, drafter=drafter_for("local"), chunk_size=48, **options).generate(prompts, greedy)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids
        assert [t.logprob for t in a.logprobs] == [t.logprob for t in b.logprobs]


def test_qwen2_biases_and_norms_stay_float32(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: Kind.Q8_0, arch="qwen2")
    folder = folder_of(path)
    torch.testing.assert_close(logits_of(folder), transformers_logits(path), atol=1e-4, rtol=1e-5)
    decoder, source = load_decoder(folder, torch.bfloat16), GgufSource(path)
    norm = source.get("model.layers.1.input_layernorm.weight")
    assert torch.equal(decoder._sublayers[2].branches[0].pre_norm.weight, norm)
    assert not torch.equal(norm, norm.bfloat16().float())


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip


def rope_table(parameters: dict[str, object]) -> np.ndarray:
    """As llama.cpp's converter computes rope_freqs: how far each frequency is lowered."""
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4, rope_parameters=parameters)
    default = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    return (default / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()


def test_a_rope_table_is_transformers_llama3(tmp_path: Path) -> None:
    (path,) = write_gguf(
        tmp_path / "model.gguf", lambda name: Kind.F32, extra={"rope_freqs.weight": rope_table(LLAMA3)}
    )
    folder, source = folder_of(path), GgufSource(path)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=2,
        rms_norm_eps=1e-5, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        rope_parameters=LLAMA3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: source.get(name) for name in source.names()})
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt()])).logits[0]
    ours = logits_of(folder)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    # transformers reads no table out of a GGUF.
    assert (transformers_logits(path) - theirs).abs().max() > 0.01, "the table changes nothing here"


@pytest.mark.parametrize(
    "scaling, expected",
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"type": "linear"}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_attn_factor": 1.25},
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        ),
    ],
)  # fmt: skip
def test_rope_keys_mean_what_transformers_computes(
    tmp_path: Path, scaling: dict[str, object], expected: dict[str, object]
) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        for key, value in scaling.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add = writer.add_uint32 if isinstance(value, int) else add
            add(f"llama.rope.scaling.{key}", value)

    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: Kind.Q8_0, keys=keys)
    rope = ModelConfig.from_hf(GgufSource(path).hf_config()).spec.attentions[0].rope
    assert rope is not None
    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=4, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10000.0} | expected,
    )  # fmt: skip
    default = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    theirs, factor = default, 1.0
    if expected["rope_type"] != "default":
        theirs, factor = ROPE_INIT_FUNCTIONS[expected["rope_type"]](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(rope), theirs, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    (whole,) = write_gguf(tmp_path / "whole.gguf", MIXES["q4_k_m"])
    parts = write_gguf(tmp_path / "part.gguf", MIXES["q4_k_m"], split=6)
    assert len(parts) == 4 and parts[0].name == "part-00001-of-00004.gguf"
    one, many = GgufSource(whole), GgufSource(parts[0])
    assert many.files == parts and GgufSource(parts[2]).files == parts
    assert one.names() == many.names() and one.hf_config() == many.hf_config()
    assert all(torch.equal(one.get(name), many.get(name)) for name in one.names())
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelLoadError, match=r"part-00002-of-00004\.gguf is missing next to"):
        GgufSource(parts[0])
    with pytest.raises(ModelLoadError, match="one of 4 parts of a model; name the parts"):
        GgufSource(tmp_path / "elsewhere.gguf")
    parts[2].rename(parts[1])
    parts[3].rename(parts[2])
    (tmp_path / "elsewhere.gguf").rename(parts[3])
    with pytest.raises(ModelLoadError, match="a part of another model"):
        GgufSource(parts[0])


def test_conversion_in_spans_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", MIXES["keys in float16"])
    folder = folder_of(path)
    for quantization in (Quantization.NONE, Quantization.W4A8):
        file = ensure_weights(folder, torch.float32, packed=True, quantization=quantization)
        whole = file.read_bytes()
        file.unlink()
        monkeypatch.setattr("tandem_engine.model_loader.convert._SPAN", 1)
        assert (
            ensure_weights(folder, torch.float32, packed=True, quantization=quantization).read_bytes()
            == whole
        )
        monkeypatch.undo()


def read_everything(path: Path) -> None:
    source = GgufSource(path)
    ModelConfig.from_hf(source.hf_config())
    for name in source.names():
        source.get(name)
        if source.grid(name):
            source.stored(name)


@pytest.mark.parametrize("mix", ["q4_k_m", "keys in float16"])
def test_damaged_files_raise_only_model_load_errors(tmp_path: Path, mix: str) -> None:
    """Random bytes of the header, whole numbers of it, and its end are changed. A header that would cost
    memory or minutes makes this test fail by its time."""

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token {n}" for n in range(20)])
        writer.add_token_scores([0.5] * 20)

    (path,) = write_gguf(tmp_path / "model.gguf", MIXES[mix], keys=keys)
    whole = path.read_bytes()
    header_size = whole.index(b"blk.1.ffn_down.weight") + 200
    generator = np.random.default_rng(5)
    failed = 0
    for n in range(150):
        data = bytearray(whole[: header_size + 20_000] if n % 4 == 0 else whole)
        at = int(generator.integers(4, header_size))
        match n % 3:
            case 0:
                data[at] ^= 1 << int(generator.integers(8))
            case 1:
                hostile = [2**64 - 1, 2**63, 2**40, 2**31, 2**32 - 1, 0, 7][int(generator.integers(7))]
                data[at : at + 8] = hostile.to_bytes(8, "little")
            case 2:
                data[at : at + 4] = generator.integers(0, 256, 4, dtype=np.uint8).tobytes()
        path.write_bytes(data)
        try:
            read_everything(path)
        except ModelLoadError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 40


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_factors_that_are_no_numbers_are_refused(tmp_path: Path, kind: Kind) -> None:
    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: kind)
    data = bytearray(path.read_bytes())
    at = data.index(GgufSource(path)._tensors["lm_head.weight"].rows.tobytes())
    data[at : at + 2] = np.array([np.nan], dtype=np.float16).tobytes()
    path.write_bytes(data)
    for read in (GgufSource(path).get, GgufSource(path).stored):
        with pytest.raises(ModelLoadError, match=r"numbers in output.weight that are infinite or no numbers"):
            read("lm_head.weight")
