"""How long a decode step takes on a GPU that is not here, so that replayed drafts have a price and a worth.

    T(rows) = max(bytes / bandwidth, operations / speed)

    bytes        all projections' weights once, and every sequence's keys and values once, whatever its rows
    operations   2 for every weight and row, 4 for every row, query head, head dimension, key and layer

Assumed, and nothing else: loads and products overlap perfectly; the bandwidth and the speed are those that
good kernels reach, not those of the data sheet; attention reads a sequence's keys once for all nodes of its
draft, as turbo_attention does; launches, sampling and drafting cost nothing. So T is a lower bound of a real
step, and a ratio of two T is fair where both are bound by the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    name: str
    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class ModelShape:
    """Of a dense decoder; `num_weights` are those multiplied at every step, the head's too."""

    name: str
    num_weights: float
    bytes_per_weight: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    bytes_per_kv: float

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.bytes_per_kv


#: 4.3 of 4.8 TB/s as a copy kernel measures, and 70 % of 989 dense bfloat16 TFLOP/s.
H200 = Accelerator("H200", 4.3e12, 0.7 * 989e12)
#: Llama 3.1 8B in bfloat16 without the embedding table, of which a step reads a row per token.
LLAMA_8B = ModelShape("Llama 3.1 8B, bfloat16", 7.50e9, 2.0, 32, 32, 8, 128, 2.0)


@dataclass(frozen=True)
class CostModel:
    """Decode steps of `batch` sequences with `context` tokens each."""

    batch: int
    context: float
    machine: Accelerator = H200
    model: ModelShape = LLAMA_8B

    def step_seconds(self, rows: float) -> float:
        """A step that verifies `rows` tokens in all: one for every sequence, and its guesses."""
        model = self.model
        weights = model.num_weights * model.bytes_per_weight
        memory = weights + self.batch * self.context * model.kv_bytes_per_token
        per_row = 2 * model.num_weights
        per_row += 4 * model.num_layers * model.num_heads * model.head_size * self.context
        return max(memory / self.machine.bytes_per_s, rows * per_row / self.machine.operations_per_s)

    def price(self, max_guesses: int) -> list[float]:
        """Seconds of a step with 0, 1, ... up to `max_guesses` guesses in the whole batch."""
        return [self.step_seconds(self.batch + guesses) for guesses in range(max_guesses + 1)]

    def speed_up(self, mat: float, drafted_per_step: float, drafting_s: float = 0.0) -> float:
        """Tokens per second with drafts over those without.

        `drafting_s`: of the CPU, for each sequence and step, while the GPU waits.
        """
        drafted = self.step_seconds(self.batch * (1 + drafted_per_step)) + self.batch * drafting_s
        return mat * self.step_seconds(self.batch) / drafted
