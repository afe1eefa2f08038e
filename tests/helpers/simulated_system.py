"""The real gateway and the real engine in simulated time: only the model is not computed.

    client -> Gateway.run: admission, forecasts, router, relay -> SimulatedPod: the engine's scheduler and its
              measurement of costs; the step time follows from given costs and the machine's Speed

All run in one process on a clock that jumps from event to event. A minute of overload takes a few seconds,
runs with one seed are equal, and wrong decisions can be separated from noise of the machine. Only steps take
time; the gateway's own work and the network take none.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.record import Recorder
from tandem_cli.bench.requests import Request as SentRequest
from tandem_cli.bench.transports import SendError, Transport, note_receipt
from tandem_core import codec
from tandem_core.contracts import RefusalReason
from tandem_core.errors import TandemError
from tandem_core.model.conversation import Message
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from tandem_core.step_cost import StepCost
from tandem_engine.batch import Batch
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.draft_source import Emitted, Likeliest
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import Engine, StepOutput
from tandem_engine.request import Request
from tandem_engine.runner import PromptListener, StepLogits
from tandem_engine.sampling.verify import Verifier
from tandem_engine.scheduler import Scheduler, SchedulerConfig
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.admission.gate import Gate
from tandem_gateway.auth import Caller
from tandem_gateway.call.gateway import Gateway
from tandem_gateway.call.relay import Relay
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.errors import OverloadedError, presentation
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Fleet, Role
from tandem_gateway.fleet.routing import Router
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import ReceivedRequest, TokenizedRequest
from tandem_gateway.settings import GatewaySettings
from tandem_pod.requests import due_at, end_due_at, token_objective
from tandem_proto.v1 import common_pb2, decode_pb2
from tandem_service.discovery import Discovery
from tandem_service.interceptors import REQUEST_ID_KEY
from tandem_service.tracing import Tracing

T = TypeVar("T")

_TARGET = "127.0.0.1:1"
#: Prefix of the ids of requests whose decision is given.
_ADMITTED, _REFUSED = "admitted-", "refused-"
_RETRY_S = 1.0
#: Tokens of the simulated engine: ids of the real tokenizer modulo this.
_VOCABULARY = 64
#: Length of a simulated draft.
_NUM_GUESSES = 4
#: A pod sends something at least this often.
_HEARTBEAT_S = 0.25
#: Time constant of the machine's slow changes, s.
_DRIFT_S = 10.0
_NS_PER_S = 1_000_000_000


class VirtualTime:
    """Monotonic time and an event loop on it: time passes only while the loop waits."""

    def __init__(self) -> None:
        self._now = 10_000.0
        self.loop = asyncio.SelectorEventLoop(_Jumping(self))
        self.loop.time = self.now  # type: ignore[method-assign]

    def now(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the clocks of the module `time` in this process."""
        with (
            patch("time.monotonic", self.now),
            patch("time.perf_counter", self.now),
            patch("time.monotonic_ns", lambda: round(self._now * _NS_PER_S)),
        ):
            yield

    def run_for(self, seconds: float) -> None:
        """Lets this time pass; called from outside the loop."""
        handle = self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        handle.cancel()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)


class _Jumping(selectors.DefaultSelector):
    """Advances the time instead of waiting."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout:
            self._clock.skip(timeout)
        return events


@dataclass(frozen=True)
class PodSpec:
    """A decode pod that also computes the prompts. These are the true costs; it reports measured ones."""

    prefill: StepCost
    decode: StepCost
    num_blocks: int = 4096
    block_size: int = 64
    chunk_size: int = 512
    max_batch: int = 16
    enough_prompt_tokens: int = 128
    #: Guesses that are right in a step, the mean over the texts; of each text another mean. 0: no drafts. A
    #: guess costs as much as a token of a prompt.
    right_guesses: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """A step with prompts in it reads the weights once."""
        prompts, texts, num_guesses = [], [], 0
        for sequence in batch.sequences:
            is_text = sequence.samples and sequence.num_new_tokens == 1 + len(sequence.draft or ())
            (texts if is_text else prompts).append(sequence)
            num_guesses += len(sequence.draft or ())
        pairs = sum(s.num_new_tokens * (2 * s.start + s.num_new_tokens) / 2 for s in prompts)
        num_tokens = num_guesses + sum(s.num_new_tokens for s in prompts)
        seconds = self.prefill.seconds(bool(prompts), num_tokens, pairs)
        return seconds + self.decode.seconds(not prompts, len(texts), sum(s.start for s in texts))


class Speed:
    """Factor between step times and costs: random per step, and slowly changing."""

    def __init__(self, clock: VirtualTime, noise: float, drift: float, seed: int) -> None:
        """`noise`, `drift`: standard deviations of the factor's logarithm."""
        self._clock, self._noise, self._drift = clock, noise, drift
        self._random = random.Random(seed)
        self._slow, self._seen_at = self._random.gauss(0.0, drift), clock.now()

    def factor(self) -> float:
        # An Ornstein-Uhlenbeck process.
        kept = math.exp((self._seen_at - self._clock.now()) / _DRIFT_S)
        self._seen_at = self._clock.now()
        self._slow = kept * self._slow + self._random.gauss(0.0, self._drift * math.sqrt(1 - kept * kept))
        return math.exp(self._slow + self._random.gauss(0.0, self._noise))


class _Runner:
    """Replaces a ModelRunner: a step computes nothing, and only time passes."""

    def __init__(self, clock: VirtualTime, spec: PodSpec, speed: Speed) -> None:
        self._clock, self._spec, self._speed = clock, spec, speed

    def execute(
        self, batch: Batch, _: object = None, on_prompt_logits: PromptListener | None = None
    ) -> StepLogits:
        self._clock.run_for(self._spec.seconds(batch) * self._speed.factor())
        for sequence in batch.sequences:
            if on_prompt_logits is not None and (scored := sequence.scored_positions):
                on_prompt_logits(sequence, scored[0], torch.zeros(len(scored), _VOCABULARY))
        return StepLogits(torch.zeros(batch.num_logits_rows, _VOCABULARY))

    def compact(self, *_: object) -> None:
        pass


class _Drafts:
    """Replaces a drafter: drafts of equal length for each sequence, with different acceptance."""

    def __init__(self, mean: float, seed: int) -> None:
        self._mean, self._seed = mean, seed
        #: By request: how many guesses are right in a step, on average, and chance. Both follow from the
        #: prompt, so that what else runs does not change them.
        self._texts: dict[str, tuple[float, random.Random]] = {}

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        return [_chain(self._num_right(request), _NUM_GUESSES) for request in requests]

    def _num_right(self, request: Request) -> int:
        if request.request_id not in self._texts:
            chance = random.Random(hash((self._seed, *request.prompt_token_ids)))
            self._texts[request.request_id] = chance.expovariate(1 / self._mean), chance
        mean, chance = self._texts[request.request_id]
        return int(chance.expovariate(math.log1p(1 / mean)))  # geometric, from 0

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        pass

    def extend(self, emitted: Sequence[Emitted], logits: torch.Tensor | Likeliest) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)


def _chain(num_right: int, length: int) -> DraftTree:
    """A chain of drafts for the simulated model, which always generates 0."""
    tokens = [0 if index < num_right else 1 for index in range(length)]
    return DraftTree(tuple(tokens), tuple(range(length)), ("output",) * length)


class SimulatedPod:
    """A decode pod's engine behind a stand-in for its gRPC channel."""

    def __init__(self, clock: VirtualTime, spec: PodSpec, speed: Speed, seed: int) -> None:
        self._clock, self._spec = clock, spec
        blocks = BlockManager([BlockGroup(spec.num_blocks)], spec.block_size)
        config = SchedulerConfig(
            max_model_len=spec.num_blocks * spec.block_size,
            max_batch=spec.max_batch,
            max_tokens_per_step=spec.chunk_size,
            chunk_size=spec.chunk_size,
            enough_prompt_tokens=spec.enough_prompt_tokens,
        )
        self.engine = Engine(
            _Runner(clock, spec, speed),  # type: ignore[arg-type]
            Scheduler(blocks, config),
            Verifier(),
            blocks,
            vocab_size=_VOCABULARY,
            drafter=_Drafts(spec.right_guesses, seed) if spec.right_guesses else None,
        )
        self._snapshot = self.engine.snapshot()
        #: What the engine's thread does before its next step.
        self._inbox: list[Callable[[], object]] = []
        self._work = asyncio.Event()
        self._calls: dict[str, _Call] = {}

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs steps while there is work; returns when `main` is done."""
        task = self._clock.loop.create_task(main)
        while not task.done():
            inbox, self._inbox = self._inbox, []
            for command in inbox:
                command()
            self._snapshot = self.engine.snapshot()
            if self.engine.has_work():
                self._hand_out(self.engine.step())
            else:
                self.engine.rest()
                self._work.clear()
                self._clock.run(_first_of(task, self._work))
        return task.result()

    def _hand_out(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request.request_id)
            if call is not None:
                call.take(output)

    def _do(self, command: Callable[[], object]) -> None:
        self._inbox.append(command)
        self._work.set()

    def abort(self, request_id: str) -> None:
        if self._calls.pop(request_id, None) is not None:
            self._do(lambda: self.engine.abort(request_id))

    # -- the channel -------------------------------------------------------------------------------

    def unary_stream(self, *_: object, **__: object) -> Callable[..., _Call]:
        return self._decode

    def unary_unary(self, path: str, **_: object) -> Callable[..., Coroutine[Any, Any, Any]]:
        return self._check if path.endswith("Check") else self._status

    async def close(self, grace: float | None = None) -> None:
        pass

    def _decode(self, message: decode_pb2.DecodeRequest, **_: object) -> _Call:
        sampling = SamplingParams(temperature=0.0, max_tokens=message.sampling.max_tokens, ignore_eos=True)
        request = Request(
            message.request_id,
            [token_id % _VOCABULARY for token_id in message.prompt_token_ids],
            sampling,
            due=due_at(message),
            token_s=token_objective(message),
            ends_by=end_due_at(message),
            num_expected=message.expected_tokens,
        )
        call = self._calls[message.request_id] = _Call(self, message.request_id, self._clock.now())
        self._do(lambda: self.engine.add(request))
        return call

    async def _check(self, *_: object, **__: object) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def _status(self, *_: object, **__: object) -> decode_pb2.GetDecodeStatusResponse:
        engine, snapshot = self.engine, self._snapshot
        now, blocks, requests = self._clock.now(), snapshot.blocks, snapshot.requests
        status = common_pb2.PodStatus(
            pod_id="simulated",
            role="decode",
            block_size=self._spec.block_size,
            usage=common_pb2.ResourceUsage(
                blocks_total=blocks.total,
                blocks_free=blocks.free - blocks.cached,
                blocks_cached=blocks.cached,
                blocks_used=blocks.used,
                requests_waiting=requests.waiting,
                requests_running=requests.running,
            ),
            prompts=[
                common_pb2.PromptWork(
                    due_seconds=prompt.due - now,
                    start=prompt.start,
                    stop=prompt.stop,
                    request_id=prompt.request_id,
                )
                for prompt in snapshot.prompts
            ],
            chunk_size=self._spec.chunk_size,
            max_batch=self._spec.max_batch,
            enough_prompt_tokens=self._spec.enough_prompt_tokens,
            prefill_cost=codec.step_cost_to_proto(engine.prefill_times.cost()),
            decode_cost=codec.step_cost_to_proto(engine.decode_times.cost()),
            tokens_per_step=engine.tokens_per_step.mean,
            tokens_per_step_by_batch=engine.tokens_per_step.by_batch(),
        )
        return decode_pb2.GetDecodeStatusResponse(status=status)


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class _Call:
    """A Decode call: its responses, and a sign of life in between."""

    def __init__(self, pod: SimulatedPod, request_id: str, began: float) -> None:
        self._pod, self._request_id, self._began = pod, request_id, began
        self._responses: asyncio.Queue[decode_pb2.DecodeResponse | None] = asyncio.Queue()
        self._num_tokens = 0

    def take(self, output: StepOutput) -> None:
        chunk = decode_pb2.DecodeChunk(token_ids=output.token_ids, offset=self._num_tokens)
        self._num_tokens += len(output.token_ids)
        self._responses.put_nowait(decode_pb2.DecodeResponse(chunk=chunk))
        if output.finished:
            finished = decode_pb2.DecodeFinished(
                reason=common_pb2.FINISH_REASON_LENGTH,
                receipt=common_pb2.Receipt(output_tokens=self._num_tokens, decode_steps=self._num_tokens),
            )
            self._responses.put_nowait(decode_pb2.DecodeResponse(finished=finished))
            self._responses.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeResponse]:
        return self

    async def __anext__(self) -> decode_pb2.DecodeResponse:
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                response = await self._responses.get()
        except TimeoutError:
            return decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress())
        if response is None:
            raise StopAsyncIteration
        return response

    async def initial_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((REQUEST_ID_KEY, self._request_id),)

    def cancel(self) -> None:
        self._pod.abort(self._request_id)


#: Costs that a pod of smollm2-135m-instruct measured on 2 cores with AVX2 (plan.py).
MEASURED = PodSpec(
    prefill=StepCost(per_step=0.017, per_token=0.00118),
    decode=StepCost(per_step=0.011, per_token=0.0035, per_pair=6.5e-6),
)


@dataclass
class SimulatedSystem:
    """A gateway with these settings and one pod, while it is `started`."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: PodSpec = MEASURED
    clock: VirtualTime = field(default_factory=VirtualTime)
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0
    #: Requests with a given decision; predictions decide the others.
    decided: Mapping[SentRequest, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speed = Speed(self.clock, self.noise, self.drift, self.seed)
        self.pod = SimulatedPod(self.clock, self.spec, speed, self.seed)
        settings = GatewaySettings(model=Path(), decode=(_TARGET,), **self.settings)
        manifest = self.tokenizer.manifest
        self.fleet = Fleet(
            {Role.DECODE: Discovery([_TARGET]), Role.PREFILL: Discovery([])},
            model_revision=manifest.revision,
            poll_interval_s=settings.poll_interval_s,
        )
        lengths = OutputLengths()
        router = Router(self.fleet, lengths)
        forecaster = Forecaster(
            router,
            lengths,
            first_confidence=settings.slo_ttft_confidence,
            end_confidence=settings.slo_end_confidence,
        )
        self.admission = Admission(
            forecaster,
            max_in_flight=settings.max_in_flight,
            max_queue=settings.max_queue,
            slack=settings.slo_slack,
        )
        self.admission.gate = _DecidedGate(forecaster, self.admission.queue, slack=settings.slo_slack)
        metrics = GatewayMetrics(CollectorRegistry(), model_name=manifest.name)
        self.gateway = Gateway(
            tokenizer=self.tokenizer,
            fleet=self.fleet,
            admission=self.admission,
            relay=Relay(self.fleet, router, metrics, failover_wait_s=settings.failover_wait_s),
            metrics=metrics,
            ended=EndedRequests(),
            settings=settings,
            tracing=Tracing(),
        )

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        with self.clock.installed(), patch("tandem_gateway.fleet.pods.open_channel", lambda *_: self.pod):
            self.pod.engine.measure_costs(decodes=True)
            self.pod.run(self._start())
            yield
            self.pod.run(self.fleet.close())

    async def _start(self) -> None:
        await self.fleet.start()
        while not self.fleet.healthy(Role.DECODE):
            await self.fleet.wait_for_change(1.0)

    def transport(self, options: BenchOptions) -> SimulatedTransport:
        return SimulatedTransport(self, options)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.pod.run(main)


class _DecidedGate(Gate):
    """Applies given decisions after its own, so that equal decisions make equal runs."""

    def decide(self, request: TokenizedRequest, num_places: int = 1, other_tokens: int = 0) -> Admitted:
        refusal, admitted = None, None
        try:
            admitted = super().decide(request, num_places, other_tokens)
        except OverloadedError as error:
            refusal = error
        if request.request_id.startswith(_REFUSED):
            admitted = None
        elif admitted is None and request.request_id.startswith(_ADMITTED):
            admitted = Admitted(request)
        if admitted is None:
            raise refusal or OverloadedError("decided beforehand", _RETRY_S, RefusalReason.OTHERS)
        return admitted


class SimulatedTransport(Transport):
    """Calls the gateway of a system."""

    def __init__(self, system: SimulatedSystem, options: BenchOptions) -> None:
        self._gateway, self._options, self._decided = system.gateway, options, system.decided
        self._encode = system.tokenizer.encode_chat

    async def send(self, request: SentRequest, recorder: Recorder) -> None:
        decision = self._decided.get(request)
        mark = "" if decision is None else _ADMITTED if decision else _REFUSED
        messages = tuple(Message(turn.role, turn.content) for turn in request.prompt.messages)
        received = ReceivedRequest(
            request_id=f"{mark}{request.index}",
            caller=Caller(request.tenant.name or "default"),
            model="",
            sampling={
                "max_tokens": request.max_tokens, "temperature": 0.0, "seed": 0,
                "ignore_eos": self._options.ignore_eos,
            },
            slo_class=request.slo.name,
            arrived=asyncio.get_running_loop().time(),
        )  # fmt: skip
        try:
            tokenized = await self._gateway.prepare_tokens(received, self._encode(messages))
            async with aclosing(self._gateway.run([tokenized])) as events:
                async for event in events:
                    if isinstance(event, decode_pb2.DecodeFinished):
                        recorder.end()
                        note_receipt(event.receipt, recorder)
                    elif event.token_ids:
                        recorder.tokens(len(event.token_ids), "")
        except TandemError as error:
            retry_after_s = getattr(error, "retry_after_s", None)
            raise SendError(presentation(error).status.name, str(error), retry_after_s) from error

    async def close(self) -> None:
        pass
