"""Chat prompts of two workloads. Equal seeds give equal prompts.

    retail     customer-service dialogues with their policy: phrases recur
    random     random words, answers sampled from all tokens at temperature 2: no phrases recur

A retail prompt of a given length:

    system:  policy
             ## Earlier conversations        other dialogues, drawn per prompt, up to the wanted length
    user, assistant, tool, ...               one dialogue up to the last question that has an answer

The served model writes the answers; small models repeat themselves more than large ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_cli.bench.dataset import Dialogue, Turn

TokenCounter = Callable[[str], int]

_EARLIER = "\n\n## Earlier conversations\n\n"
#: Mean of English text in common tokenizers.
_CHARACTERS_PER_TOKEN = 4.0
#: Tokens of random words, where no length is given.
_DEFAULT_TOKENS = 160
_RANDOM_TEMPERATURE = 2.0


def estimate_tokens(text: str) -> int:
    """Number of tokens estimated from the text's length."""
    return round(len(text) / _CHARACTERS_PER_TOKEN)


def tokenizer_counter(model_dir: Path) -> TokenCounter:
    """Counts tokens with the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Prompt:
    dialogue_id: str
    messages: tuple[Turn, ...]
    #: None: temperature of the run.
    temperature: float | None = None
    #: None: the model's own.
    top_p: float | None = None
    #: Added to the run's seed.
    seed_offset: int = 0


@dataclass(frozen=True)
class Material:
    """Input of the workloads. input_tokens: length of all contents together, without the chat template;
    None: the workload's own length."""

    dialogues: Sequence[Dialogue]
    policy: str
    input_tokens: int | None
    count: TokenCounter
    seed: int


def _retail(material: Material, index: int) -> Prompt:
    """Uses each dialogue once before it repeats one."""
    order = list(range(len(material.dialogues)))
    random.Random(material.seed).shuffle(order)
    chosen = order[index % len(order)]
    turns, system = question(material.dialogues[chosen]), material.policy.strip()
    if material.input_tokens is not None:
        turns, system = _fit(material, material.input_tokens, turns, chosen, index)
    messages = (Turn("system", system), *turns) if system else turns
    return Prompt(material.dialogues[chosen].id, messages)


def _fit(
    material: Material, wanted: int, turns: tuple[Turn, ...], chosen: int, index: int
) -> tuple[tuple[Turn, ...], str]:
    """Turns and system prompt that together have about the wanted number of tokens."""
    policy, count = material.policy.strip(), material.count
    num_policy, num_tokens = count(policy), [count(turn.content) for turn in turns]
    while len(turns) > 1 and sum(num_tokens) + num_policy > wanted:
        turns, num_tokens = turns[1:], num_tokens[1:]
    room = wanted - sum(num_tokens)
    if num_policy >= room:
        return turns, cut_to_tokens(policy, room, count)
    others = [other for number, other in enumerate(material.dialogues) if number != chosen]
    random.Random(f"{material.seed}/{index}").shuffle(others)
    system = policy + _EARLIER
    # If all dialogues together are too short, they repeat.
    while others and count(system) < room:
        for other in others:
            system += other.as_text() + "\n\n"
            if count(system) >= room:
                break
    return turns, cut_to_tokens(system, room, count)


def question(dialogue: Dialogue) -> tuple[Turn, ...]:
    """The dialogue up to its last user turn that has an answer; without one, its last user turn."""
    users = [index for index, turn in enumerate(dialogue.turns) if turn.role == "user"]
    answered = [
        index for index in users if any(turn.role == "assistant" for turn in dialogue.turns[index + 1 :])
    ]
    return dialogue.turns[: (answered or users)[-1] + 1]


def cut_to_tokens(text: str, num_tokens: int, count: TokenCounter) -> str:
    """The longest prefix of the text with at most `num_tokens` tokens, within a few characters."""
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


def _random(material: Material, index: int) -> Prompt:
    generator = random.Random(f"random/{material.seed}/{index}")
    length = material.input_tokens or _DEFAULT_TOKENS
    # A random word has more than one token, so `length` words are enough.
    words = ("".join(generator.choices(_LETTERS, k=generator.randint(3, 9))) for _ in range(length))
    text = cut_to_tokens(" ".join(words), length, material.count)
    # With a common seed, all answers would sample with the same random numbers.
    return Prompt(
        f"random-{index}",
        (Turn("user", text),),
        temperature=_RANDOM_TEMPERATURE,
        top_p=1.0,
        seed_offset=index,
    )


#: A workload makes the prompt of a request from the material and the request's number.
WORKLOADS: dict[str, Callable[[Material, int], Prompt]] = {
    "retail": _retail,
    "random": _random,
}

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
