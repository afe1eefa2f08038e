"""How a peer's process runs jobs on concurrent streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest
from peers import streams
from peers.protocol import Interference, Together, decode_job, encode_job


class Clockwork:
    """A system whose first token takes `prefill_s` per prompt token and every other one `step_s`."""

    def __init__(self, prefill_s: float = 0.0, step_s: float = 0.0, tokens_per_step: int = 1) -> None:
        self._prefill_s, self._step_s, self._tokens_per_step = prefill_s, step_s, tokens_per_step
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def open_stream(self, prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            time.sleep(self._prefill_s * len(prompt))
            yield 1
            left, steps = max_tokens - 1, 0
            while left > 0:
                time.sleep(self._step_s)
                count = min(self._tokens_per_step, left)
                left, steps = left - count, steps + 1
                yield count
            return steps
        finally:
            with self._lock:
                self.num_running -= 1


@pytest.mark.parametrize("job", [Together([[1, 2], [3]], 4), Interference([1], [2, 3], 5, 6)])
def test_a_job_survives_the_pipe(job: Together | Interference) -> None:
    assert decode_job(encode_job(job)) == job


def test_prompts_of_a_job_run_at_once_and_answers_keep_their_order() -> None:
    system = Clockwork(prefill_s=0.05, tokens_per_step=2)
    answer = streams.run(system.open_stream, Together([[0] * 4, [0]], 6))
    assert system.most_running == 2
    assert [stream.counts for stream in answer.streams] == [[1, 2, 2, 1]] * 2
    assert [stream.decode_steps for stream in answer.streams] == [3, 3]
    long, short = answer.streams
    assert long.times_s[0] - long.sent_s > short.times_s[0] - short.sent_s


def test_the_other_prompt_arrives_when_the_stream_has_had_its_tokens_and_the_stream_goes_on_after() -> None:
    system = Clockwork(prefill_s=0.02, step_s=0.005)
    running, arriving = streams.run(system.open_stream, Interference([0], [0] * 10, 8, 4)).streams
    before = sum(t <= arriving.sent_s for t in running.times_s)
    after = sum(t > arriving.times_s[0] for t in running.times_s)
    assert before >= 8
    assert 3 <= after <= 6
    assert len(running.times_s) > before + after
    assert arriving.counts == [1]
    assert system.num_running == 0


def test_a_stream_that_fails_fails_the_job() -> None:
    def broken(prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
        yield 1
        raise ConnectionError("gone")

    for job in (Together([[1]], 4), Interference([1], [2], 3, 3)):
        with pytest.raises(ConnectionError, match="gone"):
            streams.run(broken, job)
