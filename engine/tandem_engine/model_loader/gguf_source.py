"""A GGUF file as a source of weights and of the config. Quantized tensors are dequantized to float32;
formats with groups of 32 (Q8_0, Q4_0, Q4_1) are also readable as they are.

llama.cpp stores the rows of llama's (and mistral's) queries and keys interleaved for its own RoPE; `get`
undoes that, so that a name means the same tensor from every source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from tandem_core.errors import ModelLoadError
from tandem_kernels import QuantizedWeight
from torch import Tensor

_Kind = GGMLQuantizationType

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """Tensors by Hugging Face name, float32. Raises ModelLoadError for what we cannot read or run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = GGUFReader(path)
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist; pull the model again") from None
        except Exception as error:  # a damaged header surfaces as almost any exception of numpy or gguf
            raise ModelLoadError(f"{path} is not a whole GGUF file ({error}); download it again") from error
        self.architecture = str(self._field("general.architecture"))
        self._tensors = {self._hf_name(t.name): t for t in self._reader.tensors}
        end = max((int(t.data_offset) + int(t.n_bytes) for t in self._reader.tensors), default=0)
        if not self._tensors or path.stat().st_size < end:
            raise ModelLoadError(f"{path} is truncated; download it again")

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelLoadError(f"{self._path} lacks the GGUF key {key}; download another conversion")
            return default
        return field.contents()

    def _hf_name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        if name == "rope_freqs.weight":
            raise ModelLoadError(
                f"{self._path} scales RoPE by its own table (rope_freqs), which is not supported; "
                "use the safetensors version of this model"
            )
        match name.split("."):
            case ["blk", layer, kind, suffix] if kind in _PER_LAYER:
                return f"model.layers.{layer}.{_PER_LAYER[kind]}.{suffix}"
        raise ModelLoadError(f"{self._path} holds {name}, which the supported architectures do not have")

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str) -> Tensor:
        stored: ReaderTensor = self._tensors[name]
        try:
            # gguf lists dimensions innermost first; dequantize returns rows of values in torch's order.
            values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelLoadError(
                f"{self._path} is quantized as {stored.tensor_type.name}, which cannot be read ({error}); "
                "use Q8_0, Q4_1 or a K-quant"
            ) from error
        tensor = torch.from_numpy(values.reshape(tuple(int(n) for n in reversed(stored.shape))))
        order = self._row_order(name, tensor.shape[0])
        return tensor if order is None else tensor[order]

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """For each row of the tensor its row in the file; None: the same order."""
        if self.architecture != "llama" or not name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            return None
        heads = self._heads() if "q_proj" in name else self._kv_heads()
        return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def bits(self, name: str) -> int | None:
        """4 or 8 where `get_quantized` has the tensor, else None."""
        kind = self._tensors[name].tensor_type if name in self._tensors else None
        return {_Kind.Q8_0: 8, _Kind.Q4_0: 4, _Kind.Q4_1: 4}.get(kind) if kind is not None else None

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """A tensor of Q8_0, Q4_0 or Q4_1, unchanged; None for any other format."""
        bits = self.bits(name)
        if bits is None:
            return None
        stored = self._tensors[name]
        depth, num_rows = (int(n) for n in stored.shape)
        # A block: scale, with Q4_1 the minimum, both float16; then the codes.
        blocks = torch.from_numpy(np.array(stored.data)).view(torch.uint8).view(num_rows, depth // 32, -1)
        halves = blocks[:, :, :4].contiguous().view(torch.float16)
        scales = halves[:, :, 0].contiguous()
        if bits == 8:
            # Signed bytes, counted from -128.
            codes, minimums = blocks[:, :, 2:] ^ 128, scales * -128
        else:
            has_minimum = stored.tensor_type == _Kind.Q4_1
            minimums = halves[:, :, 1].contiguous() if has_minimum else scales * -8
            packed = blocks[:, :, 4 if has_minimum else 2 :]
            codes = torch.cat([packed & 15, packed >> 4], dim=2)
        weight = QuantizedWeight(bits, codes.reshape(num_rows, depth), scales, minimums)
        order = self._row_order(name, num_rows)
        return weight if order is None else weight.rows(order)

    def _heads(self) -> int:
        return int(self._field(f"{self.architecture}.attention.head_count"))

    def _kv_heads(self) -> int:
        return int(self._field(f"{self.architecture}.attention.head_count_kv", self._heads()))

    @property
    def license(self) -> str:
        return str(self._field("general.license", "unknown"))

    def hf_config(self) -> dict[str, Any]:
        """The file's hyperparameters as a Hugging Face config.json."""
        arch = self.architecture

        def number(key: str, default: float | None = None) -> Any:
            return self._field(f"{arch}.{key}", default)

        embeddings = "model.embed_tokens.weight"
        if embeddings not in self._tensors:
            raise ModelLoadError(f"{self._path} lacks {embeddings}; download another conversion of the model")
        head_dim = int(number("embedding_length")) // self._heads()
        config: dict[str, Any] = {
            "model_type": arch,
            "architectures": [f"{arch.capitalize()}ForCausalLM"],
            # gguf lists dimensions innermost first.
            "vocab_size": int(self._tensors[embeddings].shape[-1]),
            "hidden_size": int(number("embedding_length")),
            "intermediate_size": int(number("feed_forward_length")),
            "num_hidden_layers": int(number("block_count")),
            "num_attention_heads": self._heads(),
            "num_key_value_heads": self._kv_heads(),
            "head_dim": int(number("attention.key_length", head_dim)),
            "max_position_embeddings": int(number("context_length")),
            # Written as float32; the nearest short decimal is what the model was trained with.
            "rms_norm_eps": float(f"{float(number('attention.layer_norm_rms_epsilon')):.6g}"),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": arch != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", -1),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", -1),
            "rope_parameters": self._rope(),
        }
        if window := int(number("attention.sliding_window", 0)):
            # llama.cpp files mistral under llama; every layer then has the window.
            config |= {"model_type": "mistral" if arch == "llama" else arch, "sliding_window": window}
            config |= {"use_sliding_window": True, "max_window_layers": 0}
        return {k: v for k, v in config.items() if v != -1}

    def _rope(self) -> dict[str, Any]:
        arch = self.architecture
        rope: dict[str, Any] = {
            "rope_type": str(self._field(f"{arch}.rope.scaling.type", "default")),
            "rope_theta": float(self._field(f"{arch}.rope.freq_base", 10000.0)),
        }
        if rope["rope_type"] == "none":
            rope["rope_type"] = "default"
        if rope["rope_type"] != "default":
            rope["factor"] = float(self._field(f"{arch}.rope.scaling.factor"))
        if rope["rope_type"] == "yarn":
            key = f"{arch}.rope.scaling.original_context_length"
            rope["original_max_position_embeddings"] = int(self._field(key))
        return rope
