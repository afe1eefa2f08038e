"""The scheduler's limits, and the small records that it hands out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of one request, in tokens where not stated otherwise.

    Raises ValueError naming the setting and what it must be.
    """

    #: Prompt and output together.
    max_model_len: int
    #: Sequences that share a step.
    max_batch: int = 32
    #: Tokens computed in a step: decoded, drafted and prefilled ones.
    max_tokens_per_step: int = 512
    #: Tokens of one prompt in one step.
    chunk_size: int = 512
    #: Prompt tokens that saturate the processor. A step with this many takes no further prompt: the second
    #: one would not finish sooner, and the first one later. A step in which sequences decode takes no more
    #: prompt tokens than this: with more, each sequence waits longer for its token, and prompts are not
    #: faster. None: no such limit.
    enough_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("max_model_len", self.max_model_len),
            ("max_batch", self.max_batch),
            ("chunk_size", self.chunk_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.max_tokens_per_step < self.max_batch:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must let every sequence of a batch "
                f"decode one token: raise it, or lower max_batch ({self.max_batch})"
            )


@dataclass(frozen=True)
class Reservation:
    """Where a prefill pod's KV goes: blocks for the whole prompt, of which the leading ones may be cached."""

    #: By group, the physical blocks in logical order (`BlockManager.block_ids`).
    block_ids: tuple[tuple[int, ...], ...]
    #: Leading prompt tokens whose KV is already here; a multiple of the block size.
    num_cached_tokens: int
    #: By group, the logical indices into block_ids that are still to be filled.
    wanted_blocks: tuple[tuple[int, ...], ...]

    def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """By group, its block_ids and wanted_blocks."""
        return list(zip(self.block_ids, self.wanted_blocks, strict=True))


@dataclass(frozen=True)
class PromptWork:
    """A prompt that is not computed yet: tokens [start, stop)."""

    request_id: str
    #: Monotonic seconds, as in `Request.due`.
    due: float
    start: int
    stop: int


@dataclass(frozen=True)
class RequestCounts:
    """Number of requests by state; those that have KV and wait for a place in the batch count as waiting."""

    waiting: int
    running: int
    waiting_for_kv: int
