"""Admission: bounded, earliest deadline first, and nobody waits for someone who has left."""

import asyncio

import pytest
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SLO_CLASSES
from tandem_gateway.admission import Admission, Predictor
from tandem_gateway.errors import DeadlineError, OverloadedError
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2
from waiting import run_ready_tasks


def _request(name: str, slo_class: str = "interactive", *, timeout_s: float = 60.0) -> TokenizedRequest:
    now = asyncio.get_running_loop().time()
    return TokenizedRequest(
        name, "default", (1,), SamplingParams(), SLO_CLASSES[slo_class], now, now + timeout_s
    )


class Line:
    """Requests in front of an admission; `entered` is the order in which they got their places."""

    def __init__(self, *, max_in_flight: int = 1, max_queue: int = 8) -> None:
        self.admission = Admission(max_in_flight=max_in_flight, max_queue=max_queue)
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}

    async def arrive(self, request: TokenizedRequest) -> asyncio.Task[None]:
        self._leave[request.request_id] = asyncio.Event()
        task = asyncio.create_task(self._stay(request))
        await run_ready_tasks()
        return task

    async def _stay(self, request: TokenizedRequest) -> None:
        async with self.admission.slot(request):
            self.entered.append(request.request_id)
            await self._leave[request.request_id].wait()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await run_ready_tasks()


async def test_places_are_bounded_and_passed_on():
    line = Line(max_in_flight=2)
    tasks = [await line.arrive(_request(name)) for name in "abc"]
    assert line.entered == ["a", "b"]
    assert (line.admission.num_in_flight, line.admission.num_waiting) == (2, 1)
    await line.leave("b")
    assert line.entered == ["a", "b", "c"]
    for name in "ac":
        await line.leave(name)
    await asyncio.gather(*tasks)
    assert (line.admission.num_in_flight, line.admission.num_waiting) == (0, 0)


async def test_the_most_urgent_goes_first_whenever_it_came():
    line = Line()
    tasks = [await line.arrive(_request("running"))]
    for name, slo_class in [("b", "batch"), ("i", "interactive"), ("c", "chat"), ("i2", "interactive")]:
        tasks.append(await line.arrive(_request(name, slo_class)))
    for name in ("running", "c", "i", "i2", "b"):
        await line.leave(name)
    assert line.entered == ["running", "c", "i", "i2", "b"]
    await asyncio.gather(*tasks)


async def test_a_full_queue_refuses_at_once_with_a_retry_after_that_grows_with_the_queue():
    line = Line(max_queue=2)
    tasks = [await line.arrive(_request("running"))]
    waits = []
    for name in "abc":
        waits.append(line.admission.retry_after_s())
        tasks.append(await line.arrive(_request(name)))
    assert waits == sorted(set(waits))
    with pytest.raises(OverloadedError, match="2 waiting, limit 2") as info:
        await tasks[-1]
    assert info.value.retry_after_s == pytest.approx(3.0), "three requests of a second each, one place"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (line.admission.num_in_flight, line.admission.num_waiting) == (0, 0)


async def test_who_is_cancelled_while_queued_leaves_at_once():
    line = Line()
    running, gone, last = [await line.arrive(_request(name)) for name in ("running", "gone", "last")]
    gone.cancel()
    await run_ready_tasks()
    assert line.admission.num_waiting == 1
    await line.leave("running")
    assert line.entered == ["running", "last"]
    await line.leave("last")
    await asyncio.gather(running, last)


async def test_a_place_given_to_someone_cancelled_in_the_same_moment_is_passed_on():
    line = Line()
    running, gone, last = [await line.arrive(_request(name)) for name in ("running", "gone", "last")]
    running.cancel()
    await asyncio.sleep(0)  # one turn of the loop: the place is now promised to "gone", who has not run yet
    gone.cancel()
    await run_ready_tasks()
    assert line.entered == ["running", "last"]
    await line.leave("last")
    await last
    assert (line.admission.num_in_flight, line.admission.num_waiting) == (0, 0)


async def test_a_deadline_ends_the_wait():
    line = Line()
    running = await line.arrive(_request("running"))
    with pytest.raises(DeadlineError, match="waited for its turn"):
        await (await line.arrive(_request("late", timeout_s=0.05)))
    with pytest.raises(DeadlineError, match="before the request could start"):
        await (await line.arrive(_request("dead", timeout_s=-1.0)))
    assert line.admission.num_waiting == 0
    await line.leave("running")
    await running


def test_the_predictor_learns_from_receipts():
    predictor = Predictor()
    receipt = common_pb2.Receipt(
        prompt_tokens=1100, cached_tokens=100, ttft_ns=3_000_000_000, e2e_ns=5_000_000_000, output_tokens=10
    )
    for _ in range(200):
        predictor.observe(receipt, queued_s=1.0)
    assert predictor.service_s == pytest.approx(4.0, rel=0.01)
    assert predictor.prefill_s(500) == pytest.approx(1.0, rel=0.01), "2 s for 1000 uncached tokens"
