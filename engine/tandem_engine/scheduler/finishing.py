"""When does a text end? The rules on token ids, apart from the scheduler that applies them.

Emitted tokens are appended one by one; the first that ends the text is kept, what follows it is dropped:

    eos or stop token id   STOP, unless the output is still shorter than min_tokens
    token limit            LENGTH: max_tokens of output, or the context is full

Stop strings need text, which the engine does not know: the pod's loop finishes such a request by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem_core.sampling import FinishReason

from tandem_engine.request import Request


class VerifiedTokens(Protocol):
    """What the scheduler reads of a verification; the verifier's own result has more."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens emitted, 1..n: the accepted guesses and one more from the target."""
        ...

    @property
    def path(self) -> tuple[int, ...]:
        """Draft nodes whose KV is kept, root (0) first; as many as token_ids."""
        ...


@dataclass(frozen=True)
class RequestUpdate:
    """What one step did to one request."""

    request: Request
    #: Appended to the output; shorter than what was verified when one of them ended the text.
    new_token_ids: tuple[int, ...]
    finished: bool


def token_limit(request: Request, max_model_len: int) -> int:
    """Tokens of prompt and output at which the request ends."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


def append_tokens(request: Request, token_ids: Sequence[int], max_model_len: int) -> RequestUpdate:
    """Append up to and including the first token that ends the text; sets the finish reason then."""
    limit = token_limit(request, max_model_len)
    for count, token_id in enumerate(token_ids, start=1):
        request.output_token_ids.append(token_id)
        if _ends_text(request, token_id):
            request.finish_reason = FinishReason.STOP
            request.stop_reason = str(token_id)
        elif request.num_tokens >= limit:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            return RequestUpdate(request, tuple(token_ids[:count]), finished=True)
    return RequestUpdate(request, tuple(token_ids), finished=False)


def _ends_text(request: Request, token_id: int) -> bool:
    sampling = request.sampling
    if len(request.output_token_ids) < sampling.min_tokens:
        return False
    if token_id in sampling.stop_token_ids:
        return True
    return token_id in request.eos_token_ids and not sampling.ignore_eos
