"""A pod that sends nothing is left; a pause of the gateway itself is not the pods' silence."""

import asyncio
import threading
import time

import pytest
from tandem_gateway.call.silence import Silence


def stand_still(seconds: float) -> None:
    """In place of all that blocks an event loop."""
    time.sleep(seconds)


async def test_a_read_without_a_result_ends_after_the_limit():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await Silence(0.5).within(asyncio.Event().wait())
    assert 0.5 <= time.monotonic() - began < 2.0


async def test_a_message_that_came_while_the_loop_stood_is_read():
    silence, loop, arrived = (
        Silence(0.5),
        asyncio.get_running_loop(),
        asyncio.get_running_loop().create_future(),
    )
    reading = asyncio.create_task(silence.within(arrived))
    await asyncio.sleep(0.45)
    threading.Timer(0.3, loop.call_soon_threadsafe, [arrived.set_result, "message"]).start()
    stand_still(1.0)
    assert await reading == "message"


async def test_a_message_soon_after_a_pause_is_read():
    silence = Silence(0.5)
    reading = asyncio.create_task(silence.within(asyncio.sleep(1.2, "message")))
    await asyncio.sleep(0.05)
    stand_still(1.0)
    assert await reading == "message", "sent .2 s after the loop went on"


async def test_streams_stay_on_their_pods_when_the_gateway_stands_still(pods, gateway):
    first, second = await pods("first", pause_s=0.5), await pods("second", pause_s=0.5)
    front = await gateway(first, second)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [asyncio.create_task(front.http.post("/v1/chat/completions", json=body)) for _ in range(4)]
    await first.started.wait()
    await second.started.wait()
    for _ in range(2):
        stand_still(1.4)
        await asyncio.sleep(0.2)
    receipts = [(await task).json()["usage"]["tandem_receipt"] for task in asked]
    assert [receipt["decode_retries"] for receipt in receipts] == [0] * 4
    assert {receipt["decode_pod"] for receipt in receipts} == {"first", "second"}
