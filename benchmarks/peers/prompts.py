"""Prompts of exact lengths out of customer-service dialogues; no two are alike."""

from __future__ import annotations

from pathlib import Path

from tandem_cli.bench.dataset import load_dialogues, sample_dialogues, sample_policy
from tandem_core.model.tokenizer import Tokenizer

#: From this length on a prompt opens with the agent's policy, as a bot's prompts do.
_POLICY_FROM_TOKENS = 1000


class PromptMaker:
    """Makes prompts from a file of dialogues (JSON lines), or from the sample that comes with Tandem."""

    def __init__(self, tokenizer: Tokenizer, dataset: Path | None) -> None:
        dialogues = load_dialogues(dataset) if dataset else sample_dialogues()
        self._texts = [dialogue.as_text() for dialogue in dialogues]
        self._policy = sample_policy()
        self._tokenizer = tokenizer
        self._number = 0

    def make(self, num_tokens: int) -> list[int]:
        number = self._number
        self._number += 1
        # The number comes first, so that no two prompts share a cached prefix.
        parts = [f"Ticket {number}."]
        if num_tokens >= _POLICY_FROM_TOKENS:
            parts.append(self._policy)
        prompt: list[int] = []
        # A data set smaller than the prompt is read again from its start.
        for turn in range(number, number + 10_000):
            parts.append(self._texts[turn % len(self._texts)])
            # Tokens are counted now and then only: each count encodes the whole text again.
            if sum(map(len, parts)) >= 3 * num_tokens:
                prompt = self._tokenizer.encode("\n\n".join(parts))
                if len(prompt) >= num_tokens:
                    break
        return prompt[:num_tokens]
