"""A random llama of three layers: a token takes a pod a millisecond, so that faults take the time."""

from __future__ import annotations

from pathlib import Path

NAME = "chaos-random"
#: Longest text in tokens.
_CONTEXT = 8192
_VOCABULARY = 96
_SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]


def save(folder: Path) -> Path:
    """Writes a Hugging Face checkpoint; returns its folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        # Larger than usual, so that texts vary.
        initializer_range=0.2,
    )
    checkpoint = folder / NAME
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    # One token a byte, for as many bytes as there is room for.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: _VOCABULARY - len(_SPECIAL_TOKENS)]
    vocab = {token: index for index, token in enumerate([*_SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(checkpoint)
    return checkpoint
