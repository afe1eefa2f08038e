"""The cost model of an engine's steps: pods fit it, gateways predict with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """seconds = per_step + per_token * tokens + per_pair * pairs

    In a step that computes prompts, pairs are those of a token and an earlier one, which attention compares.
    In a step that only decodes, "tokens" are sequences, and "pairs" their cached tokens. All zero: unknown.
    """

    per_step: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    #: Duration of steps on an otherwise idle machine, as a share of these times.
    unloaded: float = 1.0

    @property
    def is_known(self) -> bool:
        return self.per_step + self.per_token + self.per_pair > 0

    def seconds(self, num_steps: float, num_tokens: float, num_pairs: float) -> float:
        return self.per_step * num_steps + self.per_token * num_tokens + self.per_pair * num_pairs

    def prompt_seconds(self, start: int, stop: int, chunk_size: int) -> float:
        """Time to compute the prompt tokens [start, stop) in chunks on an idle pod."""
        num_tokens = max(stop - start, 0)
        num_chunks = -(-num_tokens // max(chunk_size, 1))
        return self.seconds(num_chunks, num_tokens, num_tokens * (start + stop) / 2)


def tokens_gained(by_batch: Sequence[float], num_sequences: float) -> float:
    """Tokens that each sequence gains in a decode step of `num_sequences`. `by_batch` has the values for 1,
    2-3, 4-7, ... sequences; the last one counts for larger batches."""
    size = max(round(num_sequences), 1).bit_length() - 1
    return by_batch[min(size, len(by_batch) - 1)]


UNKNOWN_COST = StepCost()
