"""Steps that run before the engine serves: they compile every kernel that later steps launch, and show how
much memory the largest step takes.

They read and write the scratch block alone, so they may run with any pool.
"""

from __future__ import annotations

from dataclasses import replace

from tandem_core.sampling import SamplingParams

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.draft_source import NUM_LIKELIEST
from tandem_engine.draft_tree import MAX_TREE_NODES, DraftTree
from tandem_engine.kv_pool import KVPool
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.device import read_back
from tandem_engine.workspace import StepLimits

_GREEDY = SamplingParams(temperature=0.0)
#: Every filter of the draw.
_SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=1)


def idle_batch(pool: KVPool) -> Batch:
    """A decode step of one sequence."""
    return Batch((_sequence(pool, 1, _GREEDY, is_prompt=False),))


def largest_batches(
    pool: KVPool, limits: StepLimits, max_model_len: int, sampling: SamplingParams
) -> list[Batch]:
    """A step with as many rows as there can be, prompts among them, and one of drafts alone."""
    num_prompts = min(limits.max_seqs, -(-limits.max_tokens // max_model_len))
    num_nodes = min(limits.max_decode_tokens // limits.max_seqs, MAX_TREE_NODES)
    drafted = [_sequence(pool, num_nodes, sampling, is_prompt=False)] * limits.max_seqs
    # One sequence's logits go to the host. If all did, that would take as much pinned memory as all logits.
    drafted[-1] = _sequence(pool, num_nodes, replace(sampling, logprobs=0), is_prompt=False)
    rest = limits.max_tokens - num_nodes * (limits.max_seqs - num_prompts)
    prompts = []
    for _ in range(num_prompts):
        num_tokens = min(rest, max_model_len)
        rest -= num_tokens
        prompts.append(_sequence(pool, num_tokens, sampling, is_prompt=True))
    return [Batch((*prompts, *drafted[num_prompts:])), Batch(tuple(drafted))]


def warm_up(runner: ModelRunner, limits: StepLimits) -> None:
    """Runs the largest steps, greedy and sampled, and moves KV as after a draft."""
    max_model_len = runner.decoder.spec.max_len
    for sampling in (_SAMPLED, _GREEDY):
        for batch in largest_batches(runner.pool, limits, max_model_len, sampling):
            logits = runner.execute(batch).values
            read_back(batch.sequences, logits, NUM_LIKELIEST)
            last = [(0, s.num_new_tokens - 1) if s.num_new_tokens > 2 else (0,) for s in batch.sequences]
            runner.compact(batch, last)


def _sequence(
    pool: KVPool, num_tokens: int, sampling: SamplingParams, *, is_prompt: bool
) -> ScheduledSequence:
    """A prompt, or the root of a draft and a chain of guesses, all of it in the scratch block."""
    draft = None
    if num_tokens > 1 and not is_prompt:
        draft = DraftTree((0,) * (num_tokens - 1), tuple(range(num_tokens - 1)), ("",) * (num_tokens - 1))
    return ScheduledSequence(
        Request("warm-up", [0] * (1 if draft else num_tokens), sampling),
        block_ids=tuple(
            (group.num_blocks,) * -(-num_tokens // group.shape.block_size) for group in pool.groups
        ),
        start=0,
        token_ids=(0,) * num_tokens,
        draft=draft,
        samples=True,
    )
