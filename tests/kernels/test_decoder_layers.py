"""All sublayers in one call give the bits of the operators called one by one, whatever they are, and of each
sequence alone."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_libraries import COMPILED, native_library
from tandem_kernels import (
    AttentionLayer,
    AttentionMetadata,
    AttentionWeights,
    BranchWeights,
    DecoderEnds,
    DecoderLayers,
    ExpertProjection,
    KVCache,
    MlpWeights,
    MoeWeights,
    NormWeights,
    PackedExperts,
    PackedProjection,
    PackedWeight,
    Packing,
    RouterScore,
    Routing,
    SharedMlp,
    StepInputs,
    StepTable,
    SublayerWeights,
    activate,
    add_norm,
    deinterleave,
    finish_logits,
    interleave,
    moe,
    native,
    norm_rows,
    pack_quantized,
    pack_weight,
    packed_linear,
    quantize_weight,
    rope_store,
    runs_interleaved,
    sigmoid_gate,
    split_cache,
    turbo_attention,
)

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")
HIDDEN, INNER, HEADS, KV_HEADS, D = 96, 160, 6, 2, 32
BLOCK, NUM_BLOCKS, EPS = 64, 12, 1e-5
VOCAB, POSITIONS = 200, 256


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclasses.dataclass
class Weights:
    """Makes random weights, each from its own seed; packing None: of dtype."""

    dtype: torch.dtype
    packing: Packing | None = None
    biases: bool = False
    seed: int = 0

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.seed += 1
        return random(*shape, dtype=dtype, seed=self.seed)

    def linear(self, columns: int, depth: int) -> PackedProjection:
        weight = self.random(columns, depth) / depth**0.5
        if self.packing is None:
            packed = pack_weight(weight.to(self.dtype))
        else:
            packed = pack_quantized(quantize_weight(weight, self.packing))
        bias = self.random(columns) if self.biases else None
        return PackedProjection(PackedWeight((packed,), columns), bias)

    def experts(self, count: int, columns: int, depth: int) -> ExpertProjection:
        made = [self.linear(columns, depth) for _ in range(count)]
        weight = PackedExperts((torch.stack([p.weight.parts[0] for p in made]),), columns)
        biases = [p.bias for p in made if p.bias is not None]
        return ExpertProjection(weight, torch.stack(biases) if biases else None)

    def norm(self, kind: str | None, width: int = HIDDEN, *, bias: bool = False) -> NormWeights | None:
        """kind "bare" has no weight."""
        if kind is None:
            return None
        if kind == "bare":
            return NormWeights("rms", EPS)
        return NormWeights(kind, EPS, 1 + self.random(width) / 8, self.random(width) / 8 if bias else None)

    def rotations(self, dims: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(float(POSITIONS)), self.random(dims // 2).abs())
        return torch.polar(torch.ones_like(angles), angles)


def llama(dtype: torch.dtype) -> list[SublayerWeights]:
    """Three blocks."""
    make = Weights(dtype)
    rotations = make.rotations(D)
    return [
        SublayerWeights((BranchWeights(mixer, make.norm("rms")),))
        for _ in range(3)
        for mixer in (
            AttentionWeights(
                make.linear((HEADS + 2 * KV_HEADS) * D, HIDDEN), make.linear(HIDDEN, HEADS * D), HEADS,
                KV_HEADS, D, D, D**-0.5, rotations,
            ),
            MlpWeights(make.linear(2 * INNER, HIDDEN), make.linear(HIDDEN, INNER), "silu"),
        )
    ]  # fmt: skip


def ends(dtype: torch.dtype) -> DecoderEnds:
    make = Weights(dtype, seed=1000)
    norm = make.norm("rms")
    assert norm is not None
    return DecoderEnds(make.random(VOCAB, HIDDEN, dtype=dtype), norm, make.linear(VOCAB, HIDDEN))


NORMS = st.sampled_from([None, "rms", "layer", "bare"])


@st.composite
def attentions(draw: st.DrawFn, make: Weights) -> AttentionWeights:
    heads, kv_heads = draw(st.sampled_from([(6, 2), (4, 4), (3, 1), (2, 2)]))
    k_dim, v_dim = draw(st.sampled_from([(32, 32), (16, 16), (48, 48), (64, 32), (32, 96), (80, 64)]))
    if heads * v_dim % 32:
        v_dim *= 2
    kind, whole = draw(NORMS), draw(st.booleans())
    rope_dims = draw(st.sampled_from([0, k_dim, k_dim // 2, 10]))
    out = heads * v_dim
    gate = draw(st.sampled_from([None, None, heads, out]))
    return AttentionWeights(
        qkv=make.linear((heads + kv_heads) * k_dim + kv_heads * v_dim, HIDDEN),
        o=make.linear(HIDDEN, out),
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        scale=draw(st.sampled_from([k_dim**-0.5, 0.1])),
        rotations=make.rotations(rope_dims) if rope_dims else None,
        window=draw(st.sampled_from([None, 20, 70])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=make.random(heads) if draw(st.booleans()) else None,
        gate=None if gate is None else make.linear(gate, HIDDEN),
        q_norm=make.norm(kind, k_dim * (heads if whole else 1), bias=draw(st.booleans())),
        k_norm=make.norm(kind, k_dim * (kv_heads if whole else 1)),
        v_norm=make.norm(draw(st.sampled_from([None, "bare"])), v_dim),
        norm_whole=whole,
        norm_after_rope=draw(st.booleans()),
    )


@st.composite
def mlps(draw: st.DrawFn, make: Weights) -> MlpWeights:
    gated = draw(st.booleans())
    act = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]))
    limit = draw(st.sampled_from([None, 1.5])) if gated else None
    up = make.linear(INNER * (2 if gated else 1), HIDDEN)
    return MlpWeights(up, make.linear(HIDDEN, INNER), act, gated, limit)


@st.composite
def mixtures(draw: st.DrawFn, make: Weights) -> MoeWeights:
    experts, inner = 4, 64
    shared = None
    if draw(st.booleans()):
        gate = make.random(HIDDEN) / 8 if draw(st.booleans()) else None
        shared = SharedMlp(make.linear(2 * inner, HIDDEN).weight, make.linear(HIDDEN, inner).weight, gate)
    score = draw(st.sampled_from(RouterScore))
    return MoeWeights(
        Routing(score, top_k=2, renorm=draw(st.booleans())),
        make.random(experts, HIDDEN) / HIDDEN**0.5,
        make.experts(experts, 2 * inner, HIDDEN),
        make.experts(experts, HIDDEN, inner),
        correction=make.random(experts) if draw(st.booleans()) else None,
        shared=shared,
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[torch.dtype, list[SublayerWeights], DecoderEnds]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    make = Weights(dtype, draw(st.sampled_from([None, Packing.INT8, Packing.INT4])), draw(st.booleans()))

    def branch() -> BranchWeights:
        # Sublayers need not all be of the same packing.
        mixer = draw(st.one_of(attentions(make), mlps(make), mixtures(make)))
        return BranchWeights(mixer, make.norm(draw(NORMS), bias=draw(st.booleans())), make.norm(draw(NORMS)))

    sublayers = [
        SublayerWeights(
            tuple(branch() for _ in range(draw(st.integers(1, 2)))),
            make.norm(draw(st.sampled_from([None, None, "rms"]))),
            draw(st.sampled_from([1.0, 0.25])),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    norm = make.norm(draw(st.sampled_from(["rms", "layer"])))
    assert norm is not None
    learned = draw(st.booleans())
    outer = DecoderEnds(
        embedding=make.random(VOCAB, HIDDEN, dtype=dtype),
        norm=norm,
        head=make.linear(VOCAB, HIDDEN),
        embed_scale=draw(st.sampled_from([1.0, 9.8])),
        learned_positions=make.random(POSITIONS + 2, HIDDEN, dtype=dtype) if learned else None,
        position_offset=2,
        logit_scale=draw(st.sampled_from([1.0, 0.3])),
        logit_cap=draw(st.sampled_from([None, 1.5])),
    )
    return dtype, sublayers, outer


def attention_of(sublayers: Sequence[SublayerWeights]) -> list[AttentionWeights]:
    mixers = [branch.mixer for sublayer in sublayers for branch in sublayer.branches]
    return [mixer for mixer in mixers if isinstance(mixer, AttentionWeights)]


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
        self.hidden = random(25, HIDDEN, dtype=torch.float32, seed=7)

    def caches(self, sublayers: Sequence[SublayerWeights]) -> list[KVCache]:
        made: list[KVCache] = []
        for n, a in enumerate(attention_of(sublayers)):
            size = a.num_kv_heads * BLOCK * (a.k_dim + a.v_dim)
            blocks = random(NUM_BLOCKS, size, dtype=self.dtype, seed=50 + n)
            if a.k_dim == a.v_dim:
                made.append(blocks.view(NUM_BLOCKS, 2, a.num_kv_heads, BLOCK, a.k_dim))
            else:
                made.append(split_cache(blocks, a.num_kv_heads, BLOCK, a.k_dim, a.v_dim))
        return made

    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(self.block_table, self.seq_lens, self.query_start_loc, self.bits)

    def inputs(self) -> StepInputs:
        token_ids = torch.randint(0, VOCAB, (25,), generator=torch.Generator().manual_seed(3))
        given = (token_ids, self.positions, self.slots, self.block_table.flatten(), self.seq_lens)
        return StepInputs(*[t.tolist() for t in (*given, self.query_start_loc, self.bits)])

    def alone(self, sequence: int) -> tuple[StepInputs, slice]:
        """One of the sequences as a step of its own, and its rows of this one."""
        inputs, rows = self.inputs(), slice(*self.query_start_loc[sequence : sequence + 2].tolist())
        count = rows.stop - rows.start
        assert inputs.ancestor_bits is not None
        return StepInputs(
            inputs.token_ids[rows], inputs.positions[rows], inputs.slot_mapping[rows],
            self.block_table[sequence].tolist(), [inputs.seq_lens[sequence]], [0, count],
            inputs.ancestor_bits[rows],
        ), rows  # fmt: skip


def linear(x: torch.Tensor, p: PackedProjection) -> torch.Tensor:
    return packed_linear(x, p.weight, p.bias)


def mixed(
    step: Step,
    mixer: AttentionWeights | MlpWeights | MoeWeights,
    normed: torch.Tensor,
    caches: list[KVCache],
) -> torch.Tensor:
    """What the mixer makes of its input; takes its cache from the front of caches."""
    if isinstance(mixer, MoeWeights):
        return moe(normed, mixer)
    if isinstance(mixer, MlpWeights):
        return linear(activate(linear(normed, mixer.up), mixer.act, mixer.gated, mixer.limit), mixer.down)
    cache = caches.pop(0)
    qkv = linear(normed, mixer.qkv)
    query = rope_store(
        qkv, step.positions, mixer.rotations, cache, step.slots, q_norm=mixer.q_norm, k_norm=mixer.k_norm,
        v_norm=mixer.v_norm, norm_whole=mixer.norm_whole, norm_after_rope=mixer.norm_after_rope,
    )  # fmt: skip
    layer = AttentionLayer(mixer.scale, mixer.window, mixer.softcap, mixer.sinks)
    attended = turbo_attention(query, cache, step.metadata(), layer)
    if mixer.gate is not None:
        sigmoid_gate(attended, linear(normed, mixer.gate))
    return linear(attended.flatten(1), mixer.o)


def one_by_one(
    step: Step, sublayers: Sequence[SublayerWeights], caches: list[KVCache], hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The residual stream, the last sublayer's result, which has not joined it, and that one's scale."""
    hidden, delta, scale, caches = hidden.clone(), None, 1.0, list(caches)
    for sublayer in sublayers:
        results = []
        for branch in sublayer.branches:
            normed = add_norm(hidden, delta, branch.pre, step.dtype, scale=scale)
            delta = None
            result = mixed(step, branch.mixer, normed, caches)
            results.append(result if branch.post is None else norm_rows(result, branch.post))
        delta, scale = results[0] if len(results) == 1 else results[0] + results[1], sublayer.scale
        if sublayer.post is not None:
            delta = norm_rows(delta, sublayer.post)
    assert delta is not None
    return hidden, delta, scale


def embedded(inputs: StepInputs, outer: DecoderEnds) -> torch.Tensor:
    hidden = outer.embedding[inputs.token_ids].float() * outer.embed_scale
    if outer.learned_positions is None:
        return hidden
    rows = torch.tensor(inputs.positions) + outer.position_offset
    return hidden + outer.learned_positions[rows].float()


def parts(caches: Sequence[KVCache]) -> list[torch.Tensor]:
    """The caches' memory as tensors that can be compared."""
    return [t for cache in caches for t in (cache if isinstance(cache, tuple) else (cache,))]


DRAWN = settings(
    max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("library", COMPILED)
@DRAWN
@given(model=models(), num_threads=st.integers(1, 3))
def test_one_call_gives_the_bits_of_many(
    library: str, model: tuple[torch.dtype, list[SublayerWeights], DecoderEnds], num_threads: int
) -> None:
    """Caches included; in a whole step from ids to logits, and sublayer by sublayer; and of each sequence the
    bits that it has without the others."""
    dtype, sublayers, outer = model
    step = Step(dtype)
    inputs = step.inputs()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with native_library(library):
            assert DecoderLayers.supports(sublayers, dtype)
            expected_caches = step.caches(sublayers)
            start = embedded(inputs, outer)
            hidden, delta, scale = one_by_one(step, sublayers, expected_caches, start)
            compiled = DecoderLayers(sublayers, dtype, ends=outer)
            ours, our_delta = start.clone(), torch.full((25, HIDDEN), torch.nan).to(dtype)
            caches = step.caches(sublayers)
            for n in range(len(sublayers)):
                compiled.run(n, n + 1, ours, our_delta, step.positions, caches, step.slots, step.metadata())
            assert torch.equal(ours, hidden) and torch.equal(our_delta, delta)
            assert all(map(torch.equal, parts(caches), parts(expected_caches)))

            normed = add_norm(hidden, delta, outer.norm, dtype, scale=scale)
            expected = packed_linear(normed, outer.head.weight, outer.head.bias, out_dtype=torch.float32)
            finish_logits(expected, outer.logit_scale, outer.logit_cap)
            for rows in ([19, 20, 21, 22, 23, 24], [20], []):
                caches = step.caches(sublayers)
                logits, likeliest = compiled.step(inputs, caches, rows)
                assert torch.equal(logits, expected[rows])
                assert likeliest == logits.argmax(1).tolist()
                assert all(map(torch.equal, parts(caches), parts(expected_caches)))
            for sequence in range(3):
                single, rows_of_it = step.alone(sequence)
                logits, _ = compiled.step(
                    single, step.caches(sublayers), range(rows_of_it.stop - rows_of_it.start)
                )
                assert torch.equal(logits, expected[rows_of_it])
            dims = {d for a in attention_of(sublayers) for d in (a.k_dim, a.v_dim)}
            if not all(runs_interleaved(dtype, dim, BLOCK) for dim in dims):
                return
            caches = [interleave(cache) for cache in step.caches(sublayers)]
            logits, _ = compiled.step(inputs, caches, [3, 24], interleaved=True)
            assert torch.equal(logits, expected[[3, 24]])
            plain = [deinterleave(cache) for cache in caches]
            assert all(map(torch.equal, parts(plain), parts(expected_caches)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_several_groups_have_pools_and_tables_of_their_own(dtype: torch.dtype) -> None:
    """The second layer's blocks are the others' in reverse, in a pool with one more."""
    step, sublayers, outer = Step(dtype), llama(dtype), ends(dtype)
    inputs = step.inputs()
    expected, _ = DecoderLayers(sublayers, dtype, ends=outer).step(
        inputs, (plain := step.caches(sublayers)), range(25)
    )
    (branch,) = sublayers[2].branches
    grouped = dataclasses.replace(branch, mixer=dataclasses.replace(branch.mixer, group=1))
    sublayers[2] = dataclasses.replace(sublayers[2], branches=(grouped,))
    compiled = DecoderLayers(sublayers, dtype, ends=outer)
    caches = step.caches(sublayers)
    caches[1] = torch.cat([torch.zeros_like(caches[1][:1]), caches[1].flip(0)])
    table = NUM_BLOCKS - step.block_table
    slots = (NUM_BLOCKS - step.slots // BLOCK) * BLOCK + step.slots % BLOCK
    second = StepTable(slots.tolist(), table.flatten().tolist())
    logits, _ = compiled.step(dataclasses.replace(inputs, more_tables=(second,)), caches, range(25))
    assert torch.equal(logits, expected)
    assert torch.equal(caches[1][1:].flip(0), plain[1])

    hidden, delta = step.hidden.clone(), torch.empty(25, HIDDEN, dtype=dtype)
    caches[1][1:] = step.caches(sublayers)[1].flip(0)
    metadata = step.metadata()
    compiled.run(
        0, 6, hidden, delta, step.positions, caches, step.slots, metadata,
        more_groups=[(slots, dataclasses.replace(metadata, block_table=table))],
    )  # fmt: skip
    alone = step.hidden.clone(), torch.empty(25, HIDDEN, dtype=dtype)
    compiled.run(0, 6, *alone, step.positions, step.caches(sublayers), step.slots, metadata)
    assert torch.equal(hidden, alone[0]) and torch.equal(delta, alone[1])

    wrong = dataclasses.replace(second, block_table=[NUM_BLOCKS + 1] * len(second.block_table))
    with pytest.raises(ValueError, match=r"names blocks .* wanted ids in \[0, 13\)"):
        compiled.step(dataclasses.replace(inputs, more_tables=(wrong,)), caches, [3])
    with pytest.raises(ValueError, match="there are 3 block tables, wanted 1 or 2"):
        compiled.step(dataclasses.replace(inputs, more_tables=(second, second)), caches, [3])


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    step, sublayers = Step(torch.float32), llama(torch.float32)
    compiled = DecoderLayers(sublayers, torch.float32, ends=ends(torch.float32))
    inputs, caches = step.inputs(), step.caches(sublayers)

    def run(rows: tuple[int, ...] = (24,), **changed: object) -> None:
        compiled.step(dataclasses.replace(inputs, **changed), caches, rows)

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
    assert all(map(torch.equal, caches, step.caches(sublayers)))


@pytest.mark.parametrize(
    "changed",
    [
        {"embedding": torch.zeros(VOCAB - 1, HIDDEN)},
        {"embedding": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)},
        {"embedding": torch.zeros(HIDDEN, VOCAB).t()},
        {"learned_positions": torch.zeros(POSITIONS, HIDDEN + 16)},
        {"norm": NormWeights("rms", EPS, torch.ones(HIDDEN - 16))},
        {"head": Weights(torch.float32).linear(VOCAB, HIDDEN // 2)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_ends_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    outer = dataclasses.replace(ends(torch.float32), **changed)
    with pytest.raises(ValueError, match=f"{next(iter(changed))} has "):
        DecoderLayers(llama(torch.float32), torch.float32, ends=outer)


@pytest.mark.parametrize(
    "message, mixer, changed",
    [
        (r"qkv is \[320, 96\], wanted \[640, 96\]", 0, {"k_dim": 64, "v_dim": 64}),
        ("q_norm has shape", 0, {"q_norm": NormWeights("rms", EPS, torch.ones(D + 1))}),
        ("sinks has shape", 0, {"sinks": torch.zeros(HEADS + 1)}),
        ("rotations has 17 columns", 0, {"rotations": torch.ones(4, D // 2 + 1, dtype=torch.complex64)}),
        ("wanted a multiple of Hkv", 0, {"num_heads": 5}),
        (r"gate is \[5, 96\], wanted", 0, {"gate": Weights(torch.float32).linear(5, HIDDEN)}),
        (r"up is \[320, 96\], wanted \[160, 96\]", 1, {"gated": False}),
        (r"down is \[80, 160\], wanted \[96, 160\]", 1, {"down": Weights(torch.float32).linear(80, INNER)}),
    ],
)
def test_weights_that_do_not_fit_are_refused(message: str, mixer: int, changed: dict[str, object]) -> None:
    sublayers = llama(torch.float32)
    (branch,) = sublayers[mixer].branches
    branch = dataclasses.replace(branch, mixer=dataclasses.replace(branch.mixer, **changed))
    sublayers[mixer] = dataclasses.replace(sublayers[mixer], branches=(branch,))
    with pytest.raises(ValueError, match=message):
        DecoderLayers(sublayers, torch.float32)


def test_what_does_not_fit_is_said_and_changes_nothing() -> None:
    step, sublayers = Step(torch.float32), llama(torch.float32)
    compiled = DecoderLayers(sublayers, torch.float32)
    hidden, delta, caches = step.hidden.clone(), torch.zeros(25, HIDDEN), step.caches(sublayers)

    def run(**changed: object) -> None:
        arguments = {
            "hidden": hidden, "delta": delta, "positions": step.positions, "kv_caches": caches,
            "slot_mapping": step.slots, "metadata": step.metadata(),
        }  # fmt: skip
        compiled.run(0, 6, **(arguments | changed))

    with pytest.raises(ValueError, match=r"delta has shape .* wanted a dense \[25, 96\] of torch.float32"):
        run(delta=delta.bfloat16())
    with pytest.raises(ValueError, match="positions has shape"):
        run(positions=step.positions[:3])
    with pytest.raises(ValueError, match="there are 2 kv_caches for 3 layers"):
        run(kv_caches=caches[:2])
    with pytest.raises(ValueError, match=r"kv_caches\[1\] has K .*bfloat16, wanted a contiguous"):
        run(kv_caches=[caches[0], caches[1].bfloat16(), caches[2]])
    with pytest.raises(ValueError, match=r"kv_caches\[2\] has K"):
        run(kv_caches=[*caches[:2], caches[2].transpose(0, 3).contiguous().transpose(0, 3)])
    elsewhere = dataclasses.replace(step.metadata(), block_table=step.block_table + NUM_BLOCKS)
    with pytest.raises(ValueError, match=r"block_table\[0\] names blocks .* wanted ids in \[0, 12\)"):
        run(metadata=elsewhere)
    with pytest.raises(IndexError, match="token 3 has position 256"):
        run(positions=step.positions.index_fill(0, torch.tensor([3]), 256))
    with pytest.raises(IndexError, match=f"slot {NUM_BLOCKS * BLOCK}, wanted them below"):
        run(slot_mapping=step.slots.index_fill(0, torch.tensor([24]), NUM_BLOCKS * BLOCK))
    assert torch.equal(hidden, step.hidden)
    assert all(map(torch.equal, caches, step.caches(sublayers)))


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_no_numbers_has_no_most_likely_token(dtype: torch.dtype, library: str) -> None:
    step, sublayers, outer = Step(dtype), llama(dtype), ends(dtype)
    assert outer.norm.weight is not None
    outer.norm.weight[3] = torch.nan
    with native_library(library):
        compiled = DecoderLayers(sublayers, dtype, ends=outer)
        _, likeliest = compiled.step(step.inputs(), step.caches(sublayers), [19, 24])
    assert likeliest == [-1, -1]
