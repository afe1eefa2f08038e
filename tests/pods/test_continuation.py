"""An answer that one pod has begun and another continues is the answer of one pod, wherever it is cut."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import grpc
import guided_models
import pytest
from guide_schemas import fault
from pod_fleet import Fleet, request, run_fleet
from tandem_proto.v1 import common_pb2, decode_pb2
from toy_models import prompt_of

NUM_TOKENS = 24
CASES = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "seed": 11, "top_p": 0.95, "top_k": 40},
    "penalties": {
        "temperature": 0.9,
        "seed": 5,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
    },
    "logprobs": {"logprobs": 3, "frequency_penalty": 1.0},
    "min_tokens": {"ignore_eos": False, "min_tokens": 9, "stop_token_ids": list(range(0, 96, 2))},
    "bad_words": {"bad_words": [common_pb2.TokenIds(ids=[token]) for token in range(1, 96, 3)]},
}

#: As an argument of a tool.
GUIDED = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^#W[0-9]{7}$"},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 6},
    },
    "required": ["order_id", "items", "note"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finished: decode_pb2.DecodeFinished = field(default_factory=decode_pb2.DecodeFinished)

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def answer_to(fleet: Fleet, message: decode_pb2.DecodeRequest) -> Answer:
    answer = Answer()
    async for response in fleet.decode.Decode(message):
        if response.HasField("finished"):
            answer.finished = response.finished
        if not response.HasField("chunk"):
            continue
        chunk = response.chunk
        assert chunk.offset == len(message.output_token_ids) + len(answer.token_ids)
        # The text of a chunk is that of its last token.
        answer.texts += [""] * (len(chunk.token_ids) - 1) + [chunk.text]
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
    return answer


def begun(message: decode_pb2.DecodeRequest, token_ids: list[int]) -> decode_pb2.DecodeRequest:
    again = decode_pb2.DecodeRequest()
    again.CopyFrom(message)
    again.output_token_ids[:] = token_ids
    again.decode_retries = 1
    return again


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", CASES)
async def test_wherever_an_answer_is_cut_its_rest_is_the_same(
    tiny_model: Path, case: str, apart: bool
) -> None:
    # Without drafts a chunk has one token, so that the text after each is known.
    async with run_fleet(tiny_model, speculation="off") as fleet:
        targets = [fleet.prefill_target] if apart else []
        message = request("whole", prompt_of(90), targets, max_tokens=NUM_TOKENS, **CASES[case])
        whole = await answer_to(fleet, message)
        num_tokens = len(whole.token_ids)
        assert num_tokens == NUM_TOKENS or case == "min_tokens"
        for cut in range(1, num_tokens + 1):
            rest = await answer_to(fleet, begun(message, whole.token_ids[:cut]))
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.text == "".join(whole.texts[cut:])
            assert rest.logprobs == whole.logprobs[cut:]
            assert rest.finished.reason == whole.finished.reason
            assert rest.finished.stop_reason == whole.finished.stop_reason
            assert rest.finished.receipt.output_tokens == num_tokens - cut
        await fleet.assert_idle()


@pytest.fixture(scope="module")
def guided_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guided")
    return guided_models.save_model(folder, guided_models.byte_level(), seed=3)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", ["greedy", "sampled", "penalties"])
async def test_wherever_json_is_cut_another_pod_writes_the_same_rest(
    guided_model: Path, case: str, apart: bool
) -> None:
    """The prefill pod samples the first token; each rest begins on a pod without the state of the guide."""
    guide = common_pb2.Guide(json_schema=json.dumps(GUIDED))
    sampling = CASES[case] | {"guide": guide, "ignore_eos": False, "max_tokens": 200}
    async with run_fleet(guided_model, speculation="off") as first:
        targets = [first.prefill_target] if apart else []
        whole = await answer_to(first, request("whole", prompt_of(90), targets, **sampling))
    assert whole.finished.reason == common_pb2.FINISH_REASON_STOP
    assert fault(GUIDED, whole.text) == ""
    async with run_fleet(guided_model) as second:
        targets = [second.prefill_target] if apart else []
        message = request("whole", prompt_of(90), targets, **sampling)
        for cut in range(1, len(whole.token_ids) + 1):
            rest = await answer_to(second, begun(message, whole.token_ids[:cut]))
            assert rest.token_ids == whole.token_ids[cut:]
            assert "".join(whole.texts[:cut]) + rest.text == whole.text
            assert rest.finished.reason == whole.finished.reason
        await second.assert_idle()


async def test_another_pod_continues_what_this_one_began(tiny_model: Path) -> None:
    """Nothing is cached there; the prefill pod computes prompt and answer so far."""
    message = request("whole", prompt_of(200), [], temperature=0.8, seed=3)
    async with run_fleet(tiny_model) as first:
        whole = await answer_to(first, message)
    for num_cut in (1, 7, 22):
        async with run_fleet(tiny_model) as second:
            again = begun(message, whole.token_ids[:num_cut])
            again.prefill_targets.append(second.prefill_target)
            rest = await answer_to(second, again)
            assert rest.token_ids == whole.token_ids[num_cut:]
            assert rest.finished.receipt.prefill_pod == "p0"
            assert rest.finished.receipt.prompt_tokens == 200
            await second.assert_idle()


async def test_a_prefill_pod_that_fails_with_a_begun_answer_costs_only_time(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        message = request("whole", prompt_of(200), [])
        whole = await answer_to(fleet, message)
    async with run_fleet(tiny_model) as fleet:
        again = begun(message, whole.token_ids[:9])
        again.prefill_targets.append("127.0.0.1:9")
        rest = await answer_to(fleet, again)
        assert rest.token_ids == whole.token_ids[9:]
        await fleet.assert_idle()


async def test_a_stop_string_is_found_across_the_cut(tiny_model: Path) -> None:
    async with run_fleet(tiny_model, speculation="off") as fleet:
        plain = await answer_to(fleet, request("plain", prompt_of(90), []))
        stop = plain.text[len(plain.text) // 2 :][:6]
        message = request("stop", prompt_of(90), [], stop=[stop])
        whole = await answer_to(fleet, message)
        assert whole.text == plain.text[: plain.text.index(stop)]
        for cut in range(1, len(whole.token_ids) + 1):
            rest = await answer_to(fleet, begun(message, whole.token_ids[:cut]))
            assert "".join(whole.texts[:cut]) + rest.text == whole.text
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.finished.stop_reason == stop
        await fleet.assert_idle()


async def test_many_continue_at_once_with_drafts(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        messages = [
            request(f"r{i}", prompt_of(100 + 30 * i, start=i), [fleet.prefill_target], max_tokens=60)
            for i in range(6)
        ]
        whole = await asyncio.gather(*(answer_to(fleet, message) for message in messages))
        rest = await asyncio.gather(
            *(
                answer_to(fleet, begun(message, answer.token_ids[: 5 + 9 * i]))
                for i, (message, answer) in enumerate(zip(messages, whole, strict=True))
            )
        )
        for i, (answer, tail) in enumerate(zip(whole, rest, strict=True)):
            assert answer.token_ids[5 + 9 * i :] == tail.token_ids
        await fleet.assert_idle()


@pytest.mark.parametrize(
    ("token_ids", "sampling", "words"),
    [
        ([5, 96], {}, "output_token_ids: token id 96"),
        ([5] * 25, {}, "output_token_ids: has 25 tokens, but the text ends after 24"),
        ([5, 7, 5], {"stop_token_ids": [7]}, "the text ends after 2"),
    ],
)
async def test_a_beginning_of_another_request_is_refused(
    tiny_model: Path, token_ids: list[int], sampling: dict[str, object], words: str
) -> None:
    async with run_fleet(tiny_model) as fleet:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer_to(fleet, begun(request("bad", prompt_of(40), [], **sampling), token_ids))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in refused.value.details()
        await fleet.assert_idle()


@pytest.mark.parametrize("case", ["greedy", "logprobs"])
async def test_chunks_of_one_token_let_a_caller_go_on_anywhere(tiny_model: Path, case: str) -> None:
    async with run_fleet(tiny_model) as fleet:
        # The prompt repeats itself and so does the text, so that drafts make chunks of several tokens.
        message = request("whole", prompt_of(8) * 6, [], max_tokens=60, ignore_eos=True, **CASES[case])
        whole = await answer_to(fleet, message)
        again = begun(message, [])
        lengths: list[int] = []
        # How much is drafted depends on what steps cost here and now, and grows with each repetition.
        for again.one_token_chunks in (*[False] * 6, True):
            chunks = [
                response.chunk async for response in fleet.decode.Decode(again) if response.HasField("chunk")
            ]
            assert [chunk.offset for chunk in chunks] == list(
                accumulate((len(chunk.token_ids) for chunk in chunks[:-1]), initial=0)
            )
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert [logprob for chunk in chunks for logprob in chunk.logprobs] == whole.logprobs
            lengths.append(max(len(chunk.token_ids) for chunk in chunks))
        *free, limited = lengths
        assert max(free) > 1
        assert limited == 1
