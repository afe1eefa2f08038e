"""Byte-level BPE tokenizers made on the spot: every text can be encoded, and no download is needed."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(model: models.BPE) -> Tokenizer:
    """A tokenizer as in GPT-2, Llama 3 and Qwen: characters of the vocabulary stand for bytes."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def trained(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """One with the merges of these texts; the special tokens have the first ids."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def without_merges(vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """One token a byte, for as many bytes as there is room for; other bytes become special_tokens[0]."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - len(special_tokens)]
    vocab = {token: i for i, token in enumerate([*special_tokens, *alphabet])}
    return byte_level(models.BPE(vocab=vocab, merges=[], unk_token=special_tokens[0]))
