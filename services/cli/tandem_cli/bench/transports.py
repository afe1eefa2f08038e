"""Transports: gRPC `Chat` and HTTP `/v1/chat/completions`, both streaming."""

from __future__ import annotations

import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import cast

import grpc
import grpc.aio
import httpx
from google.protobuf import json_format
from tandem_core.codec import slo_from_proto, slo_to_proto
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_channel
from tandem_service.interceptors import RETRY_AFTER_KEY

from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import Promise, Recorder, Speculation
from tandem_cli.bench.requests import Request
from tandem_cli.targets import key_metadata


class SendError(Exception):
    """The request failed; `status` is a gRPC code name or "HTTP <code>".

    retry_after_s: the server's retry-after; None if it sent none.
    """

    def __init__(self, status: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


_NS_PER_S = 1_000_000_000


def _temperature(options: BenchOptions, prompt: Prompt) -> float:
    return options.temperature if prompt.temperature is None else prompt.temperature


class Transport(ABC):
    """Sends requests. Cancelling `send` cancels the request on the server."""

    @abstractmethod
    async def send(self, request: Request, recorder: Recorder) -> None:
        """Send one request and record its events. Raises SendError."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class GrpcTransport(Transport):
    def __init__(self, target: str, options: BenchOptions) -> None:
        self._options = options
        self._channel = open_public_channel(target, options.ca)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def send(self, request: Request, recorder: Recorder) -> None:
        options, prompt = self._options, request.prompt
        message = gateway_pb2.ChatRequest(
            model=options.model,
            messages=[
                gateway_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in prompt.messages
            ],
            sampling=common_pb2.SamplingParams(
                max_tokens=request.max_tokens,
                temperature=_temperature(options, prompt),
                top_p=prompt.top_p,
                seed=options.seed + prompt.seed_offset,
                ignore_eos=options.ignore_eos,
            ),
            slo_class=request.slo.name,
            speculation=options.speculation or "",
            slo=slo_to_proto(request.slo) if request.sends_objectives else None,
        )
        metadata = key_metadata(request.tenant.key or options.api_key)
        try:
            async for response in self._stub.Chat(message, metadata=metadata):
                if response.WhichOneof("event") == "end":
                    recorder.end()
                    note_receipt(response.end.receipt, recorder)
                elif response.chunk.token_ids:
                    recorder.tokens(len(response.chunk.token_ids), response.chunk.text)
        except grpc.aio.AioRpcError as error:
            trailers = dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ()))
            retry_after_ms = _number(trailers.get(RETRY_AFTER_KEY, ""))
            retry_after_s = None if retry_after_ms is None else retry_after_ms / 1000
            raise SendError(error.code().name, error.details() or "", retry_after_s) from error

    async def close(self) -> None:
        await self._channel.close(None)


def _number(text: str) -> float | None:
    """The number; None for anything but a number >= 0."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None


def note_receipt(receipt: common_pb2.Receipt, recorder: Recorder) -> None:
    recorder.prompt_tokens = receipt.prompt_tokens
    recorder.output_tokens = receipt.output_tokens
    recorder.speculation = Speculation(
        receipt.decode_steps,
        receipt.drafted_tokens,
        receipt.accepted_tokens,
        dict(receipt.accepted_by_source),
        receipt.hit_steps,
    )
    recorder.promise = Promise(
        ttft_s=receipt.ttft_ns / _NS_PER_S,
        e2e_s=receipt.e2e_ns / _NS_PER_S,
        queue_s=receipt.queue_ns / _NS_PER_S,
        slo=slo_from_proto(receipt.slo),
        met=receipt.slo_met,
        miss_reason=receipt.slo_miss_reason,
        miss_cause=receipt.slo_miss_cause,
        widened=receipt.slo_widened,
        ttft_p50_s=_seconds(receipt.predicted_ttft_p50_ns),
        ttft_p90_s=_seconds(receipt.predicted_ttft_p90_ns),
        e2e_p50_s=_seconds(receipt.predicted_e2e_p50_ns),
        e2e_p90_s=_seconds(receipt.predicted_e2e_p90_ns),
    )


def _seconds(predicted_ns: int) -> float | None:
    """The prediction in seconds; None if there is none."""
    return predicted_ns / _NS_PER_S if predicted_ns else None


class HttpTransport(Transport):
    """OpenAI's protocol with server-sent events; other servers send no receipts."""

    def __init__(
        self,
        base_url: str,
        options: BenchOptions,
        extra_body: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """extra_body: fields that replace those of the body, for other servers; None removes a field."""
        self._options = options
        self._extra_body = extra_body
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            verify=True if options.ca is None else ssl.create_default_context(cafile=str(options.ca)),
        )

    async def send(self, request: Request, recorder: Recorder) -> None:
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json=self._body(request), headers=self._headers(request)
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    retry_after_s = _retry_after_s(response.headers)
                    raise SendError(f"HTTP {response.status_code}", text[:500], retry_after_s)
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        self._take_event(line.removeprefix("data:").strip(), recorder)
        except httpx.HTTPError as error:
            raise SendError(type(error).__name__, str(error)) from error

    async def close(self) -> None:
        await self._client.aclose()

    def _headers(self, request: Request) -> dict[str, str]:
        """The key, and the objectives if they differ from those of the class."""
        headers = {}
        if key := request.tenant.key or self._options.api_key:
            headers["Authorization"] = f"Bearer {key}"
        if request.sends_objectives:
            slo = request.slo
            for name, limit_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)):
                if limit_s:
                    headers[f"x-slo-{name}-ms"] = f"{1000 * limit_s:g}"
        return headers

    def _body(self, request: Request) -> dict[str, object]:
        options, prompt = self._options, request.prompt
        body: dict[str, object] = {
            "model": options.model,
            "messages": [{"role": turn.role, "content": turn.content} for turn in prompt.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "temperature": _temperature(options, prompt),
            "seed": options.seed + prompt.seed_offset,
        }
        # Sent only if given, because other servers may refuse unknown fields.
        if request.slo.name:
            body["slo_class"] = request.slo.name
        if prompt.top_p is not None:
            body["top_p"] = prompt.top_p
        if options.speculation:
            body["speculation"] = options.speculation
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
                # A chunk may hold several tokens; the final usage has their number.
                recorder.tokens(1, text)
        if usage := event.get("usage"):
            if receipt := usage.get("tandem_receipt"):
                parsed = json_format.ParseDict(receipt, common_pb2.Receipt(), ignore_unknown_fields=True)
                note_receipt(parsed, recorder)
            recorder.prompt_tokens = int(usage["prompt_tokens"])
            recorder.output_tokens = int(usage["completion_tokens"])


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """OpenAI's header in milliseconds, else HTTP's in seconds; ignores dates."""
    retry_after_ms = _number(headers.get("retry-after-ms", ""))
    return _number(headers.get("retry-after", "")) if retry_after_ms is None else retry_after_ms / 1000
