"""How the next token is chosen, why a text ended, and what a token's probability was: for all parts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tandem_core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; immutable and validated at construction.

    Raises InvalidRequestError naming the field and its limit.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    #: None: none wanted; n: the chosen token's log probability and the n most likely.
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be in [0, 2]"),
            ("top_k", self.top_k >= 0, "must be 0 (all) or positive"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be in [0, 1]"),
            # 0.01 as the wire's float32 is a little less.
            ("repetition_penalty", 0.0099 < self.repetition_penalty <= 10.0, "must be in [0.01, 10]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be in [-2, 2]"),
            ("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "values: [-100, 100]"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            ("stop", all(self.stop), "an empty string would end every text; remove it"),
            ("seed", 0 <= self.seed < 2**64, "must be in [0, 2^64)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
             f"must be in [0, {MAX_LOGPROBS}]"),
        ]  # fmt: skip
        for name, good, limit in checks:
            if not good:
                raise InvalidRequestError(name, f"{getattr(self, name)!r} is out of range: {limit}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_processing(self) -> bool:
        """Whether logits change before the choice in a way that depends on the tokens so far."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
        )


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one output position: the chosen token's, then the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
