"""The queue: how many requests run at once, and the order in which waiting ones begin."""

import itertools

import pytest
from reported_pods import BATCH, SLO, request
from tandem_core.contracts import RefusalReason
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.queue import Queue
from tandem_gateway.errors import OverloadedError
from tandem_gateway.request import TenantLimits


def make_queue(*, max_in_flight: int = 8, max_queue: int = 8, num_batch_slots: int = 0) -> Queue:
    return Queue(max_in_flight=max_in_flight, max_queue=max_queue, num_batch_slots=lambda: num_batch_slots)


def admitted_of(slo=SLO, num_places: int = 1, **fields: object) -> Admitted:
    return Admitted(request(slo, **fields), num_places=num_places)


def due_in(seconds: float, slo=SLO, num_places: int = 1) -> Admitted:
    return admitted_of(slo, num_places, due_s=seconds)


def run(queue: Queue, slo=SLO, num_places: int = 1) -> Admitted:
    admitted = admitted_of(slo, num_places)
    queue.opened(admitted)
    queue.take(admitted)
    return admitted


def next_one(queue: Queue, *kept_back: Admitted) -> Admitted | None:
    """The request that begins next; `kept_back` ones may not."""
    waiter = queue.next_waiting(lambda admitted: admitted not in kept_back)
    if waiter is None:
        return None
    queue.take(waiter.admitted)
    return waiter.admitted


class TestPlaces:
    def test_places_are_bounded(self, clock):
        queue = make_queue(max_in_flight=2)
        fits = []
        for _ in range(3):
            fits.append(queue.fits(request()))
            run(queue)
        assert fits == [True, True, False]

    def test_a_request_for_more_places_than_there_are_gets_all_of_them(self, clock):
        queue = make_queue(max_in_flight=4)
        assert queue.fits(request(), 7)
        one = run(queue)
        assert not queue.fits(request(), 7)
        assert queue.fits(request(), 3) and not queue.fits(request(), 4)
        queue.leave(one)
        assert queue.fits(request(), 7)

    def test_best_effort_requests_leave_a_quarter_of_the_places(self, clock):
        queue = make_queue(max_in_flight=4)
        for _ in range(3):
            assert queue.fits(request(BATCH))
            run(queue, BATCH)
        assert not queue.fits(request(BATCH))
        assert queue.fits(request())

    def test_best_effort_requests_are_at_most_slightly_more_than_the_pods_batch_slots(self, clock):
        queue = make_queue(max_in_flight=100, num_batch_slots=8)
        for _ in range(10):
            assert queue.fits(request(BATCH))
            run(queue, BATCH)
        assert not queue.fits(request(BATCH)), "1.25 times eight"
        assert queue.fits(request())

    def test_one_best_effort_request_always_runs(self, clock):
        queue = make_queue(max_in_flight=1)
        assert queue.fits(request(BATCH))
        assert make_queue(max_in_flight=4).fits(request(BATCH), 4)

    def test_without_predictions_at_most_the_pods_batch_slots_run(self, clock):
        queue = make_queue(max_in_flight=8, num_batch_slots=2)
        queue.is_blind = True
        run(queue)
        assert queue.fits(request())
        run(queue)
        assert not queue.fits(request())
        queue.is_blind = False
        assert queue.fits(request())
        without_pods = make_queue(max_in_flight=8)
        without_pods.is_blind = True
        run(without_pods)
        assert without_pods.fits(request())

    def test_places_are_counted_by_tenant_until_requests_are_closed(self, clock):
        queue = make_queue()
        chat, batch = admitted_of(num_places=2), admitted_of(BATCH, tenant="other")
        for one in (chat, batch):
            queue.opened(one)
        assert queue.of_tenant == {"default": 2, "other": 1}
        for one in (chat, batch):
            queue.closed(one)
        assert not queue.of_tenant, "tenants that left are forgotten"


class TestOrder:
    async def test_the_earliest_deadline_goes_first_in_any_order_of_arrival(self):
        queue = make_queue()
        last, first, second = due_in(9.0), due_in(1.0), due_in(1.0)
        for one in (last, first, second):
            queue.wait(one)
        assert [next_one(queue) for _ in range(4)] == [first, second, last, None]

    async def test_a_request_that_may_not_begin_blocks_those_of_its_kind(self):
        queue = make_queue()
        kept_back, behind, chat = due_in(1.0, BATCH), due_in(2.0, BATCH), due_in(9.0)
        for one in (kept_back, behind, chat):
            queue.wait(one)
        assert [next_one(queue, kept_back) for _ in range(2)] == [chat, None]
        assert [next_one(queue) for _ in range(2)] == [kept_back, behind]

    async def test_a_request_that_waits_for_several_places_is_not_overtaken(self):
        queue = make_queue(max_in_flight=4)
        running = [run(queue) for _ in range(3)]
        wide, later = due_in(1.0, num_places=3), due_in(2.0, BATCH)
        for one in (wide, later):
            queue.wait(one)
        assert next_one(queue) is None, "one place is free"
        for one in running[:2]:
            queue.leave(one)
        assert next_one(queue) is wide

    async def test_an_earlier_deadline_of_its_kind_is_ahead_of_a_new_request(self):
        queue = make_queue()
        queue.wait(due_in(5.0, BATCH))
        assert queue.is_behind_others(due_in(6.0, BATCH))
        assert not queue.is_behind_others(due_in(4.0, BATCH))
        assert not queue.is_behind_others(due_in(6.0))

    async def test_a_request_that_gave_up_does_not_start(self):
        queue = make_queue()
        gone, stays = queue.wait(due_in(1.0)), due_in(2.0)
        queue.wait(stays)
        queue.give_up(gone)
        assert queue.num_waiting == 1
        assert [next_one(queue), next_one(queue)] == [stays, None]

    async def test_a_request_that_was_just_cancelled_does_not_start(self):
        queue = make_queue()
        gone, stays = queue.wait(due_in(1.0)), due_in(2.0)
        queue.wait(stays)
        gone.turn.cancel()
        assert list(queue.waiting()) == [stays]
        assert not queue.is_behind_others(due_in(1.5))
        assert next_one(queue) is stays


class TestWaits:
    async def test_a_full_queue_refuses_with_a_retry_after_that_grows_with_the_queue(self):
        queue = make_queue(max_in_flight=1, max_queue=2)
        turns = []
        for _ in range(2):
            turns.append(queue.turn_s())
            queue.wait(admitted_of())
        with pytest.raises(OverloadedError, match="2 waiting, limit 2") as info:
            queue.wait(admitted_of())
        assert info.value.reason is RefusalReason.QUEUE_FULL
        turns.append(info.value.retry_after_s)
        assert turns == pytest.approx([1.0, 2.0, 3.0]), "requests of a second each, one place"

    async def test_the_wait_for_a_place_follows_from_recent_service_times(self):
        queue = make_queue(max_in_flight=4)
        for _ in range(200):
            queue.ended(2.0)
        assert queue.turn_s() == pytest.approx(0.5)

    async def test_queued_prompt_tokens_are_bounded_and_a_tenant_has_half(self, monkeypatch):
        monkeypatch.setattr("tandem_gateway.admission.queue.MAX_QUEUED_TOKENS", 1000)
        queue, limits = make_queue(), TenantLimits(places=8)
        waiters = [queue.wait(admitted_of(num_prompt=250, limits=limits)) for _ in range(2)]
        with pytest.raises(OverloadedError, match="2 waiting, limit 8 with 1000 prompt tokens"):
            queue.wait(admitted_of(num_prompt=1, limits=limits))
        queue.wait(admitted_of(num_prompt=500, limits=limits, tenant="other"))
        with pytest.raises(OverloadedError, match="queue is full"):
            queue.wait(admitted_of(num_prompt=1, limits=limits, tenant="third"))
        queue.give_up(waiters[0])
        queue.wait(admitted_of(num_prompt=250, limits=limits))

    async def test_no_retry_after_is_longer_than_clients_accept(self):
        queue = make_queue(max_queue=0)
        queue.ended(1e9)
        with pytest.raises(OverloadedError) as info:
            queue.wait(admitted_of())
        assert info.value.retry_after_s == 60.0

    async def test_the_wait_counts_only_requests_with_earlier_deadlines(self):
        queue = make_queue(max_in_flight=2)
        for seconds in (1.0, 2.0):
            queue.wait(due_in(seconds))
        waits = [queue.wait_s(due_in(seconds).request) for seconds in (0.5, 1.5, 3.0)]
        assert waits == pytest.approx([0.5, 1.0, 1.5], rel=0.01)

    async def test_requests_that_gave_up_are_not_kept(self):
        queue, numbers = make_queue(max_queue=64), itertools.count()
        for _ in range(200):
            queue.give_up(queue.wait(due_in(float(next(numbers)))))
        assert queue.num_waiting == 0
        assert not list(queue.waiting())
