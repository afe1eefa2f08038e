"""Flags and environment of `tandem-gateway`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from tandem_service.channels import MAX_MESSAGE_BYTES
from tandem_service.settings import Port, RedisSettings, Targets


class GatewaySettings(RedisSettings):
    """The gateway listens on two ports, gRPC and HTTP. With Redis, several gateways share the answers that
    clients may resume."""

    grpc_port: Port = 50051
    """port of the gRPC API; 0 takes a free one"""
    http_port: Port = 8000
    """port of the OpenAI API, /health, /metrics and /fleet; 0 takes a free one"""
    model: Path
    """model folder with tandem.json and tokenizer.json"""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """longest text, prompt and answer, in tokens, as of the pods; 0: the model's context"""
    decode: Annotated[Targets, Field(min_length=1)]
    """decode pods, host:port[,host:port...]; a DNS name means all its addresses"""
    prefill: Targets = ()
    """prefill pods, in the same form; none: decode pods compute the prompts"""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """most requests in the queue; more are refused at once with a retry-after"""
    max_in_flight: Annotated[int, Field(ge=1)] = 128
    """most requests on the decode pods at a time"""
    api_keys_file: Path | None = None
    """JSON lines of key_sha256, tenant, slo_classes; unset: no key is required"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """longest time of a request whose client sets no shorter deadline"""
    max_body_bytes: Annotated[int, Field(ge=1024, le=MAX_MESSAGE_BYTES)] = 8 * 1024 * 1024
    """largest request, checked before it is parsed"""
    max_messages: Annotated[int, Field(ge=1)] = 1024
    """most messages in one chat"""
    resume_ttl_s: Annotated[float, Field(ge=0)] = 120.0
    """seconds for which a cut stream can be resumed, or an answer be asked for again by its key; 0: never"""
    resume_max_bytes: Annotated[int, Field(ge=1 << 20)] = 64 << 20
    """memory for such answers; beyond, the oldest are dropped"""
    poll_interval_s: Annotated[float, Field(gt=0)] = 1.0
    """seconds between polls of each pod"""
    failover_wait_s: Annotated[float, Field(ge=0)] = 30.0
    """longest time that a request waits for a decode pod when none is healthy"""

    def listen_port(self) -> int:
        return self.grpc_port
