"""`vllm bench serve`. Its module needs no engine; the command itself would import one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import feature, words_of
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

COMMAND = r"""
# snippet sh
vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url $URL \
  --model $MODEL --tokenizer $MODEL_FOLDER --num-prompts 24 \
  --dataset-name random --random-input-len 64 --random-output-len 16
# end
"""


def run(*flags: str) -> dict[str, Any]:
    """The report of a run with these flags added."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    report = Path("report.json")
    flags = (*words_of(COMMAND)[3:], *flags, "--save-result", "--result-filename", str(report))
    main(parser.parse_args([*flags]))
    return dict(json.loads(report.read_text()))


def check(report: dict[str, Any]) -> None:
    assert report["completed"] == 24
    assert report["failed"] == 0
    assert report["total_output_tokens"] > 24
    assert report["median_ttft_ms"] > 0
    assert report["median_tpot_ms"] > 0


@feature("stream")
def _() -> None:
    check(run())


@feature("completions")
def _() -> None:
    check(run("--backend", "openai", "--endpoint", "/v1/completions"))


@feature("ignore_eos, exact lengths")
def _() -> None:
    assert run("--ignore-eos", "--temperature", "0")["total_output_tokens"] == 24 * 16
