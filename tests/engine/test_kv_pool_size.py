"""How many KV blocks fit on a GPU, for simulated sizes of its memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_core.errors import CapacityError
from tandem_engine.kv_pool import GpuMemory, KVShape, gpu_num_blocks, graph_reserve

GIB = 1 << 30
#: An 8B model: 8 MiB for a block of 64 tokens in all layers.
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_size=128, block_size=64, dtype=torch.bfloat16)
BLOCK = SHAPE.block_bytes * SHAPE.num_layers


def test_a_block_of_the_model_takes_what_the_figures_below_assume() -> None:
    assert BLOCK == 8 << 20


@pytest.mark.parametrize(
    "total, held, utilization, blocks",
    [
        # 72 GiB may be used, less 18 held, 2 and 1 reserved: 51 GiB.
        (80 * GIB, 18 * GIB, 0.9, 51 * 128 - 1),
        # A quarter of the GPU serves another process.
        (80 * GIB, (18 + 20) * GIB, 0.9, 31 * 128 - 1),
        (80 * GIB, 18 * GIB, 0.5, 19 * 128 - 1),
        # 126.9 GiB, less 21.
        (141 * GIB, 18 * GIB, 0.9, 13_554),
        (141 * GIB, 18 * GIB, 0.95, (141 * GIB * 95 // 100 - 21 * GIB) // BLOCK - 1),
        # A size that no block divides, as drivers report it.
        (
            85_028_175_872,
            18_123_456_789,
            0.9,
            (85_028_175_872 * 9 // 10 - 18_123_456_789 - 3 * GIB) // BLOCK - 1,
        ),
    ],
)
def test_the_pool_takes_what_is_left(total: int, held: int, utilization: float, blocks: int) -> None:
    memory = GpuMemory(total, total - held, activations=2 * GIB, graphs=GIB)
    assert gpu_num_blocks(SHAPE, memory, utilization) == blocks


@given(
    total=st.integers(1 * GIB, 200 * GIB),
    held_share=st.floats(0.0, 1.0),
    activations=st.integers(0, 8 * GIB),
    graphs=st.integers(0, 4 * GIB),
    utilization=st.floats(0.05, 0.99),
)
def test_a_pool_never_exceeds_the_share_and_wastes_less_than_a_block(
    total: int, held_share: float, activations: int, graphs: int, utilization: float
) -> None:
    held = int(total * held_share)
    memory = GpuMemory(total, total - held, activations, graphs)
    may_use = int(total * utilization)
    try:
        num_blocks = gpu_num_blocks(SHAPE, memory, utilization)
    except CapacityError:
        assert held + activations + graphs + 3 * BLOCK > may_use
        return
    with_scratch_block = held + activations + graphs + (num_blocks + 1) * BLOCK
    assert num_blocks >= 2
    assert with_scratch_block <= may_use < with_scratch_block + BLOCK


def test_too_little_memory_is_said_with_the_figures_and_the_remedy() -> None:
    memory = GpuMemory(16 * GIB, GIB, activations=GIB // 2, graphs=GIB // 4)
    with pytest.raises(CapacityError) as raised:
        gpu_num_blocks(SHAPE, memory, 0.9)
    for part in (
        "needs 0.02 GiB for two blocks but gets 0.00",
        "of the GPU's 16.00 GiB, 1.00 are free, 1.60 stay unused at --gpu-memory-utilization 0.9",
        "a step takes 0.50 and CUDA graphs 0.25",
        "raise --gpu-memory-utilization, lower --chunk-size or --max-batch, end other processes",
    ):
        assert part in str(raised.value)


def test_graphs_need_a_step_of_their_own_and_some_memory_each() -> None:
    assert graph_reserve(0, activations=GIB) == 0
    assert GIB < graph_reserve(1, activations=GIB) < graph_reserve(17, activations=GIB) < 1.5 * GIB
