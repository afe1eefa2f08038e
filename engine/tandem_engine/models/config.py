"""The shape of a llama-family model, read from Hugging Face's config.json.

One decoder serves llama, mistral, qwen2, qwen3 and the models that share their config (smollm, many
fine-tunes). They differ in biases, QK norm, window, softcap and RoPE, all of which are plain values here. A
config that asks for anything else is refused when it is read, never run approximately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from tandem_core.model.json_file import read_object

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def check_architecture(name: object, where: object) -> str:
    """The name, if models of this architecture can be computed. Raises ModelLoadError."""
    supported = ", ".join(ARCHITECTURES)
    if not name:
        raise ModelLoadError(f"{where} names no architecture; use a model of one of these: {supported}")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{where}: architecture {quoted(str(name))} is not supported; use one of {supported}"
        )
    return str(name)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters. `kind` is one of default, linear, llama3, yarn, table.

    `dynamic` (NTK) is read as `default` with the context held to the trained length, where the two agree:
    beyond it the rotation of keys already cached would have to change with every token.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: Multiplies cos and sin; 1 except for yarn.
    attention_factor: float = 1.0
    #: Whether yarn's correction range is rounded to whole dimensions.
    truncate: bool = True
    #: kind "table", from GGUF files: each frequency is divided by its number here and by factor.
    table: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    #: Per layer: a query sees this many latest keys, itself included; None: all of them.
    windows: tuple[int | None, ...]
    #: Attention logits become softcap * tanh(logits / softcap); None: they stay as they are.
    attn_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"the config has {self.num_heads} heads over {self.num_kv_heads} KV heads, which does not "
                "divide; the model's config.json is damaged, pull it again"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"head size {self.head_dim} is odd, but RoPE rotates pairs; use another model"
            )
        if self.attn_logit_softcapping is not None and not self.attn_logit_softcapping > 0:
            raise ModelLoadError(
                f"attn_logit_softcapping is {self.attn_logit_softcapping}, which is not positive; "
                "the model's config.json is damaged, pull it again"
            )
        if len(self.windows) != self.num_layers:
            raise ModelLoadError(
                f"the config lists {len(self.windows)} layer types for {self.num_layers} layers; "
                "the model's config.json is damaged, pull it again"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` of a model folder. Raises ModelLoadError."""
        path = folder / "config.json"
        try:
            return cls.from_hf(read_object(path))
        except FileNotFoundError:
            raise ModelLoadError(f"{folder} has no config.json; pull the model again") from None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parse a Hugging Face config, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`)."""
        architecture = check_architecture(raw.get("model_type"), "config.json")
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelLoadError(
                f"activation {quoted(str(raw['hidden_act']))} is not supported; only silu is"
            )
        if "quantization_config" in raw:
            raise ModelLoadError(
                "quantized safetensors are not supported; use the unquantized model or a GGUF"
            )
        try:
            return cls._parse(architecture, raw)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelLoadError(
                f"config.json lacks or garbles a value ({type(error).__name__}: {quoted(str(error))}); "
                "pull the model again"
            ) from error

    @classmethod
    def _parse(cls, architecture: str, raw: Mapping[str, Any]) -> ModelConfig:
        num_heads = _whole("num_attention_heads", raw["num_attention_heads"])
        num_layers = _whole("num_hidden_layers", raw["num_hidden_layers"], limit=10_000)
        hidden_size = _whole("hidden_size", raw["hidden_size"])
        attention_bias = bool(raw.get("attention_bias", False))
        softcap = raw.get("attn_logit_softcapping")
        return cls(
            architecture=architecture,
            vocab_size=_whole("vocab_size", raw["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=_whole("intermediate_size", raw["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_whole("num_key_value_heads", raw.get("num_key_value_heads") or num_heads),
            head_dim=_whole("head_dim", raw.get("head_dim") or hidden_size // num_heads),
            max_model_len=_whole("max_position_embeddings", raw["max_position_embeddings"], limit=1 << 30),
            rms_norm_eps=_positive("rms_norm_eps", raw["rms_norm_eps"]),
            rope=_parse_rope(raw),
            windows=_parse_windows(architecture, raw, num_layers),
            attn_logit_softcapping=None if softcap is None else float(softcap),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or (architecture != "mistral" and attention_bias),
            o_bias=architecture in ("llama", "qwen3") and attention_bias,
            mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
        )


def _whole(name: str, value: Any, limit: int = 1 << 24) -> int:
    """`value` as an integer from 1 to `limit`; none of today's models is near it."""
    number = int(value)
    if not 1 <= number <= limit:
        raise ModelLoadError(
            f"config.json: {name} is {quoted(str(value))}, but must be from 1 to {limit}; "
            "pull the model again"
        )
    return number


def _positive(name: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ModelLoadError(
            f"config.json: {name} is {quoted(str(value))}, but must be a positive number; "
            "pull the model again"
        )
    return number


def _parse_windows(architecture: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    on = architecture == "mistral" or bool(raw.get("use_sliding_window", False))
    if not on or window is None:
        return (None,) * num_layers
    size = _whole("sliding_window", window, limit=1 << 30)
    if "layer_types" in raw and raw["layer_types"] is not None:
        return tuple(size if t == "sliding_attention" else None for t in raw["layer_types"])
    first = 0 if architecture == "mistral" else int(raw["max_window_layers"])
    return tuple(size if layer >= first else None for layer in range(num_layers))


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = _positive("rope_theta", scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError("partial rotary embeddings are not supported; use another model")
    name = "original_max_position_embeddings"
    original = _whole(name, scaling.get(name) or raw["max_position_embeddings"], limit=1 << 30)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, _positive("factor", scaling["factor"]))
    if kind == "table":
        return RopeConfig(
            kind,
            theta,
            _positive("factor", scaling["factor"]),
            table=tuple(_positive("table", f) for f in scaling["table"]),
        )
    if kind == "llama3":
        low, high = (_positive(name, scaling[name]) for name in ("low_freq_factor", "high_freq_factor"))
        return RopeConfig(kind, theta, _positive("factor", scaling["factor"]), original, low, high)
    if kind == "yarn":
        factor = _positive("factor", scaling.get("factor") or raw["max_position_embeddings"] / original)
        return RopeConfig(
            kind,
            theta,
            factor,
            original,
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(scaling, factor),
            truncate=bool(scaling.get("truncate", True)),
        )
    raise ModelLoadError(
        f"RoPE scaling {kind!r} is not supported; use default, linear, dynamic, llama3 or yarn"
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The temperature on cos and sin as Hugging Face computes it (yarn, section 3.4)."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(float(scaling["mscale"])) / magnitude(float(scaling["mscale_all_dim"]))
    return magnitude(1.0)
