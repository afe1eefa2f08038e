"""All layers in one call give the bits of the operators called one by one."""

import dataclasses

import pytest
import torch
from native_libraries import COMPILED, native_library
from tandem_kernels import (
    AttentionLayer,
    AttentionMetadata,
    DecoderEnds,
    DecoderLayers,
    LayerWeights,
    NormWeights,
    PackedProjection,
    PackedWeight,
    Packing,
    StepInputs,
    activate,
    add_norm,
    deinterleave,
    interleave,
    native,
    pack_quantized,
    pack_weight,
    packed_linear,
    quantize_weight,
    rope_store,
    runs_interleaved,
    turbo_attention,
)

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")
HIDDEN, INNER, HEADS, KV_HEADS, D = 96, 160, 6, 2, 32
BLOCK, NUM_BLOCKS, EPS, SOFTCAP = 64, 12, 1e-5, 2.0
VOCAB = 200


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(
    columns: int, depth: int, dtype: torch.dtype, packing: Packing | None, *, seed: int, has_bias: bool
) -> PackedProjection:
    weight = random(columns, depth, dtype=torch.float32, seed=seed) / depth**0.5
    packed = (
        pack_weight(weight.to(dtype)) if packing is None else pack_quantized(quantize_weight(weight, packing))
    )
    bias = random(columns, dtype=torch.float32, seed=seed + 1) if has_bias else None
    return PackedProjection(PackedWeight((packed,), columns), bias)


def layers(dtype: torch.dtype, packing: Packing | None, *, rich: bool) -> list[LayerWeights]:
    """Three layers; rich ones have biases, QK norm and (the second) a window."""

    def projection(columns: int, depth: int, seed: int) -> PackedProjection:
        return linear(columns, depth, dtype, packing, seed=seed, has_bias=rich)

    return [
        LayerWeights(
            input_norm=1 + random(HIDDEN, dtype=torch.float32, seed=100 * n) / 8,
            qkv=projection((HEADS + 2 * KV_HEADS) * D, HIDDEN, 100 * n + 1),
            q_norm=1 + random(D, dtype=torch.float32, seed=100 * n + 3) / 8 if rich else None,
            k_norm=1 + random(D, dtype=torch.float32, seed=100 * n + 4) / 8 if rich else None,
            o=projection(HIDDEN, HEADS * D, 100 * n + 5),
            post_norm=1 + random(HIDDEN, dtype=torch.float32, seed=100 * n + 7) / 8,
            gate_up=projection(2 * INNER, HIDDEN, 100 * n + 8),
            down=projection(HIDDEN, INNER, 100 * n + 10),
            window=20 if rich and n == 1 else None,
        )
        for n in range(3)
    ]


def ends(dtype: torch.dtype, packing: Packing | None) -> DecoderEnds:
    return DecoderEnds(
        embedding=random(VOCAB, HIDDEN, dtype=dtype, seed=1000),
        norm=1 + random(HIDDEN, dtype=torch.float32, seed=1001) / 8,
        head=linear(VOCAB, HIDDEN, dtype, packing, seed=1002, has_bias=False),
    )


@dataclasses.dataclass
class Step:
    """A chunk of 20 tokens, a decode step, and a tree of 4 nodes, over caches that hold earlier keys."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
        self.block_table = order.view(3, -1).int()
        contexts, new = (50, 130, 190), (20, 1, 4)
        self.seq_lens = torch.tensor([c + n for c, n in zip(contexts, new, strict=True)], dtype=torch.int32)
        self.query_start_loc = torch.tensor([0, 20, 21, 25], dtype=torch.int32)
        logical = [torch.arange(c, c + n) for c, n in zip(contexts, new, strict=True)]
        self.slots = torch.cat(
            [self.block_table[b].long()[at // BLOCK] * BLOCK + at % BLOCK for b, at in enumerate(logical)]
        )
        self.positions = torch.cat([*logical[:2], 190 + torch.tensor([0, 1, 1, 2])])
        self.bits = torch.tensor([0] * 21 + [0b0001, 0b0011, 0b0101, 0b1011])
        angles = torch.outer(
            torch.arange(256.0), torch.rand(D // 2, generator=torch.Generator().manual_seed(2))
        )
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        self.hidden = random(25, HIDDEN, dtype=torch.float32, seed=7)

    def caches(self) -> list[torch.Tensor]:
        shape = (NUM_BLOCKS, 2, KV_HEADS, BLOCK, D)
        return [random(*shape, dtype=self.dtype, seed=50 + n) for n in range(3)]

    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(self.block_table, self.seq_lens, self.query_start_loc, self.bits)

    def inputs(self) -> StepInputs:
        token_ids = torch.randint(0, VOCAB, (25,), generator=torch.Generator().manual_seed(3))
        given = (token_ids, self.positions, self.slots, self.block_table.flatten(), self.seq_lens)
        return StepInputs(*[t.tolist() for t in (*given, self.query_start_loc, self.bits)])


def rms(weight: torch.Tensor | None) -> NormWeights | None:
    return None if weight is None else NormWeights("rms", EPS, weight)


def one_by_one(
    step: Step, weights: list[LayerWeights], caches: list[torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """The residual stream after all layers; hidden is the one before."""

    def linear(x: torch.Tensor, p: PackedProjection) -> torch.Tensor:
        return packed_linear(x, p.weight, p.bias)

    metadata = step.metadata()
    hidden, delta = hidden.clone(), None
    for layer, cache in zip(weights, caches, strict=True):
        normed = add_norm(hidden, delta, rms(layer.input_norm), step.dtype)
        qkv = linear(normed, layer.qkv)
        query = rope_store(
            qkv, step.positions, step.rotations, cache, step.slots, q_norm=rms(layer.q_norm),
            k_norm=rms(layer.k_norm),
        )  # fmt: skip
        attended = turbo_attention(query, cache, metadata, AttentionLayer(D**-0.5, layer.window, SOFTCAP))
        delta = linear(attended.view(-1, HEADS * D), layer.o)
        normed = add_norm(hidden, delta, rms(layer.post_norm), step.dtype)
        delta = linear(activate(linear(normed, layer.gate_up), "silu", True), layer.down)
    assert delta is not None
    return hidden + delta


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [None, Packing.INT8, Packing.INT4])
@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_one_call_gives_the_bits_of_many(
    num_threads: int, rich: bool, packing: Packing | None, dtype: torch.dtype, library: str
) -> None:
    step, weights = Step(dtype), layers(dtype, packing, rich=rich)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with native_library(library):
            expected_caches = step.caches()
            expected = one_by_one(step, weights, expected_caches, step.hidden)
            compiled = DecoderLayers(weights, dtype, head_size=D, eps=EPS, scale=D**-0.5, softcap=SOFTCAP)
            for spans in ([(0, 3)], [(0, 1), (1, 2), (2, 3)]):
                hidden, delta = step.hidden.clone(), torch.full((25, HIDDEN), torch.nan).to(dtype)
                caches = step.caches()
                for first, end in spans:
                    compiled.run(
                        first, end, hidden, delta, step.positions, step.rotations, caches, step.slots,
                        step.metadata(),
                    )  # fmt: skip
                assert torch.equal(hidden + delta, expected)
                assert all(map(torch.equal, caches, expected_caches))
            if not runs_interleaved(dtype, D, BLOCK):
                return
            hidden, delta = step.hidden.clone(), torch.empty(25, HIDDEN, dtype=dtype)
            caches = [interleave(cache) for cache in step.caches()]
            compiled.run(
                0, 3, hidden, delta, step.positions, step.rotations, caches, step.slots, step.metadata(),
                interleaved=True,
            )  # fmt: skip
            assert torch.equal(hidden + delta, expected)
            assert all(torch.equal(deinterleave(c), e) for c, e in zip(caches, expected_caches, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [None, Packing.INT8, Packing.INT4])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_step_from_ids_to_logits_gives_the_bits_of_many_calls(
    num_threads: int, packing: Packing | None, dtype: torch.dtype, library: str
) -> None:
    step, weights, outer = Step(dtype), layers(dtype, packing, rich=True), ends(dtype, packing)
    inputs = step.inputs()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with native_library(library):
            expected_caches = step.caches()
            embedded = outer.embedding[inputs.token_ids].float()
            hidden = one_by_one(step, weights, expected_caches, embedded)
            normed = add_norm(hidden, None, rms(outer.norm), dtype)
            expected = packed_linear(normed, outer.head.weight, out_dtype=torch.float32)
            compiled = DecoderLayers(
                weights, dtype, head_size=D, eps=EPS, scale=D**-0.5, softcap=SOFTCAP, ends=outer
            )
            for rows in ([19, 20, 21, 22, 23, 24], [20], list(range(25)), []):
                caches = step.caches()
                logits, likeliest = compiled.step(inputs, step.rotations, caches, rows)
                assert torch.equal(logits, expected[rows])
                assert likeliest == logits.argmax(1).tolist()
                assert all(map(torch.equal, caches, expected_caches))
            if runs_interleaved(dtype, D, BLOCK):
                caches = [interleave(cache) for cache in step.caches()]
                logits, _ = compiled.step(inputs, step.rotations, caches, [3, 24], interleaved=True)
                assert torch.equal(logits, expected[[3, 24]])
    finally:
        torch.set_num_threads(before)


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    step = Step(torch.float32)
    compiled = DecoderLayers(
        layers(torch.float32, None, rich=False), torch.float32, head_size=D, eps=EPS, scale=D**-0.5,
        ends=ends(torch.float32, None),
    )  # fmt: skip
    inputs, caches = step.inputs(), step.caches()

    def run(rows: tuple[int, ...] = (24,), **changed: object) -> None:
        compiled.step(dataclasses.replace(inputs, **changed), step.rotations, caches, rows)

    with pytest.raises(IndexError, match=r"token 1 has position 51, slot .* and id 200, wanted"):
        run(token_ids=[0, VOCAB, *inputs.token_ids[2:]])
    with pytest.raises(IndexError, match=r"token 0 has position 50, slot .* and id -1"):
        run(token_ids=[-1, *inputs.token_ids[1:]])
    with pytest.raises(IndexError, match=f"token 24 .* slot {NUM_BLOCKS * BLOCK} and"):
        run(slot_mapping=[*inputs.slot_mapping[:24], NUM_BLOCKS * BLOCK])
    with pytest.raises(IndexError, match=r"rows are \[3, 25\], wanted rows of 25 tokens"):
        run(rows=(3, 25))
    with pytest.raises(ValueError, match=r"rows are \[3, 24, 3\], wanted each row once"):
        run(rows=(3, 24, 3))
    with pytest.raises(ValueError, match=r"25 token ids, \(24, 25, 25\) positions"):
        run(positions=inputs.positions[1:])
    with pytest.raises(ValueError, match=r"block_table\[0\] names blocks .* wanted ids in \[0, 12\)"):
        run(block_table=[block + NUM_BLOCKS for block in inputs.block_table])
    with pytest.raises(ValueError, match=r"ancestor_bits\[21\] is 0x2, wanted bit 0 set"):
        run(ancestor_bits=[0] * 21 + [2, 2, 4, 8])
    assert all(map(torch.equal, caches, step.caches()))


@pytest.mark.parametrize(
    "changed",
    [
        {"embedding": torch.zeros(VOCAB - 1, HIDDEN)},
        {"embedding": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)},
        {"embedding": torch.zeros(HIDDEN, VOCAB).t()},
        {"norm": torch.ones(HIDDEN - 16)},
        {"head": linear(VOCAB, HIDDEN // 2, torch.float32, None, seed=0, has_bias=False)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_ends_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    outer = dataclasses.replace(ends(torch.float32, None), **changed)
    with pytest.raises(ValueError, match=f"{next(iter(changed))} has "):
        DecoderLayers(
            layers(torch.float32, None, rich=False), torch.float32, head_size=D, eps=EPS, scale=D**-0.5,
            ends=outer,
        )  # fmt: skip


def test_what_does_not_fit_is_said_and_changes_nothing() -> None:
    step, weights = Step(torch.float32), layers(torch.float32, None, rich=False)
    compiled = DecoderLayers(weights, torch.float32, head_size=D, eps=EPS, scale=D**-0.5, softcap=SOFTCAP)
    hidden, delta, caches = step.hidden.clone(), torch.zeros(25, HIDDEN), step.caches()

    def run(**changed: object) -> None:
        arguments = {
            "hidden": hidden, "delta": delta, "positions": step.positions, "rotations": step.rotations,
            "kv_caches": caches, "slot_mapping": step.slots, "metadata": step.metadata(),
        }  # fmt: skip
        compiled.run(0, 3, **(arguments | changed))

    with pytest.raises(ValueError, match=r"delta has shape .* wanted a dense \[25, 96\] of torch.float32"):
        run(delta=delta.bfloat16())
    with pytest.raises(ValueError, match="positions has shape"):
        run(positions=step.positions[:3])
    with pytest.raises(ValueError, match=r"kv_caches\[1\] has shape .*bfloat16, wanted a contiguous"):
        run(kv_caches=[caches[0], caches[1].bfloat16(), caches[2]])
    with pytest.raises(ValueError, match=r"kv_caches\[2\] has shape"):
        run(kv_caches=[*caches[:2], caches[2].transpose(0, 3).contiguous().transpose(0, 3)])
    elsewhere = dataclasses.replace(step.metadata(), block_table=step.block_table + NUM_BLOCKS)
    with pytest.raises(ValueError, match=r"block_table\[0\] names blocks .* wanted ids in \[0, 12\)"):
        run(metadata=elsewhere)
    with pytest.raises(IndexError, match="token 3 has position 256"):
        run(positions=step.positions.index_fill(0, torch.tensor([3]), 256))
    with pytest.raises(IndexError, match=f"slot {NUM_BLOCKS * BLOCK}, wanted them below"):
        run(slot_mapping=step.slots.index_fill(0, torch.tensor([24]), NUM_BLOCKS * BLOCK))
    assert torch.equal(hidden, step.hidden)
    assert all(map(torch.equal, caches, step.caches()))


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [None, Packing.INT8, Packing.INT4])
def test_a_step_of_no_numbers_has_no_most_likely_token(
    packing: Packing | None, dtype: torch.dtype, library: str
) -> None:
    step, weights, outer = Step(dtype), layers(dtype, packing, rich=True), ends(dtype, packing)
    inputs = step.inputs()
    outer.norm[3] = torch.nan
    with native_library(library):
        compiled = DecoderLayers(
            weights, dtype, head_size=D, eps=EPS, scale=D**-0.5, softcap=SOFTCAP, ends=outer
        )
        _, likeliest = compiled.step(inputs, step.rotations, step.caches(), [19, 24])
    assert likeliest == [-1, -1]
