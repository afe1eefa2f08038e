"""`python -m gpu`: its parts as dry runs, and that a stage which fails or hangs does not stop the others."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu import attention, checks, transfer
from gpu.__main__ import extend_path
from gpu.attention import (
    KV_DTYPES,
    Case,
    Step,
    WrongResultError,
    check,
    fa3_calls,
    grid,
    measure_grid,
    tandem_calls,
)
from gpu.checks import outcome_of, run_tests
from gpu.runner import PARTS, Bench, Stage, plan, run_parts, run_stages
from gpu.steps import MEASURING_S, counts, fill
from gpu.transfer import RESERVE_S, Fleet, Stream, measure_at_once, measure_idle
from processes import is_alive
from waiting import wait_until

CPU = torch.device("cpu")
COMMAND = Path(__file__).resolve().parents[2] / "benchmarks/gpu"


@pytest.mark.parametrize("part", PARTS)
def test_every_stage_runs_on_the_cpu(part: str, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, COMMAND, "--part", part, "--dry-run", "--minutes", "9", "--out", tmp_path],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"},
    )
    page = (tmp_path / f"{part}-dry-run.md").read_text()
    assert process.returncode == 0, page + (tmp_path / f"{part}-dry-run.log").read_text()[-3000:]
    assert page.startswith(f"# Part {part}: DRY RUN on the CPU with tiny shapes, not a result\n")
    assert page in process.stdout
    names = [stage.name for stage in importlib.import_module(f"gpu.{PARTS[part]}").STAGES]
    shown = page.split("\n## ")[1:]
    assert [stage.partition("\n")[0] for stage in shown] == [f"{name} (dry run)" for name in names]
    assert all("\nDone in " in stage for stage in shown)


def test_a_bundles_wheels_can_be_imported_here_and_in_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, unpacked = tmp_path / "bundle", tmp_path / "unpacked"
    bundle.mkdir()
    unpacked.mkdir()
    with zipfile.ZipFile(bundle / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along.py", "from pathlib import Path")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TANDEM_GPU_BUNDLE", "")
    extend_path(bundle, unpacked)
    script = "import brought_along, processes, tandem_core, gpu"
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd=tmp_path)
    assert importlib.util.find_spec("brought_along") is not None


def test_the_first_stages_get_their_seconds_and_the_last_are_cut() -> None:
    stages = [Stage(name, 60, lambda bench: None) for name in "abcd"]
    assert plan(stages, 600) == [60, 60, 60, 60]
    assert plan(stages, 160) == [60, 60, 40, 0]
    assert plan(stages, 140) == [60, 60, 0, 0], "20 of 60 seconds would show nothing"
    assert plan([stages[0], Stage("e", 600, stages[0].run), stages[1]], 150) == [60, 0, 60]


def run_some(tmp_path: Path, total_s: float, *stages: Stage) -> tuple[list[str], str]:
    """Names of the failed stages, and the page."""
    with (tmp_path / "page.md").open("w") as page, (tmp_path / "log").open("w") as log:
        failed = run_stages(stages, total_s, CPU, page, log)
    return failed, (tmp_path / "page.md").read_text()


def test_stages_that_fail_are_named_with_their_last_line_and_the_next_ones_run(tmp_path: Path) -> None:
    def raises(bench: Bench) -> None:
        """Fails after a row."""
        bench.table("n")
        bench.row(1)
        raise ValueError("no such kernel\nFor debugging consider this and that.")

    def dies(bench: Bench) -> None:
        """Ends like a segmentation fault."""
        os.kill(os.getpid(), 11)

    def works(bench: Bench) -> None:
        """Works."""
        bench.table("n", "m")
        bench.row(2, 0.123456)

    stages = [Stage(work.__name__, 20, work) for work in (raises, dies, works)]
    failed, page = run_some(tmp_path, 60, *stages)
    assert failed == ["raises", "dies"]
    assert "| n |\n|---|\n| 1 |\n\n**FAILED** after 0 s: `ValueError: no such kernel`" in page
    assert re.search(r"## dies.*\*\*FAILED \(SIGSEGV\)\*\* after 0 s: `File .* in dies`", page, re.DOTALL)
    assert "| 2 | 0.1235 |\n\nDone in 0 s." in page


def test_a_stage_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    def hangs(bench: Bench) -> None:
        """Hangs."""
        bench.table("pid")
        bench.row(subprocess.Popen(["sleep", "60"]).pid)
        time.sleep(60)

    def works(bench: Bench) -> None:
        """Works."""
        bench.note(f"{bench.left_s:.0f} s left")

    began = time.monotonic()
    failed, page = run_some(tmp_path, 6, Stage("hangs", 3, hangs), Stage("works", 3, works))
    assert time.monotonic() - began < 10
    assert failed == ["hangs"]
    assert "**TIMED OUT** after 3 s: `File " in page
    assert "in hangs`" in page
    assert not is_alive(int(page.partition("|---|\n| ")[2].partition(" ")[0]))
    assert "\n3 s left\n" in page


def dry_options(out: Path, *, stage: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        part=["A"], stage=[stage] if stage else None, minutes=1.0, dry_run=True, out=out
    )


def test_a_run_that_is_told_to_end_ends_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(bench: Bench) -> None:
        """Hangs."""
        bench.table("pid")
        bench.row(os.getpid())
        time.sleep(60)

    monkeypatch.setattr(checks, "STAGES", [Stage("hangs", 60, hangs)])
    page = tmp_path / "A-dry-run.md"
    process = multiprocessing.get_context("fork").Process(target=run_parts, args=(dry_options(tmp_path),))
    process.start()
    wait_until(lambda: page.exists() and page.read_text().count("\n| ") == 2)
    pid = int(page.read_text().rpartition("\n| ")[2].partition(" ")[0])
    assert is_alive(pid)
    process.terminate()
    process.join(10)
    assert process.exitcode == 143
    wait_until(lambda: not is_alive(pid))


def test_a_second_run_keeps_the_rows_of_the_first_and_an_unknown_stage_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def works(bench: Bench) -> None:
        """Works."""
        bench.table("n")
        bench.row(4)

    monkeypatch.setattr(checks, "STAGES", [Stage("first", 20, works), Stage("second", 20, works)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run_parts(dry_options(tmp_path)) == 0
    assert run_parts(dry_options(tmp_path, stage="second")) == 0
    page = (tmp_path / "A-dry-run.md").read_text()
    assert re.findall("## (.*) \\(", page) == ["first", "second", "second"]
    assert page.count("| 4 |") == 3
    capsys.readouterr()
    assert run_parts(dry_options(tmp_path, stage="secnd")) == 1
    assert "\nNo such stage: secnd; there are first, second\nFailed: secnd\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--minutes", "0", "--out", "new"], "gpu: error: --minutes 0: wanted more than 0"),
        (["--bundle", "gone", "--out", "new"], "gpu: error: --bundle gone: no such folder"),
        (["--out", "a_file"], "gpu: stopped with --out a_file: [Errno 17] File exists"),
        (["--out", "full"], "gpu: stopped with --out full: [Errno 28] No space left on device"),
    ],
    ids=["minutes", "bundle", "file", "full"],
)
def test_flags_and_folders_that_cannot_be_used_are_one_sentence(
    flags: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/A-dry-run.md").symlink_to("/dev/full")
    command = [sys.executable, COMMAND, "--part", "A", "--stage", "versions", "--dry-run", *flags]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode != 0
    assert process.stderr.splitlines()[-1].startswith(said)
    assert "Traceback" not in process.stderr


def test_stages_without_minutes_are_named(tmp_path: Path) -> None:
    def works(bench: Bench) -> None:
        """Works."""

    failed, page = run_some(tmp_path, 30, Stage("first", 30, works), Stage("second", 30, works))
    assert failed == []
    assert "Plan of 0.5 minutes: first 30 s, second CUT" in page
    assert "## second: CUT" in page


def test_the_grid_begins_with_the_cases_that_matter_most() -> None:
    cases = grid(dry=False)
    assert len(cases) == len(set(cases)) == 3 * 3 * 2 * 3 * 5 * 4
    assert set(cases[:8]) == {Case(batch=batch, num_new=n) for batch in (1, 8, 32, 128) for n in (1, 8)}
    numbers = {case: number for number, case in enumerate(cases)}
    for case, number in numbers.items():
        assert numbers[replace(case, num_new=1)] <= number, "T_n/T_1 needs T_1 first"


def test_a_case_that_fails_does_not_end_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(num_heads=heads, num_kv_heads=2, head_size=32, context=20) for heads in (3, 4)]
    monkeypatch.setattr(attention, "grid", lambda dry: cases)
    page = io.StringIO()
    with pytest.raises(RuntimeError, match="1 cases failed"):
        measure_grid(Bench(CPU, page))
    bad, good = page.getvalue().splitlines()[-2:]
    assert bad == "| bf16 | 3/2 | 32 | 20 | 1 | 1 | ValueError |  |  |  |"
    assert float(good.split("|")[7]) > 0


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_wrong_result_is_detected(kv: str) -> None:
    step = Step(Case(kv, 4, 2, 32, 50, 2, 8, ragged=True, block_size=16), CPU)
    result = tandem_calls(step)[0]()
    check(step, result)
    result[-1, 0, 0] += 0.2
    with pytest.raises(WrongResultError, match="wrong result"):
        check(step, result)


def attend_in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    seq_lens: torch.Tensor, visible: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Attention over pages [pages, page size, heads, D]; visible(sequence, length) is its mask."""
    rows = query.unflatten(0, (len(seq_lens), -1))
    out = torch.empty_like(rows)
    for b, length in enumerate(seq_lens.tolist()):
        k, v = (
            pages[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None].float()
            for pages in (key, value)
        )
        mask = visible(b, length)
        out[b] = torch.nn.functional.scaled_dot_product_attention(
            rows[b].transpose(0, 1)[None].float(), k, v, attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)
    return out.flatten(0, 1)


PEER_CASE = Case("bf16", 4, 2, 32, 50, 2, 8, ragged=True, block_size=16)


def test_fa3_gets_its_arguments_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with some of the extension's arguments, which reads the same pages."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? cu_seqlens_q, Tensor? seqused_k, "
        "int? max_seqlen_q, Tensor? page_table, float softmax_scale, bool is_causal) -> Tensor[]"
    )

    def forward(q, k, v, k_new, starts, seq_lens, n, table, scale, is_causal):
        assert (k_new, n, scale, is_causal) == (None, 8, 32**-0.5, True)
        assert starts.tolist() == [0, 8, 16]
        causal = [torch.ones(n, length, dtype=torch.bool).tril(length - n) for length in seq_lens.tolist()]
        return [attend_in_float32(q, k, v, table, seq_lens, lambda b, length: causal[b])]

    library.impl("fwd", forward, "CPU")
    (tmp_path / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.setenv("TANDEM_GPU_BUNDLE", str(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    step = Step(PEER_CASE, CPU)
    result = fa3_calls(step)[0]()
    check(step, result, causal=True)
    with pytest.raises(WrongResultError):
        check(step, result)


def test_kernels_launches_and_waits_are_counted_per_step() -> None:
    def event(category: str, name: str, begin: float, duration: float) -> dict[str, object]:
        return {"cat": category, "name": name, "ts": begin, "dur": duration}

    events = [
        event("cpu_op", "aten::linear", 0, 50),
        event("cuda_runtime", "cudaGraphLaunch", 0, 5),
        event("cuda_driver", "cuLaunchKernelEx", 6, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 9, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 12, 60),
        event("kernel", "gemm", 10, 20),
        event("kernel", "attention", 25, 15),  # overlaps the first on another stream
        event("gpu_memcpy", "Memcpy DtoH", 50, 10),
        {"name": "process_name", "ph": "M"},
    ]
    assert counts(events, 2) == ["1.0", "1.0", "0.5", "20%"]


def test_sequences_are_filled_while_the_stage_has_time_to_measure_them() -> None:
    decoding: list[types.SimpleNamespace] = []
    aborted: list[str] = []

    class Engine:
        scheduler = types.SimpleNamespace(decoding=lambda: decoding)
        abort = aborted.append

        def step(self) -> None:
            time.sleep(0.05)
            decoding.append(types.SimpleNamespace(request_id=f"r{len(decoding)}"))

    page = io.StringIO()
    assert fill(Bench(CPU, page), Engine(), 2, 4096) == 2
    assert aborted == []
    hurried = Bench(CPU, page, deadline=time.monotonic() + MEASURING_S + 0.2)
    filled = fill(hurried, Engine(), 1000, 4096)
    assert 2 < filled < 10
    assert aborted == [f"r{i}" for i in range(filled, 1000)]
    assert f"The other {1000 - filled} did not fit the time" in page.getvalue()


async def test_what_was_measured_is_written_when_the_stages_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def one_request(fleet: Fleet, prompt: list[int], *, apart: bool = True) -> Stream:
        stream = Stream(time.perf_counter())
        await asyncio.sleep(0.02 if apart else 60)
        stream.times.append(time.perf_counter())
        return stream

    monkeypatch.setattr(transfer, "one_request", one_request)
    page = io.StringIO()
    bench = Bench(CPU, page, deadline=time.monotonic() + RESERVE_S + 0.4)
    fleet = Fleet(None, "", 100)
    await measure_at_once(bench, fleet, 8, 1)
    await measure_idle(bench, fleet, 8, 1)
    await measure_at_once(bench, fleet, 8, 1)
    assert bench.left_s > RESERVE_S - 1
    shown = [[cell.strip() for cell in row.split("|")[1:3]] for row in page.getvalue().splitlines() if row]
    assert [row[0] for row in shown[2:4]] == ["1", "4"]
    assert all(20 < float(row[1]) < 60 for row in shown[2:4])
    assert [row[1] for row in shown[6:9]] == ["did not fit the time"] * 3
    assert shown[11:] == [["1", "did not fit the time"], ["4", "did not fit the time"]]


def test_each_test_of_a_gpu_has_its_row_also_where_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(
        "import signal, time, pytest\n"
        "@pytest.mark.parametrize('x', ['a b=(1, 2)'])\n"
        "def test_works(x): pass\n"
        "def test_fails(): assert 0\n"
        "def test_hangs():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "    time.sleep(200)\n"
        "def test_comes_after(): pass\n"
    )
    monkeypatch.setattr(checks, "TEST_TIMEOUT_S", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    page = io.StringIO()
    failure = run_tests(Bench(torch.device("cuda"), page), [str(suite)])
    assert failure is not None
    assert failure.startswith("pytest ended with 1: ")
    rows = {row.split("::")[1].rstrip(" |") for row in page.getvalue().splitlines()}
    assert rows == {
        "test_works[a b=(1, 2)] | PASSED", "test_fails | FAILED", "test_hangs | FAILED",
        "test_comes_after | PASSED",
    }  # fmt: skip


def test_a_tests_outcome_is_read_with_and_without_workers() -> None:
    assert outcome_of("a/b.py::test_x[c d] SKIPPED (no)       [ 16%]\n") == ("a/b.py::test_x[c d]", "SKIPPED")
    assert outcome_of("[gw12] [  3%] FAILED a/b.py::test_x[c d] \n") == ("a/b.py::test_x[c d]", "FAILED")
    assert outcome_of("a/b.py::test_x \n") is None
    assert outcome_of("FAILED a/b.py::test_x - assert 0\n") is None
