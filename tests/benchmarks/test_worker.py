"""The driver's side of a peer, with real processes that speak its protocol."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from peers.environments import PeerUnavailableError
from peers.protocol import Together
from peers.worker import Worker
from waiting import wait_until

JOB = Together([[1, 2, 3]], 2)
ECHO = """
import os, subprocess, sys
from peers.protocol import Answer, Stream, serve, take_stdout

replies = take_stdout()
print("libraries may print")
child = subprocess.Popen(["sleep", "60"])

def handle(job):
    if job.max_tokens == 0:
        raise ValueError("no tokens wanted")
    if job.max_tokens == 99:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    return Answer([Stream(0.0, [0.5], [len(job.prompts[0])], child.pid)])

serve("an echo", handle, replies)
child.kill()
"""


def start(tmp_path: Path, program: str = ECHO, *, pausable: bool = True) -> Worker:
    return Worker([sys.executable, "-P", "-c", program], environ={}, log=tmp_path / "log", pausable=pausable)


def test_a_worker_answers_and_sleeps_with_its_children_between_jobs(tmp_path: Path) -> None:
    worker = start(tmp_path)
    try:
        assert worker.description == "an echo"
        (stream,) = worker.ask(JOB).streams
        child = psutil.Process(stream.decode_steps)
        assert (stream.times_s, stream.counts) == ([0.5], [3])
        # A stop takes effect when the process is next scheduled.
        wait_until(lambda: child.status() == child.parent().status() == psutil.STATUS_STOPPED)
        assert worker.ask(JOB).streams == [stream]
    finally:
        worker.close()
    assert not child.is_running()


def test_a_worker_that_must_not_be_stopped_is_not(tmp_path: Path) -> None:
    worker = start(tmp_path, pausable=False)
    try:
        (stream,) = worker.ask(JOB).streams
        assert psutil.Process(stream.decode_steps).status() != psutil.STATUS_STOPPED
    finally:
        worker.close()


def test_an_error_is_told_and_the_next_job_answered(tmp_path: Path) -> None:
    worker = start(tmp_path)
    try:
        with pytest.raises(PeerUnavailableError, match="ValueError: no tokens wanted"):
            worker.ask(Together([[1]], 0))
        assert worker.ask(JOB).streams[0].counts == [3]
    finally:
        worker.close()


def test_a_worker_that_dies_says_its_last_words(tmp_path: Path) -> None:
    worker = start(tmp_path)
    try:
        with pytest.raises(PeerUnavailableError, match="its process ended: out of memory"):
            worker.ask(Together([[1]], 99))
    finally:
        worker.close()


def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="No module named 'a_peer_that_is_not_there'"):
        start(tmp_path, "import a_peer_that_is_not_there")
