"""With the compiled kernels nothing but a text's own tokens has a part in it: in bfloat16 too, where rounding
is coarse enough to turn a text, every token and every log probability comes out the same to the last bit
whatever was computed beside it, drafted, or cut into chunks."""

from pathlib import Path

import pytest
from free_drafts import FreeDrafts
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.llm import LLM, Completion
from tandem_kernels import native

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="torch's products depend on the batch")
CHARS = (200, 700, 1500, 2600)


def generate(
    model_dir: Path, corpus, dtype: str, *, alone: bool, speculation: str, **options: object
) -> list[Completion]:
    drafter = drafter_for(speculation)
    if drafter is not None:
        drafter.step_cost = FreeDrafts()
    llm = LLM(model_dir, dtype=dtype, num_blocks=200, drafter=drafter, **options)
    prompts = [llm.tokenizer.encode(corpus.prompt(i, n)) for i, n in enumerate(CHARS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
    return [
        c for group in ([[p] for p in prompts] if alone else [prompts]) for c in llm.generate(group, sampling)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.wide)])
def test_the_same_bits_in_any_company(model_dir: Path, corpus, dtype: str) -> None:
    plain = generate(model_dir, corpus, dtype, alone=True, speculation="off", chunk_size=512)
    drafted = generate(model_dir, corpus, dtype, alone=False, speculation="local", chunk_size=192)
    assert sum(c.stats.accepted_tokens for c in drafted) > 10, "hardly anything was speculated"
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert [p.logprob for p in one.logprobs] == [p.logprob for p in other.logprobs]
