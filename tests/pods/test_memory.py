"""A pod whose settings do not fit the machine ends before it serves, with one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("role", "flags", "said"),
    [
        ("decode", ("--num-blocks", "1000000000"), "--num-blocks 1000000000: the pod needs "),
        ("prefill", ("--memory-bytes", "1000000"), "--model: the pod needs "),
        ("prefill", ("--max-model-len", "1025"), "has a context of 1024"),
    ],
)
def test_a_pod_that_does_not_fit_ends_with_one_sentence(
    tiny_model: Path, role: str, flags: tuple[str, str], said: str
) -> None:
    command = [Path(sys.executable).parent / f"tandem-{role}", "--model", tiny_model, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    *_, last = ended.stderr.splitlines()
    assert last.startswith("error: ") and said in last
    assert "Traceback" not in ended.stderr + ended.stdout
