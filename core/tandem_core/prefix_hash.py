"""The salt of the prefix cache: requests whose salts differ share no KV."""

from __future__ import annotations

import hashlib


def cache_salt(tenant: str, model_revision: str, lora: str = "") -> bytes:
    """16 bytes from what must keep KV apart; each part is length-prefixed so that no two sets collide."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant, model_revision, lora):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()
