"""Runs jobs on a peer that streams requests concurrently; standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

from peers.protocol import Answer, Interference, Job, Stream, Together

#: (prompt, max_tokens) -> yields how many tokens arrived, each time some do; returns the decode steps.
#: Closing it cancels the request.
OpenStream = Callable[[list[int], int], Generator[int, None, int]]

#: More than any stream is let run; the interference job cancels it long before.
_ENDLESS = 6000


def run(open_stream: OpenStream, job: Job) -> Answer:
    if isinstance(job, Together):
        return _together(open_stream, job)
    return _interference(open_stream, job)


def _together(open_stream: OpenStream, job: Together) -> Answer:
    epoch = time.perf_counter()
    with ThreadPoolExecutor(len(job.prompts)) as pool:
        streams = pool.map(lambda prompt: _read(open_stream, prompt, job.max_tokens, epoch), job.prompts)
        return Answer(list(streams))


def _interference(open_stream: OpenStream, job: Interference) -> Answer:
    epoch = time.perf_counter()
    warm, arrived = threading.Event(), threading.Event()

    def read_running() -> Stream:
        after = 0

        def wants_more(num_tokens: int, count: int) -> bool:
            nonlocal after
            if num_tokens >= job.num_before:
                warm.set()
            if arrived.is_set():
                after += count
            return after < job.num_after

        try:
            return _read(open_stream, job.running, _ENDLESS, epoch, wants_more)
        finally:
            warm.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(read_running)
        try:
            warm.wait()
            arriving = _read(open_stream, job.arriving, 1, epoch)
        finally:
            arrived.set()
        return Answer([running.result(), arriving])


def _read(
    open_stream: OpenStream,
    prompt: list[int],
    max_tokens: int,
    epoch: float,
    wants_more: Callable[[int, int], bool] = lambda num_tokens, count: True,
) -> Stream:
    """wants_more(tokens so far, tokens that just came) says after each arrival whether to go on."""
    sent_s = time.perf_counter() - epoch
    times_s: list[float] = []
    counts: list[int] = []
    stream = open_stream(prompt, max_tokens)
    while True:
        try:
            count = next(stream)
        except StopIteration as end:
            return Stream(sent_s, times_s, counts, end.value)
        times_s.append(time.perf_counter() - epoch)
        counts.append(count)
        if not wants_more(sum(counts), count):
            stream.close()
            return Stream(sent_s, times_s, counts)
