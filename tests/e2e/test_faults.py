"""A process is killed, stopped or drained under load: no request fails and no text changes."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import pause, wait_until

if TYPE_CHECKING:
    from conftest import RunningFleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(start_fleet, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with start_fleet(model_dir, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


#: Of an answer: enough that the fault comes before its end.
NUM_TOKENS = 400


def complete(
    fleet: RunningFleet, prompt: str, on_token: Callable[[], None] = lambda: None
) -> tuple[tuple[int, ...], common_pb2.Receipt]:
    tokens: list[int] = []
    request = gateway_pb2.GenerateRequest(
        text=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        slo_class="batch",
    )
    for response in fleet.gateway().Generate(request, timeout=300):
        tokens.extend(response.chunk.token_ids)
        if response.chunk.token_ids:
            on_token()
        if response.HasField("end"):
            receipt = response.end.receipt
    return tuple(tokens), receipt


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("prefill", signal.SIGKILL),
        ("decode", signal.SIGKILL),
        ("decode", signal.SIGSTOP),
        ("decode", signal.SIGTERM),
        ("lookahead", signal.SIGKILL),
        ("redis", signal.SIGKILL),
    ],
)
def test_no_request_fails_and_no_text_changes(
    fleet: RunningFleet, corpus, what: str, fault: signal.Signals
) -> None:
    prompts = [corpus.prompt(100 * fault + 10 * len(what) + i, 1700 + 300 * i) for i in range(3)]
    decoding = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(complete, fleet, prompt, decoding.set) for prompt in prompts]
        # One request decodes, the others are still with the prefill pod or on their way from it.
        assert decoding.wait(60)
        wait_until(lambda: _num_requests(fleet) == 3, limit_s=10, interval_s=0.01)
        # Pods say within 0.25 s that they have a request; one that is lost before has not been tried.
        pause(0.3)
        pid = fleet.pid(what)
        os.kill(pid, fault)
        under_fire = [future.result() for future in running]
    assert [len(tokens) for tokens, _ in under_fire] == [NUM_TOKENS] * 3
    if what == "prefill":
        assert any(not receipt.prefill_pod or receipt.prefill_retries for _, receipt in under_fire)
    if what == "decode":
        # A drain lets short answers end.
        if fault is not signal.SIGTERM:
            assert [receipt.decode_retries for _, receipt in under_fire] == [1, 1, 1]
        assert [receipt.output_tokens for _, receipt in under_fire] == [NUM_TOKENS] * 3
    _wait_back(fleet, what, pid)
    fleet.assert_idle(within_s=20.0)
    for prompt, (tokens, _) in zip(prompts, under_fire, strict=True):
        again, _ = complete(fleet, prompt)
        assert again == tokens, "the fault changed a text"
    fleet.assert_idle()


@pytest.mark.parametrize("what", ["gateway", "prefill", "decode", "lookahead", "redis"])
def test_a_pause_of_a_process_moves_no_other_stream_and_fails_none(
    fleet: RunningFleet, corpus, what: str
) -> None:
    prompts = [corpus.prompt(7000 + 10 * len(what) + i, 600) for i in range(2)]
    decoding = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, fleet, prompt, decoding.set) for prompt in prompts]
        assert decoding.wait(60)
        pid = fleet.pid(what)
        os.kill(pid, signal.SIGSTOP)
        pause(1.5)
        os.kill(pid, signal.SIGCONT)
        answers = [future.result() for future in running]
    assert [len(tokens) for tokens, _ in answers] == [NUM_TOKENS] * 2
    if what != "decode":  # which is silent itself for longer than a second
        assert [receipt.decode_retries for _, receipt in answers] == [0, 0]
    assert fleet.pid(what) == pid, "the supervisor waits for longer"
    fleet.assert_idle(within_s=20.0)


def test_a_prefill_pod_that_is_back_is_used_again(fleet: RunningFleet, corpus) -> None:
    _, receipt = complete(fleet, "Never seen before. " + corpus.prompt(99, 3000))
    assert receipt.prefill_pod == "prefill-0"


def _num_requests(fleet: RunningFleet) -> int:
    """Requests that the decode pod has accepted."""
    usage = fleet.usage()["decode-0"]
    return usage.requests_waiting + usage.requests_running


def _wait_back(fleet: RunningFleet, what: str, killed: int) -> None:
    """Until the supervisor has started a new one."""

    def is_back() -> bool:
        try:
            return fleet.pid(what) != killed and (what == "redis" or bool(fleet.usage()))
        except (OSError, ValueError, grpc.RpcError):
            return False

    wait_until(is_back, limit_s=60, interval_s=0.1)
