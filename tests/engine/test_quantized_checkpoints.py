"""Quantized safetensors: every format gives the numbers that it defines, and bad files one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_model import PagedModel
from quantized_checkpoints import FORMATS, Format, awq, gptq, mxfp4_groups, nf4, write_quantized
from safetensors.torch import load_file, save_file
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_engine.model_loader import describe, ensure_weights, load_decoder, pull
from tandem_engine.model_loader.convert import open_source, quantized_bits
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.model_loader.stored import Dense, Grid, Groups, Lut, byte_table, pack, pick_packing
from tandem_engine.models import ModelConfig, Quantization
from tandem_kernels import Packing, native
from toy_tokenizers import without_merges

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 105, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
#: Relative error (rms) that a packing may add: scales of bfloat16 fit float16, products of two do not.
ADDED = {
    "nf4": 0.008, "nf4 plain": 0.008, "nvfp4": 0.02, "fp8": 0.008, "fp8 blocks": 0.008, "fp8 rows": 0.008,
    "llm.int8": 3e-4, "awq": 6e-4, "auto-round": 6e-4, "gptq": 6e-4, "gptq v2": 6e-4, "w4a16 zeros": 6e-4,
}  # fmt: skip
BITS_8 = {"gptq 8 bits", "w8a8", "fp8 rows", "fp8 blocks", "fp8", "nvfp4", "llm.int8"}
Q_PROJ = "model.layers.0.self_attn.q_proj"
compiled = pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    found = {"model.embed_tokens.weight": normal(105, 128), "lm_head.weight": normal(105, 128)}
    for n in range(2):
        layer = f"model.layers.{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = normal(128) + 1
        for name, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 128)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = normal(rows, 128)
        for name, shape in (("gate", (256, 128)), ("up", (256, 128)), ("down", (128, 256))):
            found[f"{layer}.mlp.{name}_proj.weight"] = normal(*shape)
    return found | {"model.norm.weight": normal(128) + 1}


def model_folder(checkpoint: Path) -> Path:
    """As pull makes it from the checkpoint."""
    folder = checkpoint.with_name(f"{checkpoint.name}-model")
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    ModelManifest(
        name="tiny", revision="ab" * 32, source="test", license="unknown", architecture="llama",
        max_model_len=256, vocab_size=105, eos_token_ids=(2,), bos_token="", eos_token="</s>",
        chat_template="", tokenizer_hash="", add_bos=False, weights=str(checkpoint),
        weight_bits=quantized_bits(ModelConfig.from_folder(folder), open_source(checkpoint)),
    ).write(folder)  # fmt: skip
    return folder


def logits_of(folder: Path, quantization: Quantization = Quantization.NONE) -> torch.Tensor:
    paged = PagedModel(load_decoder(folder, torch.float32, quantization=quantization), num_sequences=1)
    ids = [3 + i * i % 97 for i in range(50)]
    return torch.cat([paged.step([ids[:33]])[0], paged.step([ids[33:]])[0]])


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_gives_the_numbers_of_its_format(name: str, tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "quantized", CONFIG, weights(), FORMATS[name])
    source = open_source(tmp_path / "quantized")
    assert source.names() == values.keys()
    for tensor, wanted in values.items():
        assert source.shape(tensor) == tuple(wanted.shape)
        torch.testing.assert_close(source.get(tensor).float(), wanted, rtol=1e-6, atol=1e-9)
        if grid := source.grid(tensor):
            # Any rows, not those of whole words alone.
            torch.testing.assert_close(source.get(tensor, slice(5, 62)), source.get(tensor)[5:62])
            packed = pack(source.stored(tensor), pick_packing(grid)).dequantize()
            stored = source.stored(tensor)
            if isinstance(stored, Groups) and stored.order is not None:
                packed = torch.empty_like(packed).index_copy_(1, stored.order, packed)
            error = (packed - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
            assert error <= ADDED.get(name, 0), (name, tensor)
    assert quantized_bits(ModelConfig.from_hf(CONFIG), source) == (8 if name in BITS_8 else 4)


@compiled
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "quantized", CONFIG, weights(), FORMATS[name])
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({key: value.contiguous() for key, value in values.items()}, dense / "model.safetensors")
    (dense / "config.json").write_text(json.dumps(CONFIG))
    wanted = logits_of(model_folder(dense))
    folder = model_folder(tmp_path / "quantized")
    torch.testing.assert_close(logits_of(folder), wanted, rtol=1e-5, atol=1e-5)
    picked = pick_numerics(folder).quantization
    assert picked is (Quantization.W8A8 if name in BITS_8 else Quantization.W4A8)
    ours = logits_of(folder, picked)
    # Activations of 8 bits cost more than the packing.
    assert (ours - wanted).square().mean() < 2e-3 * wanted.square().mean()


@pytest.mark.parametrize("write", [awq, gptq])
def test_groups_of_128_are_kept_with_their_zero_points(write: Any, tmp_path: Path) -> None:
    config = FORMATS["awq" if write is awq else "gptq"].config | {"group_size": 128}
    made = Format(config, lambda module, weight: write(module, weight, 128))
    values = write_quantized(tmp_path / "quantized", CONFIG, weights(), made)
    source = open_source(tmp_path / "quantized")
    grid = source.grid(f"{Q_PROJ}.weight")
    assert grid is not None and pick_packing(grid) is Packing.INT4_ZEROS
    packed = pack(source.stored(f"{Q_PROJ}.weight"), Packing.INT4_ZEROS)
    assert torch.equal(packed.dequantize(), values[f"{Q_PROJ}.weight"])


@compiled
def test_parts_with_different_orders_of_inputs_go_to_8_bits(tmp_path: Path) -> None:
    """They multiply the same activations, which have one order."""
    write_quantized(tmp_path / "quantized", CONFIG, weights(), FORMATS["gptq act-order"])
    folder = model_folder(tmp_path / "quantized")
    file = tmp_path / "quantized/model.safetensors"
    same = load_file(ensure_weights(folder, torch.float32, packed=True, quantization=Quantization.W4A8))
    assert same["sublayers.0.0.qkv_proj.weight.order"].dtype == torch.int32
    tensors = load_file(file)
    name = f"{Q_PROJ}.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    shutil.rmtree(folder)
    folder = model_folder(tmp_path / "quantized")
    wanted = logits_of(folder)
    ours = logits_of(folder, Quantization.W4A8)
    assert (ours - wanted).square().mean() < 2e-3 * wanted.square().mean()
    mixed = load_file(folder / "model-float32-w4a8.safetensors")
    assert "sublayers.0.0.qkv_proj.weight.order" not in mixed and "sublayers.0.0.o_proj.weight.order" in mixed


def test_biases_that_a_model_lacks_may_be_zeros(tmp_path: Path) -> None:
    write_quantized(tmp_path / "quantized", CONFIG, weights(), FORMATS["gptq"])
    file, name = tmp_path / "quantized/model.safetensors", "model.layers.1.mlp.up_proj.bias"
    for value in (0.0, 1.0):
        save_file(load_file(file) | {name: torch.full((256,), value)}, file)
        folder = model_folder(tmp_path / "quantized")
        if value:
            with pytest.raises(ModelLoadError, match=f"the weights hold {name}, which"):
                ensure_weights(folder, torch.float32)
        else:
            ensure_weights(folder, torch.float32)
        shutil.rmtree(folder)


def test_blocks_that_cover_the_ends_of_rows(tmp_path: Path) -> None:
    """bitsandbytes counts blocks over the whole weight."""
    weight = torch.randn(10, 96, generator=torch.Generator().manual_seed(1))
    tensors, values = nf4("model.x_proj", weight)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": FORMATS["nf4"].config}))
    source = open_source(tmp_path)
    assert isinstance(source.stored("model.x_proj.weight"), Dense)
    for rows in (slice(0, 10), slice(1, 2), slice(3, 9)):
        torch.testing.assert_close(source.get("model.x_proj.weight", rows), values[rows])


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    codes, exponents, values = mxfp4_groups(
        torch.randn(3 * 64, 96, generator=torch.Generator().manual_seed(1))
    )
    packed = (codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": packed.view(3, 64, 3, 16), f"{name}_scales": exponents.view(3, 64, 3)
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    assert source.names() == {name} and source.shape(name) == (3, 64, 96)
    assert torch.equal(source.get(name, slice(60, 130)), values[60:130])
    assert torch.equal(pack(source.stored(name), Packing.LUT4).dequantize(), values)


def test_tables_keep_whole_numbers_and_round_others_to_bytes() -> None:
    whole, unit = byte_table((0.0, 0.5, 1.0, 6.0, *[-1.5] * 12))
    assert unit == 2 and whole.tolist() == [128, 129, 130, 140, *[125] * 12]
    assert pick_packing(Grid("", Lut, 4, 16)) is Packing.INT8
    with pytest.raises(ValueError, match="scales exceed the range of float16"):
        pack(Lut(torch.zeros(1, 32).byte(), torch.ones(16), torch.full((1, 1), 1e6)), Packing.LUT4)


def test_pull_reads_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    checkpoint = tmp_path / "quantized"
    write_quantized(checkpoint, CONFIG, weights(), FORMATS["awq"])
    without_merges(105, ["<unk>", "<s>", "</s>"]).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    folder = pull(str(checkpoint))
    assert ModelManifest.read(folder).weight_bits == 4
    caplog.set_level("INFO", logger="tandem_engine")
    assert logits_of(folder).isfinite().all()
    assert "14 weights of AWQ 4 bits/64 dequantized to float32" in caplog.text
    ensure_weights(folder, torch.float32, packed=True, quantization=Quantization.W4A8)
    assert "14 weights of AWQ 4 bits/64 kept as INT4" in caplog.text
    shown = describe(folder)
    assert "AWQ 4 bits/64" in {found.kind for found in shown.formats}
    assert shown.num_parameters == sum(tensor.numel() for tensor in weights().values())


def change_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        raw["quantization_config"] |= changes
        path.write_text(json.dumps(raw))

    return damage


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()
        save_file(tensors, folder / "model.safetensors")

    return damage


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.clone().fill_(value)


BAD: list[tuple[str, Callable[[Path], None], str]] = [
    ("awq", change_config(bits=3), r"quantization_config.bits is '3', .*only 4.*; use"),
    ("awq", change_config(version="gemv"), "version is 'gemv', which cannot be read"),
    (
        "awq",
        change_config(quant_method="hqq"),
        "quant_method is 'hqq', which cannot be read; use the model's",
    ),
    ("awq", change_config(quant_method="gptq"), r"qweight|scales .* wanted|does not"),
    ("awq", change_tensor(f"{Q_PROJ}.scales", lambda t: None), "lack .*scales; the download is incomplete"),
    ("awq", change_tensor(f"{Q_PROJ}.scales", lambda t: t[:, :8]), r"scales is F16 \[2, 8\], wanted"),
    ("awq", change_tensor(f"{Q_PROJ}.scales", filled(float("nan"))), "q_proj.weight that are infinite or no"),
    ("awq", change_tensor(f"{Q_PROJ}.qzeros", lambda t: t.float()), r"qzeros is F32 .*wanted I32"),
    ("gptq", change_tensor(f"{Q_PROJ}.g_idx", filled(-1)), "does not put 64 inputs in each of 2 groups"),
    ("gptq", change_tensor(f"{Q_PROJ}.g_idx", filled(7)), "does not put 64 inputs"),
    ("gptq", change_tensor(f"{Q_PROJ}.qzeros", lambda t: t[:, :5]), "fits no 2, 4 or 8 bits"),
    ("gptq", change_tensor(f"{Q_PROJ}.qzeros", lambda t: None), "lack .*qzeros"),
    ("w4a16", change_tensor(f"{Q_PROJ}.weight_shape", filled(2**40)), r"weight_shape is .*does not fit"),
    ("w4a16", change_config(format="marlin-24"), "format 'marlin-24', and sparse weights"),
    (
        "w4a16",
        change_config(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse weights cannot be read",
    ),
    ("w4a16", change_config(transform_config={"config_groups": {"a": {}}}), "transform_config rotates"),
    ("w8a8", change_tensor(f"{Q_PROJ}.weight_scale", lambda t: t[:7]), r"weight_scale is BF16 \[7, 1\]"),
    ("fp8 blocks", change_tensor(f"{Q_PROJ}.weight_scale_inv", lambda t: t.repeat(2, 3)), "wanted one of"),
    ("fp8 blocks", change_config(weight_block_size=[0, 128]), r"weight_block_size is '\[0, 128\]'"),
    ("nf4", change_tensor(f"{Q_PROJ}.weight.absmax", lambda t: t[:9]), r"absmax is U8 \[9\], wanted"),
    ("nf4", change_tensor(f"{Q_PROJ}.weight.quant_map", filled(float("inf"))), "quant_map holds infinite"),
    (
        "nf4",
        change_tensor(f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4", filled(91)),
        "is no quantization state",
    ),
    ("mxfp4", change_tensor(f"{Q_PROJ}.weight_scale", filled(255)), "infinite or no numbers"),
    ("mxfp4", change_tensor(f"{Q_PROJ}.weight_scale", filled(250)), "scales exceed the range of float16"),
]


@pytest.mark.parametrize(("name", "damage", "message"), BAD)
def test_bad_input_gets_one_sentence(
    name: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path / "quantized", CONFIG, weights(), FORMATS[name])
    damage(tmp_path / "quantized")
    with pytest.raises(ModelLoadError, match=message) as raised:
        folder = model_folder(tmp_path / "quantized")
        ModelConfig.from_folder(folder)
        ensure_weights(folder, torch.float32, packed=True, quantization=Quantization.W4A8)
    assert "\n" not in str(raised.value) and ";" in str(raised.value)
    assert not list(tmp_path.glob("*/model-*")) and not list(tmp_path.glob("*/.*.tmp"))


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    one_layer = {key: value for key, value in weights().items() if "layers.1" not in key}
    for name, format_ in FORMATS.items():
        write_quantized(folder / f"{name} quantized", CONFIG | {"num_hidden_layers": 1}, one_layer, format_)
    return folder


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_hostile_checkpoints_raise_only_model_load_errors(checkpoints: Path, data: st.DataObject) -> None:
    """One value of the config, one tensor's header, or some of its numbers are changed."""
    original = checkpoints / f"{data.draw(st.sampled_from(sorted(FORMATS)))} quantized"
    folder = shutil.copytree(original, checkpoints / "hostile", dirs_exist_ok=True)
    if data.draw(st.booleans(), label="config"):
        raw = json.loads((folder / "config.json").read_text())
        key = data.draw(st.sampled_from([*sorted(raw["quantization_config"]), "config_groups", "bits"]))
        raw["quantization_config"][key] = data.draw(HOSTILE)
        (folder / "config.json").write_text(json.dumps(raw))
    else:
        content = bytearray((folder / "model.safetensors").read_bytes())
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        name = data.draw(st.sampled_from(sorted(n for n in header if "_proj" in n)))
        first, end = header[name]["data_offsets"]
        kind = data.draw(st.sampled_from(["bytes", "shape", "dtype", "drop"]))
        if kind == "bytes":
            at = data.draw(st.integers(first, end - 1)) + 8 + size
            noise = data.draw(st.binary(min_size=1, max_size=min(16, 8 + size + end - at)))
            content[at : at + len(noise)] = noise
        elif kind == "shape":
            header[name]["shape"] = data.draw(st.permutations(header[name]["shape"] + [1]))
        elif kind == "dtype":
            header[name]["dtype"] = data.draw(st.sampled_from(["I8", "U8", "BF16", "F32", "I32", "F8_E4M3"]))
        else:
            header[f"{name}x"] = header.pop(name)
        text = json.dumps(header).encode()
        whole = len(text).to_bytes(8, "little") + text + content[8 + size :]
        (folder / "model.safetensors").write_bytes(whole)
    try:
        model = model_folder(folder)
        ensure_weights(model, torch.float32, packed=True, quantization=Quantization.W4A8)
    except ModelLoadError as error:
        assert "\n" not in str(error) and len(str(error)) <= 1001
        assert not list((checkpoints / "hostile-model").glob("model-*"))
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(checkpoints / "hostile-model", ignore_errors=True)
