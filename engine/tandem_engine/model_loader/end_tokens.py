"""Tokens that end a text in every model that has them, by their names.

Files often list one end token where the model has several: the end of a turn, of a text, and the marks with
which code models leave a completion in the middle of a file. GGUF files and checkpoints get the same set, in
addition to the ids that they list.
"""

from __future__ import annotations

END_TOKENS = frozenset({
    # the end of a turn or of a message
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>",
    # the end of a text
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]", "<eos>",
    "<EOT>", "\u2581<EOT>", "[EOT]",
    # padding, or the next file, behind a completion in the middle of one
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>",
    "<|file_sep|>",
})  # fmt: skip
#: The other marks of completions in the middle of a file; they end nothing.
FIM_TOKENS = frozenset({
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>",
    "<fim_prefix>", "<fim_middle>", "<fim_suffix>",
})  # fmt: skip
