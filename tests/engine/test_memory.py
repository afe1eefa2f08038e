"""What a pod says about its memory before it takes it, and what it refuses."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import toy_models
from native_libraries import NATIVE, native_library
from tandem_core.beams import BeamParams
from tandem_core.errors import CapacityError, ModelLoadError
from tandem_core.sampling import SamplingParams
from tandem_engine import model_loader
from tandem_engine.beam_search import BeamSearch
from tandem_engine.free_memory import available_bytes
from tandem_engine.kv_pool import DEFAULT_POOL_BYTES, KVShape, PoolSizes
from tandem_engine.llm import LLM
from tandem_engine.memory import MemoryNeed, beam_bytes, fit_pool, step_bytes
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import Quantization
from tandem_engine.workspace import StepLimits
from tandem_kernels import pack_weight, packed_linear
from transformers import LlamaConfig, LlamaForCausalLM

GB = 10**9
#: An 8B model in bfloat16: 8 MiB for a block of 64 tokens in all layers.
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_size=128, block_size=64, dtype=torch.bfloat16)
SIZES = PoolSizes((SHAPE,), 16, 512)
BLOCK = 8 << 20
BESIDE_KV = MemoryNeed(weights=5 * GB, process=GB // 2, kv=0, kv_tokens=0, step=GB // 2, transfer=GB // 10)
LONG_PROMPT, LONG_CONTEXT = 16_384, 20_000
#: What a process loads with its first request, measured: 25 to 45 MB.
_ON_DEMAND = 60 << 20


def fit(**settings: int) -> tuple[int, MemoryNeed]:
    defaults = {"num_blocks": 0, "context": 131_072, "max_model_len": 0, "memory_bytes": 20 * GB}
    return fit_pool(SIZES, BESIDE_KV, **{**defaults, **settings})


def test_the_default_pool_leaves_memory_to_others() -> None:
    assert fit()[0] == DEFAULT_POOL_BYTES // BLOCK
    blocks, need = fit(memory_bytes=3 * GB)
    assert blocks == (3 * GB - BESIDE_KV.private) // 2 // BLOCK
    assert need.private == BESIDE_KV.private + (blocks + 1) * BLOCK
    assert f"KV {need.kv / GB:.2f} for {blocks * 64:,} tokens" in str(need)


def test_shared_text_is_counted_and_leaves_less_for_the_pool() -> None:
    need = replace(BESIDE_KV, shared_text=2 * GB)
    assert need.private == BESIDE_KV.private + 2 * GB
    assert "shared text 2.00" in str(need)
    settings = {"num_blocks": 0, "context": 131_072, "max_model_len": 0, "memory_bytes": 4 * GB}
    assert fit_pool(SIZES, need, **settings)[0] == (4 * GB - need.private) // 2 // BLOCK
    with pytest.raises(CapacityError, match="--shared-text-bytes"):
        fit_pool(SIZES, need, **{**settings, "memory_bytes": 2 * GB})


def test_the_pool_holds_the_context_that_was_asked_for() -> None:
    blocks, need = fit(max_model_len=131_072)
    assert (blocks, need.kv_tokens) == (2048, 131_072)
    assert fit(max_model_len=16_384, context=16_384)[0] == DEFAULT_POOL_BYTES // BLOCK


@pytest.mark.parametrize(
    ("settings", "named", "remedy"),
    [
        ({"num_blocks": 4000}, "--num-blocks 4000: ", "set it to {fitting} or less"),
        ({"max_model_len": 131_072, "memory_bytes": 10 * GB}, "--max-model-len 131072: ", "to {tokens} or"),
        ({"memory_bytes": 10**9}, "--chunk-size, --max-batch or --draft-nodes: ", "lower one of them"),
        ({"memory_bytes": 10**8}, "--model: ", "choose a smaller model"),
        ({"num_blocks": 8, "max_model_len": 1024}, "--num-blocks 8 holds 512 tokens", "16 or more, or to 0"),
    ],
)  # fmt: skip
def test_a_setting_that_does_not_fit_is_named_with_need_room_and_remedy(
    settings: dict[str, int], named: str, remedy: str
) -> None:
    context = {"context": settings["max_model_len"]} if "max_model_len" in settings else {}
    with pytest.raises(CapacityError) as refused:
        fit(**settings, **context)
    room = settings.get("memory_bytes", 20 * GB)
    fitting = (room - BESIDE_KV.private) // BLOCK - 1
    text = str(refused.value)
    assert text.startswith(named) and remedy.format(fitting=fitting, tokens=fitting * 64) in text
    if "{" in remedy:
        assert f"{room / GB:.2f} GB are there" in text
        follows = {"num_blocks": fitting} if "num_blocks" in settings else {"max_model_len": fitting * 64}
        fit(**{**settings, **follows}, **({} if "num_blocks" in settings else {"context": fitting * 64}))


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert available_bytes(tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("10000\n")
    assert available_bytes(tmp_path) == 7500


@pytest.fixture(scope="module")
def long_context_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=toy_models.VOCABULARY,
        hidden_size=256,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONG_CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    )
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "long-llama"
    toy_models.save_checkpoint(LlamaForCausalLM(config), checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return model_loader.pull(str(checkpoint))


def test_a_prompt_of_16k_tokens_takes_the_memory_that_was_said(
    long_context_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a kernel that cannot pre-fault: else the pool may be faulted in before the measurement begins.
    monkeypatch.setattr("tandem_engine.prefault._MADV_POPULATE_WRITE", -1)
    sizes = {"max_model_len": 16_640, "num_blocks": 260, "chunk_size": 512, "threads": 1, "dtype": "float32"}
    with caplog.at_level(logging.INFO, logger="tandem_engine"):
        llm = LLM(long_context_model, **sizes)
    (said,) = (r.args[0] for r in caplog.records if isinstance(r.args, tuple) and r.msg == "memory: %s")
    assert isinstance(said, MemoryNeed)
    assert said.kv_tokens == 260 * 64
    # Must show in what is measured.
    used_kv = said.kv * LONG_PROMPT // (261 * 64)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    gc.collect()  # else what earlier tests left may be freed meanwhile
    before = psutil.Process().memory_full_info().uss
    (done,) = llm.generate([toy_models.prompt_of(LONG_PROMPT)], greedy)
    taken = psutil.Process().memory_full_info().uss - before
    assert len(done.token_ids) == 8
    assert 0.5 * used_kv < taken < said.kv + said.step + _ON_DEMAND


@pytest.mark.skipif("avx2" not in NATIVE, reason="only kernels without bfloat16 products widen")
def test_what_bfloat16_takes_without_products_of_its_own_is_counted(long_context_model: Path) -> None:
    rows, depth, threads = 512, 16_384, 1
    raw = json.loads((long_context_model / "config.json").read_text()) | {"intermediate_size": depth}
    spec = ModelConfig.from_hf(raw).spec
    limits = StepLimits(max_tokens=rows, max_seqs=1, max_decode_tokens=1)

    def said(quantization: Quantization) -> int:
        return step_bytes(
            spec, torch.bfloat16, limits, packed=True, quantization=quantization, threads=threads
        )

    widened = said(Quantization.NONE) - said(Quantization.W8A8)
    x, weight = torch.randn(rows, depth).bfloat16(), pack_weight(torch.randn(64, depth).bfloat16())

    def taken() -> int:
        torch.set_num_threads(threads)
        before = psutil.Process().memory_full_info().uss
        packed_linear(x, weight)
        return psutil.Process().memory_full_info().uss - before

    # A new thread has taken nothing yet; of several threads one may find no work, and takes nothing.
    with native_library("avx2"), ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(taken).result() == pytest.approx(widened, rel=0.1)


def test_the_candidates_of_a_beam_search_are_counted() -> None:
    vocab_size, width = 100_000, 16
    search = BeamSearch(BeamParams(width), end_token_ids=(2,), max_tokens=8)
    search.advance(torch.log_softmax(torch.randn(1, vocab_size), dim=-1).numpy())
    log_probs = torch.log_softmax(torch.randn(width, vocab_size), dim=-1).numpy()
    tracemalloc.start()
    try:
        search.advance(log_probs)
        taken = log_probs.nbytes + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = beam_bytes(vocab_size, max_seqs=32)
    assert 0.98 * said < taken < 1.02 * said
    assert beam_bytes(vocab_size, max_seqs=4) == said // 4


def test_a_context_beyond_the_models_is_refused(long_context_model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--max-model-len 20001: .* has a context of 20000"):
        LLM(long_context_model, threads=1, max_model_len=LONG_CONTEXT + 1)


def test_a_shorter_context_limits_requests(long_context_model: Path) -> None:
    llm = LLM(long_context_model, threads=1, max_model_len=100, num_blocks=4)
    assert llm.manifest == replace(llm.manifest, max_model_len=100)
    (done,) = llm.generate([toy_models.prompt_of(90)], SamplingParams(max_tokens=64, ignore_eos=True))
    assert len(done.token_ids) == 10


def test_a_shorter_context_takes_less_memory(
    long_context_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A context of a million tokens, of which 2,048 are used, takes as much as one of 2,048."""
    folder = tmp_path / "million"
    shutil.copytree(long_context_model, folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tandem.json", "max_model_len")):
        path = folder / name
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), key: 1_000_000}))
    said = []
    for model in (long_context_model, folder):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="tandem_engine"):
            LLM(model, max_model_len=2048, threads=1)
        said += [r.args[0] for r in caplog.records if isinstance(r.args, tuple) and r.msg == "memory: %s"]
    short, long = said
    assert (long.step, long.kv) == (short.step, short.kv)


def test_the_decoder_is_as_long_as_the_texts(long_context_model: Path) -> None:
    decoder = model_loader.load_decoder(long_context_model, torch.float32, max_model_len=128)
    assert decoder.spec.max_len == 128
    whole = model_loader.load_decoder(long_context_model, torch.float32)
    assert whole.spec.max_len == LONG_CONTEXT
