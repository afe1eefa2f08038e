"""Memory of an engine on a CPU, computed and checked before it is used.

    weights     the mapped weight file; pods on one machine share its pages
    process     Python, torch and the tokenizer, as measured when the engine is assembled
    kv          the KV pool
    step        the largest step: activations of a prompt chunk, logits of all sampling rows, candidates of a
                beam search
    states      the recurrent states of sequences, and snapshots of them
    transfer    KV frames that open transfers hold, sent or received
    shared text what the drafter keeps of tenants' shared text, at most

All but the weights is private to a pod. The pool's and a step's memory is taken on first use, so a pod that
does not fit would start and be killed by the kernel under load. On a GPU the steps are measured instead
(assemble.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tandem_core.beams import MAX_BEAM_WIDTH
from tandem_core.errors import CapacityError
from tandem_core.model.spec import Mlp, ModelSpec, Moe

from tandem_engine.free_memory import available_bytes
from tandem_engine.kv_pool import KVShape, PoolSizes, default_num_blocks
from tandem_engine.models.layout import Quantization
from tandem_engine.runner import MAX_PROMPT_ROWS
from tandem_engine.transport.base import DEFAULT_CREDIT_BYTES
from tandem_engine.workspace import StepLimits

_GB = 1e9
#: Bytes of a value of an 8-bit activation, with its group's factors.
_QUANTIZED_BYTES = 2
#: csrc/linear.cpp: rows that a thread widens to float32 at once.
_WIDENED_ROWS = 1024
#: csrc/linear.h: each expert's 8-bit rows begin with a tile of their own, of this many rows.
_TILE_ROWS = 24


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one pod, and the tokens of KV that its pool holds."""

    weights: int
    process: int
    kv: int
    kv_tokens: int
    step: int
    transfer: int
    shared_text: int = 0
    states: int = 0

    @property
    def private(self) -> int:
        """All that pods on one machine do not share."""
        return self.process + self.kv + self.step + self.transfer + self.shared_text + self.states

    def __str__(self) -> str:
        return (
            f"{self.private / _GB:.2f} GB at most: KV {self.kv / _GB:.2f} for {self.kv_tokens:,} tokens, "
            f"largest step {self.step / _GB:.2f}, KV transfers {self.transfer / _GB:.2f}, shared text "
            f"{self.shared_text / _GB:.2f}, recurrent states {self.states / _GB:.2f}, process "
            f"{self.process / _GB:.2f}; and weights {self.weights / _GB:.2f} that pods share"
        )


#: csrc/attention.cpp: keys of a split, rows of a task, and floats of a row's state in addition to its D
#: values.
_SPLIT_KEYS, _TASK_VALUES, _TASK_ROWS, _STATE_FLOATS = 512, 16384, 16, 17


def step_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    limits: StepLimits,
    *,
    packed: bool,
    quantization: Quantization,
    threads: int,
) -> int:
    """What the largest step allocates on a CPU.

    A step that only decodes samples from every row, one with prompts from one row of a sequence.

    packed: the compiled layers compute it, in `threads`.
    """
    element, hidden = dtype.itemsize, spec.hidden_size
    mixers = [branch.mixer for sublayer in spec.sublayers for branch in sublayer.branches]
    inner = max((mixer.inner for mixer in mixers if isinstance(mixer, Mlp)), default=0)
    attended = max(a.heads * a.v_dim for a in spec.attentions)
    projected = max(a.heads * a.k_dim + a.kv_heads * (a.k_dim + a.v_dim) for a in spec.attentions)
    head_size = max(a.v_dim for a in spec.attentions)
    # As csrc/decoder.cpp: normed, qkv, attended, gate and up, their product, and 8-bit activations.
    row = element * (hidden + projected + attended + 3 * inner)
    row += _QUANTIZED_BYTES * max(hidden, inner, attended)
    # decoder.py: the embedding's rows, the residual stream, the last product, its norm, the rows that sample.
    row += 4 * hidden + 4 * element * hidden
    if not packed:
        # torch keeps float32 copies of both operands of a product.
        row += 4 * (hidden + projected + 3 * inner)
    # The logits of prompts' positions, and their logarithms, exist in addition to those that sample; the
    # compiled call keeps its own.
    logits_rows = limits.max_decode_tokens, limits.max_seqs + 2 * MAX_PROMPT_ROWS
    logits = 4 * spec.vocab_size * (sum(logits_rows) if packed else max(logits_rows))
    # Few tasks are split by keys, and each split keeps a state.
    splits = 4 * threads * -(-spec.max_len // _SPLIT_KEYS)
    rows = max(_TASK_ROWS, _TASK_VALUES // head_size)
    partials = splits * rows * (head_size + _STATE_FLOATS) * 4
    # Without products of bfloat16 each thread widens a projection's input.
    widened = 0
    if packed and quantization is Quantization.NONE and dtype == torch.bfloat16:
        widened = threads * min(limits.max_tokens, _WIDENED_ROWS) * max(hidden, inner, attended) * 4
    beams = beam_bytes(spec.vocab_size, limits.max_seqs)
    experts = max(
        (experts_bytes(m, hidden, element, limits.max_tokens) for m in mixers if isinstance(m, Moe)),
        default=0,
    )
    return limits.max_tokens * row + logits + beams + partials + widened + experts


def experts_bytes(moe: Moe, hidden: int, element: int, rows: int) -> int:
    """What a mixture of experts takes for `rows` rows (csrc/moe.cpp)."""
    inner, top_k = moe.expert.inner, moe.router.top_k
    gated = 1 + moe.expert.gated
    # The rows of each chosen expert, gate and up, their product, 8-bit forms, and the float32 result.
    pair = element * (hidden + (gated + 1) * inner) + _QUANTIZED_BYTES * (hidden + inner) + 4 * hidden
    row = 4 * (hidden + moe.experts) + top_k * pair
    if moe.shared:
        row += element * (gated + 1) * moe.shared.inner + _QUANTIZED_BYTES * moe.shared.inner + 4 * hidden
    used = min(moe.experts, rows * top_k)
    return rows * row + used * _TILE_ROWS * _QUANTIZED_BYTES * (hidden + inner)


def beam_bytes(vocab_size: int, max_seqs: int) -> int:
    """Bytes of the widest beam search's step without its logits; searches of a batch run one after the
    other."""
    # Float32 log probabilities and totals, and for each total whether it may be among the best.
    return (4 + 4 + 1) * vocab_size * min(max_seqs, MAX_BEAM_WIDTH)


def transfer_bytes(shapes: Sequence[KVShape], max_seqs: int) -> int:
    """Frames in flight while every sequence of a full batch is sent or received."""
    return max_seqs * max(DEFAULT_CREDIT_BYTES, *(shape.block_bytes for shape in shapes))


def fit_pool(
    sizes: PoolSizes,
    need_without_kv: MemoryNeed,
    *,
    num_blocks: int,
    context: int,
    max_model_len: int,
    memory_bytes: int,
) -> tuple[int, MemoryNeed]:
    """How many blocks for texts the pool gets, and what the pod then needs.

    Args:
        num_blocks: as set; 0: a default size, or more where `max_model_len` demands it.
        context: longest text that the pod takes, in tokens.
        max_model_len: `context` as set, which the pool then has to hold; 0: the model's own.
        memory_bytes: private memory that the pod may take; 0: what this machine has free.

    Raises CapacityError, which names the setting that asks for too much.
    """
    need = need_without_kv
    block_size = sizes.shapes[0].block_size
    room = memory_bytes or available_bytes() + need.process - need.weights
    for_context = -(-context // block_size)
    if num_blocks and max_model_len and num_blocks < for_context:
        raise CapacityError(
            f"--num-blocks {num_blocks} holds {num_blocks * block_size} tokens, fewer than "
            f"--max-model-len {max_model_len}; set --num-blocks to {for_context} or more, or to 0"
        )
    if room < need.private:
        shared_text = "--shared-text-bytes, " if need.shared_text else ""
        setting = (
            (f"{shared_text}--chunk-size, --max-batch or --draft-nodes", "lower one of them")
            if room >= need.process
            else ("--model", "choose a smaller model")
        )
        raise CapacityError(_too_much(setting[0], need, room, setting[1]))
    blocks = num_blocks
    if not blocks:
        # Without a share of its own, a pod leaves room for others.
        blocks = default_num_blocks(sizes, (room - need.private) // (2 if memory_bytes else 4))
        blocks = max(blocks, for_context) if max_model_len else blocks
    tokens = blocks * block_size
    need = replace(need, kv=sizes.num_bytes(blocks) + sizes.scratch_bytes, kv_tokens=tokens)
    if need.private > room:
        fitting = sizes.fitting(room - need_without_kv.private - sizes.scratch_bytes)
        if num_blocks:
            text = _too_much(f"--num-blocks {num_blocks}", need, room, f"set it to {fitting} or less")
        else:
            most = fitting * block_size
            text = _too_much(f"--max-model-len {max_model_len}", need, room, f"set it to {most} or less")
        raise CapacityError(text)
    return blocks, need


def _too_much(setting: str, need: MemoryNeed, room: int, remedy: str) -> str:
    return (
        f"{setting}: the pod needs {need}, but {max(0, room) / _GB:.2f} GB are there for it; {remedy}, or "
        "free memory"
    )
