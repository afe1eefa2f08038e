"""Padding a decode step to a bucket changes nothing of it, whatever the buffers held before.

The compiled kernels compute rows independently of each other, so there results are equal to the last bit;
torch's products are not, so without the kernels they are equal within rounding.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import MAX_ROWS, Bucket, StaticInputs, bucket_for, compute
from tandem_engine.draft_tree import DraftTree
from tandem_engine.kv_pool import KVPool, KVShape
from tandem_engine.model_loader import load_decoder
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner, model_inputs
from tandem_kernels import native
from toy_models import VOCABULARY

BLOCK_SIZE, MAX_BLOCKS = 16, 12
CPU = torch.device("cpu")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequence(
    start: int, draft: DraftTree | None, block_ids: list[int], rng: random.Random, num_new: int = 1
) -> ScheduledSequence:
    """As scheduled when `start` tokens are in the cache; num_new counts only without a draft."""
    guesses = draft.token_ids if draft else tuple(rng.randrange(VOCABULARY) for _ in range(num_new - 1))
    request = Request("r", [1] * (start + 1), SamplingParams())
    blocks = tuple(block_ids[: -(-(start + 1 + len(guesses)) // BLOCK_SIZE)])
    return ScheduledSequence(request, blocks, start, (rng.randrange(VOCABULARY), *guesses), draft, True)


def random_tree(rng: random.Random) -> DraftTree | None:
    n = rng.choice([0, 0, 1, 3, 7])
    if n == 0:
        return None
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(n))
    return DraftTree(tokens, tuple(rng.randint(0, i) for i in range(n)), ("output",) * n)


def decode_batch(rng: random.Random, num_seqs: int, all_blocks: list[int]) -> Batch:
    """Sequences of random lengths, some with drafts, over blocks of their own."""
    blocks = iter(range(0, len(all_blocks), MAX_BLOCKS))
    return Batch(
        tuple(
            sequence(rng.randint(0, 150), random_tree(rng), all_blocks[b : b + MAX_BLOCKS], rng)
            for b, _ in zip(blocks, range(num_seqs), strict=False)
        )
    )


def tensors(inputs: StaticInputs) -> list[torch.Tensor]:
    """All that a step reads on the device."""
    step = inputs.inputs
    return [step.input_ids, step.positions, step.slot_mapping, *vars(step.attention).values()]


def make_runner(folder: Path, dtype: torch.dtype, num_blocks: int, device: str = "cpu") -> ModelRunner:
    """Over a cache of random KV, the same for the same sizes."""
    decoder = load_decoder(folder, dtype, device)
    config = decoder.config
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    pool = KVPool(shape, num_blocks, torch.device(device))
    generator = torch.Generator().manual_seed(5)
    for cache in pool.caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return ModelRunner(decoder, pool, torch.device(device))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 0.0 if native.LIBRARY is not None else 0.02
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_steps_equal_unpadded_ones(tiny_model: Path, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    num_seqs = 5
    blocks = rng.sample(range(num_seqs * MAX_BLOCKS), num_seqs * MAX_BLOCKS)
    padded, plain = (make_runner(tiny_model, dtype, len(blocks)) for _ in range(2))
    # Larger than any batch below, so that one set of buffers serves them all, one after another.
    inputs = StaticInputs(Bucket(64, 8), MAX_BLOCKS + 1, padded.pool.scratch_slot, CPU)
    for _ in range(12):
        batch = decode_batch(rng, rng.randint(1, num_seqs), blocks)
        inputs.load(model_inputs(batch, BLOCK_SIZE))
        logits = compute(padded.decoder, padded.pool.caches, inputs.inputs)
        assert logits.shape == (64, VOCABULARY)
        expected = plain.execute(batch)
        assert_same(logits[: batch.num_tokens], expected)
        for ours, theirs in zip(padded.pool.caches, plain.pool.caches, strict=True):
            assert_same(ours[:-1], theirs[:-1])  # all but the scratch block
            ours[:-1].copy_(theirs[:-1])


def test_padding_rows_write_to_the_scratch_slot_alone(tiny_model: Path) -> None:
    rng = random.Random(2)
    runner = make_runner(tiny_model, torch.float32, MAX_BLOCKS)
    before = [cache.clone() for cache in runner.pool.caches]
    batch = Batch((sequence(20, None, list(range(MAX_BLOCKS)), rng),))
    inputs = StaticInputs(Bucket(4, 2), MAX_BLOCKS, runner.pool.scratch_slot, CPU)
    inputs.load(model_inputs(batch, BLOCK_SIZE))
    compute(runner.decoder, runner.pool.caches, inputs.inputs)
    assert runner.pool.scratch_slot // BLOCK_SIZE == MAX_BLOCKS
    for cache, old in zip(runner.pool.caches, before, strict=True):
        changed = (cache != old).any(dim=(1, 2, 4)).nonzero().tolist()
        assert changed == [[1, 4], [MAX_BLOCKS, 0]]


def test_the_buffers_stay_where_they_are() -> None:
    rng = random.Random(3)
    inputs = StaticInputs(Bucket(8, 4), MAX_BLOCKS, 999, CPU)
    kept = tensors(inputs)
    addresses = [tensor.data_ptr() for tensor in kept]
    for num_seqs in (4, 1):
        batch = Batch(tuple(sequence(30, None, list(range(MAX_BLOCKS)), rng) for _ in range(num_seqs)))
        inputs.load(model_inputs(batch, BLOCK_SIZE))
        metadata = inputs.inputs.attention
        assert metadata.seq_lens.tolist() == [31] * num_seqs + [0] * (4 - num_seqs)
        assert metadata.query_start_loc.tolist() == [*range(num_seqs), *[num_seqs] * (5 - num_seqs)]
        assert inputs.inputs.slot_mapping.tolist() == [30] * num_seqs + [999] * (8 - num_seqs)
    assert [tensor.data_ptr() for tensor in kept] == addresses


@pytest.mark.parametrize("bucket", [Bucket(1, 1), Bucket(6, 1), Bucket(6, 6), Bucket(16, 12)], ids=str)
def test_every_input_is_aligned_as_triton_wants_it(bucket: Bucket) -> None:
    inputs = StaticInputs(bucket, MAX_BLOCKS, 0, CPU)
    start = inputs.inputs.input_ids.data_ptr()
    for tensor in tensors(inputs):
        if tensor is not inputs.inputs.attention.block_table:
            assert (tensor.data_ptr() - start) % 16 == 0
        assert tensor.is_contiguous()


def test_buckets() -> None:
    rng = random.Random(4)
    wasted = []
    for n in range(1, MAX_ROWS + 1):
        batch = Batch(tuple(sequence(3, None, [0], rng) for _ in range(n)))
        bucket = bucket_for(batch)
        assert bucket is not None
        assert bucket.num_rows == bucket.num_seqs >= n
        wasted.append(1 - n / bucket.num_rows)
    assert max(wasted) < 1 / 3
    chain = DraftTree((1, 2, 3, 4), (0, 1, 2, 3), ("output",) * 4)
    batch = Batch((sequence(3, chain, [0], rng), sequence(9, None, [1], rng)))
    assert bucket_for(batch) == Bucket(6, 2)


def test_prompt_chunks_and_steps_too_large_are_left_to_the_eager_path() -> None:
    rng = random.Random(5)
    decode = sequence(3, None, [0], rng)
    last_chunk = sequence(3, None, [1], rng, num_new=4)
    other_chunk = ScheduledSequence(decode.request, (0,), 3, (1,), None, samples=False)
    assert bucket_for(Batch((decode, last_chunk))) is None
    assert bucket_for(Batch((decode, other_chunk))) is None
    assert bucket_for(Batch((decode,) * (MAX_ROWS + 1))) is None


@pytest.mark.parametrize("device", [GPU])
def test_graphs_replay_what_the_eager_step_computes(tiny_model: Path, device: str) -> None:
    """Twice the same batch: the first run captures, the second replays."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rng = random.Random(6)
    num_seqs = 5
    blocks = list(range(num_seqs * MAX_BLOCKS))
    graphs, plain = (make_runner(tiny_model, torch.float16, len(blocks), device) for _ in range(2))
    for num in (5, 2, 5, 1):
        batch = decode_batch(rng, num, blocks)
        # A listener keeps the other runner on the eager path.
        expected = plain.execute(batch, on_layer_done=lambda layer: None)
        for _ in range(2):
            torch.testing.assert_close(graphs.execute(batch), expected, atol=0.02, rtol=0.02)
