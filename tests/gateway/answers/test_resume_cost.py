"""A long answer: resumed, it does not keep the event loop from others; without ids, it takes no memory."""

import time

from loop_turns import STALL_S, watched_loop
from prometheus_client import CollectorRegistry
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_gateway.answers.answers import Answers
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2, decode_pb2

NUM_EVENTS = 10_000


def request() -> TokenizedRequest:
    now = time.monotonic()
    return TokenizedRequest(
        request_id="r", tenant="t", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=NUM_EVENTS),
        slo=SloTarget(""), arrived=now, deadline=now + 60.0,
    )  # fmt: skip


async def run(_requests, _on_accepted):
    for token in range(NUM_EVENTS - 1):
        yield decode_pb2.DecodeChunk(text="w ", token_ids=[token], offset=token)
    yield decode_pb2.DecodeFinished(reason=common_pb2.FINISH_REASON_LENGTH)


def render() -> None:
    """Takes the time of an event of a chat."""
    ends = time.thread_time() + 65e-6
    while time.thread_time() < ends:
        pass


def new_answers() -> Answers:
    metrics = GatewayMetrics(CollectorRegistry(), model_name="m", slo_classes=DEFAULT_SLO_CLASSES)
    kept = KeptAnswers(ttl_s=60.0, max_bytes=1 << 26)
    return Answers(run, metrics, None, kept=kept, request_timeout_s=60.0)


async def test_a_resumed_answer_is_replayed_in_short_turns():
    answers = new_answers()
    answer = await answers.begin([request()], kind="chat")
    event_id = ""
    async for sent in answers.read(answer):
        event_id = sent.event_id
    found, position = await answers.find("t", event_id, "chat")
    async with watched_loop() as turns:
        num_seen = 0
        async for sent in answers.read(found, position):
            render()
            num_seen += sent.is_seen
    assert num_seen == NUM_EVENTS
    assert sum(turns) > 0.3, "there was enough to do"
    assert max(turns) < STALL_S
    await answers.close()


async def test_an_answer_that_cannot_be_resumed_holds_no_events_that_were_read():
    answers = new_answers()
    answer = await answers.begin([request()], kind="chat", is_resumable=False)
    num_read = 0
    async for sent in answers.read(answer):
        num_read += 1
        assert sent.event_id == ""
        assert not any(answer.events[max(num_read - 10, 0) : num_read])
    assert num_read == NUM_EVENTS
    await answers.close()
