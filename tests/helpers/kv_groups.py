"""Groups of layers for tests of the KV cache and its transfer."""

from __future__ import annotations

from tandem_core.model.spec import CacheGroup, CacheKind, CachePart


def kv_group(layers: range, num_kv_heads: int, head_size: int, window: int | None = None) -> CacheGroup:
    parts = tuple(CachePart(name, (num_kv_heads, head_size)) for name in ("k", "v"))
    kind = CacheKind.FULL if window is None else CacheKind.WINDOW
    return CacheGroup(kind, tuple(layers), parts, window)
