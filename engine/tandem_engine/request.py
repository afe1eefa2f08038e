"""A request as the engine sees it: token ids in, token ids out, no text.

    prompt_token_ids            output_token_ids
    |<------ num_prompt ------>|<--- grows --->|
    |<-- num_computed_tokens -->|  KV of these tokens is in the cache
                                |<- num_tokens - num_computed_tokens: to be scheduled

One counter, `num_computed_tokens`, serves prefill and decode alike (after vLLM v1): a request with one
token left to compute is decoding; one with more is prefilling, also after a preemption.

A request may begin with output tokens: another engine computed them, and this one continues the text. Nothing
else is needed, because a token depends on prompt, output, sampling parameters and seed alone.

A beam search is one request. Its beams have the same length, so its counters are those of each beam; its
output is the best beam's, and in the end the best text. It has no tokens to show before it ends, so it begins
anew where other requests continue.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tandem_core.beams import BeamParams
from tandem_core.errors import InvalidRequestError, InvariantError
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_core.speculation import SpeculationMode

from tandem_engine.beam_search import BeamSearch
from tandem_engine.draft_tree import DraftTree
from tandem_engine.guided import GuideState
from tandem_engine.prompt_scores import PromptScores

if TYPE_CHECKING:
    from tandem_engine.sampling.processors import TokenHistory
    from tandem_engine.step_masks import StepMasks


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    #: Blocks are reserved and a prefill pod is filling them; not schedulable until adopted.
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """State of one sequence. Only the scheduler and the engine's loop change it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    #: Mixed into the hash of the first block; requests with different salts share nothing.
    cache_salt: bytes = b""
    eos_token_ids: frozenset[int] = frozenset()
    tenant: str = ""
    #: Speculation mode of this request; None: the pod's. A pod never drafts more than its own mode allows.
    speculation: SpeculationMode | None = None
    #: Made from sampling.guide when the request was; None without one.
    guide: GuideState | None = None
    #: Collects the prompt's log probabilities; None: they are not wanted, or are delivered.
    prompt_scores: PromptScores | None = None
    #: When its first token should be there, in monotonic seconds; the scheduler serves the earliest first. It
    #: moves when the scheduler puts off a late answer.
    due: float = math.inf
    #: Objective in seconds per output token; 0: none. Prompts in the same steps are cut to keep it.
    token_s: float = 0.0
    #: When its last token should be there, in monotonic seconds; inf: no objective.
    ends_by: float = math.inf
    #: Output tokens that it is expected to have in the end; 0: as many as it may.
    num_expected: int = 0

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    #: Prompt tokens found in the prefix cache: when it came, and again when it was first scheduled.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    #: The token of `stop_token_ids` that ended the text; None: something else did.
    stop_token_id: int | None = None
    #: time.monotonic_ns() of the first step that computed part of it; None until then.
    first_scheduled_ns: int | None = None
    #: Proposal for the next step, set by the engine's loop before scheduling; None: plain decode.
    draft: DraftTree | None = None
    #: Masks of the current step, or of a skipped one; None: no masks are needed.
    masks: StepMasks | None = field(init=False, default=None)
    #: The tokens on which penalties and the like depend, from the first choice that does; None before it.
    history: TokenHistory | None = field(init=False, default=None)
    #: None: the request is no beam search.
    search: BeamSearch | None = field(init=False, default=None)
    #: For each beam, the beam that it continues, until the blocks are forked.
    fork: tuple[int, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequestError("prompt", "is empty; send at least one token")
        if self.num_computed_tokens != 0 or self.status is not RequestStatus.WAITING:
            raise InvariantError(f"request {self.request_id} must start with nothing computed")
        if (self.guide is None) is not (self.sampling.guide is None):
            raise InvariantError(f"request {self.request_id} needs a state for its guide, and only for one")
        if self.sampling.beam_search is not None:
            if self.output_token_ids:
                raise InvariantError(f"request {self.request_id} is a beam search, which continues no text")
            self.begin_search(self.sampling.beam_search)

    def begin_search(self, params: BeamParams) -> None:
        """Also begins anew, without the tokens so far."""
        self.output_token_ids.clear()
        self.fork = None
        self.search = BeamSearch(
            params,
            end_token_ids=self.end_token_ids,
            max_tokens=self.sampling.max_tokens,
            num_top=self.sampling.logprobs,
        )

    def shorten(self, max_tokens: int) -> None:
        """Lowers max_tokens before the request begins."""
        least = min(self.sampling.min_tokens, max_tokens)
        self.sampling = replace(self.sampling, max_tokens=max_tokens, min_tokens=least)
        if self.sampling.beam_search is not None:
            self.begin_search(self.sampling.beam_search)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the text: its stop tokens, and the model's unless it ignores them."""
        stop = frozenset(self.sampling.stop_token_ids)
        return stop if self.sampling.ignore_eos else stop | self.eos_token_ids

    @property
    def num_places(self) -> int:
        """In a batch."""
        return 1 if self.sampling.beam_search is None else self.sampling.beam_search.width

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the last sampled token is missing from the KV cache."""
        return bool(self.output_token_ids) and self.num_uncomputed_tokens == 1

    @property
    def waits_for_guide(self) -> bool:
        """Whether another thread uses its guide between two steps, for this request or another."""
        if self.masks is not None:
            return not self.masks.are_ready
        return self.guide is not None and self.guide.is_busy

    def token_limit_s(self, now: float) -> float:
        """Seconds per output token that keep its objectives from now on, in monotonic seconds, if each step
        gains one; inf: none. At most 0: it is late."""
        limit = self.token_s or math.inf
        if self.ends_by == math.inf:
            return limit
        num_tokens, most = len(self.output_token_ids), self.sampling.max_tokens
        # One that should have ended takes a quarter more, as the gateway expects.
        expected = max(self.num_expected or most, num_tokens + max(num_tokens // 4, 1))
        return min(limit, (self.ends_by - now) / max(min(expected, most) - num_tokens, 1))

    @property
    def late_at(self) -> float:
        """From when on its answer can meet no objective any more, in monotonic seconds; inf: never."""
        if self.ends_by < math.inf:
            return max(self.due, self.ends_by)
        return math.inf if self.token_s else self.due

    @property
    def num_matchable_tokens(self) -> int:
        """Tokens that can be taken from the prefix cache: all but the last, whose logits are needed; and none
        whose position is still to be scored."""
        return self.num_tokens - 1 if self.prompt_scores is None else self.prompt_scores.num_done

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) of prompt + output, without joining the two lists."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]
