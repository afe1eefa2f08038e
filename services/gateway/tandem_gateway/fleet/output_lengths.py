"""Predicts the lengths of answers from the last ones of each tenant and template."""

from __future__ import annotations

from collections import OrderedDict, deque

from tandem_gateway.request import TokenizedRequest

#: Most templates with kept lengths. A template is the first tokens of a prompt, this many.
_MAX_TEMPLATES = 4096
_TEMPLATE_TOKENS = 64
#: Lengths kept per template or tenant, and the number that suffices for a prediction. The first answers that
#: end are the short ones.
_NUM_LENGTHS, _ENOUGH_LENGTHS = 16, 4
#: Tokens that stand for each missing length; most answers end long before max_tokens.
_USUAL_LENGTH = 128


class OutputLengths:
    """Lengths of the last answers by tenant and template.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        #: By tenant and first tokens; the tenant alone is the fallback.
        self._lengths: OrderedDict[tuple[str, int], deque[int]] = OrderedDict()

    def of(self, request: TokenizedRequest) -> tuple[int, ...]:
        """Equally likely lengths of the answer in tokens, between its min_tokens and its max_tokens."""
        least, most = max(request.sampling.min_tokens, 1), request.sampling.max_tokens
        if request.sampling.ignore_eos:
            return (most,)
        of_template, of_tenant = ([*self._lengths.get(key, ())] for key in self._keys(request))
        known = of_template if len(of_template) >= _ENOUGH_LENGTHS else of_tenant
        known += [_USUAL_LENGTH] * (_ENOUGH_LENGTHS - len(known))
        return tuple(min(max(length, least), most) for length in known)

    def observe(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool = False) -> None:
        """Adds the length of an answer that ended. `is_cut`: it ended at its max_tokens, so others may be
        longer."""
        if is_cut:
            num_tokens = max(num_tokens, _USUAL_LENGTH)
        for key in self._keys(request):
            self._lengths.setdefault(key, deque(maxlen=_NUM_LENGTHS)).append(num_tokens)
            self._lengths.move_to_end(key)
        while len(self._lengths) > _MAX_TEMPLATES:
            self._lengths.popitem(last=False)

    def _keys(self, request: TokenizedRequest) -> tuple[tuple[str, int], tuple[str, int]]:
        return (request.tenant, hash(request.prompt_token_ids[:_TEMPLATE_TOKENS])), (request.tenant, 0)
