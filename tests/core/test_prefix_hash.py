"""Chain hashes cover full blocks and everything before them, and salts keep chains apart."""

from tandem_core.prefix_hash import cache_salt, hash_block, hash_prefixes, hash_salt


def test_hashes_cover_full_blocks_and_everything_before_them() -> None:
    tokens = list(range(3 * 16 + 5))
    salt = cache_salt("tenant", "revision")
    hashes = hash_prefixes(salt, tokens, 16)
    assert len(hashes) == 3
    assert hashes[0] == hash_block(hash_salt(salt), tokens[:16])
    assert hash_prefixes(salt, tokens[:32], 16) == hashes[:2]
    assert not set(hash_prefixes(salt, [7, *tokens[1:]], 16)) & set(hashes)
    assert not set(hash_prefixes(cache_salt("other", "revision"), tokens, 16)) & set(hashes)


def test_salts_of_different_parts_differ() -> None:
    salts = {
        cache_salt("a", "bc"),
        cache_salt("ab", "c"),
        cache_salt("a", "bc", "l"),
        cache_salt("a", "b", "c"),
        cache_salt("a", "b", salt="c"),
        cache_salt("a", "b", "c", "l"),
    }
    assert len(salts) == 6
