# ruff: noqa: N802  (the methods are named by the .proto)
"""Stand-ins for decode and prefill pods: the real services on loopback, with scripted answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings
from tandem_service.tls import Role
from waiting import pause_async

MODEL = "tiny-chat"
REVISION = "ab" * 32


@dataclass
class FakePod(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """A decode pod that streams `words`, one chunk each, after those that the request brings; also a prefill
    pod that answers when `gate` is set."""

    name: str = "d-0"
    words: tuple[str, ...] = ("Hello", " there", "!")
    #: Before each word; with heartbeats, unless it `hangs`.
    pause_s: float = 0.0
    hangs: bool = False
    #: A prompt token for which it hangs before the first word.
    hangs_on: int | None = None
    #: Fails with this status after `fail_after` chunks.
    fail_with: grpc.StatusCode | None = None
    fail_after: int = 0
    #: Sends before each word that it drains.
    is_draining: bool = False
    #: Crashes of prefill pods that it reports first.
    prefill_crashes: int = 0
    #: Attempts at prefill pods that failed, which it reports then.
    prefill_failures: int = 0
    #: Reported in its receipts.
    cached_tokens: int = 0
    #: Reported seconds per step; 0: unknown.
    step_s: float = 0.0
    #: Log probabilities are -1 / (1 + seed).
    logprob_of_seed: bool = False
    #: False: begins every answer anew, like a pod older than DecodeRequest.output_token_ids.
    can_continue: bool = True
    #: False: is older than they are.
    knows_prompt_logprobs: bool = True
    #: False: like a pod older than DecodeRequest.sampling.beam_search.
    can_search: bool = True
    #: Why its answers end.
    reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_STOP
    #: The stop string that ends them; "": the model's end token.
    stop_reason: str = ""
    total_blocks: int = 100
    free_blocks: int = 100
    num_running: int = 0
    #: Prompts of a thousand tokens each that it has yet to compute.
    #: Fields of its report.
    num_waiting: int = 0
    #: Fields of each receipt.
    num_preemptions: int = 0
    num_prefill_preemptions: int = 0
    num_prompts: int = 0
    revision: str = REVISION
    age_seconds: float = 0.0
    target: str = ""
    requests: list[decode_pb2.DecodeRequest] = field(default_factory=list)
    #: Opens the answers of the prefill service.
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    num_status_calls: int = 0
    #: Status calls raise this, while the health service reports SERVING.
    status_error: Exception | None = None
    server: PodServer | None = None
    #: Certificates for mutual TLS, as the settings pod_tls_*; then only gateways may call it.
    tls: Mapping[str, Path] = field(default_factory=dict)

    async def start(self, port: int = 0) -> None:
        services = ["tandem.v1.DecodeService", "tandem.v1.PrefillService"]
        settings = PodSettings(drain_s=0.0, pod_id=self.name, port=port, **self.tls)
        callers = dict.fromkeys(("Decode", "GetDecodeStatus"), (Role.GATEWAY,)) if self.tls else None
        self.server = PodServer(
            settings, role="decode", service_names=services, status_codes={}, callers=callers
        )
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server.grpc_server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server.grpc_server)
        await self.server.start()
        self.server.set_serving(True)
        self.target = f"127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None

    async def Decode(self, request, context):
        self.requests.append(request)
        self.started.set()
        wants_logprobs = request.sampling.HasField("logprobs")
        num_done = len(request.output_token_ids) if self.can_continue else 0
        if request.sampling.HasField("beam_search") and self.can_search:
            async for response in self._search(request, context):
                yield response
            return
        try:
            if self.hangs_on in request.prompt_token_ids:
                await pause_async(10.0)
            if self.prefill_crashes or self.prefill_failures:
                progress = decode_pb2.DecodeProgress(
                    prefill_crashes=self.prefill_crashes, prefill_failures=self.prefill_failures
                )
                yield decode_pb2.DecodeResponse(progress=progress)
            for index, word in list(enumerate(self.words))[num_done:]:
                if self.fail_with is not None and index >= self.fail_after:
                    await context.abort(self.fail_with, f"prompt: {self.name} says no")
                if self.is_draining:
                    yield decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress(draining=True))
                end = time.monotonic() + self.pause_s
                if self.hangs:
                    yield decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress())
                while (left_s := end - time.monotonic()) > 0:
                    await pause_async(left_s if self.hangs else min(left_s, 0.1))
                    yield decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress())
                logprobs = []
                if wants_logprobs:
                    token = common_pb2.TokenLogprob(
                        token_id=10 + index, logprob=-0.5, token_bytes=word.encode()
                    )
                    if self.logprob_of_seed:
                        token.logprob = -1 / (1 + request.sampling.seed)
                    other = common_pb2.TokenLogprob(token_id=99, logprob=-1.5, token_bytes=b"\xe2\x82")
                    top = [token, other][: request.sampling.logprobs]
                    logprobs = [common_pb2.PositionLogprobs(chosen=token, top=top)]
                chunk = decode_pb2.DecodeChunk(text=word, token_ids=[10 + index], logprobs=logprobs)
                chunk.offset = index if self.can_continue else 0
                if index == 0 and self.knows_prompt_logprobs and request.sampling.HasField("prompt_logprobs"):
                    num_top, num_tokens = request.sampling.prompt_logprobs, len(request.prompt_token_ids) - 1
                    chunk.prompt_logprobs.CopyFrom(
                        common_pb2.PromptLogprobs(
                            logprobs=[-0.25] * num_tokens,
                            ranks=[2] * num_tokens,
                            top_token_ids=list(range(5, 5 + num_top)) * num_tokens,
                            top_logprobs=[-0.125] * num_top * num_tokens,
                        )
                    )
                yield decode_pb2.DecodeResponse(chunk=chunk)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        receipt = common_pb2.Receipt(
            request_id=request.request_id,
            queue_ns=1000,
            prefill_ns=2000,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.words) - num_done,
            decode_pod=self.name,
            decode_steps=2,
            drafts=1,
            drafted_tokens=3,
            drafted_by_source={"prompt": 3},
            accepted_tokens=2,
            accepted_by_source={"prompt": 2},
            accepted_at=[1, 1],
            preemptions=self.num_preemptions,
            prefill_preemptions=self.num_prefill_preemptions,
        )
        yield decode_pb2.DecodeResponse(
            finished=decode_pb2.DecodeFinished(
                reason=self.reason, stop_reason=self.stop_reason, receipt=receipt
            )
        )

    async def _search(self, request, context):
        """A text per beam, of one, two, ... words."""
        end = time.monotonic() + self.pause_s
        while (left_s := end - time.monotonic()) > 0:
            await pause_async(min(left_s, 0.1))
            progress = decode_pb2.DecodeProgress(draining=self.is_draining, prompt_computed=True)
            yield decode_pb2.DecodeResponse(progress=progress)
        if self.fail_with is not None:
            await context.abort(self.fail_with, f"prompt: {self.name} says no")
        beams = []
        for i in range(request.sampling.beam_search.width):
            ids = list(range(10, 11 + i))
            text = " ".join(self.words[: i + 1])
            beams.append(decode_pb2.DecodeBeam(text=text, token_ids=ids, reason=self.reason))
        receipt = common_pb2.Receipt(decode_pod=self.name, decode_steps=3, transfer_bytes=100)
        receipt.preemptions = self.num_preemptions
        yield decode_pb2.DecodeResponse(beams=decode_pb2.DecodeBeams(beams=beams, receipt=receipt))

    async def Prefill(self, request, context):
        yield prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress())
        if self.fail_with is not None:
            await context.abort(self.fail_with, f"prompt: {self.name} says no")
        await self.gate.wait()
        yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())

    async def GetDecodeStatus(self, request, context):
        return decode_pb2.GetDecodeStatusResponse(status=self._status("decode"))

    async def GetPrefillStatus(self, request, context):
        return prefill_pb2.GetPrefillStatusResponse(status=self._status("prefill"))

    def _status(self, role: str) -> common_pb2.PodStatus:
        self.num_status_calls += 1
        if self.status_error is not None:
            raise self.status_error
        usage = common_pb2.ResourceUsage(
            blocks_total=self.total_blocks,
            blocks_free=self.free_blocks,
            requests_waiting=self.num_waiting,
            requests_running=self.num_running,
        )
        return common_pb2.PodStatus(
            pod_id=self.name,
            role=role,
            model=MODEL,
            model_revision=self.revision,
            block_size=64,
            usage=usage,
            age_seconds=self.age_seconds,
            prefill_cost=common_pb2.StepCost(per_step=self.step_s),
            decode_cost=common_pb2.StepCost(per_step=self.step_s),
            prompts=[common_pb2.PromptWork(due_seconds=-1.0, stop=1000)] * self.num_prompts,
        )
