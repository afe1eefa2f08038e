"""The driver's side of a peer: its process, paused while others are measured.

A peer that spins or keeps house in the background would slow the one being measured. So every peer's
processes are stopped between its jobs, except those that must keep talking to each other (Tandem's
heartbeats); what those cost while idle is measured (cpu_seconds).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from peers.environments import PeerUnavailableError
from peers.protocol import Answer, Job, decode_answer, encode_job

_BENCHMARKS = Path(__file__).resolve().parents[1]
#: vLLM compiles for two minutes when its cache is empty, on a quiet machine.
_START_TIMEOUT_S = 900.0
_JOB_TIMEOUT_S = 900.0


class Worker:
    """One running peer. Raises PeerUnavailableError when it does not start, and when a job fails."""

    def __init__(
        self, command: Sequence[str], *, environ: dict[str, str], log: Path, pausable: bool = True
    ) -> None:
        self._log = log
        self._pausable = pausable
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=os.environ | environ | {"PYTHONPATH": str(_BENCHMARKS)},
                # A session of its own, so that it can be stopped with all its children.
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.description = str(self._receive(_START_TIMEOUT_S)["ready"])
        except PeerUnavailableError:
            self.close()
            raise
        self._pause()

    def ask(self, job: Job) -> Answer:
        assert self._process.stdin is not None
        self._resume()
        try:
            self._process.stdin.write(encode_job(job) + "\n")
            self._process.stdin.flush()
            reply = self._receive(_JOB_TIMEOUT_S)
        except BrokenPipeError as error:
            raise PeerUnavailableError(self._last_words()) from error
        finally:
            self._pause()
        if "error" in reply:
            raise PeerUnavailableError(str(reply["error"]))
        return decode_answer(reply["answer"])  # type: ignore[arg-type]

    def cpu_seconds(self) -> float:
        """CPU time of the peer's living processes so far."""
        return sum(_cpu_seconds(process) for process in self._tree())

    def close(self) -> None:
        """Ends the peer, gently at first."""
        assert self._process.stdin is not None
        self._resume()
        tree = self._tree()
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        for process in tree:
            if process.is_running():
                process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _receive(self, timeout_s: float) -> dict[str, object]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerUnavailableError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise PeerUnavailableError(self._last_words())
        reply: dict[str, object] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended: {lines[-1].strip() if lines else 'nothing in its log'}"

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if not self._pausable:
            return
        for process in self._tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
