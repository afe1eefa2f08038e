"""turbo_attention's contract on the CPU: what each row sees, and how close the result is to float64's."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    COMPILED,
    CPU_BACKENDS,
    Case,
    Options,
    Sequence,
    Shape,
    assert_as_good_as_torch,
    attend,
    make_case,
    native_library,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from native_libraries import EMULATED, NATIVE
from tandem_kernels import split_cache
from tandem_kernels.turbo_attention.cpu_torch import TorchAttention

BACKENDS = ["reference", *CPU_BACKENDS]

#: Trees, plain decode, chunks below and above 64 tokens, empty contexts and block boundaries in one call.
MIX = [
    Sequence(37, 8, tree=True),
    Sequence(100, 1),
    Sequence(0, 130),
    Sequence(15, 1, tree=True),
    Sequence(16, 64, tree=True),
    Sequence(63, 20),
    Sequence(0, 3, tree=True),
    Sequence(200, 5, tree=True),
]

OPTIONS = [
    Options(),
    Options(window=7),
    Options(window=64, sinks=True),
    Options(softcap=5.0),
    Options(sinks=True, scales=True),
    Options(window=33, softcap=2.0, sinks=True, scales=True),
    Options(window=33, sinks=True, token_scales=True),
]


def along_paths(case: Case, context: int, window: int | None, backend: str) -> Iterator[torch.Tensor]:
    """For each node of a tree, plain attention over the context and the node's path."""
    assert case.ancestor_bits is not None
    blocks = -(-(context + len(case.query)) // 16)
    slots = case.kv_cache[case.block_table[0, :blocks].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
    for row, bits in enumerate(case.ancestor_bits.tolist()):
        path = [node for node in range(len(case.query)) if bits >> node & 1]
        assert path[-1] == row
        linear = slots[:, :, [*range(context), *(context + node for node in path)]]
        yield attend(
            case.query[row : row + 1],
            linear[None].contiguous(),
            torch.tensor([[0]], dtype=torch.int32),
            torch.tensor([context + len(path)], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            scale=64**-0.5,
            window=window,
            backend=backend,
        )


# What a row sees


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("num_nodes", [2, 9, 64])
def test_a_tree_row_is_causal_attention_along_its_path(
    backend: str, window: int | None, num_nodes: int
) -> None:
    """Also the definition of the window in a tree, and of bit 63: with 64 nodes it is the sign bit."""
    context = 21
    case = make_case(
        [Sequence(context, num_nodes, tree=True)], options=Options(window=window), dtype=torch.float64
    )
    expected = torch.cat([*along_paths(case, context, window, "reference")])
    torch.testing.assert_close(case.run(backend), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_causal_row_is_softmax_over_the_keys_up_to_its_own(backend: str, window: int | None) -> None:
    case = make_case([Sequence(5, 4)], Shape(1, 1, 8), Options(window=window), dtype=torch.float64)
    key, value = case.kv_cache[case.block_table[0, 0]][:, 0]
    for row, result in enumerate(case.run(backend)[:, 0]):
        position = 5 + row
        first = 0 if window is None else position - window + 1
        weights = (key[first : position + 1] @ case.query[row, 0] * 8**-0.5).softmax(0)
        torch.testing.assert_close(result, weights @ value[first : position + 1], rtol=1e-12, atol=1e-12)


def with_bits(case: Case, bits: torch.Tensor | None, backend: str) -> torch.Tensor:
    return attend(
        case.query, case.kv_cache, case.block_table, case.seq_lens, case.query_start_loc, bits,
        scale=0.125, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_of_zero_or_more_than_64_rows_mean_causal(backend: str) -> None:
    case = make_case([Sequence(9, 30), Sequence(3, 65), Sequence(17, 1)])
    causal = with_bits(case, None, backend)
    bits = torch.zeros(96, dtype=torch.int64)
    assert torch.equal(with_bits(case, bits, backend), causal)
    bits[30:95] = 1
    assert torch.equal(with_bits(case, bits, backend), causal)
    bits[95] = 1  # a tree of one node is plain decode
    torch.testing.assert_close(with_bits(case, bits, backend), causal, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_nodes_is_causal(backend: str) -> None:
    case = make_case([Sequence(40, 64)])
    chain = torch.tensor([(2 << i) - 1 - (2**64 if i == 63 else 0) for i in range(64)])
    torch.testing.assert_close(
        with_bits(case, chain, backend), with_bits(case, None, backend), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_the_blocks_lie_changes_nothing(backend: str) -> None:
    case = make_case(MIX)
    order = torch.randperm(len(case.kv_cache), generator=torch.Generator().manual_seed(5))
    moved = torch.empty_like(case.kv_cache)
    moved[order] = case.kv_cache
    in_use = case.block_table >= 0
    table = torch.where(in_use, order[case.block_table.clamp(min=0).long()].int(), case.block_table)
    args = (case.seq_lens, case.query_start_loc, case.ancestor_bits)
    assert torch.equal(
        attend(case.query, case.kv_cache, case.block_table, *args, scale=0.1, backend=backend),
        attend(case.query, moved, table, *args, scale=0.1, backend=backend),
    )


# How exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_mix_of_trees_decodes_and_chunks(backend: str, options: Options, dtype: torch.dtype) -> None:
    assert_as_good_as_torch(make_case(MIX, options=options, dtype=dtype), backend)


@pytest.mark.parametrize("num_kv_heads, group_size", [(1, 1), (1, 8), (4, 1), (2, 5)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_head_sizes_and_groupings(
    backend: str, dtype: torch.dtype, head_size: int, num_kv_heads: int, group_size: int
) -> None:
    shape = Shape(num_kv_heads, group_size, head_size, block_size=32)
    sequences = [Sequence(50, 6, tree=True), Sequence(31, 2), Sequence(7, 90)]
    assert_as_good_as_torch(make_case(sequences, shape, dtype=dtype), backend)


@pytest.mark.parametrize("head_size", [512, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_largest_heads(backend: str, dtype: torch.dtype, head_size: int) -> None:
    sequences = [Sequence(50, 6, tree=True), Sequence(31, 2), Sequence(7, 40)]
    assert_as_good_as_torch(make_case(sequences, Shape(1, 4, head_size), dtype=dtype), backend)


@pytest.mark.parametrize("options", [Options(), Options(window=20, sinks=True, softcap=5.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_values_narrower_than_keys(backend: str, dtype: torch.dtype, options: Options) -> None:
    """The result is that of whole values without its last elements."""
    case = make_case(MIX, Shape(head_size=96), options, dtype)
    keys, values = case.kv_cache.unbind(1)
    blocks = torch.cat([keys.flatten(1), values[..., :32].flatten(1)], 1)
    narrow = replace(case, kv_cache=split_cache(blocks, 2, 16, 96, 32))
    result, whole = narrow.run(backend), case.run(backend)[..., :32]
    if backend == "torch":
        torch.testing.assert_close(result, whole, rtol=0.02, atol=0.02)
    else:
        assert torch.equal(result, whole)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [Options(scales=True), Options(token_scales=True)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_caches(
    backend: str, options: Options, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = make_case(MIX, options=options, dtype=dtype, cache_dtype=cache_dtype)
    assert_as_good_as_torch(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_be_apart_and_heads_in_another_order(backend: str) -> None:
    case = make_case(MIX)
    apart = torch.full((len(case.kv_cache), 3, 2, 16, 64), torch.nan)
    apart[:, ::2] = case.kv_cache.flip(2)
    layout = apart.transpose(1, 2).contiguous().transpose(1, 2)[:, ::2]
    assert not layout.is_contiguous()
    args = (case.block_table, case.seq_lens, case.query_start_loc, case.ancestor_bits)
    result = attend(
        case.query.unflatten(1, (2, 3)).flip(1).flatten(1, 2), layout, *args, scale=0.1, backend=backend
    )
    expected = attend(case.query, case.kv_cache, *args, scale=0.1, backend=backend)
    torch.testing.assert_close(
        result, expected.unflatten(1, (2, 3)).flip(1).flatten(1, 2), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_may_be_one_number(backend: str) -> None:
    case = make_case([Sequence(20, 3)], Shape(num_kv_heads=2))
    args = (case.query, case.kv_cache, case.block_table, case.seq_lens, case.query_start_loc)
    result = attend(*args, scale=0.1, k_scale=3.0, v_scale=torch.tensor(0.5), backend=backend)
    expected = attend(*args, scale=0.3, backend=backend) * 0.5
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_long_contexts_are_split(backend: str, dtype: torch.dtype) -> None:
    sequences = [Sequence(3000, 48, tree=True), Sequence(2900, 40, tree=True), Sequence(1100, 300)]
    for options in (Options(), Options(sinks=True), Options(softcap=3.0), Options(window=500)):
        assert_as_good_as_torch(make_case(sequences, Shape(1, 3), options, dtype), backend)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_computing_in_bfloat16_as_on_processors_that_multiply_it(options: Options) -> None:
    case = make_case([*MIX[:6], Sequence(1500, 40, tree=True)], options=options, dtype=torch.bfloat16)
    assert_as_good_as_torch(case, TorchAttention(bfloat16=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("window", [None, 20])
def test_full_trees_of_unequal_length_share_a_group(backend: str, window: int | None) -> None:
    """Node 63's bit must not let a row see the padding after a shorter sequence."""
    sequences = [Sequence(10, 64, tree=True), Sequence(41, 64, tree=True), Sequence(30, 61, tree=True)]
    assert_as_good_as_torch(make_case(sequences, options=Options(window=window)), backend)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def sequence() -> Sequence:
        tree = draw(st.booleans())
        return Sequence(draw(st.integers(0, 90)), draw(st.integers(1, 64 if tree else 140)), tree)

    sequences = [sequence() for _ in range(draw(st.integers(1, 5)))]
    shape = Shape(
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([8, 16, 24, 64, 80])),
        block_size=draw(st.sampled_from([1, 7, 16, 64])),
    )
    options = Options(
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.none() | st.just(4.0)),
        sinks=draw(st.booleans()),
        scales=draw(st.booleans()),
        token_scales=draw(st.booleans()),
    )
    return make_case(sequences, shape, options, seed=draw(st.integers(0, 1000)))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_any_batch(case: Case) -> None:
    for backend in CPU_BACKENDS:
        assert_as_good_as_torch(case, backend)


@pytest.mark.wide
@settings(max_examples=1500, deadline=None)
@given(case=cases())
def test_very_many_batches(case: Case) -> None:
    for backend in BACKENDS:
        assert_as_good_as_torch(case, backend)


# What the compiled kernel promises beyond that: a row's bits depend on its own query and keys alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", COMPILED)
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(backend: str, dtype: torch.dtype) -> None:
    sequences = [*MIX, Sequence(1500, 40, tree=True), Sequence(700, 1), Sequence(1030, 90)]
    case = make_case(sequences, options=Options(sinks=True), dtype=dtype)
    together = case.run(backend)
    assert case.ancestor_bits is not None
    for b in range(len(sequences)):
        start, stop = case.query_start_loc[b : b + 2].tolist()
        alone = attend(
            case.query[start:stop], case.kv_cache, case.block_table[b : b + 1], case.seq_lens[b : b + 1],
            torch.tensor([0, stop - start], dtype=torch.int32), case.ancestor_bits[start:stop],
            scale=64**-0.5, sinks=case.sinks, backend=backend,
        )  # fmt: skip
        assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", COMPILED)
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    backend: str, window: int | None, dtype: torch.dtype
) -> None:
    length = 1200
    case = make_case([Sequence(0, length)], options=Options(window=window), dtype=dtype)
    whole = case.run(backend)
    for cuts in ([0, 64, 65, 600, 1199, length], [0, 511, 513, length]):
        for first, end in itertools.pairwise(cuts):
            part = attend(
                case.query[first:end], case.kv_cache, case.block_table,
                torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - first], dtype=torch.int32),
                scale=64**-0.5, window=window, backend=backend,
            )  # fmt: skip
            assert torch.equal(part, whole[first:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", COMPILED)
def test_a_chain_of_drafts_gives_the_bits_of_plain_decoding(backend: str, dtype: torch.dtype) -> None:
    case = make_case([Sequence(1000, 40)], dtype=dtype)
    chain = torch.tensor([(2 << i) - 1 for i in range(40)])
    assert torch.equal(with_bits(case, chain, backend), with_bits(case, None, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("context", [0, 37, 64, 500, 1100])
@pytest.mark.parametrize("backend", COMPILED)
def test_a_node_gives_the_bits_of_plain_decoding_along_its_path(
    backend: str, context: int, window: int | None, dtype: torch.dtype
) -> None:
    case = make_case(
        [Sequence(context, 64, tree=True)], options=Options(window=window), dtype=dtype, seed=context
    )
    assert torch.equal(case.run(backend), torch.cat([*along_paths(case, context, window, backend)]))


@pytest.mark.parametrize("backend", COMPILED)
def test_the_number_of_threads_changes_no_bit(backend: str) -> None:
    case = make_case([Sequence(3000, 7), Sequence(20, 300)])
    expected = case.run(backend)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(case.run(backend), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif("amx" not in NATIVE, reason="no AMX on this machine")
def test_the_emulation_of_amx_gives_its_bits() -> None:
    case = make_case([*MIX, Sequence(600, 9, tree=True)], options=Options(sinks=True), dtype=torch.bfloat16)
    assert torch.equal(case.run("amx"), case.run(EMULATED))


def test_without_compiled_kernels_torch_computes() -> None:
    case = make_case(MIX)
    assert torch.equal(attend_without_native(case), case.run("torch"))


def attend_without_native(case: Case) -> torch.Tensor:
    with native_library("off"):
        return case.run("cpu")


# The rest of the contract


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_run_gives_the_same_bits(backend: str) -> None:
    case = make_case([*MIX, Sequence(1500, 40, tree=True)], options=Options(sinks=True))
    assert torch.equal(case.run(backend), case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_written_and_returned_whatever_its_strides(backend: str) -> None:
    case = make_case(MIX)
    storage = torch.full((case.query.shape[0], 10, 64), torch.nan)
    out = storage[:, 2:8]
    args = (case.query, case.kv_cache, case.block_table, case.seq_lens, case.query_start_loc)
    returned = attend(*args, case.ancestor_bits, scale=0.125, out=out, backend=backend)
    assert returned is out
    assert torch.equal(out, attend(*args, case.ancestor_bits, scale=0.125, backend=backend))
    assert storage[:, :2].isnan().all()
    assert storage[:, 8:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_without_new_tokens_and_rows_of_nobody_are_left_alone(backend: str) -> None:
    case = make_case([Sequence(10, 2), Sequence(20, 3)])
    expected = case.run(backend)
    out = torch.full((7, *case.query.shape[1:]), 5.0)
    attend(
        torch.cat((case.query, case.query[:2])),
        case.kv_cache,
        case.block_table[[0, 0, 1]],
        torch.tensor([12, 0, 23], dtype=torch.int32),
        torch.tensor([0, 2, 2, 5], dtype=torch.int32),
        scale=0.125,
        out=out,
        backend=backend,
    )
    torch.testing.assert_close(out[:5], expected, rtol=0, atol=1e-6)
    assert (out[5:] == 5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_gives_an_empty_result(backend: str) -> None:
    none, start = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    result = attend(
        torch.zeros(0, 4, 8),
        torch.zeros(1, 2, 2, 4, 8),
        none.view(0, 3),
        none,
        start,
        scale=1.0,
        backend=backend,
    )
    assert result.shape == (0, 4, 8)


def test_auto_is_the_cpu_backend_for_cpu_tensors() -> None:
    case = make_case(MIX)
    assert torch.equal(case.run("auto"), case.run("cpu"))


@pytest.mark.parametrize("library", ["off", *COMPILED])
def test_errors_name_the_argument_what_it_is_and_what_is_wanted(library: str) -> None:
    case = make_case([Sequence(20, 3), Sequence(5, 2, tree=True)])

    def run(**changed: object) -> None:
        arguments = {
            name: getattr(case, name)
            for name in ("query", "kv_cache", "block_table", "seq_lens", "query_start_loc", "ancestor_bits")
        }
        attend(**{"scale": 0.125, **arguments, **changed})

    ids = torch.int32
    for message, changed in {
        r"query has shape \[5, 384\], wanted \[T, Hq, D\]": {"query": case.query.flatten(1)},
        "query has head size 32, wanted the cache's 64": {"query": case.query[..., :32]},
        "query has 5 heads, wanted a multiple of Hkv = 2": {"query": case.query[:, :5]},
        "query has strides .* wanted 1": {"query": case.query[..., :1].expand(-1, -1, 64)},
        "query has dtype torch.int64": {"query": case.query.long()},
        "kv_cache has dtype torch.float16, wanted the query's": {"kv_cache": case.kv_cache.half()},
        "kv_cache has strides": {"kv_cache": case.kv_cache.transpose(2, 3)},
        "block_table has dtype torch.int64, wanted torch.int32": {"block_table": case.block_table.long()},
        "block_table has strides": {"block_table": case.block_table[:, :2]},
        r"seq_lens has shape \[1\], wanted \[2\]": {"seq_lens": case.seq_lens[:1]},
        r"query_start_loc has shape \[2\], wanted \[3\]": {"query_start_loc": case.query_start_loc[:2]},
        r"ancestor_bits has shape \[4\], wanted \[5\]": {"ancestor_bits": case.ancestor_bits[:4]},
        r"sinks has shape \[2\], wanted \[Hq\] = \[6\]": {"sinks": torch.zeros(2)},
        "window is 0": {"window": 0},
        "softcap is -1.0": {"softcap": -1.0},
        r"k_scale has shape \[3\], wanted a number, \[Hkv\] = \[2\] or \[num_blocks, Hkv, block_size\] = ": {
            "k_scale": torch.ones(3)
        },
        "v_scale has dtype torch.float64, wanted float32": {
            "v_scale": torch.ones(len(case.kv_cache), 2, 16, dtype=torch.float64)
        },
        r"out has shape \[5, 6, 64\], .* and dtype torch.float16": {"out": case.query.half()},
        "backend is 'cuda'": {"backend": "cuda"},
        r"seq_lens\[0\] is 2, wanted at least its 3 new tokens": {
            "seq_lens": torch.tensor([2, 7], dtype=ids)
        },
        r"ancestor_bits\[4\] is 0x1, wanted bit 1 set: a node of a tree sees itself": {
            "ancestor_bits": torch.tensor([0, 0, 0, 1, 1])
        },
        "query_start_loc is": {"query_start_loc": torch.tensor([0, 4, 3], dtype=ids)},
        "block_table has 4 blocks a sequence, wanted enough for the 99 tokens": {
            "seq_lens": torch.tensor([99, 7], dtype=ids)
        },
        r"block_table\[1\] names blocks .* wanted ids in \[0, ": {
            "block_table": torch.full_like(case.block_table, 3).index_fill_(0, torch.tensor(1), -1)
        },
    }.items():
        with native_library(library), pytest.raises(ValueError, match=message):
            run(**changed)
