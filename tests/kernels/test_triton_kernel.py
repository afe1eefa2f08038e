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

    64 KB of shared memory leave room for three programs on each multiprocessor of sm_90 (227 KB) and two of
    sm_80's (163 KB). No registers spill. Half precision is multiplied by tensor cores, on sm_90 by their
    asynchronous instruction alone. A head of 128 or more takes the same memory whatever its size.
    """
    results = [json.loads(line) for line in output.splitlines()]
    shared: dict[str, set[int]] = {}
    for result in results:
        sm_90 = result["name"].startswith("sm_90")
        assert 0 < result["shared_bytes"] <= 64 * 1024, result
        if result["stack_bytes"] is None:
            continue  # Triton came without cuobjdump
        assert result["stack_bytes"] == 0, f"registers spill: {result}"
        assert result["local"] == 0, f"registers spill: {result}"
        assert result["registers"] <= 255, result
        if "fp32" in result["name"]:
            assert result["hgmma"] == result["hmma"] == 0, result
        elif sm_90:
            assert result["hgmma"] > 0, result
            assert result["hmma"] == 0, result
        else:
            assert result["hgmma"] == 0, result
            assert result["hmma"] > 0, result
    for result in results:
        tile = f"{result['rows']} x {result['keys']}"
        if result["head_size"] >= 128:
            model = result["name"].replace(f"D{result['head_size']}", "D")
            shared.setdefault(f"{model} {tile}", set()).add(result["shared_bytes"])
    assert all(max(sizes) <= 1.01 * min(sizes) for sizes in shared.values()), shared
    return len(results)


def test_compiles_ahead_of_time_within_the_gpus_limits(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = run(str(HERE / "compile_triton_kernel.py"), "subset", TRITON_CACHE_DIR=str(tmp_path))
    assert assert_within_limits(output) == 13


def test_q_is_loaded_once_where_one_chunk_is_the_whole_head(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = run(str(HERE / "compile_triton_kernel.py"), "queries", TRITON_CACHE_DIR=str(tmp_path))
    results = [json.loads(line) for line in output.splitlines()]
    assert [(" D64 " in result["name"]) for result in results] == [True, False] * 2
    for result in results:
        assert result["once"] == (" D64 " in result["name"]), result


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
