"""Kinds of requests that drafts meet, from those made for them to those of which nothing can be guessed.

    retail     customer-service dialogues behind their policy (workload.py): what recurs is phrases
    random     made-up words, and an answer drawn at temperature 2: nothing recurs
    copy       a passage to be repeated: the answer is in the prompt
    faq        a few questions, asked again and again: the answer is in earlier requests
    json       orders to be put as JSON objects: the answer's form recurs, its values do not

Equal seeds give equal prompts. What is asked for is not always what comes: the answers are the served
model's own, and a small one loses the thread, or repeats itself, which is easy to guess.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_cli.bench.dataset import Dialogue, Turn
from tandem_cli.bench.workload import Prompt, PromptMaker, TokenCounter, cut_to_tokens

#: Tokens of a passage to copy, and of random words, where no length is given.
_DEFAULT_TOKENS = 160
_RANDOM_TEMPERATURE = 2.0


@dataclass(frozen=True)
class Material:
    """What prompts are made from; `input_tokens` None: as long as the workload likes."""

    dialogues: Sequence[Dialogue]
    policy: str
    input_tokens: int | None
    count: TokenCounter
    seed: int


def _retail(material: Material, index: int) -> Prompt:
    maker = PromptMaker(
        material.dialogues,
        material.policy,
        input_tokens=material.input_tokens,
        count=material.count,
        seed=material.seed,
    )
    return maker.make(index)


def _random(material: Material, index: int) -> Prompt:
    generator = random.Random(f"random/{material.seed}/{index}")
    length = material.input_tokens or _DEFAULT_TOKENS
    # A made-up word has more than one token, so these are too many.
    words = ("".join(generator.choices(_LETTERS, k=generator.randint(3, 9))) for _ in range(length))
    text = cut_to_tokens(" ".join(words), length, material.count)
    # With equal seeds, answers that are nearly noise would choose the same token at the same place.
    return Prompt(
        f"random-{index}", (Turn("user", text),), temperature=_RANDOM_TEMPERATURE, seed_offset=index
    )


def _copy(material: Material, index: int) -> Prompt:
    generator = random.Random(f"copy/{material.seed}/{index}")
    dialogue = generator.choice(material.dialogues)
    text = dialogue.as_text()
    # From another place each time, for there are more requests than dialogues.
    start = text.find(" ", generator.randrange(max(len(text) // 2, 1))) + 1
    passage = cut_to_tokens(text[start:], material.input_tokens or _DEFAULT_TOKENS, material.count)
    asked = f"Repeat the following text word for word, and write nothing else.\n\n{passage}"
    return Prompt(f"copy-{dialogue.id}-{index}", (Turn("user", asked),))


def _faq(material: Material, index: int) -> Prompt:
    number = index % len(_QUESTIONS)
    system = Turn("system", material.policy.strip())
    return Prompt(f"faq-{number}", (system, Turn("user", _QUESTIONS[number])))


def _json(material: Material, index: int) -> Prompt:
    generator = random.Random(f"json/{material.seed}/{index}")
    orders = "\n".join(
        f"{generator.choice(_NAMES)} from {generator.choice(_CITIES)} bought {generator.randint(2, 9)} "
        f"{generator.choice(_GOODS)} for {generator.randint(5, 400)}.{generator.randint(0, 99):02d} euros."
        for _ in range(5)
    )
    turns = (
        Turn("user", f"{_TASK}\n\nMia from Bonn bought 2 lamps for 39.90 euros."),
        Turn("assistant", _EXAMPLE),
        Turn("user", f"{_TASK}\n\n{orders}"),
    )
    return Prompt(f"json-{index}", turns)


#: From what there is and the request's index.
WORKLOADS: dict[str, Callable[[Material, int], Prompt]] = {
    "retail": _retail,
    "random": _random,
    "copy": _copy,
    "faq": _faq,
    "json": _json,
}

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_QUESTIONS = (
    "What can I do if my order has not arrived yet?",
    "How do I return something, and when do I get my money back?",
    "Can I still change the address of my order?",
    "What do you need to know from me before you can help me?",
)
_TASK = "Write each order as a JSON object with the keys customer, city, quantity, item and price."
_EXAMPLE = '[\n  {"customer": "Mia", "city": "Bonn", "quantity": 2, "item": "lamps", "price": 39.90}\n]'
_NAMES = ("Ada", "Ben", "Chiara", "Deniz", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kim", "Lena")
_CITIES = ("Turin", "Lyon", "Graz", "Porto", "Oslo", "Ghent", "Brno", "Cork", "Malmo", "Split")
_GOODS = ("tents", "stoves", "packs", "ropes", "mugs", "maps", "boots", "jackets", "lanterns", "mats")
