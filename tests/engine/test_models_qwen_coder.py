"""Qwen2.5-Coder-1.5B-Instruct as Q4_K_M: a whole file with several formats and another architecture.

In float32 its greedy text is transformers' on the dequantised weights; in the packings a text depends neither
on the batch nor on drafts. Needs the pulled model (1.1 GB), 15 GB of memory and 8 GB of disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from greedy import GREEDY, NUM_TOKENS, Prompts, assert_same, generate, make_llm
from tandem_core.model.conversation import Message
from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest
from tandem_core.model.registry import folder_name, models_root
from tandem_engine.llm import LLM
from tandem_kernels import native
from transformers import AutoModelForCausalLM, GgufConfig

MODEL = "qwen2.5-coder-1.5b-instruct"
FOLDER = models_root() / folder_name(MODEL)
#: Characters of the parts of dialogues.
CHARS = (300, 500, 700, 900, 1100, 1300, 1600, 2000)

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (FOLDER / MANIFEST_NAME).is_file(),
        reason=f"{MODEL} is not pulled; `tandem model pull {MODEL}` downloads 1.1 GB",
    ),
]


def make_prompts(llm: LLM, corpus, count: int) -> Prompts:
    """Parts of dialogues: to be continued, and as a chat's question, in turn."""
    texts = [corpus.dialogues[i][: CHARS[i]] for i in range(count)]
    return tuple(
        tuple(
            llm.tokenizer.encode_chat([Message("user", f"Repeat, then answer:\n{text}")])
            if i % 2
            else llm.tokenizer.encode(text)
        )
        for i, text in enumerate(texts)
    )


@torch.inference_mode()
def test_text_equals_transformers_greedy(corpus, tmp_path: Path) -> None:
    """Given our text as the prefix, transformers' most likely next token is ours at each place."""
    llm = make_llm(FOLDER, num_blocks=200)
    prompts = make_prompts(llm, corpus, len(CHARS))
    ours = generate(llm, prompts)
    # Both models at once would need 15 GB.
    del llm
    # Beside the file transformers would read our config.json.
    link = tmp_path / "model.gguf"
    link.symlink_to((FOLDER / ModelManifest.read(FOLDER).weights).resolve())
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=link.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    predicted = []
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = reference(ids, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        predicted.append(logits.argmax(-1).tolist())
    assert_same(ours, predicted, "transformers")
    assert sum(c.stats.accepted_tokens for c in ours) > 0, "nothing was speculated"


@pytest.mark.skipif(native.LIBRARY is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_chunks_and_drafts_change_no_bit_in_the_packings(corpus, dtype: str) -> None:
    def make(speculation: str, chunk_size: int) -> LLM:
        return make_llm(
            FOLDER, speculation, dtype=dtype, quantization="w4a8", num_blocks=200, chunk_size=chunk_size,
            deterministic=True,
        )  # fmt: skip

    single = make("off", 512)
    prompts = make_prompts(single, corpus, 4)
    alone = [single.generate([prompt], GREEDY)[0] for prompt in prompts]
    del single
    together = generate(make("off", 48), prompts)
    drafted = generate(make("local", 128), prompts)
    assert sum(c.stats.accepted_tokens for c in drafted) > 0, "nothing was speculated"
    for want, *others in zip(alone, together, drafted, strict=True):
        for got in others:
            assert got.token_ids == want.token_ids
            assert [t.logprob for t in got.logprobs] == [t.logprob for t in want.logprobs]
