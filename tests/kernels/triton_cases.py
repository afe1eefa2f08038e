"""The Triton backend against float64; run by test_triton_kernel in a process of its own.

TRITON_INTERPRET must be set before Triton is imported, and then holds for the whole process. Under it the
cases run on the CPU, without it on the GPU. The interpreter's bfloat16 products are wrong, so it gets none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Options, Sequence, Shape, assert_as_good_as_torch, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_kernels.turbo_attention.triton_backend import TritonAttention
from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
#: For cases whose branches of the kernel others take too, each alone: slow in the interpreter, not on a GPU.
SLOW = [pytest.mark.wide] if DEVICE == "cpu" else []

MIX = [
    Sequence(37, 8, tree=True),
    Sequence(30, 1),
    Sequence(0, 70),
    Sequence(16, 64, tree=True),
    Sequence(15, 1, tree=True),
    Sequence(0, 3, tree=True),
]
#: Contexts of several splits of 64 keys, ending on their boundaries and between them.
LONG = [
    Sequence(300, 9, tree=True),
    Sequence(127, 1),
    Sequence(128, 1),
    Sequence(100, 80),
    Sequence(40, 5),
    Sequence(190, 64, tree=True),
]


def plan_for(
    case: Case,
    split_size: int = 64,
    max_new_tokens: int | None = None,
    share: int | None = None,
    num_places: int = 1 << 20,
) -> AttentionPlan:
    """A plan with room to spare, for steps like the case; its workspace is poisoned.

    share: partial results for each sequence, in new tokens times splits; None: as many as it may leave.
    num_places: items of a K/V head that run at once; by default so many that splits are as small as can be.
    """
    _, num_heads, head_size = case.query.shape
    max_seqs = len(case.seq_lens) + 3
    memory = {} if share is None else {"partials_bytes": share * max_seqs * num_heads * (head_size + 2) * 4}
    plan = AttentionPlan(
        max_tokens=len(case.query) + 17,
        max_seqs=max_seqs,
        max_seq_len=int(case.seq_lens.max()) + 40,
        num_heads=num_heads,
        num_kv_heads=case.kv_cache.shape[2],
        head_size=head_size,
        dtype=case.query.dtype,
        cache_dtype=case.kv_cache.dtype,
        device=case.query.device,
        window=case.options.window,
        max_new_tokens=max_new_tokens,
        draft_tokens=4,
        split_size=split_size,
        **memory,
    )
    for workspace in (plan.partials, plan.maxima, plan.sums):
        workspace.fill_(torch.nan)
    plan.num_places = num_places
    plan.update(case.seq_lens, case.query_start_loc)
    return plan


def check(case: Case, make_plan: Callable[[Case], AttentionPlan] | None = None) -> None:
    """The case is as good as torch's, and its plan is left clean."""
    if make_plan is None:
        assert_as_good_as_torch(case, "triton", DEVICE)
        return
    plan = make_plan(case.to(DEVICE))
    assert_as_good_as_torch(case, TritonAttention([plan]), DEVICE)
    assert not plan.counters.any() and not plan.schedule.any()


# How exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        pytest.param(Options(window=7), marks=pytest.mark.wide),
        pytest.param(Options(softcap=5.0, sinks=True), marks=pytest.mark.wide),
        Options(window=33, softcap=2.0, sinks=True, scales=True),
        pytest.param(Options(window=70, token_scales=True), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_mix_of_trees_decodes_and_chunks(options: Options, dtype: torch.dtype) -> None:
    check(make_case(MIX, Shape(1, 3, 16), options, dtype))


# Partial results are float32 for any query; test_a_plan_serves_all_layers_and_steps joins some in float32.
@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=SLOW), *DTYPES[1:]], ids=str)
@pytest.mark.parametrize(
    "options",
    [pytest.param(Options(), marks=pytest.mark.wide), Options(window=100, sinks=True, softcap=3.0)],
    ids=str,
)
def test_splits_are_joined(options: Options, dtype: torch.dtype) -> None:
    check(make_case(LONG, Shape(1, 3, 16), options, dtype), plan_for)


@pytest.mark.parametrize("num_places", [1 << 20, 6, 1], ids=str)
def test_many_splits_are_joined(num_places: int) -> None:
    sequences = [Sequence(600, 5, tree=True), Sequence(310, 1), Sequence(20, 70)]
    case = make_case(sequences, Shape(1, 3, 16), dtype=torch.float16)
    plans = []

    def make_plan(case: Case) -> AttentionPlan:
        plans.append(plan_for(case, num_places=num_places))
        return plans[-1]

    check(case, make_plan)
    most = max(item[5] for item in plans[0].items[: int(plans[0].num_items)].tolist())
    assert most == {1 << 20: 10, 6: 3, 1: 1}[num_places]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 64, 64),
        Shape(1, 8, 80, 32),
        Shape(4, 1, 96, 16),
        Shape(1, 5, 128, 48),
        Shape(1, 40, 192, 128),
        Shape(1, 2, 256, 16),
        Shape(2, 2, 24, 7),
    ],
    ids=str,
)
def test_head_sizes_groupings_and_block_sizes(shape: Shape) -> None:
    sequences = [Sequence(50, 6, tree=True), Sequence(7, 20), Sequence(130, 1)]
    case = make_case(sequences, shape, dtype=torch.float16)
    check(case, plan_for)


@pytest.mark.parametrize("options", [Options(scales=True), Options(token_scales=True)], ids=str)
@pytest.mark.parametrize(
    "cache_dtype, dtype",
    [
        # float8 becomes float32 by way of float16.
        pytest.param(cache, dtype, marks=SLOW if dtype == torch.float32 and cache != torch.int8 else [])
        for cache in (torch.int8, torch.float8_e5m2, torch.float8_e4m3fn)
        for dtype in DTYPES
    ],
    ids=str,
)
def test_quantized_caches(cache_dtype: torch.dtype, dtype: torch.dtype, options: Options) -> None:
    check(make_case(LONG[1:3], Shape(2, 2, 16), options, dtype, cache_dtype), plan_for)


def test_small_factors_do_not_leave_float16s_range() -> None:
    case = make_case([Sequence(200, 3)], Shape(1, 2, 32), Options(token_scales=True), torch.float16)
    assert case.v_scale is not None
    large = replace(case, kv_cache=case.kv_cache * 1000, k_scale=case.k_scale / 1000)
    check(replace(large, v_scale=case.v_scale * 1e-6))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int, int | None, int | None]:
    """A case and plan_for's other arguments."""

    def sequence() -> Sequence:
        tree = draw(st.booleans())
        return Sequence(draw(st.integers(0, 200)), draw(st.integers(1, 64 if tree else 80)), tree)

    shape = Shape(
        num_kv_heads=draw(st.integers(1, 2)),
        group_size=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([16, 48, 64, 80, 96, 128, 160, 192, 256])),
        block_size=draw(st.sampled_from([16, 32, 48, 64, 128])),
    )
    options = Options(
        window=draw(st.none() | st.integers(1, 200)),
        softcap=draw(st.none() | st.just(4.0)),
        sinks=draw(st.booleans()),
        scales=draw(st.booleans()),
        token_scales=draw(st.booleans()),
    )
    case = make_case(
        [sequence() for _ in range(draw(st.integers(1, 3)))],
        shape,
        options,
        draw(st.sampled_from(DTYPES)),
        draw(st.none() | st.sampled_from([torch.int8, torch.float8_e5m2])),
        seed=draw(st.integers(0, 1000)),
    )
    split_size = draw(st.sampled_from([64, 128, 1024]))
    share = draw(st.sampled_from([None, 0, 8, 20, 100]))
    return case, split_size, draw(st.sampled_from([None, 1, 4, 8])), share


def check_any(drawn: tuple[Case, int, int | None, int | None]) -> None:
    case, split_size, max_new_tokens, share = drawn
    check(case, lambda case: plan_for(case, split_size, max_new_tokens, share))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(drawn=cases())
def test_any_batch(drawn: tuple[Case, int, int | None, int | None]) -> None:
    check_any(drawn)


@pytest.mark.wide
@settings(max_examples=300, deadline=None)
@given(drawn=cases())
def test_very_many_batches(drawn: tuple[Case, int, int | None, int | None]) -> None:
    check_any(drawn)


# The same bits


def test_neither_a_second_run_nor_the_order_of_arrival_changes_a_bit() -> None:
    case = make_case(LONG[:3], Shape(1, 3, 16), Options(sinks=True), torch.float16).to(DEVICE)
    plan = plan_for(case)
    attention = TritonAttention([plan])
    first = case.run(attention)
    for num_programs in (plan.num_programs, 1, 3):
        plan.num_programs = num_programs
        assert torch.equal(case.run(attention), first)
        assert not plan.counters.any() and not plan.schedule.any()


@pytest.mark.parametrize(
    "options, share",
    [
        (Options(sinks=True), None),
        pytest.param(Options(sinks=True), 16, marks=SLOW),
        pytest.param(Options(window=90, scales=True), None, marks=SLOW),
        (Options(window=90, scales=True), 16),  # memory for fewer splits
    ],
    ids=str,
)
def test_a_sequence_with_the_same_splits_gives_the_same_bits_alone_and_in_a_batch(
    options: Options, share: int | None
) -> None:
    case = make_case(LONG[:5], Shape(1, 3, 16), options, torch.float16).to(DEVICE)
    together = case.run(TritonAttention([plan_for(case, share=share)]))
    assert case.ancestor_bits is not None
    for b in range(5):
        start, stop = case.query_start_loc[b : b + 2].tolist()
        alone = replace(
            case,
            query=case.query[start:stop],
            block_table=case.block_table[b : b + 1],
            seq_lens=case.seq_lens[b : b + 1],
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
            ancestor_bits=case.ancestor_bits[start:stop],
        )
        attention = TritonAttention([plan_for(alone, share=share)])
        assert torch.equal(alone.run(attention), together[start:stop])


def test_a_plan_serves_all_layers_and_steps() -> None:
    steps = [make_case(LONG[:3], Shape(1, 2, 16), seed=1), make_case(LONG[1:2], Shape(1, 2, 16), seed=2)]
    plan = plan_for(steps[0].to(DEVICE))
    attention = TritonAttention([plan])
    for step in (steps[0], steps[1], steps[0]):
        for _layer in range(2):
            assert_as_good_as_torch(step, attention, DEVICE)
            assert not plan.counters.any() and not plan.schedule.any()


# What a plan lists, and what is read


def expected_keys(case: Case, b: int, first_row: int, last_row: int) -> range:
    """The slots that some of a chunk's rows see, by the definition; a short sequence's rows count as one."""
    group_size = case.query.shape[1] // case.kv_cache.shape[2]
    seq_len = int(case.seq_lens[b])
    num_new = int(case.query_start_loc[b + 1] - case.query_start_loc[b])
    first_token = first_row // group_size if num_new > 64 else 0
    end = seq_len - num_new + last_row // group_size + 1 if num_new > 64 else seq_len
    window = case.options.window
    return range(0 if window is None else max(0, seq_len - num_new + first_token - window + 1), end)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 200)), min_size=1, max_size=9),
    group_size=st.integers(1, 7),
    window=st.none() | st.integers(1, 300),
    share=st.none() | st.integers(0, 40),
)
def test_a_plan_lists_every_row_and_key_once(
    lens: list[tuple[int, int]], group_size: int, window: int | None, share: int | None
) -> None:
    sequences = [Sequence(context, new) for context, new in lens]
    case = make_case(sequences, Shape(1, group_size, 8), Options(window=window))
    plan = plan_for(case.to(DEVICE), share=share)
    items = plan.items[: int(plan.num_items)].tolist()
    tiles: dict[tuple[int, int], list[list[int]]] = {}
    for item in items:
        tiles.setdefault((item[0], item[1]), []).append(item)
    block_rows, block_keys = plan.tiles.block_rows, plan.tiles.block_keys
    assert sorted(tiles) == [
        (b, row) for b, s in enumerate(sequences) for row in range(0, s.new * group_size, block_rows)
    ]
    assert len({own[0][6] for own in tiles.values()}) == len(tiles), "tiles share a counter"
    assert len(plan.items) >= len(items)
    partial_rows: set[int] = set()
    for (b, first_row), own in tiles.items():
        num_rows = min(block_rows, sequences[b].new * group_size - first_row)
        keys = expected_keys(case, b, first_row, first_row + num_rows - 1)
        assert own[0][2] == keys.start // block_keys * block_keys
        assert own[-1][3] == keys.stop
        for split, (_, _, begin, end, ordinal, num_splits, tile, first_partial) in enumerate(own):
            assert (ordinal, num_splits, tile, first_partial) == (split, len(own), own[0][6], own[0][7])
            assert begin < end
            if sequences[b].new > 64:
                assert num_splits == 1
            elif share is None:
                assert begin // plan.split_size == (end - 1) // plan.split_size
            else:
                assert num_splits == 1 or num_splits * sequences[b].new <= share
            if split:
                assert begin == own[split - 1][3]
                assert begin % plan.split_size == 0
            if num_splits > 1:
                rows = range(first_partial + split * num_rows, first_partial + (split + 1) * num_rows)
                assert partial_rows.isdisjoint(rows)
                assert rows.stop <= plan.num_partial_rows
                partial_rows.update(rows)


def num_splits(lens: list[int], num_places: int) -> list[int]:
    """Splits of each sequence of one new token, with splits of 64 to 1024 keys."""
    case = make_case([Sequence(seq_len - 1, 1) for seq_len in lens], Shape(1, 1, 16)).to(DEVICE)
    plan = plan_for(case, num_places=num_places)
    items = plan.items[: int(plan.num_items)].tolist()
    return [sum(item[0] == b for item in items) for b in range(len(lens))]


def test_splits_are_as_small_as_lets_all_run_at_once() -> None:
    # Not below the plan's 64 keys, nor above 1024.
    assert num_splits([1024], 100) == [16]
    assert num_splits([1024], 4) == [4]
    assert num_splits([1024, 512], 6) == [4, 2]
    assert num_splits([2048, 64], 1) == [2, 1]
    # 17 units of 64 keys, 5 of which would be a split: three splits of 6, 6 and 5, not a fourth one of 2.
    assert num_splits([1024 + 64], 4) == [3]


def test_blocks_before_the_window_are_not_read() -> None:
    case = make_case([Sequence(300, 3), Sequence(200, 70)], Shape(1, 1, 16), Options(window=40))
    expected = case.run("reference")
    for b, seq in enumerate((300, 200)):
        case.kv_cache[case.block_table[b, : (seq - 40 - 64) // 16].long()] = torch.nan
    result = case.to(DEVICE).run("triton").cpu()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_keys_past_the_longest_sequence_of_the_plan_are_left_out() -> None:
    whole = make_case([Sequence(300, 1)], Shape(1, 2, 16), dtype=torch.float16)
    cut = replace(whole, seq_lens=torch.tensor([250], dtype=torch.int32))
    expected = cut.run("reference")
    # A block has 16 slots.
    whole.kv_cache[whole.block_table[0, 16:19].long()] = torch.nan
    case = whole.to(DEVICE)
    plan = AttentionPlan(
        max_tokens=1, max_seqs=1, max_seq_len=250, num_heads=2, num_kv_heads=1, head_size=16,
        dtype=torch.float16, cache_dtype=torch.float16, device=DEVICE, split_size=64,
    )  # fmt: skip
    result = case.run(TritonAttention([plan])).cpu()
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


def test_plain_decode_of_many_sequences() -> None:
    check(make_case([Sequence(7 * i, 1) for i in range(9)], Shape(1, 4, 32)))


def test_sequences_without_new_tokens_are_left_alone() -> None:
    case = make_case([Sequence(10, 2), Sequence(20, 0), Sequence(0, 0), Sequence(20, 3)], Shape(1, 2, 16))
    check(case, plan_for)


# The rest of the contract


def test_errors_say_what_the_kernel_does_not_cover() -> None:
    for message, shape, dtype in (
        ("query has dtype float64", Shape(), torch.float64),
        ("query has head size 512, wanted at most 256", Shape(1, 1, 512), torch.float32),
    ):
        with pytest.raises(ValueError, match=message):
            make_case([Sequence(3, 2)], shape, dtype=dtype).to(DEVICE).run("triton")


def test_a_plan_for_another_model_or_a_smaller_step_is_refused() -> None:
    case = make_case([Sequence(3, 40)], Shape(1, 2, 16)).to(DEVICE)
    for message, other in (
        ("plan is for head_size 16, wanted this call's 32", make_case([Sequence(3, 2)], Shape(1, 2, 32))),
        ("plan is for group_size 2, wanted this call's 3", make_case([Sequence(3, 2)], Shape(1, 3, 16))),
        ("plan is for num_kv_heads 1, wanted this call's 2", make_case([Sequence(3, 2)], Shape(2, 2, 16))),
        (
            r"plans are for windows \[None\], wanted this layer's 3",
            make_case([Sequence(3, 2)], Shape(1, 2, 16), Options(window=3)),
        ),
        (
            "plan is for dtype torch.float32",
            make_case([Sequence(3, 2)], Shape(1, 2, 16), dtype=torch.float16),
        ),
        ("plan is for 57 new tokens at most", make_case([Sequence(3, 58)], Shape(1, 2, 16))),
    ):
        with pytest.raises(ValueError, match=message):
            other.to(DEVICE).run(TritonAttention([plan_for(case)]))
    with pytest.raises(ValueError, match="seq_lens has 5 sequences, wanted at most max_seqs = 4"):
        plan_for(case).update(case.seq_lens.expand(5), case.query_start_loc)
    with pytest.raises(ValueError, match="split_size is 100, wanted a positive multiple of 16 keys"):
        plan_for(case, split_size=100)
