"""The drafter is compiled where it can be, missed without harm, and reads nothing that is not its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tandem_core.sampling import SamplingParams
from tandem_drafting import native
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine.draft_source import Emitted
from tandem_engine.request import Request

ROOT = Path(__file__).resolve().parents[2]


def test_is_compiled_where_there_is_a_compiler() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    assert native.LIBRARY is not None


def test_without_it_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", None)
    request = Request("r", [1, 2, 3, 1, 2], SamplingParams(max_tokens=50))
    request.output_token_ids = [3]
    request.num_computed_tokens = 5
    drafter = Drafter(None, DraftPolicy())
    assert drafter.propose([request], 15) == [None]
    drafter.extend([Emitted(request, [1], ())])
    drafter.forget("r")


@pytest.mark.parametrize(("name", "at_least"), [("fuzz_drafts", 10_000), ("fuzz_promoter", 1_000)])
def test_no_sanitizer_complains(name: str, at_least: int, tmp_path: Path) -> None:
    """Each program prints how much came of what it tried, so that it cannot pass by doing nothing."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / name
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "tests" / "engine" / f"{name}.cpp"
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
