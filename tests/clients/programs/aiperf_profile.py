"""`aiperf profile`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import feature, words_of

COMMAND = r"""
# snippet sh
aiperf profile --model $MODEL --url $URL --endpoint-type chat --streaming \
  --tokenizer $MODEL_FOLDER --request-count 24 --concurrency 4 --isl 64 --osl 16
# end
"""


def run(endpoint: str) -> None:
    """Runs against this type of endpoint, and checks the report."""
    folder = Path(endpoint)
    words = words_of(COMMAND.replace("--endpoint-type chat", f"--endpoint-type {endpoint}"))
    command = [str(Path(sys.executable).with_name("aiperf")), *words[1:]]
    subprocess.run([*command, "--ui", "none", "--output-artifact-dir", str(folder)], check=True)
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 24
    assert report["error_summary"] == []
    assert report["time_to_first_token"]["p50"] > 0


@feature("stream")
def _() -> None:
    run("chat")


@feature("completions")
def _() -> None:
    run("completions")


@feature("responses")
def _() -> None:
    run("responses")
