"""Whole steps with the Triton attention, as a GPU's eager and graph steps plan it, against the CPU's own.

Run by test_gpu_steps in a process with TRITON_INTERPRET=1; the other operators are the CPU's.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.draft_tree import DraftTree
from tandem_engine.kv_pool import KVPool, KVShape
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.layout import WeightForm, stored_tensors
from tandem_engine.models.linear import PlainLinear
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.warm_up import idle_batch
from tandem_engine.workspace import StepLimits, make_workspace, step_attentions
from toy_models import VOCABULARY

BLOCK_SIZE, BLOCKS_EACH = 16, 5
LIMITS = StepLimits(max_tokens=48, max_seqs=4, max_decode_tokens=32)
CPU = torch.device("cpu")


def make_decoder(extras: str) -> Decoder:
    """Two layers, the second one with a sliding window; extras: "softcap", "sinks", "scales"."""
    raw = {
        "model_type": "mistral", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True, "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    if "softcap" in extras:
        raw |= {"attn_logit_softcapping": 1.5}
    config = ModelConfig.from_hf(raw)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        stored.name: torch.randn(stored.shape, generator=generator) * 0.3
        for stored in stored_tensors(config.spec, config.names, WeightForm(torch.float32))
    }
    for n in range(2):
        if "sinks" in extras:
            tensors[f"sublayers.{2 * n}.0.sinks"] = torch.randn(4, generator=generator)
        if "scales" in extras:
            # One number, and one per head in another dtype: both become float32 per head.
            tensors[f"sublayers.{2 * n}.0.k_scale"] = torch.tensor(0.02)
            tensors[f"sublayers.{2 * n}.0.v_scale"] = torch.tensor([0.01, 0.03], dtype=torch.bfloat16)
    return Decoder(config.spec, tensors, PlainLinear)


def make_batch(rng: random.Random, *, with_chunk: bool) -> Batch:
    sequences = []
    for b in range(rng.randint(1, LIMITS.max_seqs)):
        n = rng.choice([1, 1, 4, 8])
        draft = None
        if with_chunk and b == 0:
            n = rng.randint(2, 20)
        elif n > 1:
            tokens = tuple(rng.randrange(VOCABULARY) for _ in range(n - 1))
            draft = DraftTree(tokens, tuple(rng.randint(0, i) for i in range(n - 1)), ("",) * (n - 1))
        start = rng.randrange(40)
        token_ids = (rng.randrange(VOCABULARY), *(draft.token_ids if draft else (5,) * (n - 1)))
        blocks = tuple(range(b * BLOCKS_EACH, b * BLOCKS_EACH + -(-(start + n) // BLOCK_SIZE)))
        request = Request("r", [1] * (start + 1), SamplingParams())
        sequences.append(ScheduledSequence(request, (blocks,), start, token_ids, draft, True))
    return Batch(tuple(sequences))


@pytest.mark.parametrize(
    "extras", ["plain", pytest.param("softcap sinks", marks=pytest.mark.wide), "softcap sinks scales"]
)
def test_eager_and_graph_steps_compute_what_the_cpu_does(extras: str) -> None:
    rng = random.Random(extras)
    decoder = make_decoder(extras)
    dtype = torch.int8 if "scales" in extras else torch.float32
    shape = KVShape.of(decoder.spec, BLOCK_SIZE, dtype)
    generator = torch.Generator().manual_seed(2)
    pool, other = (KVPool([shape], [LIMITS.max_seqs * BLOCKS_EACH], CPU) for _ in range(2))
    for cache, copy in zip(pool.caches, other.caches, strict=True):
        cache.copy_(torch.randn(cache.shape, generator=generator) * (30 if dtype == torch.int8 else 1))
        copy.copy_(cache)
    plain = ModelRunner(decoder, pool, CPU)
    space = make_workspace(decoder, BLOCK_SIZE, shape.dtype, LIMITS, graphs=True)
    attention, graph_attention = step_attentions(
        decoder, space.inputs.max_blocks * BLOCK_SIZE, shape.dtype, LIMITS
    )
    runner = ModelRunner(
        decoder, other, CPU, replace(space, attention=attention, graph_attention=graph_attention)
    )
    replayed = []

    def capture(step):
        return lambda: (replayed.append(1), step())

    runner.capture_graphs(capture, idle_batch(other))
    for n in range(4):
        with_chunk = n % 2 == 1
        batch = make_batch(rng, with_chunk=with_chunk)
        before = len(replayed)
        ours, theirs = runner.execute(batch).values, plain.execute(batch).values
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        assert len(replayed) - before == (not with_chunk)


def test_softcap_and_sinks_change_the_result() -> None:
    """So that the comparison above can fail."""
    batch = make_batch(random.Random(1), with_chunk=True)
    results = []
    for extras in ("plain", "softcap", "sinks"):
        decoder = make_decoder(extras)
        shape = KVShape.of(decoder.spec, BLOCK_SIZE, torch.float32)
        pool = KVPool([shape], [LIMITS.max_seqs * BLOCKS_EACH], CPU)
        for cache in pool.caches:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(2)))
        results.append(ModelRunner(decoder, pool, CPU).execute(batch).values)
    for result in results[1:]:
        assert (result - results[0]).abs().max() > 0.01
