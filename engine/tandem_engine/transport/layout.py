"""The KV layout that two pods must agree on before one writes into the other's KV blocks.

A KV block is raw bytes without its model, dtype or shape. Reading it under another layout gives wrong text,
not an error. So every ticket carries the fingerprint of the decode pod's layout, and the prefill pod
compares it with its own before it sends anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import xxhash
from tandem_core.errors import InvariantError, LayoutMismatchError

#: Incremented when the bytes on the wire change meaning: header fields, digest, order within a block.
WIRE_VERSION = 1

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

    A block of one layer is `[2, num_kv_heads, block_size, head_size]` of `dtype`: keys, then values.
    """

    #: Hash of the source weights: the same shape with other weights is another layout.
    model_revision: str
    #: Stored element type, as torch names it, e.g. "bfloat16".
    dtype: str
    #: How elements map to real numbers: "none", or the quantization scheme's name.
    kv_quantization: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    #: Tokens per block.
    block_size: int
    #: The RoPE parameters as text, e.g. "theta=100000.0,scaling=none"; keys are stored rotated.
    rope: str
    #: Order of the axes within one layer of one block.
    block_layout: str = "KV,H,T,D"
    wire_version: int = WIRE_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InvariantError(f"KV dtype {self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_size, self.block_size) < 1:
            raise InvariantError("a KV layout's sizes are positive")
        if any(";" in str(value) for value in asdict(self).values()):
            raise InvariantError("a KV layout's fields may not contain ';'")

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_size * ELEMENT_BYTES[self.dtype]

    @property
    def description(self) -> str:
        """The text the fingerprint is computed from, "name=value" joined by "; "."""
        return "; ".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when the descriptions are."""
        return xxhash.xxh3_128_hexdigest(self.description.encode())

    def check(self, other_fingerprint: str, other_description: str) -> None:
        """Raises LayoutMismatchError, with both layouts and their differences, unless they are equal."""
        if other_fingerprint == self.fingerprint:
            return
        other_fingerprint, other_description = other_fingerprint[:_SHOWN], other_description[:_SHOWN]
        mine = {name: str(value) for name, value in asdict(self).items()}
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
