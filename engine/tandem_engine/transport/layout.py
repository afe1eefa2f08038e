"""The KV layout that two pods must agree on before one writes into the other's KV blocks.

A KV block is raw bytes without its model, dtype or shape. Reading it under another layout gives wrong text,
not an error. So every ticket carries the fingerprint of the decode pod's layout, and the prefill pod
compares it with its own before it sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod

import xxhash
from tandem_core.errors import InvariantError, LayoutMismatchError
from tandem_core.model.spec import CacheGroup, CacheKind

#: Incremented when the bytes on the wire or the tickets change meaning: header fields, digest, order within a
#: block. 2: tickets name the wanted blocks of each group of layers.
WIRE_VERSION = 2

#: Bytes per stored element, by the name torch gives the dtype.
ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


#: Characters of another pod's layout that an error shows.
_SHOWN = 2048


@dataclass(frozen=True)
class KVLayout:
    """The meaning of one KV block's bytes.

    A block of one layer has the parts of its group one after the other, a part of `[heads, size]` per token
    as `[heads, block_size, size]`. A recurrent state is the one block, number 0, of its group, which is the
    last; it has the parts as they are.
    """

    #: Hash of the source weights: the same shape with other weights is another layout.
    model_revision: str
    #: Stored element type of parts of type "kv", as torch names it, e.g. "bfloat16".
    dtype: str
    #: How elements map to real numbers: "none", or the quantization scheme's name.
    kv_quantization: str
    #: Every layer is in one of them, so a frame's layer tells the group.
    groups: tuple[CacheGroup, ...]
    #: Tokens per block.
    block_size: int
    #: Hash of the model's spec (keys are stored rotated, for example), and what else changes the numbers.
    spec: str
    #: Order of the axes within one layer of one block.
    block_layout: str = "KV,H,T,D"
    wire_version: int = WIRE_VERSION

    def __post_init__(self) -> None:
        parts = [part for group in self.groups for part in group.parts]
        for dtype in [self.dtype, *(part.dtype for part in parts if part.dtype != "kv")]:
            if dtype not in ELEMENT_BYTES:
                raise InvariantError(f"KV dtype {dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        if not parts or min(self.block_size, *(size for part in parts for size in part.shape)) < 1:
            raise InvariantError("a KV layout's sizes are positive")
        if sorted(self.group_of) != list(range(self.num_layers)) or not self.num_layers:
            raise InvariantError("a KV layout has every layer in one group")
        if any(";" in value for _, value in self._texts()):
            raise InvariantError("a KV layout's fields may not contain ';'")

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The number of each layer's group."""
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}

    @cached_property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each layer."""
        of_group = [
            sum(
                prod(part.shape) * ELEMENT_BYTES[self.dtype if part.dtype == "kv" else part.dtype]
                for part in group.parts
            )
            * (1 if group.kind is CacheKind.STATE else self.block_size)
            for group in self.groups
        ]
        return tuple(of_group[self.group_of[n]] for n in range(self.num_layers))

    @property
    def max_block_bytes(self) -> int:
        return max(self.block_bytes)

    def _texts(self) -> Iterator[tuple[str, str]]:
        for field in fields(self):
            value = getattr(self, field.name)
            yield field.name, " + ".join(map(_group_text, value)) if field.name == "groups" else str(value)

    @cached_property
    def description(self) -> str:
        """The text the fingerprint is computed from, "name=value" joined by "; "."""
        return "; ".join(f"{name}={value}" for name, value in self._texts())

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when the descriptions are."""
        return xxhash.xxh3_128_hexdigest(self.description.encode())

    def check(self, other_fingerprint: str, other_description: str) -> None:
        """Raises LayoutMismatchError, with both layouts and their differences, unless they are equal."""
        if other_fingerprint == self.fingerprint:
            return
        other_fingerprint, other_description = other_fingerprint[:_SHOWN], other_description[:_SHOWN]
        mine = dict(self._texts())
        theirs = dict(part.strip().partition("=")[::2] for part in other_description.split(";"))
        differing = [
            f"{name} (here {mine.get(name, 'absent')}, there {theirs.get(name, 'absent')})"
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        ]
        raise LayoutMismatchError(
            f"KV layouts differ in {', '.join(differing) or 'the fingerprint only'}. "
            f"Here: {self.description} [{self.fingerprint}]. "
            f"There: {other_description} [{other_fingerprint}]. "
            "Start both pods with the same model, dtype and block size."
        )


def _group_text(group: CacheGroup) -> str:
    """Such as "window 512 layers 0-4,6-10 k:4x256:kv v:4x256:kv"."""
    runs: list[list[int]] = []
    for layer in group.layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    layers = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
    parts = [f"{part.name}:{'x'.join(map(str, part.shape))}:{part.dtype}" for part in group.parts]
    window = [] if group.window is None else [str(group.window)]
    return " ".join([group.kind, *window, "layers", layers, *parts])
