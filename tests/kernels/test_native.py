"""Which compiled kernels are loaded on which processor, and what happens where the system refuses AMX."""

import logging
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from native_libraries import NATIVE
from tandem_kernels import native

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_int8", "amx_bf16"}
ASIMD = {"fp", "asimd", "crc32", "atomics", "fphp", "asimdhp", "asimdrdm"}


@pytest.mark.parametrize(
    "vendor, flags, expected",
    [
        ("AuthenticAMD", {"sse2"}, []),
        ("AuthenticAMD", AVX2, ["avx2"]),
        ("GenuineIntel", VNNI, ["avx2", "avx512", "avx512_vnni"]),
        # The dot products of bfloat16 pairs are fast on AMD's processors and slow on Intel's.
        ("AuthenticAMD", BF16, ["avx2", "avx512", "avx512_vnni", "avx512_bf16"]),
        ("GenuineIntel", BF16, ["avx2", "avx512", "avx512_bf16", "avx512_vnni"]),
        ("GenuineIntel", AMX, ["avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx"]),
        ("GenuineIntel", AMX - {"amx_int8"}, ["avx2", "avx512", "avx512_bf16", "avx512_vnni"]),
        ("GenuineIntel", AMX - {"avx512bw"}, ["avx2"]),
        ("", ASIMD, []),
        ("", ASIMD | {"asimddp"}, ["neon_dotprod"]),
        ("", ASIMD | {"asimddp", "i8mm", "bf16"}, ["neon_dotprod", "neon_bf16"]),
    ],
)
def test_the_fastest_instruction_set_comes_last(vendor: str, flags: set[str], expected: list[str]) -> None:
    assert native.supported_sets(vendor, flags) == expected


def test_on_arm_linux_lists_features(monkeypatch: pytest.MonkeyPatch) -> None:
    core = "processor\t: 0\nFeatures\t: fp asimd atomics asimddp\nCPU implementer\t: 0x41\n"
    monkeypatch.setattr(Path, "read_text", lambda path: core)
    assert native.instruction_sets() == ["neon_dotprod"]


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels here")
def test_without_permission_for_tiles_the_next_best_is_loaded_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(28, "the system refuses AMX (No space left on device)")

    monkeypatch.delenv("TANDEM_NATIVE", raising=False)
    monkeypatch.setattr(native, "request_tiles", refuse)
    monkeypatch.setattr(native, "instruction_sets", lambda: ["avx2", "amx"])
    with caplog.at_level(logging.WARNING):
        library = native._load_best()
    assert library is not None and library._name.endswith("tandem_avx2.so")
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels: using avx2 (amx: [Errno 28] the system refuses AMX (No space left on device))"
    ]


def test_amx_is_used_where_the_processor_has_it() -> None:
    """Or all tests of its instructions would be left out in silence."""
    if "amx" not in native.instruction_sets():
        pytest.skip("this processor has no AMX")
    try:
        native.request_tiles()
    except OSError as error:
        pytest.skip(str(error))
    assert "amx" in NATIVE


@pytest.mark.skipif("amx" in native.instruction_sets(), reason="this processor has AMX")
def test_a_processor_without_tiles_refuses_them() -> None:
    with pytest.raises(OSError, match="the system refuses AMX"):
        native.request_tiles()


def test_the_best_library_of_this_processor_is_loaded() -> None:
    """Or all tests of compiled kernels would be left out in silence where compiling them fails."""
    if shutil.which("g++") is None or not native.instruction_sets():
        pytest.skip("no compiled kernels here: no compiler, or an unknown processor")
    assert NATIVE, "there is a compiler, but build_native.py built nothing this processor runs"
    assert native.LIBRARY is not None
    assert native.LIBRARY._name.endswith(f"tandem_{NATIVE[-1]}.so")


def test_an_instruction_set_the_processor_lacks_is_refused_by_name() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", "import tandem_kernels"],
        env=os.environ | {"TANDEM_NATIVE": "avx1024"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "TANDEM_NATIVE is 'avx1024', wanted off or one of" in result.stderr


def test_a_library_of_other_sources_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `git pull` without `make`: the library lacks a function that the Python code calls."""
    if not native.instruction_sets():
        pytest.skip("an unknown processor")
    name = native.instruction_sets()[0]
    shutil.copy(xxhash._xxhash.__file__, tmp_path / f"tandem_{name}.so")
    monkeypatch.setenv("TANDEM_NATIVE", name)
    with pytest.raises(ImportError, match=rf"{tmp_path}/tandem_{name}.so: .*run `python build_native.py`"):
        runpy.run_path(shutil.copy(native.__file__, tmp_path))
