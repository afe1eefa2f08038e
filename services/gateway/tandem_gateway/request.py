"""A request and its answer as the gateway sees them; free of protobuf and of HTTP.

    options (as the caller gave them) --resolve--> Sampling (complete, checked) -> Job
    Job -> Chunk* -> End(receipt)

Times inside the gateway are seconds of `time.monotonic()`; in receipts nanoseconds, as on the wire.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tandem_gateway.errors import ContextLengthError, InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
DEFAULT_MAX_TOKENS = 512
NS_PER_S = 1_000_000_000
#: Where a request's drafts may come from, as the pods name it.
SPECULATIONS = ("off", "local", "chain", "global")


@dataclass(frozen=True)
class SloTarget:
    """Objectives of one request in seconds; 0 means none."""

    name: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0

    def miss(self, ttft_s: float, tpot_s: float, e2e_s: float) -> str:
        """ "" when every objective was met, else which were missed and by how much."""
        measured = (
            ("ttft", ttft_s, self.ttft_s),
            ("tpot", tpot_s, self.tpot_s),
            ("e2e", e2e_s, self.e2e_s),
        )
        return "; ".join(
            f"{name} {value:.3f} s exceeded {limit:g} s by {value - limit:.3f} s"
            for name, value, limit in measured
            if limit and value > limit
        )


@dataclass(frozen=True)
class SamplingOptions:
    """What the caller asked for; None where it left the choice to us."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def resolve(
        self, *, prompt_field: str, num_prompt_tokens: int, max_model_len: int, vocab_size: int
    ) -> Sampling:
        """Fill in the defaults (512 tokens or what room is left, a random 63-bit seed) and check.

        Raises InvalidRequestError or ContextLengthError naming field, limit and remedy.
        """
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                prompt_field,
                f"has {num_prompt_tokens} tokens; the model's context is {max_model_len} tokens and the "
                f"answer needs at least one: shorten the prompt to at most {max_model_len - 1} tokens",
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthError(
                "max_tokens",
                f"{self.max_tokens} is over the {room} tokens that the prompt of {num_prompt_tokens} leaves "
                f"in the model's context of {max_model_len}: ask for at most {room} or shorten the prompt",
            )
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(name, f"token id {token_id} is outside [0, {vocab_size})")
        return Sampling(
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Sampling:
    """Complete sampling parameters; ranges are checked at construction (InvalidRequestError)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    logprobs: int | None
    ignore_eos: bool

    def __post_init__(self) -> None:
        uint32 = 2**32
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("max_tokens", self.max_tokens, 1 <= self.max_tokens < uint32, "at least 1"),
            ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens,
             f"between 0 and max_tokens ({self.max_tokens})"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "in [0, 2]"),
            ("top_k", self.top_k, 0 <= self.top_k < uint32, "0 (all) or positive"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty, 0.0099 < self.repetition_penalty <= 10.0,
             "in [0.01, 10]"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0,
             "in [-2, 2]"),
            ("logit_bias", f"{len(self.logit_bias)} entries", len(self.logit_bias) <= MAX_LOGIT_BIAS,
             f"at most {MAX_LOGIT_BIAS} entries"),
            ("logit_bias", dict(self.logit_bias), all(-100 <= b <= 100 for b in self.logit_bias.values()),
             "with values in [-100, 100]"),
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
        )  # fmt: skip
        for name, value, good, limit in checks:
            if not good:
                raise InvalidRequestError(name, f"is {value}; it must be {limit}")


@dataclass(frozen=True)
class Job:
    """A request that passed every check. `arrived` and `deadline` are monotonic seconds."""

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    slo: SloTarget
    arrived: float
    deadline: float
    #: One of SPECULATIONS; "": as the pods do.
    speculation: str = ""

    def __post_init__(self) -> None:
        if self.speculation and self.speculation not in SPECULATIONS:
            raise InvalidRequestError(
                "speculation", f"{self.speculation!r} is unknown; use one of {', '.join(SPECULATIONS)}"
            )


class FinishReason(enum.Enum):
    """Why the text ended; the values are OpenAI's, but for "cancelled"."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Chunk:
    """Text that became final, and the tokens accepted, since the last chunk."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """Where the time went and where the tokens came from; fields as in common.proto."""

    request_id: str = ""
    queue_ns: int = 0
    prefill_ns: int = 0
    transfer_ns: int = 0
    decode_ns: int = 0
    ttft_ns: int = 0
    e2e_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prefill_pod: str = ""
    decode_pod: str = ""
    transfer_bytes: int = 0
    seed: int = 0
    slo: SloTarget = SloTarget("")
    slo_met: bool = False
    slo_miss_reason: str = ""
    prefill_retries: int = 0
    hit_steps: int = 0
    hit_steps_by_source: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    drafted_by_source: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def by_source(self) -> dict[str, dict[str, int]]:
        """Its counts by source, under their names."""
        names = ("accepted_by_source", "hit_steps_by_source", "drafted_by_source")
        return {name: dict(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class End:
    """The last event of every answer."""

    reason: FinishReason
    stop_reason: str
    receipt: Receipt


Event = Chunk | End


@dataclass(frozen=True)
class PodLoad:
    """What routing needs of a pod's last report."""

    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    num_requests: int = 0
