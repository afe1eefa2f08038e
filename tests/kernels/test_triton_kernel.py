"""The Triton backend: right in the interpreter, compiled for sm_80 and sm_90, and optional.

Each test starts a process: the interpreter is chosen before Triton is imported, and the ahead-of-time
compiler must not see it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run(*arguments: str, **environment: str) -> str:
    """The standard output of a Python process, which must succeed."""
    process = subprocess.run(
        [sys.executable, *arguments],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-6000:]
    return process.stdout


PYTEST_CASES = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py"))


def test_results_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST_CASES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_on_the_gpu() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST_CASES)


def test_compiles_ahead_of_time_within_the_gpus_limits(tmp_path: Path) -> None:
    """99 KB leave room for two programs on each multiprocessor of sm_90; sm_80 has 163 KB."""
    pytest.importorskip("triton")
    output = run(str(HERE / "compile_triton_kernel.py"), TRITON_CACHE_DIR=str(tmp_path))
    results = [json.loads(line) for line in output.splitlines()]
    assert len(results) == 9
    for result in results:
        limit = 163 * 1024 if result["name"].startswith("sm_80") else 99 * 1024
        assert 0 < result["shared_bytes"] <= limit, result
        assert result["stack_bytes"] in (0, None), f"registers spill: {result}"


def test_the_package_works_without_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
from tandem_kernels import turbo_attention
query, cache = torch.randn(1, 1, 16), torch.randn(1, 2, 1, 16, 16)
one, both = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
arguments = (query, cache, torch.tensor([[0]], dtype=torch.int32), one, both)
turbo_attention(*arguments, scale=1.0)
try:
    turbo_attention(*arguments, scale=1.0, backend="triton")
except ImportError as error:
    print(error)
"""
    assert 'pip install "tandem[gpu]"' in run("-c", script)
