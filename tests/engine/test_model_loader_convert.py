"""Conversion makes one whole file, once, or nothing; whatever is wrong with the source is said plainly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_engine.model_loader import ensure_weights
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.safetensors_source import SafetensorsSource
from tandem_engine.models import ModelConfig, Quantization
from tandem_kernels import Packing, pack_weight, quantize_weight, unpack_quantized

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def hf_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64)}
    for n in range(2):
        p = f"model.layers.{n}"
        shapes |= {f"{p}.{norm}.weight": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{p}.self_attn.{x}_proj.weight": (64, 64) for x in "qo"}
        shapes |= {f"{p}.self_attn.{x}_proj.weight": (32, 64) for x in "kv"}
        shapes |= {f"{p}.mlp.{x}_proj.weight": (96, 64) for x in ("gate", "up")}
        shapes[f"{p}.mlp.down_proj.weight"] = (64, 96)
    shapes["model.norm.weight"] = (64,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def make_folder(folder: Path, weights: str = "weights.safetensors", **changes: Any) -> Path:
    """A model folder as pull leaves it, before any conversion."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    ModelManifest(
        name="tiny", revision="ab" * 32, source="test", license="unknown", architecture="llama",
        max_model_len=128, vocab_size=64, eos_token_ids=(2,), bos_token="", eos_token="",
        chat_template="", tokenizer_hash="", add_bos=False, weights=weights,
    ).write(folder)  # fmt: skip
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(hf_tensors(), tmp_path / "weights.safetensors")
    return make_folder(tmp_path)


def test_tensors_are_fused_and_rotary_pairs_become_neighbours(folder: Path) -> None:
    ours, theirs = load_file(ensure_weights(folder, torch.float32)), hf_tensors()
    p = "model.layers.1"
    gate_up = torch.cat([theirs[f"{p}.mlp.gate_proj.weight"], theirs[f"{p}.mlp.up_proj.weight"]])
    assert torch.equal(ours["sublayers.3.0.gate_up_proj.weight"], gate_up)
    qkv, q, v = (
        ours["sublayers.2.0.qkv_proj.weight"],
        *(theirs[f"{p}.self_attn.{x}_proj.weight"] for x in "qv"),
    )
    assert torch.equal(qkv[96:], v)
    head = 3
    for d in range(8):
        assert torch.equal(qkv[head * 16 + 2 * d], q[head * 16 + d])
        assert torch.equal(qkv[head * 16 + 2 * d + 1], q[head * 16 + d + 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_packed_form_holds_the_same_numbers_in_the_kernels_order(
    folder: Path, dtype: torch.dtype
) -> None:
    plain, packed = (load_file(ensure_weights(folder, dtype, packed=form)) for form in (False, True))
    differing = {name for name in packed if name not in plain or packed[name].shape != plain[name].shape}
    assert any(name.endswith("gate_up_proj.weight") for name in differing)
    for name, tensor in packed.items():
        source = plain.get(name, plain["embed_tokens.weight"])
        assert torch.equal(tensor, pack_weight(source) if name in differing else source)


@pytest.mark.parametrize("quantization", [Quantization.W8A8, Quantization.W4A8])
def test_quantized_forms_hold_what_rounding_the_fused_weights_gives(
    folder: Path, quantization: Quantization
) -> None:
    full = load_file(ensure_weights(folder, torch.float32))
    ours = load_file(ensure_weights(folder, torch.float32, quantization=quantization))
    assert {name for name in ours if name not in full} == set()
    for name, tensor in ours.items():
        if not name.endswith(("_proj.weight", "lm_head.weight")):
            assert torch.equal(tensor, full[name])
            continue
        is_head = name == "lm_head.weight"
        packing = Packing.INT8 if is_head or quantization is Quantization.W8A8 else Packing.INT4
        values = unpack_quantized(tensor).dequantize()
        assert torch.equal(values, quantize_weight(full[name], packing).dequantize()), name
        assert (values - full[name]).square().mean().sqrt() < (0.01 if packing is Packing.INT8 else 0.12)


def test_quantized_weights_and_float16_do_not_go_together(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="w8a8 does not work with float16; use dtype float32"):
        ensure_weights(folder, torch.float16, quantization=Quantization.W8A8)


def test_each_dtype_gets_its_own_file(folder: Path) -> None:
    half = load_file(ensure_weights(folder, torch.bfloat16))
    full = load_file(ensure_weights(folder, torch.float32))
    assert half.keys() == full.keys()
    assert all(torch.equal(full[n].bfloat16(), half[n]) for n in full if full[n].ndim > 1)
    assert all(torch.equal(full[n], half[n]) for n in full if full[n].ndim == 1), "norms stay float32"
    with pytest.raises(ModelLoadError, match="int8"):
        ensure_weights(folder, torch.int8)


def test_a_second_call_converts_nothing(folder: Path) -> None:
    path = ensure_weights(folder, torch.float32)
    before = path.stat()
    (folder / "weights.safetensors").unlink()
    assert ensure_weights(folder, torch.float32) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "other revision"])
def test_a_damaged_or_outdated_file_is_made_again(folder: Path, damage: str) -> None:
    path = ensure_weights(folder, torch.float32)
    good = path.read_bytes()
    bad = {
        "truncated": good[:-5],
        "header": b"\xff" * 64 + good[64:],
        "empty": b"",
        "other revision": good.replace(b"ab" * 32, b"cd" * 32),
    }[damage]
    path.write_bytes(bad)
    ensure_weights(folder, torch.float32)
    assert path.read_bytes() == good


CONVERT = """
import pathlib, sys, torch
from tandem_engine.model_loader import load_decoder
from tandem_engine.model_loader import ensure_weights
folder, stages = pathlib.Path(sys.argv[1]), []
print("ready", flush=True)
sys.stdin.readline()
path = ensure_weights(folder, torch.float32, lambda stage, done, total: stages.append(stage))
load_decoder(folder, torch.float32)
print(path.stat().st_ino, bool(stages))
"""


def test_processes_that_start_together_convert_once(folder: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", CONVERT, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outcomes = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert len({inode for inode, _ in outcomes}) == 1
    assert [converted for _, converted in outcomes].count("True") == 1
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.0.router.weight": torch.ones(2)}), "router.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "has shape"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    tensors = hf_tensors()
    change(tensors)
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(ModelLoadError, match=reason):
        ensure_weights(make_folder(tmp_path), torch.float32)
    assert not list(tmp_path.glob("model-*")) + list(tmp_path.glob(".model-*"))


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = hf_tensors()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    source = tmp_path / "source"
    source.mkdir()
    for shard, members in shards.items():
        save_file({n: tensors[n] for n in members}, source / shard)
    index = {"weight_map": {n: shard for shard, members in shards.items() for n in members}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    read = SafetensorsSource(source)
    assert read.names() == set(tensors)
    assert all(torch.equal(read.get(n), tensors[n]) for n in names)
    (source / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks b\.safetensors; download the whole model"):
        SafetensorsSource(source)


@pytest.mark.parametrize("keep", [0, 6, 500, 20_000])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_truncated_source_is_one_clear_error(tmp_path: Path, kind: str, keep: int) -> None:
    path = tmp_path / f"weights.{kind}"
    if kind == "gguf":
        write_gguf(path)
    else:
        save_file(hf_tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="download it again"):
        ensure_weights(make_folder(tmp_path, path.name), torch.float32)


def test_a_vanished_source_is_named(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"weights\.safetensors is gone; put it back"):
        ensure_weights(folder, torch.float32)


def test_a_full_or_read_only_disk_is_one_clear_error(folder: Path) -> None:
    (folder / ".convert.lock").mkdir()
    with pytest.raises(ModelLoadError, match="free some disk space or make the folder writable"):
        ensure_weights(folder, torch.float32)


def write_gguf(path: Path, quantize: bool = False, extra: str = "", window: int = 0) -> None:
    """The tensors of hf_tensors as llama.cpp's converter writes them: its names, its row order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if window:
        writer.add_sliding_window(window)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for hf_name, tensor in hf_tensors().items():
        values = tensor.numpy()
        if "q_proj" in hf_name or "k_proj" in hf_name:
            heads = 4 if "q_proj" in hf_name else 2
            values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
        name = names.get_name(hf_name, try_suffixes=(".weight",))
        if quantize and values.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    if extra:
        writer.add_tensor(extra, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_and_safetensors_of_one_model_convert_to_the_same_file(tmp_path: Path) -> None:
    save_file(hf_tensors(), tmp_path / "weights.safetensors")
    from_safetensors = ensure_weights(make_folder(tmp_path), torch.float32).read_bytes()
    other = make_folder(tmp_path / "other", "weights.gguf")
    write_gguf(other / "weights.gguf")
    assert ensure_weights(other, torch.float32).read_bytes() == from_safetensors


def test_gguf_hyperparameters_become_the_same_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.gguf")
    raw = GgufSource(tmp_path / "weights.gguf").hf_config()
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(CONFIG)


def test_a_gguf_with_a_window_is_mistral(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.gguf", window=33)
    config = ModelConfig.from_hf(GgufSource(tmp_path / "weights.gguf").hf_config())
    assert config.model_type == "mistral"
    assert [a.window for a in config.spec.attentions] == [33, 33]


def test_quantized_gguf_tensors_are_dequantized(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.gguf", quantize=True)
    source = GgufSource(tmp_path / "weights.gguf")
    for name, tensor in hf_tensors().items():
        step = tensor.abs().max() / 127
        assert (source.get(name) - tensor).abs().max() <= step


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("rope_factors_long.weight", "which a llama model with its parameters has no use for"),
        ("blk.0.ssm_a", "holds blk.0.ssm_a"),
    ],
)
def test_gguf_variants_we_cannot_run_are_refused(tmp_path: Path, extra: str, reason: str) -> None:
    write_gguf(tmp_path / "weights.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match=reason):
        GgufSource(tmp_path / "weights.gguf").names()


def test_a_folder_that_moved_still_finds_weights_inside_it(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    shutil.move(folder, moved)
    assert ensure_weights(moved, torch.float32).parent == moved


def child(script: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs until its stdin ends."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_killed_conversion_leaves_only_what_the_next_one_removes(folder: Path) -> None:
    script = """
        import sys, torch
        from pathlib import Path
        from tandem_engine.model_loader import ensure_weights

        def stop_in_the_middle(stage, done, total):
            if 0 < done < total:
                print("half", flush=True)
                sys.stdin.read()

        ensure_weights(Path(sys.argv[1]), torch.float32, stop_in_the_middle)
    """
    with child(script, folder) as converting:
        assert line_of(converting) == "half\n"
        converting.kill()
    assert not list(folder.glob("model-*"))
    assert len(list(folder.glob(".*.tmp"))) == 1
    assert load_file(ensure_weights(folder, torch.bfloat16))["embed_tokens.weight"].dtype == torch.bfloat16
    assert not list(folder.glob(".*.tmp"))


def test_processes_share_the_pages_of_the_weights(tiny_model: Path) -> None:
    """After two processes have generated text, neither has a private copy of the weight file."""
    script = """
        import json, sys
        from pathlib import Path
        from tandem_core.sampling import SamplingParams
        from tandem_engine.llm import LLM

        llm = LLM(Path(sys.argv[1]), num_blocks=8)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4))
        print(flush=True)
        sys.stdin.readline()
        smaps = Path("/proc/self/smaps").read_text().splitlines()
        start = next(n for n, line in enumerate(smaps) if "/model-" in line)
        fields = (line.split() for line in smaps[start + 1 : start + 15])
        print(json.dumps({name.rstrip(":"): int(size) for name, size, _ in fields}), flush=True)
        sys.stdin.read()
    """
    with child(script, tiny_model) as one, child(script, tiny_model) as two:
        assert line_of(one) == line_of(two) == "\n"
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            kilobytes = json.loads(line_of(process))
            assert kilobytes["Private_Dirty"] == 0 < kilobytes["Rss"]
            assert kilobytes["Pss"] < 0.75 * kilobytes["Rss"]
