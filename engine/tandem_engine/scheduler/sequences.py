"""One sequence in one step: how much of its draft or prompt it computes, a check of the verification, and
whether its text ends.

Verified tokens are appended one by one. The first that ends the text is kept, later ones are dropped:

    eos or stop token id   STOP, unless the output is still shorter than min_tokens
    token limit            LENGTH: max_tokens of output, or the context is full

Stop strings need text, which the engine does not know: the pod ends such a request with Scheduler.finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem_core.errors import InvariantError
from tandem_core.sampling import FinishReason

from tandem_engine.batch import ScheduledSequence
from tandem_engine.beam_search import BeamSearch
from tandem_engine.block_manager import BlockManager
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request


class VerifiedTokens(Protocol):
    """The part of a verification that the scheduler reads."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens emitted: the accepted drafts and one more from the target; none if the sequence skips
        the step."""

    @property
    def path(self) -> tuple[int, ...]:
        """Draft nodes whose KV is kept, root (0) first; as many as token_ids."""


@dataclass(frozen=True)
class RequestUpdate:
    """The change of one request in one step."""

    request: Request
    #: Appended to the output; shorter than what was verified when one of them ended the text.
    new_token_ids: tuple[int, ...]
    finished: bool


def token_limit(request: Request, max_model_len: int) -> int:
    """Tokens of prompt and output at which the request ends."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


def fit_draft(blocks: BlockManager, request: Request, budget: int, max_model_len: int) -> DraftTree | None:
    """The part of the request's draft that budget, context and free blocks allow; takes its blocks."""
    draft = request.draft
    if draft is None or request.num_tokens + 1 >= token_limit(request, max_model_len):
        return None  # the next token is the last one: a guess cannot help
    size = min(
        len(draft),
        budget,
        max_model_len - request.num_tokens,
        blocks.num_allocatable_tokens(request) - request.num_tokens,
    )
    if size <= 0:
        return None
    if not blocks.allocate(request, request.num_tokens + size):
        raise InvariantError("blocks counted as free could not be allocated")
    return draft if size == len(draft) else draft.truncated(size)


def decode_sequence(blocks: BlockManager, request: Request, draft: DraftTree | None) -> ScheduledSequence:
    """The last token, and the draft's nodes behind it."""
    root = request.output_token_ids[-1]
    # A guide may let a sequence skip the step after it was computed.
    is_sure = draft is None and request.guide is None
    return ScheduledSequence(
        request=request,
        block_ids=blocks.block_ids(request.request_id),
        start=request.num_computed_tokens,
        token_ids=(root, *draft.token_ids) if draft is not None else (root,),
        draft=draft,
        samples=True,
        state=None if blocks.states is None else blocks.states.plan(request.request_id, 1, writes=is_sure),
    )


def beam_sequences(blocks: BlockManager, request: Request, search: BeamSearch) -> list[ScheduledSequence]:
    """The last token of each running beam."""
    return [
        ScheduledSequence(
            request=request,
            block_ids=blocks.block_ids(request.request_id, beam),
            start=request.num_computed_tokens,
            token_ids=(token_id,),
            draft=None,
            samples=True,
            beam=beam,
        )
        for beam, token_id in enumerate(search.last_token_ids)
    ]


def prefill_sequence(blocks: BlockManager, request: Request, max_tokens: int) -> ScheduledSequence:
    """The next chunk, of 1..max_tokens tokens.

    A chunk that is not the last ends with a block if it can, so that all of it can be shared and sent.
    """
    start = request.num_computed_tokens
    end = min(start + max_tokens, request.num_tokens)
    aligned = end // blocks.block_size * blocks.block_size
    if start < aligned and end < request.num_tokens:
        end = aligned
    state = None
    if blocks.states is not None:
        end = start + blocks.states.most_rows(request.request_id, end - start)
        state = blocks.states.plan(request.request_id, end - start)
    return ScheduledSequence(
        request=request,
        block_ids=blocks.block_ids(request.request_id),
        start=start,
        token_ids=tuple(request.tokens(start, end)),
        draft=None,
        samples=end == request.num_tokens,
        state=state,
    )


def check_verified(sequence: ScheduledSequence, verified: VerifiedTokens) -> None:
    """Check that the path fits the draft: a wrong one would put wrong KV into the prefix cache.

    Raises InvariantError unless the path descends from the root and its nodes are the emitted tokens.
    """
    path, token_ids, draft = verified.path, verified.token_ids, sequence.draft
    if not path and not token_ids and sequence.request.guide is not None:
        return
    good = len(path) == len(token_ids) and path[:1] == (0,) and (draft is not None or len(path) == 1)
    if good and draft is not None:
        good = all(
            0 < node <= len(draft)
            and draft.parents[node - 1] == parent
            and draft.token_ids[node - 1] == token
            for parent, node, token in zip(path, path[1:], token_ids, strict=False)
        )
    if not good:
        raise InvariantError(
            f"request {sequence.request.request_id}: tokens {token_ids} are not on path {path} of its draft"
        )


def append_tokens(request: Request, token_ids: Sequence[int], max_model_len: int) -> RequestUpdate:
    """Append up to and including the first token that ends the text; sets the finish reason then."""
    limit = token_limit(request, max_model_len)
    for count, token_id in enumerate(token_ids, start=1):
        request.output_token_ids.append(token_id)
        if _ends_text(request, token_id):
            request.finish_reason = FinishReason.STOP
            if not _is_end_token(request, token_id):
                request.stop_token_id = token_id
        elif request.num_tokens >= limit:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            return RequestUpdate(request, tuple(token_ids[:count]), finished=True)
    return RequestUpdate(request, tuple(token_ids), finished=False)


def advance_beams(request: Request, search: BeamSearch) -> RequestUpdate:
    """What the search, which has the step's result, means for its request: its output, and its end with the
    best text.
    """
    if not search.is_done:
        request.output_token_ids[:] = search.running_token_ids(0)
        request.fork = search.parents
        return RequestUpdate(request, (), finished=False)
    request.output_token_ids[:] = search.hypotheses()[0].token_ids
    request.finish_reason, request.stop_token_id = text_end(request, request.output_token_ids[-1])
    return RequestUpdate(request, (), finished=True)


def text_end(request: Request, last_token_id: int) -> tuple[FinishReason, int | None]:
    """Why a text that has ended ends with this token; and the token, if `stop_token_ids` alone has it."""
    if last_token_id not in request.end_token_ids:
        return FinishReason.LENGTH, None
    return FinishReason.STOP, None if _is_end_token(request, last_token_id) else last_token_id


def _ends_text(request: Request, token_id: int) -> bool:
    sampling = request.sampling
    if len(request.output_token_ids) < sampling.min_tokens:
        return False
    return token_id in sampling.stop_token_ids or _is_end_token(request, token_id)


def _is_end_token(request: Request, token_id: int) -> bool:
    """Whether it is one of the model's own end tokens, and those count."""
    return token_id in request.eos_token_ids and not request.sampling.ignore_eos
