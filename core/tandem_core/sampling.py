"""Sampling parameters, finish reasons and log probabilities, shared by all parts.

A request parameter is added in three places: the message SamplingParams in common.proto, the class of that
name below, and the code that acts on it. The codec and the OpenAI bodies are derived from these two.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tandem_core.beams import BeamParams, excluded_by_beams
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 32
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_LOGITS_PROCESSORS = 8
MAX_PROCESSOR_NAME_CHARS = 64
_UINT32 = 2**32
#: Fields for which beam search accepts only the default.
_NOT_WITH_BEAMS = (
    *("min_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "guide"),
    *("stop", "include_stop_str_in_output", "prompt_logprobs"),
)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequestError when an id of the field `name` is outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            name,
            f"token id {wrong} is outside the vocabulary [0, {vocab_size}); use the model's ids",
        )


@dataclass(frozen=True)
class SamplingParams:
    """Immutable and validated at construction. Meanings and units are in common.proto.

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
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    #: As `logprobs`, of the prompt's tokens.
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    beam_search: BeamParams | None = None

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("max_tokens", self.max_tokens, 1 <= self.max_tokens < _UINT32, "at least 1 and below 2^32"),
            ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens,
             f"between 0 and max_tokens ({self.max_tokens})"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "in [0, 2]"),
            ("top_k", self.top_k, 0 <= self.top_k < _UINT32, "0 (all), or positive and below 2^32"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            # 0.01 as the wire's float32 is a little less.
            ("repetition_penalty", self.repetition_penalty, 0.0099 < self.repetition_penalty <= 10.0,
             "in [0.01, 10]"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0,
             "in [-2, 2]"),
            ("logit_bias", f"{len(self.logit_bias)} entries", len(self.logit_bias) <= MAX_LOGIT_BIAS,
             f"at most {MAX_LOGIT_BIAS} entries"),
            ("logit_bias", "a value out of range", all(-100 <= b <= 100 for b in self.logit_bias.values()),
             "made of values in [-100, 100]"),
            ("stop", f"{len(self.stop)} strings", len(self.stop) <= MAX_STOP_STRINGS,
             f"at most {MAX_STOP_STRINGS} strings"),
            ("stop", "an empty string", all(self.stop), "free of empty strings, which would end every text"),
            ("stop", "a long string", all(len(s) <= MAX_STOP_CHARS for s in self.stop),
             f"made of strings of at most {MAX_STOP_CHARS} characters"),
            ("stop_token_ids", f"{len(self.stop_token_ids)} ids",
             len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids"),
            ("seed", self.seed, 0 <= self.seed < 2**64, "in [0, 2^64)"),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
             f"in [0, {MAX_LOGPROBS}]"),
            ("prompt_logprobs", self.prompt_logprobs,
             self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
             f"in [0, {MAX_LOGPROBS}]"),
            ("bad_words", f"{len(self.bad_words)} sequences", len(self.bad_words) <= MAX_BAD_WORDS,
             f"at most {MAX_BAD_WORDS} sequences"),
            ("bad_words", "an empty or long sequence",
             all(1 <= len(word) <= MAX_BAD_WORD_IDS for word in self.bad_words),
             f"made of sequences of 1 to {MAX_BAD_WORD_IDS} ids"),
            ("allowed_token_ids", f"{len(self.allowed_token_ids)} ids",
             len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS, f"at most {MAX_ALLOWED_TOKEN_IDS} ids"),
            ("logits_processors", f"{len(self.logits_processors)} names",
             len(self.logits_processors) <= MAX_LOGITS_PROCESSORS, f"at most {MAX_LOGITS_PROCESSORS} names"),
            ("logits_processors", "a long or empty name",
             all(1 <= len(name) <= MAX_PROCESSOR_NAME_CHARS for name in self.logits_processors),
             f"made of names of 1 to {MAX_PROCESSOR_NAME_CHARS} characters"),
            ("ignore_eos", self.ignore_eos, not (self.guide and self.ignore_eos),
             "false with a guide, which decides where the text ends"),
            ("min_tokens", self.min_tokens, not (self.guide and self.min_tokens),
             "0 with a guide, which decides where the text ends"),
        )  # fmt: skip
        for name, value, is_good, limit in checks:
            if not is_good:
                raise InvalidRequestError(name, f"is {value}; it must be {limit}")
        if self.beam_search is not None:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        """Raises InvalidRequestError for a field that would change what the search compares. Temperature and
        seed have no effect, as in transformers and vLLM."""
        unset = SamplingParams()
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(unset, name):
                field = self.guide.field if name == "guide" and self.guide is not None else name
                raise excluded_by_beams(field)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError when an id is outside [0, vocab_size), or all may be forbidden."""
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for word in self.bad_words:
            check_token_ids("bad_words", word, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        bad = {word[-1] for word in self.bad_words}
        if len(bad) >= vocab_size:
            raise InvalidRequestError("bad_words", "may forbid the whole vocabulary; leave out a sequence")
        if self.allowed_token_ids and bad.issuperset(self.allowed_token_ids):
            raise InvalidRequestError("bad_words", "may forbid all allowed_token_ids; leave out a sequence")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_processing(self) -> bool:
        """Whether logits change before the choice in a way that depends on the tokens so far."""
        return self.guide is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether parameters other than a guide change logits."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.bad_words
            or self.allowed_token_ids
            or self.logits_processors
        )


class FinishReason(enum.Enum):
    """Why a text ended; the names are those of common.proto."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one output position: the chosen token's, then the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of consecutive tokens of a prompt; of a whole one from its second token on."""

    logprobs: tuple[float, ...]
    #: Place of each token among all at its position, from 1; equals by ascending id.
    ranks: tuple[int, ...]
    #: The most likely tokens, position by position, the same number at each.
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
