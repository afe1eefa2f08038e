"""Names of tokens that end a text in every model that has them.

A model may have several end tokens, such as the end of a turn, the end of a text and, in code models, the end
of a fill-in-the-middle completion. Its files often list only one. These names apply to GGUF files and
checkpoints, in addition to the ids that they list.
"""

from __future__ import annotations

END_TOKENS = frozenset({
    # the end of a turn or of a message
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>",
    # the end of a text
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]", "<eos>",
    "<EOT>", "\u2581<EOT>", "[EOT]",
    # padding or the next file, after a fill-in-the-middle completion
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>",
    "<|file_sep|>",
})  # fmt: skip
#: The other fill-in-the-middle tokens; they do not end a text.
FIM_TOKENS = frozenset({
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>",
    "<fim_prefix>", "<fim_middle>", "<fim_suffix>",
})  # fmt: skip
