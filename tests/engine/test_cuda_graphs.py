"""Padding a decode step to a graph's size changes nothing of it, whatever the buffers held before.

Without a GPU a graph is the padded step itself, run again.

The compiled kernels compute rows independently of each other, so there results are equal to the last bit;
torch's products are not, so without the kernels they are equal within rounding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tandem_core.errors import InvariantError
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import MAX_ROWS, Capture, CudaCapture, graph_sizes
from tandem_engine.device_inputs import StaticInputs
from tandem_engine.draft_tree import DraftTree
from tandem_engine.kv_pool import KVPool, KVShape
from tandem_engine.model_loader import load_decoder
from tandem_engine.models import ModelInputs
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner, step_inputs
from tandem_engine.warm_up import idle_batch, warm_up
from tandem_engine.workspace import StepLimits, make_workspace
from tandem_kernels import native
from toy_models import VOCABULARY

BLOCK_SIZE, MAX_BLOCKS = 16, 12
LIMITS = StepLimits(max_tokens=96, max_seqs=8, max_decode_tokens=64)
CPU = torch.device("cpu")


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
    return ScheduledSequence(request, (blocks,), start, (rng.randrange(VOCABULARY), *guesses), draft, True)


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


def make_runner(folder: Path, dtype: torch.dtype, num_blocks: int, device: str = "cpu") -> ModelRunner:
    """Over a cache of random KV, the same for the same sizes; it takes the decoder's inputs as they are."""
    decoder = load_decoder(folder, dtype, device)
    shape = KVShape.of(decoder.spec, BLOCK_SIZE, dtype)
    pool = KVPool([shape], [num_blocks], torch.device(device))
    generator = torch.Generator().manual_seed(5)
    for cache in pool.caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return ModelRunner(decoder, pool, torch.device(device))


def with_graphs(
    runner: ModelRunner, limits: StepLimits = LIMITS, capture: Capture | None = None
) -> ModelRunner:
    """Over the same decoder and a pool of the same size and contents."""
    pool = KVPool([runner.pool.groups[0].shape], [runner.pool.groups[0].num_blocks], runner.device)
    for cache, other in zip(pool.caches, runner.pool.caches, strict=True):
        cache.copy_(other)
    workspace = make_workspace(runner.decoder, BLOCK_SIZE, pool.groups[0].shape.dtype, limits, graphs=True)
    other = ModelRunner(runner.decoder, pool, runner.device, workspace)
    other.capture_graphs(capture or Replays(), idle_batch(pool))
    return other


class Replays:
    """Captures by keeping the function; counts what is captured and run."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, function):
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            function()

        return replay


def assert_same_kv(ours: ModelRunner, theirs: ModelRunner) -> None:
    """In all but the scratch block; ours then becomes theirs."""
    for our_cache, their_cache in zip(ours.pool.caches, theirs.pool.caches, strict=True):
        assert_same(our_cache[:-1], their_cache[:-1])
        our_cache[:-1].copy_(their_cache[:-1])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 0.0 if native.LIBRARY is not None else 0.02
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_steps_equal_unpadded_ones(tiny_model: Path, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    num_seqs = 5
    blocks = rng.sample(range(num_seqs * MAX_BLOCKS), num_seqs * MAX_BLOCKS)
    plain = make_runner(tiny_model, dtype, len(blocks))
    replays = Replays()
    padded = with_graphs(plain, capture=replays)
    for n in range(12):
        batch = decode_batch(rng, rng.randint(1, num_seqs), blocks)
        # One set of buffers serves them all, one after another.
        assert_same(padded.execute(batch).values, plain.execute(batch).values)
        assert replays.num_replayed == n + 1
        assert_same_kv(padded, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_steps_from_the_buffers_equal_those_from_the_batch(
    tiny_model: Path, dtype: torch.dtype
) -> None:
    """Prompt chunks beside drafts; some sequences sample."""
    rng = random.Random(7)
    num_seqs = 5
    blocks = rng.sample(range(num_seqs * MAX_BLOCKS), num_seqs * MAX_BLOCKS)
    plain = make_runner(tiny_model, dtype, len(blocks))
    replays = Replays()
    staged = with_graphs(plain, capture=replays)
    for n in range(12):
        decoding = decode_batch(rng, rng.randint(1, num_seqs - 1), blocks).sequences
        chunk = sequence(0, None, blocks[-MAX_BLOCKS:], rng, num_new=rng.randint(2, 40))
        chunk = replace(chunk, samples=n % 3 != 0)
        batch = Batch((*decoding, chunk) if n % 2 else (chunk, *decoding))
        assert_same(staged.execute(batch).values, plain.execute(batch).values)
        assert_same_kv(staged, plain)
    assert replays.num_replayed == 0


def test_a_decode_step_of_more_rows_than_any_graph_runs_eagerly(tiny_model: Path) -> None:
    num_seqs = MAX_ROWS + 30
    rng = random.Random(8)
    plain = make_runner(tiny_model, torch.float32, num_seqs)
    limits = StepLimits(max_tokens=num_seqs, max_seqs=num_seqs, max_decode_tokens=num_seqs)
    replays = Replays()
    staged = with_graphs(plain, limits, replays)
    assert replays.num_captured == len(graph_sizes(num_seqs)) == 17
    for count, is_replayed in ((num_seqs, False), (MAX_ROWS, True)):
        batch = Batch(tuple(sequence(3, None, [n], rng) for n in range(count)))
        before = replays.num_replayed
        assert_same(staged.execute(batch).values, plain.execute(batch).values)
        assert replays.num_replayed - before == is_replayed


def test_padding_rows_write_to_the_scratch_slot_alone(tiny_model: Path) -> None:
    rng = random.Random(2)
    runner = with_graphs(make_runner(tiny_model, torch.float32, MAX_BLOCKS))
    for cache in runner.pool.caches:
        cache[-1] = 7.0  # capture has written there
    before = [cache.clone() for cache in runner.pool.caches]
    tree = DraftTree((1, 2), (0, 0), ("output",) * 2)
    batch = Batch((sequence(20, tree, list(range(MAX_BLOCKS)), rng),))
    runner.execute(batch)
    assert runner.pool.groups[0].scratch_slot // BLOCK_SIZE == MAX_BLOCKS
    for cache, old in zip(runner.pool.caches, before, strict=True):
        changed = (cache != old).any(dim=(1, 2, 4)).nonzero().tolist()
        assert changed == [[1, 4], [1, 5], [1, 6], [MAX_BLOCKS, 0]]


def tensors(inputs: StaticInputs, size: int) -> list[torch.Tensor]:
    """All that a step of this size reads on the device."""
    step = inputs.view(size, min(size, inputs.max_seqs))
    return [step.input_ids, step.positions, step.slot_mapping, *vars(step.attention).values()]


def test_the_buffers_stay_where_they_are() -> None:
    rng = random.Random(3)
    inputs = StaticInputs(8, 8, MAX_BLOCKS, CPU)
    addresses = {size: [tensor.data_ptr() for tensor in tensors(inputs, size)] for size in (1, 5, 8)}
    assert addresses[1] == addresses[5] == addresses[8]
    for num_seqs in (4, 1):
        batch = Batch(tuple(sequence(30, None, list(range(MAX_BLOCKS)), rng) for _ in range(num_seqs)))
        inputs.load(ModelInputs.of(step_inputs(batch, BLOCK_SIZE)), 999, num_rows=8, num_seqs=8)
        step = inputs.view(8, 8)
        metadata = step.attention
        assert metadata.block_table[:num_seqs, :2].tolist() == [[0, 1]] * num_seqs
        assert metadata.seq_lens.tolist() == [31] * num_seqs + [0] * (8 - num_seqs)
        assert metadata.query_start_loc.tolist() == [*range(num_seqs), *[num_seqs] * (9 - num_seqs)]
        assert step.slot_mapping.tolist() == [30] * num_seqs + [999] * (8 - num_seqs)
    for size in (1, 5, 8):
        assert [tensor.data_ptr() for tensor in tensors(inputs, size)] == addresses[size]


@pytest.mark.parametrize("rows, seqs", [(1, 1), (6, 1), (7, 5), (144, 16)])
def test_every_input_is_aligned_as_triton_wants_it(rows: int, seqs: int) -> None:
    inputs = StaticInputs(rows, seqs, MAX_BLOCKS, CPU)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (*tensors(inputs, rows), inputs.logits_rows(rows)))
    for size in range(1, rows + 1):
        for tensor, whole in zip(tensors(inputs, size), tensors(inputs, rows), strict=True):
            assert tensor.data_ptr() == whole.data_ptr()
            assert tensor.stride() == whole.stride()
            assert tensor.is_contiguous()


def test_steps_that_do_not_fit_the_buffers_are_refused() -> None:
    rng = random.Random(4)
    inputs = StaticInputs(4, 2, MAX_BLOCKS, CPU)
    one = sequence(3, None, [0], rng)
    with pytest.raises(InvariantError, match="3 sequences; there is room for 3 of 2"):
        inputs.load(ModelInputs.of(step_inputs(Batch((one,) * 3), BLOCK_SIZE)), 0)
    with pytest.raises(InvariantError, match="5 rows"):
        one = sequence(3, None, [0], rng, num_new=5)
        inputs.load(ModelInputs.of(step_inputs(Batch((one,)), BLOCK_SIZE)), 0)


def test_graph_sizes() -> None:
    sizes = graph_sizes(10_000)
    assert len(sizes) == 17
    assert sizes[-1] == MAX_ROWS
    padded = [min(size for size in sizes if size >= n) for n in range(1, MAX_ROWS + 1)]
    assert max(1 - n / size for n, size in enumerate(padded, start=1)) < 1 / 3
    assert graph_sizes(144) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 144]
    assert graph_sizes(1) == [1]


def test_the_largest_graph_is_captured_first(tiny_model: Path) -> None:
    runner = make_runner(tiny_model, torch.float32, 2)
    loaded = []
    load = StaticInputs.load

    def spy(self, *args, **kwargs):
        loaded.append(kwargs["num_rows"])
        return load(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticInputs, "load", spy)
        with_graphs(runner)
    assert loaded == graph_sizes(64)[::-1]


def test_a_failed_capture_leaves_one_line_and_eager_steps(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Replays):
        def __call__(self, function):
            if self.num_captured == 3:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__call__(function)

    rng = random.Random(9)
    blocks = list(range(3 * MAX_BLOCKS))
    plain = make_runner(tiny_model, torch.float32, len(blocks))
    broken = Broken()
    staged = with_graphs(plain, capture=broken)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "operation not permitted" in caplog.text
    for _ in range(3):
        batch = decode_batch(rng, 3, blocks)
        assert_same(staged.execute(batch).values, plain.execute(batch).values)
    assert broken.num_replayed == 0


def test_warm_up_runs_the_largest_steps_in_the_scratch_block(tiny_model: Path) -> None:
    runner = with_graphs(make_runner(tiny_model, torch.float32, 3), StepLimits(100, 4, 36))
    before = [cache[:-1].clone() for cache in runner.pool.caches]
    rows = []
    execute = ModelRunner.execute

    def spy(self, batch, *args):
        rows.append((batch.num_tokens, len(batch.sequences), batch.num_logits_rows))
        return execute(self, batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "execute", spy)
        warm_up(runner, StepLimits(100, 4, 36))
    assert rows == [(100, 4, 28), (36, 4, 36)] * 2
    for cache, old in zip(runner.pool.caches, before, strict=True):
        assert torch.equal(cache[:-1], old)


@pytest.mark.gpu
def test_graphs_replay_what_the_eager_step_computes(tiny_model: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rng = random.Random(6)
    num_seqs = 5
    blocks = list(range(num_seqs * MAX_BLOCKS))
    plain = make_runner(tiny_model, torch.float16, len(blocks), "cuda:0")
    graphs = with_graphs(plain, capture=CudaCapture())
    for num in (5, 2, 5, 1):
        batch = decode_batch(rng, num, blocks)
        # A listener keeps a runner on the eager path.
        expected = graphs.execute(batch, on_layer_done=lambda layer: None).values.clone()
        for _ in range(2):
            torch.testing.assert_close(graphs.execute(batch).values, expected, atol=0.02, rtol=0.02)
