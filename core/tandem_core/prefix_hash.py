"""Hashes of prompt prefixes, block by block: keys of the prefix cache and of the gateway's routing.

    chain hash of block i = hash(chain hash of block i - 1, token ids of block i)

The first block's predecessor is the salt, so requests whose salts differ share no KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NewType

#: Hash of a block together with everything before it.
ChainHash = NewType("ChainHash", bytes)
#: (hash of the preceding chain, the block's token ids) -> hash of the chain including the block.
BlockHasher = Callable[[ChainHash, Sequence[int]], ChainHash]


def cache_salt(tenant: str, model_revision: str, lora: str = "", salt: str = "") -> bytes:
    """16 bytes that separate KV that must not be shared. Each part is length-prefixed, so that no two sets
    collide. `salt`: the request's cache_salt."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant, model_revision, lora, *([salt] if salt else [])):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def hash_salt(cache_salt: bytes) -> ChainHash:
    """The parent of a first block: chains with different salts have nothing in common."""
    return ChainHash(hashlib.blake2b(cache_salt, digest_size=16, person=b"tandem-salt").digest())


def hash_block(parent: ChainHash, token_ids: Sequence[int]) -> ChainHash:
    """A cryptographic hash, because attackers choose prompts; about 1 us per block of 64 tokens."""
    packed = array("q", token_ids).tobytes()
    return ChainHash(hashlib.blake2b(parent + packed, digest_size=16, person=b"tandem-block").digest())


def hash_prefixes(cache_salt: bytes, token_ids: Sequence[int], block_size: int) -> list[ChainHash]:
    """One chain hash per full block."""
    parent = hash_salt(cache_salt)
    hashes = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes
