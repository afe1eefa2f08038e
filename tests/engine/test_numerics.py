"""What `auto` means, and what does not go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_libraries import native_library
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.assemble import EngineConfig, assemble, pick_device
from tandem_engine.llm import LLM
from tandem_engine.model_loader import DEFAULT_MODEL, load_decoder, pull, source_bits
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.models import Quantization, pick_dtype
from tandem_engine.models.linear import PlainLinear
from tandem_kernels import native

compiled = pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(DEFAULT_MODEL)


@compiled
def test_auto_takes_quantized_weights_as_they_come(folder: Path) -> None:
    assert source_bits(folder) == 4
    assert pick_numerics(folder).quantization is Quantization.W4A8
    assert pick_numerics(folder).dtype == pick_dtype("auto")


def test_naming_a_dtype_or_a_quantization_means_it(folder: Path) -> None:
    assert pick_numerics(folder, "float32").quantization is Quantization.NONE
    assert pick_numerics(folder, "auto", "none").quantization is Quantization.NONE
    assert pick_numerics(folder, "float32", "w8a8").quantization is Quantization.W8A8


def test_auto_quantizes_nothing_without_kernels_or_on_a_gpu(folder: Path) -> None:
    assert pick_numerics(folder, device="cuda").quantization is Quantization.NONE
    with native_library("off"):
        assert pick_numerics(folder).quantization is Quantization.NONE


def test_what_does_not_go_together_is_said(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="quantization 'w2' is unknown; use auto, none, w8a8, w4a8"):
        pick_numerics(folder, quantization="w2")
    with pytest.raises(ModelLoadError, match="w4a8 runs on CPUs only; use quantization none on cuda"):
        pick_numerics(folder, quantization="w4a8", device="cuda")


def test_what_the_source_holds_is_noted_once(folder: Path, tmp_path: Path) -> None:
    manifest = ModelManifest.read(folder)
    weights = str((folder / manifest.weights).resolve())
    replace(manifest, weights=weights, weight_bits=None).write(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert source_bits(tmp_path) == 4
    assert ModelManifest.read(tmp_path).weight_bits == 4


@compiled
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_results_do_not_depend_on_company_chunks_or_drafts(
    folder: Path, quantization: str, dtype: str
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [[50 + i % 40 for i in range(90)], list(range(500, 570)), [7, 8, 9] * 30]
    options = {"quantization": quantization, "dtype": dtype, "num_blocks": 40, "deterministic": True}
    one_by_one = LLM(folder, chunk_size=512, **options)  # no prompt begins as another, so none is cached
    alone = [one_by_one.generate([p], greedy)[0] for p in prompts]
    together = LLM(folder, drafter=drafter_for("local"), chunk_size=48, **options).generate(prompts, greedy)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids
        assert [t.logprob for t in a.logprobs] == [t.logprob for t in b.logprobs]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_said(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match=f"--device {device}: no CUDA device is visible"):
        assemble(EngineConfig(model=folder, device=device, num_blocks=8))


@pytest.mark.parametrize(
    "device, expected",
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_one_device_is_chosen(device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(device) == torch.device(expected)


@pytest.mark.parametrize(
    "device, message",
    [
        ("cuda:0,1", "a pod computes on one GPU, for there is no tensor parallelism yet"),
        ("cuda:0,cuda:1", "a pod computes on one GPU"),
        ("cuda:2", "torch sees 2 CUDA devices"),
        ("gpu", "wanted auto, cpu, cuda or cuda:N"),
    ],
)
def test_other_devices_are_refused_in_one_sentence(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelLoadError, match=f"--device {device}: .*{message}"):
        pick_device(device)


def test_without_kernels_quantized_weights_are_dequantized(folder: Path) -> None:
    with native_library("off"):
        decoder = load_decoder(folder, torch.float32, quantization=Quantization.W4A8)
        assert isinstance(decoder._lm_head, PlainLinear)
        with pytest.raises(ModelLoadError, match="--deterministic cannot be kept on cpu here"):
            assemble(EngineConfig(model=folder, dtype="float32", num_blocks=8, deterministic=True))
