"""The requests of a seed, and what their streams did.

A case is one request. Its reference is its answer without faults; every later answer must equal it: tokens,
text, log probabilities, finish reason. Chunks that came twice or never would change tokens and text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_channel

#: By the name of the case; each is a way to choose tokens, or an end of the text, that must survive a seam.
_SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.1, "top_p": 0.95, "top_k": 40},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
    },
    "logprobs": {"temperature": 0.7, "logprobs": 2},
    "stop string": {"temperature": 0.8},
    "min_tokens": {"temperature": 1.0, "ignore_eos": False, "min_tokens": 30},
}
_ANSWER_TOKENS = (60, 400)
_LONGEST_REQUEST_S = 240.0


@dataclass(frozen=True)
class Case:
    name: str
    #: Tokens of the prompt.
    context: int
    request: gateway_pb2.GenerateRequest


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[bytes, ...]
    reason: int
    stop_reason: str

    def difference(self, other: Answer) -> str:
        """Where they differ, in a few words."""
        for at, (mine, theirs) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if mine != theirs:
                return f"token {at} is {mine} instead of {theirs}"
        if len(self.token_ids) != len(other.token_ids):
            return f"{len(self.token_ids)} tokens instead of {len(other.token_ids)}"
        for name in ("text", "logprobs", "reason", "stop_reason"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} differs"
        return "nothing"


@dataclass(eq=False)
class Stream:
    """One request on its way. Times are monotonic seconds."""

    case: Case
    started_at: float = field(default_factory=time.monotonic)
    chunks_at: list[float] = field(default_factory=list)
    ended_at: float | None = None
    receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)
    #: Of the last event; a cut stream resumes after it.
    event_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    def has_moved_since(self, moment: float) -> bool:
        return self.ended_at is not None or bool(self.chunks_at and self.chunks_at[-1] > moment)

    def begin_anew(self) -> None:
        """Drops what came: the answer is kept nowhere any more."""
        self.event_id = ""
        for received in (self.token_ids, self.texts, self.logprobs):
            received.clear()


def make_cases(seed: int, contexts: Sequence[int], vocab_size: int, num_cases: int) -> list[Case]:
    rng = random.Random(seed)
    cases = []
    for index in range(num_cases):
        name = list(_SAMPLING)[index % len(_SAMPLING)]
        context = contexts[(index // len(_SAMPLING)) % len(contexts)]
        sampling = common_pb2.SamplingParams(
            **{  # type: ignore[arg-type]
                "seed": rng.randrange(1 << 32),
                "max_tokens": rng.randint(*_ANSWER_TOKENS),
                "ignore_eos": True,
                **_SAMPLING[name],
            }
        )
        prompt = common_pb2.TokenIds(ids=[rng.randrange(3, vocab_size) for _ in range(context)])
        cases.append(
            Case(
                name,
                context,
                gateway_pb2.GenerateRequest(
                    token_ids=prompt,
                    sampling=sampling,
                    slo_class="batch",
                    # Texts that others have generated come in a few large steps; half of them do not.
                    speculation="off" if (index + index // len(_SAMPLING)) % 2 else "",
                ),
            )
        )
    return cases


class Client:
    """Asks one gateway."""

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self._channel = open_public_channel(target)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._channel.close(None)

    async def ask(self, stream: Stream) -> Answer:
        """Fills the stream, from its beginning or after its last event. Raises AioRpcError."""
        request = stream.case.request
        if stream.event_id:
            request = gateway_pb2.GenerateRequest(last_event_id=stream.event_id)
        else:
            stream.begin_anew()
        end = gateway_pb2.GeneratedEnd()
        async for response in self._stub.Generate(request, timeout=_LONGEST_REQUEST_S):
            if response.HasField("end"):
                end = response.end
                continue
            chunk = response.chunk
            stream.chunks_at.append(time.monotonic())
            stream.event_id = chunk.event_id
            stream.token_ids += chunk.token_ids
            stream.texts.append(chunk.text)
            stream.logprobs += [one.SerializeToString(deterministic=True) for one in chunk.logprobs]
        stream.receipt = end.receipt
        stream.ended_at = time.monotonic()
        return Answer(
            tuple(stream.token_ids),
            "".join(stream.texts),
            tuple(stream.logprobs),
            end.reason,
            end.stop_reason,
        )

    async def fleet(self) -> gateway_pb2.GetFleetStatusResponse:
        """Raises AioRpcError."""
        status: gateway_pb2.GetFleetStatusResponse = await self._stub.GetFleetStatus(
            gateway_pb2.GetFleetStatusRequest(), timeout=5.0
        )
        return status


async def references(client: Client, cases: Sequence[Case]) -> tuple[list[Case], list[Answer]]:
    """The cases, of which some now have a stop string from the middle of their text, and their answers."""
    asked: list[Case] = []
    answers: list[Answer] = []
    for case in cases:
        answer = await client.ask(Stream(case))
        middle = len(answer.text) // 2
        if case.name == "stop string" and (stop := answer.text[middle : middle + 4]):
            request = gateway_pb2.GenerateRequest()
            request.CopyFrom(case.request)
            request.sampling.stop.append(stop)
            case = Case(case.name, case.context, request)
            answer = await client.ask(Stream(case))
        asked.append(case)
        answers.append(answer)
    return asked, answers
