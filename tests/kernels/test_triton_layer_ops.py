"""The other operators on a GPU, and the choice of tokens: right in the interpreter, compiled without spills.

Each test starts a process: the interpreter is chosen before Triton is imported, and the ahead-of-time
compiler must not see it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = [str(HERE / f"triton_{name}_cases.py") for name in ("layer", "draw", "gated_delta", "moe")]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore")


def run(*arguments: str, **environment: str) -> str:
    """The standard output of a Python process, which must succeed."""
    process = subprocess.run(
        [sys.executable, "-P", *arguments],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        # On a GPU less than benchmarks/gpu has for all tests.
        timeout=150 if torch.cuda.is_available() else 240,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-6000:]
    return process.stdout


def test_results_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST, *CASES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_on_the_gpu() -> None:
    pytest.importorskip("triton")
    parallel = ("-n", str(len(os.sched_getaffinity(0)))) if importlib.util.find_spec("xdist") else ()
    assert "passed" in run(*PYTEST, *CASES, *parallel)


def test_compiles_ahead_of_time_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = run(str(HERE / "compile_layer_ops.py"), TRITON_CACHE_DIR=str(tmp_path))
    results = [json.loads(line) for line in output.splitlines()]
    kernels = {"activate", "add_norm", "move_slots", "rope_store", "draw_tokens", "gated_delta", "moe"}
    assert {r["name"].split()[1] for r in results} == kernels
    assert {r["name"].split()[0] for r in results} == {"sm_80", "sm_90"}
    for result in results:
        # What a program may take without asking the driver.
        assert result["shared_bytes"] <= 48 * 1024, result
        assert result["num_spills"] in (0, None), f"registers spill: {result}"


def test_cuda_tensors_without_triton_are_refused_with_the_remedy() -> None:
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
try:
    import tandem_kernels.gpu
except ImportError as error:
    print(error)
"""
    assert 'pip install "tandem[gpu]"' in run("-c", script)
