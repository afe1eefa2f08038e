"""Decoders of transformers through our engine give transformers' own text, one test per type that
module_types.json lists; and the documents list what it lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_proof import only_modules, prove
from tandem_engine.models import type_table
from tandem_engine.models.executors import module_types

#: Windows and caps; learned positions; keys wider than values, experts; sinks; layers of different shapes;
#: attention in chunks; gated delta rule; Mamba.
_FAST = ("gemma2", "gpt2", "deepseek_v3", "gpt_oss", "gemma4_text", "llama4_text", "qwen3_5_text", "jamba")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in _FAST else [pytest.mark.wide]) for name in module_types()],
)
def test_engine_gives_the_text_of_eager_mode(model_type: str, tmp_path: Path) -> None:
    with only_modules():
        proof = prove(model_type, tmp_path)
    listed = module_types()[model_type]
    assert (proof.is_recurrent, proof.takes_drafts) == (listed.is_recurrent, listed.takes_drafts)
    assert (proof.num_drafted > 0) is listed.takes_drafts
    assert proof.num_preemptions > 0


def test_a_hundred_types_are_served_and_the_documents_list_them() -> None:
    listed = list(type_table.rows())
    assert len(listed) - 2 >= 100
    docs = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    between = docs.partition(type_table.BEGIN)[2].partition(type_table.END)[0]
    assert between.strip().splitlines() == listed, "run benchmarks/decoder_types.py --docs"
