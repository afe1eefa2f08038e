"""The C++ drafter under address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "at_least"), [("fuzz_drafts", 10_000), ("fuzz_k_anonymity", 1_000)])
def test_no_sanitizer_complains(name: str, at_least: int, tmp_path: Path) -> None:
    """Each program prints how much came of what it tried, so that it cannot pass by doing nothing."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / name
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "tests" / "drafting" / f"{name}.cpp"
    built = subprocess.run(
        [compiler, *flags, "-I", str(ROOT / "drafting" / "csrc"), str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers' libraries")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > at_least
