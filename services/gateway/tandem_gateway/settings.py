"""Flags and environment of `tandem-gateway`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliToggleFlag
from tandem_service.channels import MAX_MESSAGE_BYTES
from tandem_service.settings import Entries, Port, RedisSettings, Targets
from tandem_service.tls import PemFiles, Role, ServerTls, is_loopback

from tandem_gateway.auth import Caller
from tandem_gateway.request import TenantLimits
from tandem_gateway.tools.detect import FormatSetting


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError if the value is not a host name."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} is not a host name; give NAME or *.DOMAIN without a port; --no-api-keys allows all"
            )
    return hosts


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """ValueError for a value that no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin; give https://host[:port] without a path, or *")
    return origins


_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
#: A field of several host names.
Hosts = Annotated[Entries, AfterValidator(_check_hosts)]


def _check_aliases(aliases: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError for a name that no request can have, or one with a character class."""
    for alias in aliases:
        if not _ALIAS.fullmatch(alias):
            raise ValueError(f"{alias!r} is not a model name; use letters, digits and . _ : / @ + - *")
    return aliases


_ALIAS = re.compile(r"[A-Za-z0-9._:/@+*-]{1,128}")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")
#: A field of several origins.
Origins = Annotated[Entries, AfterValidator(_check_origins)]


class GatewaySettings(RedisSettings):
    """The gateway listens on two ports, gRPC and HTTP. With Redis, several gateways share the answers that
    clients may resume."""

    role = Role.GATEWAY

    grpc_port: Port = 20051
    """port of the gRPC API; 0 takes a free one"""
    http_port: Port = 8000
    """port of the OpenAI API, /dashboard, /health, /metrics and /fleet; 0 takes a free one"""
    model: Path
    """model folder with tandem.json and tokenizer.json"""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """longest text, prompt and answer, in tokens, the same as for the pods; 0: the model's context"""
    chat_template: Path | None = None
    """file of a Jinja template that replaces the model's chat template"""
    generation_config: Literal["auto", "none"] = "auto"
    """sampling of requests that leave it out; auto: as the model's files recommend; none: OpenAI's defaults
    """
    decode: Annotated[Targets, Field(min_length=1)]
    """decode pods, host:port[,host:port...]; a DNS name means all its addresses, k8s://SERVICE:PORT the
    pods of a Kubernetes Service"""
    prefill: Targets = ()
    """prefill pods, in the same form; none: decode pods compute the prompts"""
    max_queue: Annotated[int, Field(ge=0)] = 1024
    """most requests in the queue, with at most 8 Mi prompt tokens; more are refused at once with a
    retry-after"""
    max_in_flight: Annotated[int, Field(ge=1)] = 128
    """most requests on the decode pods at a time"""
    slo_slack: Annotated[float, Field(ge=0)] = 3.0
    """widen objectives to at least this multiple of what the request takes without load; 0: never"""
    slo_ttft_confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.99
    """a request is admitted if this quantile of the predicted time to its first token meets its objective;
    a lower value admits more requests, of which more are late"""
    slo_end_confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """as slo_ttft_confidence, for the end of the request and the ends of requests in the same batch"""
    slo_classes_file: Path | None = None
    """JSON object of SLO classes with ttft_ms, tpot_ms, e2e_ms, strict, waits; the first is the default;
    unset: standard, interactive, chat, batch"""
    api_keys_file: Path | None = None
    """JSON lines of key_sha256, tenant, slo_classes, weight, max_requests, tokens_per_minute, min_ttft_ms,
    min_tpot_ms, min_e2e_ms, operator; read again when it changes; unset: no keys"""
    no_api_keys: CliToggleFlag[bool] = False  # of other flags --no- is the negation
    """serve everyone who reaches the ports, also off loopback"""
    tls_cert: Path | None = None
    """PEM file of the certificate of both public ports; unset: plaintext"""
    tls_key: Path | None = None
    """PEM file of that certificate's key"""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """with keys: largest share that one tenant may take of the places, in flight and in the queue, and of
    --resume-max-bytes"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """longest time of a request whose client sets no shorter deadline"""
    max_body_bytes: Annotated[int, Field(ge=1024, le=MAX_MESSAGE_BYTES)] = 8 * 1024 * 1024
    """largest request, checked before it is parsed; less where the model's context holds less"""
    cors_origins: Origins = ()
    """origins whose pages may call the HTTP API from a browser, https://app.example.com[,...], or * for any;
    unset: none"""
    allowed_hosts: Hosts = ()
    """further names under which clients may call a gateway without keys, NAME or *.DOMAIN[,...], such as a
    reverse proxy's; IP addresses and this machine's names are always allowed"""
    max_connections: Annotated[int, Field(ge=1)] = 1024
    """most connections at once, of HTTP and of gRPC each"""
    max_connection_age_s: Annotated[float, Field(ge=0)] = 300.0
    """age after which a connection accepts no more requests, so that clients spread over new gateways; its
    running answers continue; 0: any age"""
    read_timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """longest time in which a request must have arrived: HTTP headers, HTTP body, gRPC message, each"""
    model_alias: Annotated[Entries, AfterValidator(_check_aliases)] = ()
    """other names of the model in requests, NAME[,NAME...]; * stands for any letters: claude-*,gpt-5*"""
    strict_fields: bool = False
    """refuse fields of a request that have no effect here; unset: the header x-tandem-ignored names them"""
    tool_format: FormatSetting = FormatSetting.AUTO
    """form of the model's tool calls; auto: as its chat template shows"""
    split_reasoning: bool = True
    """show <think>...</think> at an answer's beginning as reasoning_content, if the chat template has it"""
    resume_ttl_s: Annotated[float, Field(ge=0)] = 120.0
    """seconds for which a client can resume a cut stream, or get an answer again by its key; 0: never"""
    resume_max_bytes: Annotated[int, Field(ge=1 << 20)] = 64 << 20
    """memory for these answers; beyond it the oldest without an Idempotency-Key are dropped, and keys refused
    """
    poll_interval_s: Annotated[float, Field(gt=0, le=2)] = 1.0
    """seconds between polls of each pod; at most 2, since predictions ignore reports older than 5 s"""
    failover_wait_s: Annotated[float, Field(ge=0)] = 30.0
    """longest time that a request waits for a decode pod when none is healthy"""
    nice: Annotated[int, Field(ge=-20, le=19)] = 0
    """CPU priority against pods on the same cores, -20 first to 19 last; less than 0 needs CAP_SYS_NICE. With
    any value but 0 the gateway also waits for the end of a piece of the pods' work rather than interrupt it;
    `tandem up` sets -5"""

    @model_validator(mode="after")
    def _check_public_ports(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together; give both or none")
        if self.api_keys_file is not None and self.no_api_keys:
            raise ValueError("--api-keys-file and --no-api-keys exclude each other; give one")
        if self.api_keys_file is None and not self.no_api_keys and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is not loopback and no API keys are required; give --api-keys-file, or "
                "--no-api-keys on a network where everyone may use the models"
            )
        return self

    def public_tls(self) -> ServerTls | None:
        """None: plaintext. Raises TlsFileError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(PemFiles(self.tls_cert, self.tls_key, None))

    def check_certificates(self) -> None:
        super().check_certificates()
        self.public_tls()

    def listen_port(self) -> int:
        return self.grpc_port

    def num_places(self) -> int:
        """Most requests in flight and in the queue together."""
        return self.max_in_flight + self.max_queue

    def tenant_answer_bytes(self) -> int:
        """Most memory of one tenant's kept answers."""
        return round(self.resume_max_bytes * (1.0 if self.api_keys_file is None else self.tenant_share))

    def tenant_limits(self, caller: Caller) -> TenantLimits:
        """The limits of the caller's key; its places default to the tenant share."""
        places = None
        if not caller.is_anyone:
            places = caller.max_requests or max(1, round(self.tenant_share * self.num_places()))
        return TenantLimits(places, caller.tokens_per_minute, caller.weight, caller.waiting_class)
