"""A request that crashes pods ends, and those that shared its pods go on."""

import asyncio

import grpc
import pytest
from fake_pods import FakePod
from tandem_gateway.call.suspects import Suspect, Suspects
from tandem_proto.v1 import common_pb2, gateway_pb2

USER = [gateway_pb2.ChatMessage(role="user", content="hi")]
POISON = 666


class SharedPod(FakePod):
    """Crashes with all its calls soon after the poison has come; others' first tokens take longer."""

    num_crashes = 0

    async def Decode(self, request, context):  # noqa: N802  (named by the .proto)
        crash = self.__dict__.setdefault("crash", asyncio.Event())
        if request.sampling.seed == POISON:
            await asyncio.sleep(0.05)
            self.num_crashes += 1
            crash.set()
            self.crash = asyncio.Event()
        try:
            async with asyncio.timeout(0.15):
                await crash.wait()
        except TimeoutError:
            async for response in super().Decode(request, context):
                yield response
            return
        await context.abort(grpc.StatusCode.UNAVAILABLE, "crashed")


async def ask(front, seed: int) -> str:
    sampling = common_pb2.SamplingParams(seed=seed)
    chat = gateway_pb2.ChatRequest(messages=USER, sampling=sampling)
    return "".join([m.chunk.text async for m in front.grpc.Chat(chat, timeout=10)])


async def test_requests_that_shared_two_crashes_with_the_cause_go_on(gateway):
    pod = SharedPod()
    await pod.start()
    try:
        front = await gateway(pod)
        answers = await asyncio.gather(
            *[ask(front, seed) for seed in (1, 2, POISON, 3)], return_exceptions=True
        )
        cause = answers.pop(2)
        assert answers == ["Hello there!"] * 3
        assert isinstance(cause, grpc.aio.AioRpcError)
        assert "pods crashed while they computed token 1" in cause.details()
        assert pod.num_crashes <= 3
    finally:
        await pod.stop()


def test_a_suspect_that_was_alone_is_the_cause_at_its_second_crash():
    suspect = Suspect(Suspects())
    suspect.enter("a", "b")
    assert not suspect.is_the_cause(1.5)
    assert suspect.is_the_cause(2.0)


@pytest.mark.parametrize("left", [False, True])
def test_suspects_that_shared_a_pod_are_tried_once_more(left):
    suspects = Suspects()
    first, second = Suspect(suspects), Suspect(suspects)
    first.enter("a")
    second.enter("a", "b")
    if left:
        second.clear()
    assert not first.is_the_cause(2.0)
    assert first.is_the_cause(3.0)
    first.enter("c")
    assert first.is_the_cause(2.0)
    assert "c" in suspects.on_pod
    first.clear()
    second.clear()
    assert not suspects.on_pod


async def test_after_their_second_crash_suspects_go_on_one_at_a_time():
    suspects = Suspects()
    first, second = Suspect(suspects), Suspect(suspects)
    await first.wait_for_turn(1.0)
    await first.wait_for_turn(1.0)
    with pytest.raises(TimeoutError):
        await second.wait_for_turn(0.01)
    waiting = asyncio.create_task(second.wait_for_turn(5.0))
    await asyncio.sleep(0)
    first.clear()
    await waiting
    second.clear()
    assert not suspects.turn.locked()
