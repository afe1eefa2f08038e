"""What one sequence computes in a step: how much of its draft or of its prompt, and whether the
verification that comes back fits what was asked."""

from __future__ import annotations

from tandem_core.errors import InvariantError

from tandem_engine.batch import ScheduledSequence
from tandem_engine.block_manager import BlockManager
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request
from tandem_engine.scheduler.finishing import VerifiedTokens, token_limit


def fit_draft(blocks: BlockManager, request: Request, budget: int, max_model_len: int) -> DraftTree | None:
    """The part of the request's draft that budget, context and free blocks allow; takes its blocks."""
    draft = request.draft
    if draft is None or request.num_tokens + 1 >= token_limit(request, max_model_len):
        return None  # the next token is the last one: a guess cannot help
    size = min(
        len(draft),
        budget,
        max_model_len - request.num_tokens,
        blocks.num_allocatable_tokens(request.request_id) - request.num_tokens,
    )
    if size <= 0:
        return None
    if not blocks.allocate(request, request.num_tokens + size):
        raise InvariantError("blocks counted as free could not be allocated")
    return draft if size == len(draft) else draft.truncated(size)


def decode_sequence(blocks: BlockManager, request: Request, draft: DraftTree | None) -> ScheduledSequence:
    """The last token, and the draft's nodes behind it."""
    root = request.output_token_ids[-1]
    return ScheduledSequence(
        request=request,
        block_ids=blocks.block_ids(request.request_id),
        start=request.num_computed_tokens,
        token_ids=(root, *draft.token_ids) if draft is not None else (root,),
        draft=draft,
        samples=True,
    )


def prefill_sequence(blocks: BlockManager, request: Request, max_tokens: int) -> ScheduledSequence:
    """The next chunk, of 1..max_tokens tokens.

    A chunk that is not the last ends with a block if it can, so that all of it can be shared and sent.
    """
    start = request.num_computed_tokens
    end = min(start + max_tokens, request.num_tokens)
    aligned = end // blocks.block_size * blocks.block_size
    if start < aligned and end < request.num_tokens:
        end = aligned
    return ScheduledSequence(
        request=request,
        block_ids=blocks.block_ids(request.request_id),
        start=start,
        token_ids=tuple(request.tokens(start, end)),
        draft=None,
        samples=end == request.num_tokens,
    )


def check_verified(sequence: ScheduledSequence, verified: VerifiedTokens) -> None:
    """A wrong path would put KV of one text under the tokens of another, and the cache would share it.

    Raises InvariantError unless the path descends from the root and its nodes are the emitted tokens.
    """
    path, token_ids, draft = verified.path, verified.token_ids, sequence.draft
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
