"""Admission: bounded, earliest deadline first, and nobody waits for someone who has left."""

import asyncio
from dataclasses import replace

import pytest
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.errors import DeadlineError, OverloadedError, RefusalReason
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.settings import Policy
from waiting import run_ready_tasks


def _request(name: str, slo_class: str = "interactive", *, timeout_s: float = 60.0) -> TokenizedRequest:
    now = asyncio.get_running_loop().time()
    return TokenizedRequest(
        name, "default", (1,), SamplingParams(), DEFAULT_SLO_CLASSES[slo_class], now, now + timeout_s
    )


class NoForecast:
    """As without pods: nothing is predicted."""

    def forecast(self, request):
        return None

    def num_batch_places(self):
        return 0


NO_FORECAST = NoForecast()


class Line:
    """Requests in front of an admission; `entered` is the order in which they got their places."""

    def __init__(
        self, *, max_in_flight: int = 1, max_queue: int = 8, policy: Policy = Policy.PREDICT
    ) -> None:
        self.admission = Admission(
            NO_FORECAST, max_in_flight=max_in_flight, max_queue=max_queue, policy=policy, slack=3.0
        )
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}

    async def arrive(self, request: TokenizedRequest, num_places: int = 1) -> asyncio.Task[None]:
        self._leave[request.request_id] = asyncio.Event()
        task = asyncio.create_task(self._stay(request, num_places))
        await run_ready_tasks()
        return task

    async def _stay(self, request: TokenizedRequest, num_places: int) -> None:
        async with self.admission.slot(request, num_places):
            self.entered.append(request.request_id)
            await self._leave[request.request_id].wait()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await run_ready_tasks()


async def test_places_are_bounded_and_passed_on():
    line = Line(max_in_flight=2)
    tasks = [await line.arrive(_request(name)) for name in "abc"]
    assert line.entered == ["a", "b"]
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (2, 1)
    await line.leave("b")
    assert line.entered == ["a", "b", "c"]
    for name in "ac":
        await line.leave(name)
    await asyncio.gather(*tasks)
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (0, 0)


async def test_those_that_waited_begin_one_after_the_other(monkeypatch):
    """Each is judged when the work of the one before it counts."""
    line, num_entered = Line(), []
    monkeypatch.setattr(
        line.admission.judge, "may_begin", lambda request: num_entered.append(len(line.entered)) or True
    )
    tasks = [await line.arrive(_request(name)) for name in "abcd"]
    num_entered.clear()
    line.admission.places.max_in_flight = 4
    await line.leave("a")
    assert line.entered == list("abcd")
    assert num_entered == [1, 2, 3]
    for name in "bcd":
        await line.leave(name)
    await asyncio.gather(*tasks)
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (0, 0)


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
        waits.append(line.admission.places.turn_s())
        tasks.append(await line.arrive(_request(name)))
    assert waits == sorted(set(waits))
    with pytest.raises(OverloadedError, match="2 waiting, limit 2") as info:
        await tasks[-1]
    assert info.value.retry_after_s == pytest.approx(3.0), "three requests of a second each, one place"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (0, 0)


async def test_who_is_cancelled_while_queued_leaves_at_once():
    line = Line()
    running, gone, last = [await line.arrive(_request(name)) for name in ("running", "gone", "last")]
    gone.cancel()
    await run_ready_tasks()
    assert line.admission.places.num_waiting == 1
    await line.leave("running")
    assert line.entered == ["running", "last"]
    await line.leave("last")
    await asyncio.gather(running, last)


async def test_those_that_gave_up_are_not_kept():
    line = Line(max_queue=64)
    running = await line.arrive(_request("running"))
    for number in range(200):
        waiting = await line.arrive(_request(f"leaves {number}"))
        waiting.cancel()
        await run_ready_tasks()
    assert line.admission.places.num_waiting == 0
    await line.leave("running")
    await running


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
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (0, 0)


async def test_a_deadline_ends_the_wait():
    line = Line()
    running = await line.arrive(_request("running"))
    with pytest.raises(DeadlineError, match="waited for its turn"):
        await (await line.arrive(_request("late", timeout_s=0.05)))
    with pytest.raises(DeadlineError, match="before the request could start"):
        await (await line.arrive(_request("dead", timeout_s=-1.0)))
    assert line.admission.places.num_waiting == 0
    await line.leave("running")
    await running


async def test_fifo_serves_in_order_of_arrival_and_ttl_refuses_who_waited_for_too_long():
    line = Line(policy=Policy.FIFO)
    tasks = [
        await line.arrive(_request(name, slo))
        for name, slo in (("a", "batch"), ("b", "batch"), ("c", "chat"))
    ]
    for name in "abc":
        await line.leave(name)
    assert line.entered == ["a", "b", "c"]
    await asyncio.gather(*tasks)
    line = Line(policy=Policy.TTL)
    running = await line.arrive(_request("running"))
    late = replace(_request("late"), slo=SloTarget("chat", ttft_s=0.05))
    with pytest.raises(OverloadedError, match=r"waited longer than the 0\.05 s") as info:
        await (await line.arrive(late))
    assert info.value.reason is RefusalReason.WAITED
    await line.leave("running")
    await running


async def test_fifo_and_ttl_give_each_place_to_whoever_is_next():
    for policy in (Policy.FIFO, Policy.TTL):
        line = Line(max_in_flight=4, policy=policy)
        tasks = [await line.arrive(_request(name, "batch")) for name in "abcd"]
        assert line.entered == ["a", "b", "c", "d"]
        for name in "abcd":
            await line.leave(name)
        await asyncio.gather(*tasks)


async def test_requests_without_objectives_leave_places_for_others():
    line = Line(max_in_flight=4)
    tasks = [await line.arrive(_request(name, "batch")) for name in "abcd"]
    assert line.entered == ["a", "b", "c"], "three quarters of four"
    tasks.append(await line.arrive(_request("chat", "chat")))
    assert line.entered[-1] == "chat", "it passes the one that waits"
    await line.leave("a")
    assert line.entered[-1] == "d"
    for name in ("b", "c", "d", "chat"):
        await line.leave(name)
    await asyncio.gather(*tasks)
    assert (line.admission.places.num_in_flight, line.admission.places.num_waiting) == (0, 0)


async def test_the_wait_of_requests_with_objectives_is_that_for_a_place():
    line = Line(max_in_flight=4)
    admission = line.admission
    tasks = [await line.arrive(_request(name, "batch")) for name in "abcd"]
    for _ in range(200):
        admission.ended(Admitted(_request("before", "chat")), e2e_s=2.0, num_tokens=1, met=True)
    tasks.append(await line.arrive(_request("chat", "chat")))
    assert admission.places.queued(_request("next", "chat"), 0.1).p50 == pytest.approx(2.0 / 4)
    for name in ("a", "b", "c", "d", "chat"):
        await line.leave(name)
    await asyncio.gather(*tasks)


async def test_a_queue_full_of_requests_without_objectives_keeps_nobody_else_out():
    line = Line(max_in_flight=4, max_queue=2)
    tasks = [await line.arrive(_request(name, "batch")) for name in "abcde"]
    assert (line.entered, line.admission.places.num_waiting) == (["a", "b", "c"], 2)
    tasks.append(await line.arrive(_request("chat", "chat")))
    assert line.entered[-1] == "chat", "there is a place for it, and none for those in the queue"
    for name in ("a", "b", "c", "d", "e", "chat"):
        await line.leave(name)
    await asyncio.gather(*tasks)


async def test_who_needs_several_places_is_not_overtaken_by_those_that_come_later():
    line = Line(max_in_flight=8)  # six of them for requests without objectives
    tasks = [await line.arrive(_request(name, "batch")) for name in "abcde"]
    tasks.append(await line.arrive(_request("four", "batch"), num_places=4))
    tasks.append(await line.arrive(_request("later", "batch")))
    assert line.entered == [*"abcde"], "one place is free, for which it would have to wait again"
    tasks.append(await line.arrive(_request("chat", "chat")))
    assert line.entered[-1] == "chat", "of another kind"
    for name in "abc":
        await line.leave(name)
    assert line.entered[-1] == "four"
    assert line.admission.places.promised == {"default": 1}
    for name in ("d", "e", "four", "later", "chat"):
        await line.leave(name)
    await asyncio.gather(*tasks)
    assert line.entered[-1] == "later"
    assert not line.admission.places.promised
    assert not line.admission.places.of_tenant
