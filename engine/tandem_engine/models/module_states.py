"""Recurrent modules of transformers, sequence by sequence: Mamba, gated delta rule, short convolutions.

Their torch code takes one sequence at a time, with its state in transformers' cache. A sequence is known by
its first KV block, which is its own because such models share no blocks. Its state begins anew with its first
token and is dropped when a pass fails, so that a step never continues from the wrong state:

    begin   states of the step's sequences, each as long as its context, or InvariantError
    run     a module, once per sequence; a later chunk token by token where the module demands it
    end     states are kept for the next step
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tandem_core.errors import InvariantError
from tandem_kernels import AttentionMetadata
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

#: What modules call the argument that holds their state.
_CACHE_NAMES = ("cache_params", "past_key_values", "past_key_value", "cache")


class KeepsKeysError(Exception):
    """A module stores keys in transformers' cache, not in the pool."""


class _Cache(DynamicCache):  # type: ignore[misc]
    """A sequence's states."""

    was_written = False

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise KeepsKeysError("it keeps keys outside of the paged cache")

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        raise KeepsKeysError("it keeps an index of keys")

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.was_written = True
        state: Tensor = super().update_conv_state(*args, **kwargs)
        return state

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.was_written = True
        state: Tensor = super().update_recurrent_state(*args, **kwargs)
        return state

    @property
    def num_bytes(self) -> int:
        held = [
            getattr(layer, name, {}) for layer in self.layers for name in ("conv_states", "recurrent_states")
        ]
        return sum(state.nbytes for states in held for state in states.values() if state is not None)


@dataclass
class _State:
    cache: _Cache
    #: Tokens that it has seen.
    length: int = 0


class _Part(NamedTuple):
    """A sequence of the step: its rows, and its state before them."""

    first: int
    stop: int
    block: int
    state: _State


class RecurrentModules:
    """The recurrent modules of a model, wrapped.

    callers: ids of modules that called the paged attention. A candidate is the innermost module that takes a
    cache and holds none of these. in_chunks: whether they may take a later chunk in one call.
    """

    def __init__(
        self, body: nn.Module, config: PreTrainedConfig, callers: set[int], *, in_chunks: bool
    ) -> None:
        self._config = config
        self._states: dict[int, _State] = {}
        self._parts: list[_Part] = []
        #: Whether a block belongs to no sequence: states of such blocks are dropped.
        self.is_free: Callable[[int], bool] = lambda block: False
        self._in_chunks = in_chunks
        self._modules = {id(module): (module, name) for module, name in _candidates(body, callers)}
        self._written: set[int] = set()
        for module, name in self._modules.values():
            module.__dict__["forward"] = self._wrapped(module, module.forward, name)

    def without_unwritten(self) -> RecurrentModules | None:
        """Releases modules that have written no state; None if no module has."""
        for key, (module, _) in self._modules.items():
            if key not in self._written:
                del module.__dict__["forward"]
        self._modules = {key: value for key, value in self._modules.items() if key in self._written}
        return self if self._modules else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest state that is kept."""
        return max([state.cache.num_bytes for state in self._states.values()], default=0)

    def begin(self, metadata: AttentionMetadata) -> None:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        blocks = metadata.block_table[:, 0].tolist()
        if metadata.ancestor_bits is not None and bool(metadata.ancestor_bits.any()):
            raise InvariantError("a recurrent model verifies no drafts")
        self._parts = []
        for n, block in enumerate(blocks):
            first, stop = starts[n], starts[n + 1]
            context = lengths[n] - (stop - first)
            if first == stop:
                continue
            state = self._states.pop(block, None)
            if context == 0:
                state = _State(_Cache(config=self._config))
            if state is None or state.length != context:
                raise InvariantError(
                    f"the recurrent state of {context} tokens is wanted, but that of "
                    f"{'none' if state is None else state.length} is here"
                )
            self._parts.append(_Part(first, stop, block, state))

    def end(self) -> None:
        for part in self._parts:
            part.state.length += part.stop - part.first
            self._states[part.block] = part.state
        self._parts = []
        for block in [block for block in self._states if self.is_free(block)]:
            del self._states[block]

    def _wrapped(self, module: nn.Module, forward: Callable[..., Any], cache_name: str) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            if not self._parts:
                return forward(**arguments)
            arguments["attention_mask"] = None
            arguments = {name: value for name, value in arguments.items() if name in names or name in kwargs}
            if "use_cache" in names:
                arguments["use_cache"] = True
            num_rows, results = self._parts[-1].stop, []
            for part in self._parts:
                cache = part.state.cache
                arguments[cache_name], cache.was_written = cache, False
                for first, stop in self._spans(part):
                    mine = {name: _rows(value, num_rows, first, stop) for name, value in arguments.items()}
                    results.append(forward(**mine))
                if cache.was_written:
                    self._written.add(id(module))
            return _joined(results)

        return run

    def _spans(self, part: _Part) -> list[tuple[int, int]]:
        if self._in_chunks or part.state.length == 0:
            return [(part.first, part.stop)]
        return [(row, row + 1) for row in range(part.first, part.stop)]


def _candidates(body: nn.Module, callers: set[int]) -> Iterator[tuple[nn.Module, str]]:
    def visit(module: nn.Module) -> tuple[bool, list[tuple[nn.Module, str]]]:
        """Whether it or a module within calls attention, and the candidates within."""
        visited = [visit(child) for child in module.children()]
        calls = id(module) in callers or any(calls for calls, _ in visited)
        found = [one for _, within in visited for one in within]
        if found or calls:
            return calls, found
        names = inspect.signature(module.forward).parameters
        name = next((name for name in _CACHE_NAMES if name in names), None)
        return False, [] if name is None else [(module, name)]

    seen: set[int] = set()
    for module, name in visit(body)[1]:
        if id(module) not in seen:
            seen.add(id(module))
            yield module, name


def _rows(value: Any, num_rows: int, first: int, stop: int) -> Any:
    """Rows of what has one per token in its second dimension; all else as it is."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, num_rows):
        return value[:, first:stop]
    if type(value) in (tuple, list):
        return type(value)(_rows(one, num_rows, first, stop) for one in value)
    return value


def _joined(results: list[Any]) -> Any:
    """One result from those of the spans, whose tensors have a row per token."""
    if isinstance(results[0], Tensor):
        return torch.cat(results, 1)
    if isinstance(results[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*results, strict=True))
    return results[-1]
