"""A request at each stage of the gateway, and the events that a decode pod streams back.

    ReceivedRequest, prompt --check, tokenize--> TokenizedRequest --decode pod--> DecodeChunk*, DecodeFinished

The events are the pod's messages. The gateway completes the receipt in the last one and relays the others
unchanged. Times inside the gateway are in seconds of `time.monotonic()`, in receipts in nanoseconds.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem_core.beams import excluded_by_beams
from tandem_core.contracts import DEFAULT_DUE_S
from tandem_core.errors import InvalidRequestError
from tandem_core.prefix_hash import ChainHash, cache_salt, hash_prefixes
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES, SloTarget
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import answers_pb2, decode_pb2
from tandem_service.interceptors import request_id_or_new

from tandem_gateway.auth import Caller
from tandem_gateway.errors import ContextLengthError

#: An answer limited only by the context usually has at most this many tokens.
USUAL_TOKENS = 512
#: Choices of one prompt.
MAX_CHOICES = 32
MAX_CACHE_SALT_BYTES = 128
NS_PER_S = 1_000_000_000

Event = decode_pb2.DecodeChunk | decode_pb2.DecodeFinished


@dataclass(frozen=True)
class ReceivedRequest:
    """A request without its prompt, before it is checked."""

    request_id: str
    caller: Caller
    #: "": the served model.
    model: str
    #: The fields of SamplingParams that the caller set.
    sampling: Mapping[str, Any]
    #: "": the caller's default.
    slo_class: str
    #: Time of arrival in monotonic seconds.
    arrived: float
    #: Seconds until the caller's deadline; None: no deadline.
    timeout_s: float | None = None
    #: "": the mode of the pods.
    speculation: str = ""
    #: Objectives of this request; 0 keeps the class's.
    objectives: SloTarget = NO_OBJECTIVES
    #: Texts that the output never contains.
    bad_texts: tuple[str, ...] = ()
    #: Number of the prompt's last tokens to use; -1: as many as fit; None: all.
    truncate_to: int | None = None
    #: Whether a plain text gets the model's special tokens around it.
    add_special_tokens: bool = True
    #: Only requests of the tenant with the same salt share cached prefixes.
    cache_salt: str = ""


@dataclass(frozen=True)
class TenantLimits:
    """What a tenant may use."""

    #: Most requests at once, in flight and in the queue; None: no limit.
    places: int | None = None
    #: Prompt and output tokens; None: no limit.
    tokens_per_minute: int | None = None
    #: Share of the work, relative to other tenants, when demand exceeds capacity.
    weight: float = 1.0
    #: A class of the caller in which late requests wait; "": none.
    waiting_class: str = ""


NO_LIMITS = TenantLimits()


@dataclass(frozen=True)
class TokenizedRequest:
    """A request that passed every check. `arrived` and `deadline` are monotonic seconds."""

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    #: The objectives with which the receipt compares it.
    slo: SloTarget
    arrived: float
    deadline: float
    #: None: the mode of the pods.
    speculation: SpeculationMode | None = None
    limits: TenantLimits = NO_LIMITS
    #: The answer so far, when the request is resumed.
    output_token_ids: tuple[int, ...] = ()
    #: Whether it ran before; then its text does not count again for the lookahead service.
    is_repeated: bool = False
    #: Whether each event has one token, so that readers can resume at any token.
    one_token_events: bool = False
    #: Its number among all choices of the call.
    choice: int = 0
    #: Its number among the choices of its prompt.
    rank: int = 0
    #: Whether it is late, so it waits and runs as best effort.
    is_late: bool = False
    #: Seconds from arrival until the first token is due; None: by its objectives.
    due_s: float | None = None
    cache_salt: str = ""
    #: How a chat's text is parsed; None: everything is content.
    form: answers_pb2.AnswerForm | None = field(default=None, compare=False)
    _block_hashes: dict[int, list[ChainHash]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def promised(self) -> SloTarget:
        """The objectives that admission and pods keep."""
        return NO_OBJECTIVES if self.is_late else self.slo

    @property
    def due(self) -> float:
        """When the first token is due. Requests without objectives have a late deadline."""
        if self.due_s is not None:
            return self.arrived + self.due_s
        return self.arrived + (self.promised.ttft_s or self.promised.e2e_s or DEFAULT_DUE_S)

    @property
    def late_at(self) -> float:
        """When its answer can meet no objective any more, in monotonic seconds; from then on pods put it off
        (tandem_engine.scheduler.queues)."""
        if self.promised.e2e_s:
            return max(self.due, self.arrived + self.promised.e2e_s)
        return math.inf if self.promised.tpot_s else self.due

    @property
    def scores_prompt(self) -> bool:
        """Whether the decode pod computes all of the prompt, for its log probabilities."""
        return self.sampling.prompt_logprobs is not None and not self.output_token_ids

    @property
    def has_objectives(self) -> bool:
        """Whether admission and pods keep any."""
        slo = self.promised
        return bool(slo.ttft_s or slo.tpot_s or slo.e2e_s)

    def block_hashes(self, block_size: int) -> list[ChainHash]:
        """Hashes of the prompt's full blocks; none if `block_size` is 0."""
        if block_size not in self._block_hashes:
            salt = cache_salt(self.tenant, model_revision="", salt=self.cache_salt)
            hashes = hash_prefixes(salt, self.prompt_token_ids, block_size) if block_size else []
            self._block_hashes[block_size] = hashes
        return self._block_hashes[block_size]


def check_call(num_choices: int, *, beam_width: int | None, echoes: bool, detokenizes: bool) -> None:
    """Checks the fields of a call that no single request to a pod has. `beam_width` None: no beam search.

    Raises InvalidRequestError.
    """
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequestError("n", f"is {num_choices}; it must be between 1 and {MAX_CHOICES}")
    if beam_width is not None and num_choices > beam_width:
        raise InvalidRequestError(
            "n", f"is {num_choices}, more than the {beam_width} beams; ask for at most {beam_width}"
        )
    if echoes and beam_width is not None:
        raise excluded_by_beams("echo")
    if echoes and not detokenizes:
        raise InvalidRequestError("echo", "shows the prompt's text, so it excludes detokenize: false")


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError unless it is empty or an id that logs and pods can use."""
    if request_id and request_id_or_new(request_id) != request_id:
        raise InvalidRequestError(
            "request_id", "must be 1 to 128 letters, digits and . _ : / -; or leave it out"
        )


def check_cache_salt(salt: str) -> None:
    """Raises InvalidRequestError."""
    if len(salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            "cache_salt", f"has more than {MAX_CACHE_SALT_BYTES} bytes; send a shorter one, such as a digest"
        )


def num_choices_of(record: answers_pb2.AnswerRecord) -> int:
    """Choices of all prompts of an answer."""
    return (1 + len(record.more_requests)) * (record.num_choices or 1)


def with_seed(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds a random seed for all prompts of a call, unless one is given. It is below 2^53, so that JavaScript
    reads it exactly."""
    return {"seed": secrets.randbits(53), **sampling}


def choices_of(prompts: Sequence[TokenizedRequest], num_choices: int) -> tuple[TokenizedRequest, ...]:
    """The requests of one call: `num_choices` for each prompt, numbered prompt by prompt.

    Choice i of a prompt equals a separate request with seed + i, except that only the first choice gets the
    prompt's log probabilities. A beam search runs once for each prompt.
    """
    return tuple(
        prompt
        if not number
        else replace(
            prompt,
            request_id=f"{prompt.request_id}-{number}",
            choice=number,
            rank=i,
            sampling=replace(
                prompt.sampling,
                seed=(prompt.sampling.seed + i) % 2**64,
                prompt_logprobs=None if i else prompt.sampling.prompt_logprobs,
            ),
        )
        for p, prompt in enumerate(prompts)
        for i in range(num_choices)
        for number in (p * num_choices + i,)
    )


def complete_sampling(
    given: Mapping[str, Any],
    *,
    prompt_field: str,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    recommended: Mapping[str, Any],
) -> SamplingParams:
    """The given fields, with defaults for the others: the model's recommendation, a random seed. max_tokens
    is at most what the context leaves, which is also its default. A beam search compares the model's own
    probabilities.

    Raises InvalidRequestError or ContextLengthError naming field, limit and remedy.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            prompt_field,
            max_model_len,
            f"your prompt is too long: it has {num_prompt_tokens} tokens, and the answer needs at least one. "
            f"Shorten the prompt to at most {max_model_len - 1} tokens.",
        )
    fields = with_seed(given if given.get("beam_search") else {**recommended, **given})
    max_tokens = min(given.get("max_tokens", recommended.get("max_tokens", room)), room)
    sampling = SamplingParams(**{**fields, "max_tokens": max_tokens})
    sampling.check_vocabulary(vocab_size)
    return sampling
