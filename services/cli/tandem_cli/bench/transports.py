"""The two ways to send a request: gRPC `Chat` and HTTP `/v1/chat/completions`, both streaming."""

from __future__ import annotations

import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import grpc
import grpc.aio
import httpx
from google.protobuf import json_format
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_channel

from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import Recorder, Speculation


class SendError(Exception):
    """The request failed; `status` is a gRPC code name or "HTTP <code>"."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def temperature_of(options: BenchOptions, prompt: Prompt) -> float:
    return options.temperature if prompt.temperature is None else prompt.temperature


class Transport(ABC):
    """Sends prompts. Cancelling `send` cancels the request on the server."""

    @abstractmethod
    async def send(self, prompt: Prompt, recorder: Recorder) -> None:
        """Send one request and record its events. Raises SendError."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class GrpcTransport(Transport):
    def __init__(self, target: str, options: BenchOptions, mode: str = "") -> None:
        self._options = options
        self._mode = mode
        self._channel = open_public_channel(target, options.ca)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]
        key = options.key_for(mode)
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
                temperature=temperature_of(options, prompt),
                seed=options.seed + prompt.seed_offset,
                ignore_eos=options.ignore_eos,
            ),
            slo_class=options.slo_class,
            speculation=self._mode,
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
    )


class HttpTransport(Transport):
    """OpenAI's protocol with server-sent events; other servers send no receipts."""

    def __init__(
        self,
        base_url: str,
        options: BenchOptions,
        mode: str = "",
        extra_body: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """extra_body: fields that replace those of the body, for servers that differ; None removes one."""
        self._options = options
        self._mode = mode
        self._extra_body = extra_body
        key = options.key_for(mode)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            verify=True if options.ca is None else ssl.create_default_context(cafile=str(options.ca)),
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
            "temperature": temperature_of(options, prompt),
            "seed": options.seed + prompt.seed_offset,
        }
        # Only if given: other servers may refuse unknown fields.
        if options.slo_class:
            body["slo_class"] = options.slo_class
        if self._mode:
            body["speculation"] = self._mode
        if options.ignore_eos:
            body["ignore_eos"] = True
        body |= self._extra_body
        return {name: value for name, value in body.items() if value is not None}

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
                # A chunk may hold several tokens; the usage at the end has their number.
                recorder.tokens(1, text)
        if usage := event.get("usage"):
            if receipt := usage.get("tandem_receipt"):
                parsed = json_format.ParseDict(receipt, common_pb2.Receipt(), ignore_unknown_fields=True)
                _note_receipt(parsed, recorder)
            recorder.prompt_tokens = int(usage["prompt_tokens"])
            recorder.output_tokens = int(usage["completion_tokens"])
