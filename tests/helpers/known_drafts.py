"""Drafts that are right for a while, between wrong branches: a drafter that knows the texts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from tandem_engine.draft_source import Emitted, Likeliest
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request


class KnownDrafts:
    """texts: the output that follows each prompt."""

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], seed: int = 0) -> None:
        self._texts = texts
        self._random = random.Random(seed)

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        return [self._tree(request, max_nodes) for request in requests]

    def _tree(self, request: Request, max_nodes: int) -> DraftTree | None:
        text = self._texts[tuple(request.prompt_token_ids)]
        right = list(text[len(request.output_token_ids) :])
        size = self._random.randrange(max_nodes + 1)
        if not size:
            return None
        tokens, parents, last_right = [], [], 0
        for node in range(1, size + 1):
            if right and self._random.random() < 0.6:
                parent, token = last_right, right.pop(0)
                last_right = node
            else:
                parent, token = self._random.randrange(node), self._random.randrange(3, 90)
                if right and parent == last_right and token == right[0]:
                    token = 3 + (token - 2) % 80
            parents.append(parent)
            tokens.append(token)
        return DraftTree(tuple(tokens), tuple(parents), ("output",) * size)

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        pass

    def extend(self, emitted: Sequence[Emitted], logits: torch.Tensor | Likeliest) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass
