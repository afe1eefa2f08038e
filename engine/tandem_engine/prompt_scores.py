"""The log probabilities of one request's prompt, collected while its chunks are computed.

    position      0    1    2    ...  P-2  P-1
    logits of     x    x    x          x            say how likely the token at the next position is
    scored        |--- num_done --->|               0 <= num_done <= P - 1, in order, each position once

A position is scored by the step that computes its token. So only scored positions may be found in the prefix
cache: after a preemption the request takes those from there and scores none twice. The result leaves with the
first token of the answer. A request that continues an answer has no PromptScores, because its caller has the
result.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_core.errors import InvariantError
from tandem_core.sampling import PromptLogprobs, SamplingParams


class PromptScores:
    """num_top: how many of the most likely tokens each position lists."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        self.num_done = 0
        #: Why there is no result.
        self.error: Exception | None = None
        self._num_positions = num_prompt_tokens - 1
        self._parts: list[PromptLogprobs] = []

    @classmethod
    def wanted(cls, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> PromptScores | None:
        """None where the parameters do not ask for them."""
        num_top = sampling.prompt_logprobs
        return None if num_top is None else cls(len(prompt_token_ids), num_top)

    def missing(self, start: int, stop: int) -> range:
        """The positions among [start, stop) that are still to be scored."""
        return range(max(start, self.num_done), max(start, self.num_done, min(stop, self._num_positions)))

    def add(self, first: int, part: PromptLogprobs) -> None:
        """The scores of the positions from `first` on."""
        if first != self.num_done:
            raise InvariantError(f"position {first} of a prompt was scored after {self.num_done} others")
        self._parts.append(part)
        self.num_done += len(part.logprobs)

    def fail(self, error: Exception) -> None:
        """Nothing more is scored, and the request ends with its first token."""
        self.error = error
        self.num_done = self._num_positions

    def result(self) -> PromptLogprobs:
        if self.num_done != self._num_positions:
            raise InvariantError(f"{self.num_done} of a prompt's {self._num_positions} positions are scored")
        return _joined(self._parts)


def _joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    return PromptLogprobs(
        logprobs=tuple([value for part in parts for value in part.logprobs]),
        ranks=tuple([rank for part in parts for rank in part.ranks]),
        top_token_ids=tuple([token_id for part in parts for token_id in part.top_token_ids]),
        top_logprobs=tuple([value for part in parts for value in part.top_logprobs]),
    )
