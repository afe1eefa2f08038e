"""The Triton backend: right in the interpreter, compiled for sm_80 and sm_90, and optional.

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


#: Processes on a busy machine: pytest's limit of 300 s is for tests that compute little.
pytestmark = pytest.mark.timeout(900)


def run(*arguments: str, timeout_s: float = 840, **environment: str) -> str:
    """The standard output of a Python process, which must succeed."""
    process = subprocess.run(
        [sys.executable, *arguments],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-6000:]
    return process.stdout


#: On a GPU compiling takes most of the time, a second for each of some 80 variants.
PARALLEL = ("-n", str(len(os.sched_getaffinity(0)))) if importlib.util.find_spec("xdist") else ()
PYTEST_CASES = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py"), "-m")


def test_results_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST_CASES, "not wide", "--timeout=840", TRITON_INTERPRET="1")


@pytest.mark.wide
@pytest.mark.timeout(3600)
def test_many_results_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST_CASES, "wide", "--timeout=3600", timeout_s=3600, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_on_the_gpu() -> None:
    pytest.importorskip("triton")
    assert "passed" in run(*PYTEST_CASES, "not wide", *PARALLEL, timeout_s=150)


def assert_within_limits(output: str) -> int:
    """Check compile_triton_kernel's results, and return how many there are.

    As many programs as the tiles say run on a multiprocessor: its registers and shared memory suffice for
    them. Few registers spill. Half precision is multiplied by tensor cores.
    """
    results = [json.loads(line) for line in output.splitlines()]
    for result in results:
        programs, sm_90 = result["programs"], result["name"].startswith("sm_90")
        shared_bytes = (227 if sm_90 else 163) * 1024
        # On sm_80 a head of 256 in two buffers leaves room for one program, whatever the registers allow.
        fitting = programs if sm_90 or result["head_size"] <= 128 else 1
        assert 0 < fitting * (result["shared_bytes"] + 1024) <= shared_bytes, result
        if result["stack_bytes"] is None:
            continue  # Triton came without cuobjdump
        assert programs * result["registers"] * result["num_warps"] * 32 <= 65536, result
        plain = "softcap" not in result["name"] and "token" not in result["name"]
        assert result["stack_bytes"] <= (64 if plain else 640), f"registers spill: {result}"
        # 64 rows fill sm_90's asynchronous instruction; fewer take that of a warp.
        asynchronous = sm_90 and result["rows"] == 64
        is_half = "fp32" not in result["name"]
        assert (result["hgmma"] > 0) == (is_half and asynchronous), result
        assert (result["hmma"] > 0) == (is_half and not asynchronous), result
    return len(results)


def test_compiles_ahead_of_time_within_the_gpus_limits(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = run(str(HERE / "compile_triton_kernel.py"), "subset", TRITON_CACHE_DIR=str(tmp_path))
    assert assert_within_limits(output) == 13


@pytest.mark.wide
@pytest.mark.timeout(3600)
def test_all_configurations_compile_within_the_gpus_limits(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = run(
        str(HERE / "compile_triton_kernel.py"), "all", timeout_s=3600, TRITON_CACHE_DIR=str(tmp_path)
    )
    assert assert_within_limits(output) == 231


def test_the_package_works_without_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
from tandem_kernels import AttentionLayer, AttentionMetadata, turbo_attention
query, cache = torch.randn(1, 1, 16), torch.randn(1, 2, 1, 16, 16)
one, both = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
metadata = AttentionMetadata(torch.tensor([[0]], dtype=torch.int32), one, both)
turbo_attention(query, cache, metadata, AttentionLayer(1.0))
try:
    turbo_attention(query, cache, metadata, AttentionLayer(1.0), backend="triton")
except ImportError as error:
    print(error)
"""
    assert 'pip install "tandem[gpu]"' in run("-c", script)
