"""The two ways to send a request: gRPC `Chat` and HTTP `/v1/chat/completions`, both streaming."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
import httpx
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_channel

from tandem_cli.bench.record import Recorder, Speculation
from tandem_cli.bench.workload import Prompt


class SendError(Exception):
    """The request failed; `status` is a gRPC code name or "HTTP <code>"."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a run have in common."""

    #: "": whatever the gateway serves (gRPC only).
    model: str
    max_tokens: int
    temperature: float
    seed: int
    slo_class: str
    ignore_eos: bool
    api_key: str | None
    #: How to draft; "": as the pods do.
    speculation: str = ""

    def temperature_of(self, prompt: Prompt) -> float:
        return self.temperature if prompt.temperature is None else prompt.temperature

    def seed_of(self, prompt: Prompt) -> int:
        return self.seed + prompt.seed_offset


class Transport(ABC):
    """Sends prompts. Cancelling `send` cancels the request on the server."""

    @abstractmethod
    async def send(self, prompt: Prompt, recorder: Recorder) -> None:
        """Send one request and note its events. Raises SendError."""

    @abstractmethod
    async def close(self) -> None:
        """Give the connections back."""


class GrpcTransport(Transport):
    def __init__(self, target: str, options: RequestOptions) -> None:
        self._options = options
        self._channel = open_channel(target)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]
        key = options.api_key
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    async def send(self, prompt: Prompt, recorder: Recorder) -> None:
        options = self._options
        request = gateway_pb2.ChatRequest(
            model=options.model,
            messages=[
                gateway_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in prompt.messages
            ],
            sampling=common_pb2.SamplingParams(
                max_tokens=options.max_tokens,
                temperature=options.temperature_of(prompt),
                seed=options.seed_of(prompt),
                ignore_eos=options.ignore_eos,
            ),
            slo_class=options.slo_class,
            speculation=options.speculation,
        )
        try:
            async for response in self._stub.Chat(request, metadata=self._metadata):
                if response.WhichOneof("event") == "end":
                    recorder.end()
                    _note_receipt(response.end.receipt, recorder)
                elif response.chunk.token_ids:
                    recorder.tokens(len(response.chunk.token_ids), response.chunk.text)
        except grpc.aio.AioRpcError as error:
            raise SendError(error.code().name, error.details() or "") from error

    async def close(self) -> None:
        await self._channel.close(None)


def _note_receipt(receipt: common_pb2.Receipt, recorder: Recorder) -> None:
    recorder.prompt_tokens = receipt.prompt_tokens
    recorder.output_tokens = receipt.output_tokens
    recorder.speculation = Speculation(
        receipt.decode_steps,
        receipt.drafted_tokens,
        receipt.accepted_tokens,
        dict(receipt.accepted_by_source),
        receipt.hit_steps,
        dict(receipt.hit_steps_by_source),
        dict(receipt.drafted_by_source),
    )


class HttpTransport(Transport):
    """OpenAI's protocol with server-sent events; works against other servers too, without receipts."""

    def __init__(self, base_url: str, options: RequestOptions) -> None:
        self._options = options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def send(self, prompt: Prompt, recorder: Recorder) -> None:
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json=self._body(prompt)
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise SendError(f"HTTP {response.status_code}", text[:500])
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        self._take_event(line.removeprefix("data:").strip(), recorder)
        except httpx.HTTPError as error:
            raise SendError(type(error).__name__, str(error)) from error

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, prompt: Prompt) -> dict[str, object]:
        options = self._options
        body: dict[str, object] = {
            "model": options.model,
            "messages": [{"role": turn.role, "content": turn.content} for turn in prompt.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": options.max_tokens,
            "temperature": options.temperature_of(prompt),
            "seed": options.seed_of(prompt),
        }
        # Only what was asked for: a peer's server may refuse fields it does not know.
        if options.slo_class:
            body["slo_class"] = options.slo_class
        if options.speculation:
            body["speculation"] = options.speculation
        if options.ignore_eos:
            body["ignore_eos"] = True
        return body

    @staticmethod
    def _take_event(data: str, recorder: Recorder) -> None:
        if data == "[DONE]":
            recorder.end()
            return
        event = json.loads(data)
        if "error" in event:
            raise SendError("HTTP stream error", str(event["error"]))
        for choice in event.get("choices") or []:
            text = (choice.get("delta") or {}).get("content")
            if text:
                # How many tokens the text is, only the usage at the end tells.
                recorder.tokens(1, text)
        if usage := event.get("usage"):
            recorder.prompt_tokens = int(usage["prompt_tokens"])
            recorder.output_tokens = int(usage["completion_tokens"])
            if receipt := usage.get("tandem_receipt"):
                recorder.speculation = _speculation_of(receipt)


def _speculation_of(receipt: Mapping[str, object]) -> Speculation:
    """From the receipt in a usage chunk; what it does not name counts as 0."""

    def number(key: str) -> int:
        value = receipt.get(key, 0)
        return int(value) if isinstance(value, int | str) else 0

    def by_source(key: str) -> dict[str, int]:
        counts = receipt.get(key)
        return {str(name): int(count) for name, count in counts.items()} if isinstance(counts, dict) else {}

    return Speculation(
        number("decode_steps"),
        number("drafted_tokens"),
        number("accepted_tokens"),
        by_source("accepted_by_source"),
        number("hit_steps"),
        by_source("hit_steps_by_source"),
        by_source("drafted_by_source"),
    )
