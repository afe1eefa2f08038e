"""A GGUF file, or a split one, as a source of weights and of the config.

llama.cpp's conversions interleave the rows of some models' queries and keys for its own RoPE, and add 1 to
Gemma's norms; reading undoes that, so that a name means the same tensor from every source.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from tandem_core.errors import ModelLoadError
from torch import Tensor

from tandem_engine.model_loader.gguf_architectures import ARCHITECTURES, check_gguf_architecture
from tandem_engine.model_loader.gguf_file import GgufTensor, open_all
from tandem_engine.model_loader.gguf_formats import grid_of, stored_of, values_of
from tandem_engine.model_loader.stored import Grid, Stored, numbers_of
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import WeightForm, stored_tensors

#: Divides the frequencies of RoPE (Llama 3.1 and later); no weight, but part of the config.
_ROPE_TABLE = "rope_freqs.weight"
#: Above any model's; a damaged number would cost memory before anything else notices it.
_LONGEST_CONTEXT = 1 << 24


class GgufSource:
    """Tensors by Hugging Face name. Raises ModelLoadError for what we cannot read or run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        files = self._files = open_all(path)
        self.files = [file.path for file in files]
        self._fields = files[0].fields
        self.architecture = check_gguf_architecture(self._field("general.architecture"), path)
        self._conversion = ARCHITECTURES[self.architecture]
        #: By the file's names.
        self._stored: dict[str, GgufTensor] = {}
        self._rope_table: tuple[float, ...] = ()
        for name, tensor in ((name, t) for file in files for name, t in file.tensors.items()):
            if name == _ROPE_TABLE:
                self._rope_table = tuple(self._values(tensor).flatten().tolist())
                continue
            if name in self._stored:
                raise ModelLoadError(f"{path} holds {name} in two of its parts; download it again")
            self._stored[name] = tensor
        if not self._stored:
            raise ModelLoadError(f"{path} holds no weights; download it again")

    def _field(self, key: str, default: Any = None) -> Any:
        value = self._fields.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self._path} lacks the GGUF key {key}; download another conversion")
        return value

    def _number(self, key: str, default: float | None = None) -> Any:
        """A key of the architecture."""
        value = self._field(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ModelLoadError(
                f"{self._path} has {value!r} for {self.architecture}.{key}; download another conversion"
            )
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        value = int(self._number(key, default))
        if value < 1:
            raise ModelLoadError(f"{self._path} has {value} for {self.architecture}.{key}; download it again")
        return value

    @property
    def _has_experts(self) -> bool:
        return f"{self.architecture}.expert_count" in self._fields

    @cached_property
    def _tensors(self) -> dict[str, GgufTensor]:
        """By the names of the model's checkpoints."""
        config = ModelConfig.from_hf(self.hf_config())
        known = get_tensor_name_map(
            next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.architecture),
            self._count("block_count"),
        )
        found: dict[str, GgufTensor] = {}
        # llama.cpp stacks the experts of a layer.
        names = config.names.found_in(["model.layers.0.mlp.experts.up_proj"] if self._has_experts else [])
        # All forms have the same sources, but for a head that is tied.
        for tensor in stored_tensors(config.spec, names, WeightForm(torch.float32)):
            for part in tensor.parts:
                name = known.get_name(part.hf_name, (".weight", ".bias")) or ""
                # Names of stacked experts in checkpoints do not end so.
                name = name if name in self._stored else f"{name}.weight"
                if name in self._stored:
                    found[part.hf_name] = self._stored[name]
        used = {tensor.name for tensor in found.values()}
        if unused := sorted(self._stored.keys() - used):
            raise ModelLoadError(
                f"{self._path} holds {unused[0]}, which a {config.model_type} model with its parameters has "
                "no use for; this variant is not supported"
            )
        return found

    def names(self) -> set[str]:
        return set(self._tensors)

    def release(self) -> None:
        for file in self._files:
            file.release()

    def formats(self) -> dict[str, int]:
        """How many weights the file holds in each format."""
        counts: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind.name] += math.prod(tensor.shape)
        return counts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def get(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor, or some of its rows; float32."""
        stored, order = self._tensors[name], self._row_order(name)
        if len(stored.shape) == 1:
            values = self._values(stored)[0]
            if self._conversion.one_plus and name.endswith("norm.weight"):
                values = values - 1
            return values if order is None else values[order]
        return self._values(stored, rows if order is None else order[rows].numpy())

    def _values(self, stored: GgufTensor, rows: Any = slice(None)) -> Tensor:
        try:
            values = values_of(stored.kind, stored.rows[rows])
        except NotImplementedError:
            raise self._unreadable(stored) from None
        if not values.isfinite().all():
            raise self._not_finite(stored)
        return values

    def _unreadable(self, stored: GgufTensor) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} holds {stored.name} as {stored.kind.name}, which cannot be read; use another file "
            "of the model, such as Q4_K_M or Q8_0"
        )

    def _not_finite(self, stored: GgufTensor) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} holds numbers in {stored.name} that are infinite or no numbers; download it again"
        )

    def _row_order(self, name: str) -> Tensor | None:
        """The row in the file of each row of the tensor; None if the order is equal."""
        if not self._conversion.interleaved or not name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            return None
        stored = self._tensors[name]
        # The elements of a bias correspond to rows of a weight.
        num_rows, heads = stored.shape[0], self._heads() if "q_proj" in name else self._kv_heads()
        if num_rows % (2 * heads):
            raise ModelLoadError(
                f"{self._path} holds {stored.name} with {num_rows} rows for {heads} heads; download it again"
            )
        return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def grid(self, name: str) -> Grid | None:
        """How a tensor is quantized; None: it is not."""
        return grid_of(self._tensors[name].kind) if name in self._tensors else None

    def stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Some rows of a quantized tensor."""
        stored, order = self._tensors[name], self._row_order(name)
        wanted = stored.rows[rows if order is None else order[rows].numpy()]
        try:
            found = stored_of(stored.kind, wanted)
        except NotImplementedError:
            raise self._unreadable(stored) from None
        for numbers in numbers_of(found):
            if not numbers.isfinite().all():
                raise self._not_finite(stored)
        return found

    def _heads(self) -> int:
        return self._count("attention.head_count")

    def _kv_heads(self) -> int:
        return self._count("attention.head_count_kv", self._heads())

    @property
    def license(self) -> str:
        return str(self._field("general.license", "unknown"))

    def hf_config(self) -> dict[str, Any]:
        """The file's hyperparameters as a Hugging Face config.json."""
        arch = self.architecture
        embeddings = "token_embd.weight"
        if embeddings not in self._stored:
            raise ModelLoadError(f"{self._path} lacks {embeddings}; download another conversion of the model")
        hidden, layers, context = (
            self._count(key) for key in ("embedding_length", "block_count", "context_length")
        )
        head_dim = self._count("attention.key_length", hidden // self._heads())
        if layers > len(self._stored) or context > _LONGEST_CONTEXT:
            raise ModelLoadError(
                f"{self._path} names {layers} layers and a context of {context} tokens, which cannot be; "
                "download it again"
            )
        if self._count("attention.value_length", head_dim) != head_dim:
            raise ModelLoadError(f"{self._path} has values of another size than keys, which is not supported")
        rotated = self._count("rope.dimension_count", head_dim)
        eps, eps_key = self._conversion.eps
        config: dict[str, Any] = {
            "model_type": self._conversion.model_type,
            "architectures": [f"{arch.capitalize()}ForCausalLM"],
            "vocab_size": self._stored[embeddings].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": self._heads(),
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "max_position_embeddings": context,
            # Written as float32; the nearest short decimal is what the model was trained with.
            eps: float(f"{float(self._number(eps_key)):.6g}"),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": not arch.startswith("qwen2") and "blk.0.attn_q.bias" in self._stored,
            "attention_out_bias": "blk.0.attn_output.bias" in self._stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self._stored,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", -1),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", -1),
            "rope_parameters": self._rope(head_dim),
        }
        if rotated != head_dim:
            config["partial_rotary_factor"] = rotated / head_dim
        if self.architecture in ("gemma2", "gemma3"):
            config["query_pre_attn_scalar"] = self._query_scalar(hidden, layers, head_dim)
        for name, key in self._conversion.fields.items():
            if f"{arch}.{key}" in self._fields:
                config[name] = self._number(key)
        if self.architecture in ("llama", "qwen2", "qwen3") and (
            window := int(self._number("attention.sliding_window", 0))
        ):
            # llama.cpp files mistral under llama; every layer then has the window.
            config |= {"model_type": "mistral" if arch == "llama" else arch, "sliding_window": window}
            config |= {"use_sliding_window": True, "max_window_layers": 0}
        if self._has_experts:
            config |= self._experts(config["intermediate_size"])
        return {k: v for k, v in config.items() if v != -1}

    def _experts(self, inner: int) -> dict[str, Any]:
        """The keys of a mixture of experts; llama.cpp files mixtral under llama too."""
        count = self._count("expert_count")
        config = {
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": self._count("expert_used_count"),
            "moe_intermediate_size": self._count("expert_feed_forward_length", inner),
            "shared_expert_intermediate_size": int(self._number("expert_shared_feed_forward_length", 0))
            or -1,
            # What llama.cpp computes; files do not say it.
            "norm_topk_prob": self.architecture == "qwen3moe",
        }
        return config | ({"model_type": "mixtral"} if self.architecture == "llama" else {})

    def _query_scalar(self, hidden: int, layers: int, head_dim: int) -> float:
        """Queries of Gemma's largest models are not scaled by the size of a head; files do not say so."""
        largest = {"gemma2": 46, "gemma3": 62}[self.architecture]
        return hidden / self._heads() if layers == largest else head_dim

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """rope_parameters; kind "table" is ours (models/config.py). Files without a type scale linearly."""
        factor = float(self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)))
        kind = str(self._field(f"{self.architecture}.rope.scaling.type", "linear"))
        rope: dict[str, Any] = {
            "rope_theta": float(self._number("rope.freq_base", 10000.0)),
            "factor": factor,
        }
        if self._rope_table:
            if len(self._rope_table) != head_dim // 2 or min(self._rope_table) <= 0:
                raise ModelLoadError(
                    f"{self._path} holds a RoPE table ({_ROPE_TABLE}) that does not fit heads of {head_dim}; "
                    "download it again"
                )
            if kind not in ("none", "linear"):
                raise ModelLoadError(
                    f"{self._path} scales RoPE both by {kind} and by a table ({_ROPE_TABLE}), which is not "
                    "supported"
                )
            scale = factor if kind == "linear" and factor else 1.0
            return rope | {"rope_type": "table", "factor": scale, "table": list(self._rope_table)}
        if kind == "none" or (kind == "linear" and factor in (0, 1)):
            return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        if kind == "linear":
            return rope | {"rope_type": kind}
        if kind == "yarn":
            return rope | {"rope_type": kind} | self._yarn(factor)
        raise ModelLoadError(
            f"{self._path} scales RoPE by {kind!r}, which is not supported; use a model with linear or yarn "
            "scaling or none"
        )

    def _yarn(self, factor: float) -> dict[str, Any]:
        known = {
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
            "attention_factor": "yarn_attn_factor",
            "mscale_all_dim": "yarn_log_multiplier",
        }
        found = {
            name: self._number(f"rope.scaling.{key}")
            for name, key in known.items()
            if f"{self.architecture}.rope.scaling.{key}" in self._fields
        }
        if self._number("rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise ModelLoadError(f"{self._path} mixes yarn with another RoPE scaling, which is not supported")
        # llama.cpp's multiplier of the temperature assumes an mscale of 1.
        return found | ({"mscale": 1.0} if "mscale_all_dim" in found else {})
