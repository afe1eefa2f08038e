"""Chat prompts of a wanted length from dialogues.

    system:  policy
             ## Earlier conversations        other dialogues, drawn per prompt, as far as the length asks
    user, assistant, tool, ...               one dialogue up to the last question that has an answer

The policy is the same in all prompts, as in a real service; what follows it differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_cli.bench.dataset import Dialogue, Turn

TokenCounter = Callable[[str], int]

_EARLIER = "\n\n## Earlier conversations\n\n"
#: English text in common tokenizers.
_CHARACTERS_PER_TOKEN = 4.0


def estimate_tokens(text: str) -> int:
    """Tokens of a text by its length, for when no tokenizer is at hand."""
    return round(len(text) / _CHARACTERS_PER_TOKEN)


def tokenizer_counter(model_dir: Path) -> TokenCounter:
    """Counts with the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Prompt:
    dialogue_id: str
    messages: tuple[Turn, ...]
    #: None: as the run's.
    temperature: float | None = None
    #: Added to the run's seed.
    seed_offset: int = 0


class PromptMaker:
    """Makes prompts; equal seeds give equal prompts.

    `input_tokens`: wanted length of all contents together (the chat template adds a little);
    None: policy and dialogue as they are.
    """

    def __init__(
        self,
        dialogues: Sequence[Dialogue],
        policy: str,
        *,
        input_tokens: int | None,
        count: TokenCounter,
        seed: int,
    ) -> None:
        self._dialogues = dialogues
        self._policy = policy.strip()
        self._input_tokens = input_tokens
        self._count = count
        self._seed = seed
        self._order = list(range(len(dialogues)))
        random.Random(seed).shuffle(self._order)

    def make(self, index: int) -> Prompt:
        """The prompt of the index-th request; dialogues repeat after all were used."""
        chosen = self._order[index % len(self._order)]
        dialogue = self._dialogues[chosen]
        turns = question(dialogue)
        system = self._policy
        if self._input_tokens is not None:
            turns, system = self._fit(turns, chosen, index)
        messages = (Turn("system", system), *turns) if system else turns
        return Prompt(dialogue.id, messages)

    def _fit(self, turns: tuple[Turn, ...], chosen: int, index: int) -> tuple[tuple[Turn, ...], str]:
        """Turns and system prompt that together have about the wanted number of tokens."""
        assert self._input_tokens is not None
        while len(turns) > 1 and self._count_turns(turns) + self._count(self._policy) > self._input_tokens:
            turns = turns[1:]
        room = self._input_tokens - self._count_turns(turns)
        if self._count(self._policy) >= room:
            return turns, cut_to_tokens(self._policy, room, self._count)
        others = [other for number, other in enumerate(self._dialogues) if number != chosen]
        random.Random(f"{self._seed}/{index}").shuffle(others)
        system = self._policy + _EARLIER
        # A data set smaller than the wanted length is read again from its start.
        while others and self._count(system) < room:
            for other in others:
                system += other.as_text() + "\n\n"
                if self._count(system) >= room:
                    break
        return turns, cut_to_tokens(system, room, self._count)

    def _count_turns(self, turns: Sequence[Turn]) -> int:
        return sum(self._count(turn.content) for turn in turns)


def question(dialogue: Dialogue) -> tuple[Turn, ...]:
    """The dialogue up to its last user's turn that an assistant answers; without one, the last user's."""
    users = [index for index, turn in enumerate(dialogue.turns) if turn.role == "user"]
    answered = [
        index for index in users if any(turn.role == "assistant" for turn in dialogue.turns[index + 1 :])
    ]
    return dialogue.turns[: (answered or users)[-1] + 1]


def cut_to_tokens(text: str, num_tokens: int, count: TokenCounter) -> str:
    """The longest beginning of the text with at most `num_tokens` tokens, within a few."""
    if num_tokens <= 0:
        return ""
    if count(text) <= num_tokens:
        return text
    low, high = 0, len(text)
    while high - low > 8:
        middle = (low + high) // 2
        if count(text[:middle]) <= num_tokens:
            low = middle
        else:
            high = middle
    return text[:low]
