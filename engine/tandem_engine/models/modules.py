"""Any decoder of transformers: its own modules, with our paged attention, linear kernels and head.

    load      transformers builds the model and fills it (model_loader/modules_loading.py); no code of the
              checkpoint runs
    check     a few tokens in transformers' own attention, then as two sequences in chunks through ours; a
              model whose logits differ is refused
    settle    linear layers get the compiled kernels (linear.py)
    serve     `forward` and `logits`, as those of `Decoder`

Attention modules call a function that transformers looks up by name. `_attend` is registered there. It stores
K and V of the step's tokens in the KV pool and attends to the pool, so prefix cache, chunks, transfers, draft
trees, preemption and beams work as with `Decoder`. The n-th call in a pass has layer n of the pool, also if a
module runs twice. All layers of the pool have the widest call's shape; narrower ones are padded with zeros.

Modules with a recurrent state run sequence by sequence (module_states.py). Such a model takes no drafts, no
prefix hits and no beams, and is not served by prefill pods.

A row's last bits depend on the batch, because torch's own operators lie between the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from tandem_core.errors import InvariantError, ModelLoadError
from tandem_core.model import spec as specs
from tandem_kernels import (
    Attention,
    AttentionLayer,
    AttentionMetadata,
    StateMetadata,
    StepInputs,
    make_attention,
    store_kv,
)
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tandem_engine.models.decoder import ModelInputs
from tandem_engine.models.layout import Quantization
from tandem_engine.models.mixers import StateInputs
from tandem_engine.models.module_linears import WatchedLinear, settle, watch_linears
from tandem_engine.models.module_states import RecurrentModules

log = logging.getLogger(__name__)

#: The name under which transformers finds our attention.
_ATTENTION = "tandem"
#: Head sizes are multiples of this.
_HEAD_STEP = 16
#: Largest relative error of logits in the check at load.
_TOLERANCE = 1e-3
#: The same in bfloat16, of the median row: a router may choose another expert for single tokens, but wrong
#: attention changes nearly all rows.
_ROUNDED_TOLERANCE = 0.15
#: Tokens of the check's two texts, and how many of each its steps compute.
_CHECKED_STEPS = ((13, 6), (8, 8), (1, 1), (1, 1), (1, 1))
_CHECKED_BLOCK = 16
#: Arguments of attention that change it in ways that our kernels do not know.
_UNKNOWN = ("position_bias", "alibi", "indices", "head_mask", "topk_indices", "block_mask")


@dataclass(frozen=True)
class _Call:
    """Sizes of one call of attention."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    #: Whether tokens see only their own chunk (Llama 4).
    is_chunked: bool


@dataclass
class _Pass:
    """The pass that is under way; `inputs` None: the first one, which only records its calls."""

    inputs: ModelInputs | None
    kv_caches: Sequence[Tensor]
    attention: Attention
    on_layer_done: Callable[[int], None] | None
    #: The layer of the next call.
    layer: int = 0


class ModulesDecoder:
    """A decoder of transformers with `Decoder`'s interface.

    model: in eval mode, with eager attention, on the device and in the dtype to compute with. It is changed
    for serving. in_chunks: whether recurrent modules may take a later chunk in one call. Raises
    ModelLoadError, which names what does not work, before anything is served.
    """

    is_compiled = False
    is_batch_invariant = False

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        max_model_len: int,
        quantization: Quantization = Quantization.NONE,
        *,
        in_chunks: bool = False,
    ) -> None:
        text_config = model.config.get_text_config(decoder=True)
        self._name = str(text_config.model_type)
        # Llama 4's prefix is its multimodal model's.
        prefix = model.base_model_prefix
        self._body_name = prefix if prefix in model._modules else "model"
        if self._body_name not in model._modules or model.get_output_embeddings() is None:
            raise self._refusal("it has no decoder with a head of its own")
        self._model, self._body = model, model._modules[self._body_name]
        self.dtype, self.device = model.dtype, model.device
        self._pass: _Pass | None = None
        self._calls: list[_Call] = []
        self._callers: set[int] = set()
        self._layers: dict[tuple[int, float, int | None, float | None], AttentionLayer] = {}
        self._states: RecurrentModules | None = None
        self._chunk = _attention_chunk(text_config, max_model_len)
        #: For logs, and for the fingerprint of the KV layout.
        self.executor = f"transformers {version('transformers')}"
        if _freeze_rope(model, max_model_len):
            self.executor += f", rotation for {max_model_len} tokens"
        texts = _checked_texts(int(text_config.vocab_size), self.device)
        expected = self._plain_logits(texts)
        linears, head = watch_linears(model), model.get_output_embeddings()
        self._take_over()
        self._record(texts[0])
        self.spec = _spec(text_config, self._calls, expected[0].shape[-1], max_model_len)
        self._shape = self.spec.attentions[0]
        self._attention = make_attention(self.dtype, self._shape.k_dim, self.device)
        self._states = RecurrentModules(self._body, text_config, self._callers, in_chunks=in_chunks)
        #: Relative error of logits in the check.
        self.difference = 0.0
        self._check(texts, expected)
        settle(linears, self.dtype, quantization, head)
        #: Bytes of parameters and packed weights.
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors())

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences have a state in addition to their KV."""
        return self._states is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return 0 if self._states is None else self._states.num_bytes

    @property
    def takes_drafts(self) -> bool:
        return self._states is None and self._chunk is None

    def watch_blocks(self, is_free: Callable[[int], bool]) -> None:
        """States of sequences whose first block is free are dropped."""
        if self._states is not None:
            self._states.is_free = is_free

    def reads_interleaved(self, block_size: int) -> bool:
        """Never: `store_kv` writes plain caches."""
        if self._chunk is not None and self._chunk % block_size:
            raise ModelLoadError(
                f"--block-size {block_size} does not divide the {self._chunk} tokens of {self._name}'s "
                "attention chunks; set a block size that does"
            )
        return False

    def step(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        kv_caches: Sequence[Tensor],
        *,
        interleaved: bool = False,
    ) -> tuple[Tensor, list[int]]:
        """Only batch-invariant decoders compute a step in one call."""
        raise InvariantError("modules compute no step in one call")

    def replay(self, states: StateInputs, rows: Tensor, metadata: StateMetadata) -> None:
        """Only `Decoder` has states in a pool."""
        raise InvariantError("modules keep their states themselves")

    @torch.inference_mode()
    def forward(
        self,
        inputs: ModelInputs,
        kv_caches: Sequence[Tensor],
        on_layer_done: Callable[[int], None] | None = None,
        *,
        attention: Attention | None = None,
        interleaved: bool = False,
    ) -> Tensor:
        """As `Decoder.forward`: T new tokens -> normed hidden states [T, H]."""
        if interleaved:
            raise InvariantError("modules read no interleaved cache")
        # A workspace has made its backend for layers without windows.
        if attention is None or any(call.window is not None for call in self._calls):
            attention = self._attention
        attention.prepare(inputs.attention)
        if self._states is not None:
            self._states.begin(inputs.attention)
        under_way = _Pass(inputs, kv_caches, attention, on_layer_done)
        hidden = self._run(under_way, inputs.input_ids, inputs.positions)
        if under_way.layer != len(self._calls):
            raise InvariantError(f"{under_way.layer} calls of attention in a pass, wanted {len(self._calls)}")
        if self._states is not None:
            self._states.end()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of forward's result -> [R, vocab] float32."""
        if not len(hidden):
            return torch.empty(0, self.spec.vocab_size, dtype=torch.float32, device=self.device)
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def _run(self, under_way: _Pass, input_ids: Tensor, positions: Tensor) -> Tensor:
        self._pass = under_way
        try:
            output = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._pass = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
        if len({x.shape[2] for x in (query, key, value)}) > 1 or query.shape[0] != 1:
            raise self._refusal("its attention does not store a key for each token")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        (num_tokens, heads, k_dim), kv_heads, v_dim = q.shape, k.shape[1], v.shape[2]
        if heads % kv_heads or v.shape[1] != kv_heads:
            raise self._refusal(f"its attention has {heads} heads over {kv_heads} and {v.shape[1]} KV heads")
        under_way = self._pass
        if under_way is None:
            raise InvariantError("attention is called outside of a pass")
        if under_way.inputs is None:
            self._callers.add(id(module))
            is_chunked = self._chunk is not None and _is_chunked(module)
            self._calls.append(_Call(heads, kv_heads, k_dim, v_dim, window, is_chunked))
            return q.new_zeros(1, num_tokens, heads, v_dim)
        shape, n = self._shape, under_way.layer
        if n >= len(self._calls):
            raise InvariantError("a pass calls attention more often than the first one")
        more_dims, more_kv_heads = shape.k_dim - k_dim, shape.kv_heads - kv_heads
        more_heads = more_kv_heads * (heads // kv_heads)
        cache = under_way.kv_caches[n]
        k = F.pad(k, (0, more_dims, 0, more_kv_heads))
        v = F.pad(v, (0, shape.v_dim - v_dim, 0, more_kv_heads))
        store_kv(k, v, cache, under_way.inputs.slot_mapping)
        constants = n, float(k_dim**-0.5 if scale is None else scale), window, softcap
        layer = self._layers.get(constants)
        if layer is None:
            if sinks is not None:
                sinks = F.pad(sinks.detach().float().flatten(), (0, more_heads)).contiguous()
            layer = self._layers[constants] = AttentionLayer(*constants[1:], sinks)
        q = F.pad(q, (0, more_dims, 0, more_heads)).contiguous()
        attention = under_way.attention
        if self._calls[n].is_chunked and self._chunk is not None:
            attention = make_attention(self.dtype, shape.k_dim, self.device)
            attention.prepare(_in_chunks(under_way.inputs.attention, self._chunk, cache.shape[3]))
        attended = attention.run(q, cache, layer)
        under_way.layer += 1
        if under_way.on_layer_done is not None:
            under_way.on_layer_done(n)
        return attended[:, :heads, :v_dim].unsqueeze(0)

    def _plain_logits(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each text alone, by transformers."""
        positions = [torch.arange(len(ids), device=self.device) for ids in texts]
        return [
            self._model(input_ids=ids[None], position_ids=at[None], use_cache=False).logits[0].float()
            for ids, at in zip(texts, positions, strict=True)
        ]

    def _take_over(self) -> None:
        """Attention becomes ours, and the model's own pass only its head."""
        for module in self._model.modules():
            module.__dict__["tandem_decoder"] = self
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation = _ATTENTION
        del self._model._modules[self._body_name]
        self._model.__dict__[self._body_name] = _GivenHidden(self._body)

    def _record(self, ids: Tensor) -> None:
        """The first pass, for the sizes of its calls of attention and the modules that make them."""
        under_way = _Pass(None, (), make_attention(self.dtype, _HEAD_STEP, self.device), None)
        self._guarded(lambda: self._run(under_way, ids, torch.arange(len(ids), device=self.device)))

    def _check(self, texts: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """Raises ModelLoadError unless the texts' logits in chunks, through `forward`, are as expected."""
        assert self._states is not None
        self.difference = difference = self._guarded(lambda: self._difference(texts, expected))
        tolerance = _ROUNDED_TOLERANCE if self.dtype.itemsize < 4 else _TOLERANCE
        self._states = self._states.without_unwritten()
        if not difference <= tolerance:
            raise self._refusal(
                f"with paged attention its logits differ by {difference:.1e} of their size from those of "
                "transformers' own"
            )
        log.info(
            "%s runs through transformers, not natively (%s); its logits differ by %.1e from eager mode",
            self._name, self.executor, difference,
        )  # fmt: skip

    def _difference(self, texts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        width = -(-max(map(len, texts)) // _CHECKED_BLOCK)
        shape = (len(texts) * width, 2, self._shape.kv_heads, _CHECKED_BLOCK, self._shape.k_dim)
        caches = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self._calls]
        done = [0] * len(texts)
        parts: list[list[Tensor]] = [[] for _ in texts]
        for counts in _CHECKED_STEPS:
            inputs = _checked_step(texts, done, counts, width, self.device)
            logits = self.logits(self.forward(inputs, caches))
            for b, rows in enumerate(torch.split(logits, list(counts))):
                parts[b].append(rows)
                done[b] += counts[b]
        return max(
            _relative_error(torch.cat(rows), wanted, self.dtype)
            for rows, wanted in zip(parts, expected, strict=True)
        )

    def _guarded(self, compute: Callable[[], Any]) -> Any:
        """The result, or a refusal: modules raise anything where they need a mask or a cache."""
        try:
            return compute()
        except ModelLoadError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise self._refusal(
                f"they do not run without masks ({type(error).__name__}: {reason})"
            ) from error

    def _tensors(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        for module in (*self._body.modules(), *self._model.modules()):
            packed = module.packed_parts if isinstance(module, WatchedLinear) else ()
            for tensor in (*module.parameters(recurse=False), *packed):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor

    def _refusal(self, reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"the modules of {self._name} in transformers cannot be served: {reason}; use another model"
        )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention, without dropout."""
    decoder: ModulesDecoder = module.tandem_decoder  # type: ignore[assignment]
    unknown = [name for name in _UNKNOWN if further.get(name) is not None]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if further.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise decoder._refusal(f"its attention takes {unknown[0]}")
    window = sliding_window if isinstance(sliding_window, int) else None
    if isinstance(sliding_window, Sequence):
        window = sliding_window[0] + 1
    if scaling is None:
        scaling = getattr(module, "scaling", None)
    window = window if window and window > 0 else None
    return decoder.attend(module, query, key, value, scaling, window, softcap or None, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)


class _Output(tuple[Tensor]):
    """A body's output with hidden states alone."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _GivenHidden:
    """Stands in for the body, so that the model's own pass computes only what follows it."""

    def __init__(self, body: nn.Module) -> None:
        self._body = body

    def __call__(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        return _Output((inputs_embeds,))

    def __getattr__(self, name: str) -> Any:
        # Some models call their body's decoder.
        return self if name == "decoder" else getattr(self._body, name)


def estimated_spec(config: PreTrainedConfig, max_model_len: int) -> specs.ModelSpec:
    """From the config alone, as if all layers were attention with keys and values of its head size."""
    heads = _largest(config, "num_attention_heads") or 1
    kv_heads = _largest(config, "num_key_value_heads") or heads
    size = _largest(config, "head_dim") or int(config.hidden_size) // heads
    calls = [_Call(heads, kv_heads, size, size, None, False)] * _largest(config, "num_hidden_layers")
    return _spec(config, calls, int(config.vocab_size), max_model_len)


def _spec(
    config: PreTrainedConfig, calls: Sequence[_Call], vocab_size: int, max_model_len: int
) -> specs.ModelSpec:
    """The sizes that the engine reads, with a layer of the widest shape for each call, and one MLP as wide as
    all experts of a token. Layers with windows keep all tokens."""
    experts = _largest(config, "num_experts_per_tok") or 1
    inner = _largest(config, "intermediate_size") or 4 * int(config.hidden_size)
    inner = max(inner, experts * (_largest(config, "moe_intermediate_size") or inner))
    size = max([max(call.k_dim, call.v_dim) for call in calls], default=1)
    size = -(-size // _HEAD_STEP) * _HEAD_STEP
    kv_heads = max([call.kv_heads for call in calls], default=1)
    heads = kv_heads * max([call.heads // call.kv_heads for call in calls], default=1)
    attention = specs.Attention(heads, kv_heads, size, size, scale=size**-0.5, rope=None)
    mlp = specs.Mlp(inner, specs.Activation.SILU)
    # A pool has a layer.
    mixers = (attention,) * max(1, len(calls)), (mlp,)
    return specs.ModelSpec(
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        max_len=max_model_len,
        sublayers=tuple(specs.Sublayer((specs.Branch(mixer),)) for same in mixers for mixer in same),
        norm=specs.Norm(specs.NormKind.RMS, 1e-6),
        head=specs.Head(tied=False),
    )


def _largest(config: PreTrainedConfig, name: str) -> int:
    """A size of the config, the largest of those per layer; 0 without it."""
    value = getattr(config, name, None) or 0
    return max(map(int, value)) if isinstance(value, (list, tuple)) else int(value)


def _freeze_rope(model: PreTrainedModel, max_model_len: int) -> bool:
    """Rotation that would switch by the longest position of a batch is fixed for the longest text. Returns
    whether there is any."""
    last = torch.tensor([[max_model_len - 1]], device=model.device)
    x = torch.zeros(1, dtype=model.dtype, device=model.device)
    is_frozen = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not isinstance(kinds, (str, dict)):
            continue
        by_layer: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if "dynamic" in kind or kind == "longrope":
                module(x, last, **({} if layer_type is None else {"layer_type": layer_type}))
                is_frozen = True
        fixed = dict.fromkeys(by_layer, "default")
        module.rope_type = fixed if isinstance(kinds, dict) else "default"
    return is_frozen


def _attention_chunk(config: PreTrainedConfig, max_model_len: int) -> int | None:
    """Tokens of a chunk beyond which some layers do not look; None: texts are no longer than one."""
    chunk = getattr(config, "attention_chunk_size", None)
    if not chunk or "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return int(chunk) if max_model_len > chunk else None


def _is_chunked(module: nn.Module) -> bool:
    config, layer = module.config, module.layer_idx
    return bool(config.layer_types[layer] == "chunked_attention")  # type: ignore[union-attr, index]


def _in_chunks(metadata: AttentionMetadata, chunk: int, block_size: int) -> AttentionMetadata:
    """The step's rows as sequences that begin with their chunk; `chunk` is a multiple of `block_size`."""
    if metadata.ancestor_bits is not None:
        raise InvariantError("attention in chunks verifies no drafts")
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    rows, seq_lens, tables = [0], [], []
    width = chunk // block_size
    for b, length in enumerate(lengths):
        at = length - (starts[b + 1] - starts[b])
        while at < length:
            first = at // chunk * chunk
            stop = min(length, first + chunk)
            rows.append(rows[-1] + stop - at)
            seq_lens.append(stop - first)
            table = metadata.block_table[b, first // block_size :][:width]
            tables.append(F.pad(table, (0, width - len(table))))
            at = stop
    device = metadata.seq_lens.device
    return AttentionMetadata(
        torch.stack(tables),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
    )


def _checked_texts(vocab_size: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = [sum(counts) for counts in zip(*_CHECKED_STEPS, strict=True)]
    return [torch.randint(0, vocab_size, (n,), generator=generator).to(device) for n in lengths]


def _checked_step(
    texts: Sequence[Tensor], done: Sequence[int], counts: Sequence[int], width: int, device: torch.device
) -> ModelInputs:
    """The next `counts` tokens of each text, whose blocks lie one after another."""
    ends = [begin + count for begin, count in zip(done, counts, strict=True)]
    positions = [torch.arange(begin, end) for begin, end in zip(done, ends, strict=True)]
    slots = [at + b * width * _CHECKED_BLOCK for b, at in enumerate(positions)]
    rows = torch.tensor([0, *counts]).cumsum(0)
    return ModelInputs(
        torch.cat([ids[begin:end] for ids, begin, end in zip(texts, done, ends, strict=True)]),
        torch.cat(positions).to(device),
        torch.cat(slots).to(device),
        AttentionMetadata(
            torch.arange(len(texts) * width, dtype=torch.int32, device=device).view(-1, width),
            torch.tensor(ends, dtype=torch.int32, device=device),
            rows.to(torch.int32).to(device),
        ),
    )


def _relative_error(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The error of the worst value, or of the median row where values are rounded; NaN if any is."""
    if dtype.itemsize >= 4:
        return float((got - wanted).abs().max() / wanted.abs().max())
    rows = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    return float(rows.median()) if bool(got.isfinite().all()) else float("nan")
