"""What several folders of tests share: the real model, a toy one, and real dialogues."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from tandem_engine import model_loader

#: Larger development data, read when it lies beside the repository; the small sample ships with the package.
_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

#: For the fixtures of one test to end.
_TEARDOWN_S = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Pins each xdist worker, and so the processes that its tests start, to one core.

    Otherwise every worker's engine uses all cores, and threads that meet at barriers wait for one another.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Again each minute: what a test's own `with` and `finally` wait for holds up the first exception.
    signal.setitimer(signal.ITIMER_REAL, signal.getitimer(signal.ITIMER_REAL)[0], _TEARDOWN_S)
    marker = item.get_closest_marker("timeout")
    _end_after(item, float(marker.args[0] if marker is not None else item.config.getini("timeout")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Limits what fixtures wait for: pytest-timeout and pytest's own watch end when a test fails."""

    def expire(*_: object) -> None:
        pytest.fail(f"the test's fixtures did not end in {_TEARDOWN_S:.0f} s")

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, _TEARDOWN_S)
    _end_after(item, _TEARDOWN_S)


def pytest_runtest_logfinish() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    _watch.clear()
    faulthandler.cancel_dump_traceback_later()


#: The arguments of the last dump_traceback_later.
_watch: dict[str, Any] = {}


def _end_after(item: pytest.Item, limit_s: float) -> None:
    """Ends the process, and prints what its threads do, when native code holds back the exceptions for
    five minutes. xdist names the test; with a process lost, it may not end by itself."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    _watch.update(timeout=limit_s + 300, exit=True, file=stderr)
    faulthandler.dump_traceback_later(**_watch)


def _watch_again() -> None:
    if _watch:
        faulthandler.dump_traceback_later(**_watch)


# A forked child has no watching thread, and would wait for it when it begins a watch of its own.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=_watch_again)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failed test at once, for whoever ends the run before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when}, {report.duration:.0f} s)", flush=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m e2e` modules without such a test are not imported: 30 tests would wait 17 s for all others."""
    if not config.option.markexpr.startswith("e2e") or not collection_path.match("test_*.py"):
        return None
    return "mark.e2e" not in collection_path.read_text(encoding="utf-8") or None


@dataclass(frozen=True)
class Corpus:
    """Customer-service text: the agent's policy and dialogues as plain text."""

    policy: str
    dialogues: tuple[str, ...]

    def prompt(self, index: int, num_chars: int) -> str:
        """The policy, then dialogues from `index` on, cut to num_chars; ends within a conversation."""
        parts = [self.policy]
        while sum(map(len, parts)) < num_chars:
            parts.append(self.dialogues[(index + len(parts)) % len(self.dialogues)])
        return f"Ticket {index}.\n" + "\n\n".join(parts)[:num_chars]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder; fetched on first use."""
    return model_loader.pull(model_loader.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random llama with `toy_models.VOCABULARY` tokens, which computes in milliseconds."""
    import toy_models

    checkpoint = toy_models.save_llama(tmp_path_factory.mktemp("checkpoints"), seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return model_loader.pull(str(checkpoint))


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    shared = _SHARED / "retail_dialogues.jsonl"
    if shared.exists():
        lines = shared.read_text(encoding="utf-8").splitlines()
        dialogues = tuple(json.loads(line)["messages_display"] for line in lines)
        return Corpus((_SHARED / "retail_policy.md").read_text(encoding="utf-8"), dialogues)
    from tandem_cli.bench.dataset import sample_dialogues, sample_policy

    return Corpus(sample_policy(), tuple(dialogue.as_text() for dialogue in sample_dialogues()))
