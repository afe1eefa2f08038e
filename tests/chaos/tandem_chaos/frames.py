"""Faults on the KV plane: two prefill pods and a decode pod in this process, over real gRPC and ZeroMQ.

reference    each prompt's answer, computed by the decode pod alone
round        requests, `concurrency` at once, through both prefill pods, with frame faults
afterwards   every answer equals its reference; within `settle_s` no pod holds anything
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from pod_usage import held
from tandem_decode import main as decode_main
from tandem_decode.settings import DecodeSettings
from tandem_engine.transport.base import DropCause
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.zeromq import ReceiverOptions
from tandem_prefill import main as prefill_main
from tandem_prefill.settings import PrefillSettings
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.channels import open_channel

from tandem_chaos.frame_faults import FrameFault
from tandem_chaos.kv_watch import KVWatch, WatchedReceiver, WatchedSender
from tandem_chaos.violations import Violations

#: Blocks of credit, each a frame.
_CREDIT_BLOCKS = 16
_BLOCK_SIZE = 16
_NUM_BLOCKS = 2048
#: Of a prefill pod: blocks of a request are reused soon after it.
_FEW_BLOCKS = 200
_PROMPT_TOKENS = (40, 400, 900, 900)
_ANSWER_TOKENS = 3
_NUM_PROMPTS = 24
#: Share of requests whose client leaves.
_CANCELLED = 0.05
#: Share of requests at which everything is cut, if that is the only kind of fault.
_CUTS = 0.02
#: A request that takes longer hangs: three attempts of a second each, and the computation.
_LONGEST_REQUEST_S = 60.0


@dataclass(frozen=True)
class FrameOptions:
    model: Path
    seed: int
    #: Damaged frames to reach.
    num_faults: int
    kinds: tuple[FrameFault, ...] = tuple(FrameFault)
    #: Requests at once, and in one round.
    concurrency: int = 64
    round_size: int = 400
    #: Time in which everything must be given back after a round.
    settle_s: float = 1.0


@dataclass(frozen=True)
class FrameReport:
    num_faults: Counter[FrameFault]
    num_frames: int
    num_requests: int
    num_complete: int
    num_failed: int
    #: By the receiver, by cause.
    num_dropped: dict[DropCause, int]
    seconds: float
    violations: tuple[str, ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.num_faults.items()))
        causes = ", ".join(f"{cause.value} {count:,}" for cause, count in self.num_dropped.items() if count)
        total = self.num_faults.total()
        return (
            f"{total:,} faults on {self.num_frames:,} frames in {self.seconds:.0f} s "
            f"({total / self.seconds:,.0f}/s): {kinds}\n"
            f"{self.num_requests:,} requests; transfers: {self.num_complete:,} complete, "
            f"{self.num_failed:,} failed; frames that the receiver dropped: {causes or 'none'}"
        )


async def run_frames(options: FrameOptions, violations: Violations) -> FrameReport:
    """Rounds of requests until `num_faults` frames were damaged, or something is wrong."""
    started = time.monotonic()
    rng = random.Random(options.seed)
    watch = KVWatch(violations)
    async with _pods(options, watch) as pods:
        prompts = [
            [rng.randrange(3, 96) for _ in range(rng.choice(_PROMPT_TOKENS))] for _ in range(_NUM_PROMPTS)
        ]
        references = [await pods.answer(index, prompt, ()) for index, prompt in enumerate(prompts)]
        num_requests = 0
        proxy = pods.receiver.proxy
        faults = proxy.faults
        while faults.num_faults.total() < options.num_faults and not violations.sentences:
            asked = deque(rng.randrange(_NUM_PROMPTS) for _ in range(options.round_size))
            num_requests += len(asked)

            async def ask(asked: deque[int] = asked) -> None:
                while asked:
                    index = asked.popleft()
                    if FrameFault.CUT in options.kinds and rng.random() < _CUTS / len(options.kinds):
                        proxy.cut(rng.uniform(0.1, 1.5))
                    leaves_s = rng.uniform(0.0, 0.5) if rng.random() < _CANCELLED else _LONGEST_REQUEST_S
                    try:
                        async with asyncio.timeout(leaves_s):
                            answer = await pods.answer(index, prompts[index], pods.prefill_targets)
                    except TimeoutError:
                        if leaves_s == _LONGEST_REQUEST_S:
                            violations.add(f"prompt {index} has no answer after {leaves_s:g} s")
                    except grpc.aio.AioRpcError as error:
                        violations.add(f"prompt {index} failed: {error.code().name}: {error.details()}")
                    else:
                        if answer != references[index]:
                            violations.add(f"prompt {index}: {answer} instead of {references[index]}")

            await asyncio.gather(*(ask() for _ in range(options.concurrency)))
            await pods.check_idle(options.settle_s, violations)
        return FrameReport(
            faults.num_faults,
            faults.num_frames,
            num_requests,
            watch.num_complete,
            watch.num_failed,
            pods.receiver.dropped_frames,
            time.monotonic() - started,
            violations.sentences,
        )


@dataclass(frozen=True)
class _Pods:
    receiver: WatchedReceiver
    decode: decode_pb2_grpc.DecodeServiceStub
    prefill: tuple[prefill_pb2_grpc.PrefillServiceStub, ...]
    prefill_targets: tuple[str, ...]

    async def answer(self, index: int, prompt: Sequence[int], targets: Sequence[str]) -> tuple[int, ...]:
        sampling = common_pb2.SamplingParams(
            temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=_ANSWER_TOKENS, ignore_eos=True
        )
        request = decode_pb2.DecodeRequest(
            request_id=f"prompt-{index}", prompt_token_ids=prompt, sampling=sampling, prefill_targets=targets
        )
        tokens: list[int] = []
        async for response in self.decode.Decode(request):
            tokens += response.chunk.token_ids
        return tuple(tokens)

    async def check_idle(self, settle_s: float, violations: Violations) -> None:
        ended = time.monotonic()
        while True:
            status = await self.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
            usages = {"the decode pod": status.status.usage}
            for index, stub in enumerate(self.prefill):
                answer = await stub.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
                usages[f"prefill pod {index}"] = answer.status.usage
            kept = {name: held(usage) for name, usage in usages.items() if held(usage)}
            if not kept:
                return
            if time.monotonic() - ended > settle_s:
                violations.add(f"{settle_s:g} s after the last answer there is still held: {kept}")
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _pods(options: FrameOptions, watch: KVWatch) -> AsyncIterator[_Pods]:
    receivers: list[WatchedReceiver] = []

    def make_receiver(layout: KVLayout, store: object, given: ReceiverOptions) -> WatchedReceiver:
        receivers.append(
            WatchedReceiver(watch, options.seed, options.kinds, _CREDIT_BLOCKS, layout, store, given)  # type: ignore[arg-type]
        )
        return receivers[-1]

    make_sender = partial(WatchedSender, watch)
    with (
        _replaced(decode_main, "ZmqReceiver", make_receiver),
        _replaced(decode_main, "ZmqSender", make_sender),
        _replaced(prefill_main, "ZmqSender", make_sender),
    ):
        prefill = [
            PrefillSettings(
                pod_id=f"prefill-{index}",
                model=options.model,
                dtype="float32",
                threads=1,
                block_size=_BLOCK_SIZE,
                num_blocks=_FEW_BLOCKS,
            )
            for index in range(2)
        ]
        decode = DecodeSettings(
            pod_id="decode-0",
            model=options.model,
            dtype="float32",
            threads=1,
            block_size=_BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
            speculation="off",
            max_batch=options.concurrency,
            # Each request's KV comes over the wire.
            prefix_cache=False,
            local_prefill_tokens=1,
            idle_prefill_tokens=1,
        )
        async with (
            prefill_main.open_pod(prefill[0]) as first,
            prefill_main.open_pod(prefill[1]) as second,
            decode_main.open_pod(decode) as pod,
        ):
            targets = tuple(f"127.0.0.1:{server.port}" for server in (first, second))
            channels = [open_channel(target) for target in (f"127.0.0.1:{pod.port}", *targets)]
            stub = decode_pb2_grpc.DecodeServiceStub(channels[0])  # type: ignore[no-untyped-call]
            others = tuple(
                prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
                for channel in channels[1:]
            )
            yield _Pods(receivers[0], stub, others, targets)
            for channel in channels:
                await channel.close(None)


@contextmanager
def _replaced(module: object, name: str, new: Callable[..., object]) -> Iterator[None]:
    """The module's class is another one while pods are built."""
    old = getattr(module, name)
    setattr(module, name, new)
    try:
        yield
    finally:
        setattr(module, name, old)
