"""`guidellm run`: the sweep finds the throughput with 512 requests at once, then runs at rates below it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import feature, words_of

COMMAND = r"""
# snippet sh
guidellm run --backend kind=openai_http,target=$URL --tokenizer kind=hf_auto,model=$MODEL_FOLDER \
  --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 \
  --profile kind=sweep,sweep_size=3 --constraint kind=max_duration,seconds=10
# end
"""
#: One process for the requests is enough here; each stage starts its processes anew, which takes long.
FEW_PROCESSES = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}


def run() -> list[dict[str, Any]]:
    """The benchmarks in the report."""
    command = [str(Path(sys.executable).with_name("guidellm")), *words_of(COMMAND)[1:]]
    command += ["--output", "kind=json,path=report.json"]
    subprocess.run(command, env=os.environ | FEW_PROCESSES, check=True)
    return list(json.loads(Path("report.json").read_text())["benchmarks"])


def strategy(benchmark: dict[str, Any]) -> str:
    return str(benchmark["config"]["strategy"]["type_"])


def check(benchmarks: list[dict[str, Any]]) -> None:
    assert benchmarks
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["errored"] == 0, totals
        assert totals["successful"] > 0, totals


benchmarks = run()


@feature("stream")
def _() -> None:
    check([benchmark for benchmark in benchmarks if strategy(benchmark) == "synchronous"])


@feature("512 requests at once")
def _() -> None:
    check([benchmark for benchmark in benchmarks if strategy(benchmark) == "throughput"])


@feature("constant rate")
def _() -> None:
    check([benchmark for benchmark in benchmarks if strategy(benchmark) == "constant"])
