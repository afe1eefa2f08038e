"""The drafter reads and writes nothing that is not its own, whatever it is given: built with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_sanitizer_complains(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "fuzz"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "tests" / "engine" / "fuzz_drafts.cpp"
    built = subprocess.run(
        [compiler, *flags, "-I", str(ROOT / "engine" / "csrc"), str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers' libraries")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 10_000
