"""How many tokens answers have, learned from the last ones of each tenant and template."""

from __future__ import annotations

from collections import OrderedDict, deque

from tandem_gateway.request import TokenizedRequest

#: Beginnings of prompts whose answers' lengths are remembered, and how many tokens of them.
_MAX_TEMPLATES = 4096
_TEMPLATE_TOKENS = 64
#: Lengths remembered of each template or tenant, and how many of them suffice for a prediction: the first
#: answers that end are the short ones.
_NUM_LENGTHS, _ENOUGH_LENGTHS = 16, 4
#: Expected tokens of an answer until then: most answers end long before max_tokens.
_USUAL_LENGTH = 128


class OutputLengths:
    """Lengths of the last answers, for each tenant and beginning of a prompt, often a template.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        #: By tenant and first tokens; the tenant alone is the fallback.
        self._lengths: OrderedDict[tuple[str, int], deque[int]] = OrderedDict()

    def of(self, request: TokenizedRequest) -> tuple[int, ...]:
        """Tokens that its answer may have, from min_tokens to max_tokens, each as likely as the others."""
        least, most = max(request.sampling.min_tokens, 1), request.sampling.max_tokens
        if request.sampling.ignore_eos:
            return (most,)
        of_template, of_tenant = ([*self._lengths.get(key, ())] for key in self._keys(request))
        known = of_template if len(of_template) >= _ENOUGH_LENGTHS else of_tenant
        known += [_USUAL_LENGTH] * (_ENOUGH_LENGTHS - len(known))
        return tuple(min(max(length, least), most) for length in known)

    def observe(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool = False) -> None:
        """Notes the length of an answer that ended. `is_cut`: it ended at its max_tokens, so others may be
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
