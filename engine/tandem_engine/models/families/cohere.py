"""Command R (cohere) and Command R7B and A (cohere2): attention and MLP beside each other, over one norm."""

from __future__ import annotations

from typing import Any

from tandem_core.model.spec import Branch, Head, ModelSpec, Rope, Sublayer

from tandem_engine.models.families.config import Config
from tandem_engine.models.families.names import Names
from tandem_engine.models.families.registry import family

_NAMES = Names({"mlp.pre": "input_layernorm"}, sublayers_per_layer=1, paired=True)
_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True, "logit_scale": 0.0625}


def _parallel(c: Config, layers: list[tuple[Rope | None, int | None]]) -> ModelSpec:
    norm, mlp = c.layer_norm(bias=False), c.mlp()
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    sublayers = [
        [Sublayer((Branch(c.attention(rope, window=w, biases=biases), norm), Branch(mlp, norm)))]
        for rope, w in layers
    ]
    head = Head(c.flag("tie_word_embeddings"), scale=c.number("logit_scale"))
    return c.model(sublayers, norm, head)


@family("cohere", names=_NAMES, **_DEFAULTS)
def cohere(c: Config) -> ModelSpec:
    c.refuse("use_qk_norm", False, "norms with weights of each head are not supported")
    return _parallel(c, [(c.rope(), None)] * c.layers)


@family("cohere2", names=_NAMES, sliding_window=4096, **_DEFAULTS)
def cohere2(c: Config) -> ModelSpec:
    """Layers without a window do not rotate."""
    pattern, rope = c.count("sliding_window_pattern", 4), c.rope()
    kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(c.layers)]
    return _parallel(c, [(None if w is None else rope, w) for w in c.windows(kinds)])
