"""Trials of a running system: each probe sends small requests of its own.

certificates    the certificate that each pod presents
kv_path         a prompt through each prefill and decode pod, compared with the decode pod alone
redis_rights    the commands that gateways and the lookahead service send, on the probe's own keys
shared_answers  an answer of one gateway, resumed at another
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, RedisError
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_channel, open_public_channel
from tandem_service.discovery import parse_target
from tandem_service.redis_client import NO_ANSWER, connect, is_cluster
from tandem_service.tls import PodTls, Role, is_due

from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.system import Gateway, Pod, System, describe_error

Probe = Callable[[System], AsyncIterator[Finding]]

_CONNECT_TIMEOUT_S = 5.0
#: Time limit of a request on a slow and busy machine.
_REQUEST_TIMEOUT_S = 60.0
#: A gateway writes an answer to Redis after it has sent it.
_STORE_WAIT_S, _STORE_LOOKS = 0.2, 10
#: Ordinary tokens in every vocabulary.
_TOKENS = range(10, 90)
_ANSWER_TOKENS = 4


async def certificates(system: System) -> AsyncIterator[Finding]:
    """Certificates have a third of their time left. Failed handshakes are findings of `reachable`."""
    tls = system.access.tls
    if tls is None:
        return
    for pod in system.pods:
        if pod.error:
            continue
        try:
            not_before, not_after = await asyncio.to_thread(_validity, pod, tls)
        except (OSError, TimeoutError):  # the pod answered a moment ago
            continue
        if is_due(not_before, not_after):
            yield Finding(
                pod.where,
                f"Its certificate ends at {not_after:%Y-%m-%d %H:%M} UTC; two thirds of its time are over.",
                "Issue a new one (`tandem certificates`); pods read it without a restart.",
                Severity.WARNING,
            )


def _validity(pod: Pod, tls: PodTls) -> tuple[datetime.datetime, datetime.datetime]:
    """Start and end of the validity of the pod's certificate. Raises OSError."""
    from cryptography import x509

    target = parse_target(pod.target)
    name = pod.role.dns_name
    with (
        socket.create_connection((target.host, target.port), _CONNECT_TIMEOUT_S) as raw,
        tls.client_context().wrap_socket(raw, server_hostname=name) as secure,
    ):
        leaf = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
        return leaf.not_valid_before_utc, leaf.not_valid_after_utc


async def kv_path(system: System) -> AsyncIterator[Finding]:
    """KV arrives and is exact. Each prefill pod and each decode pod takes part in at least one trial."""
    prefills = [pod for pod in system.of(Role.PREFILL) if pod.is_serving]
    decodes = [pod for pod in system.of(Role.DECODE) if pod.is_serving]
    if not prefills or not decodes:
        return
    for index in range(max(len(prefills), len(decodes))):
        prefill, decode = prefills[index % len(prefills)], decodes[index % len(decodes)]
        if prefill.status.kv_layout == decode.status.kv_layout:  # else a finding of kv_layout
            for finding in await _try_pair(system, prefill, decode):
                yield finding


async def _try_pair(system: System, prefill: Pod, decode: Pod) -> list[Finding]:
    where = f"KV from {prefill.where} to {decode.where}"
    status = decode.status
    length = max(status.local_prefill_tokens, status.idle_prefill_tokens) + status.block_size + 1
    if length + _ANSWER_TOKENS > min(status.max_model_len, prefill.status.max_model_len):
        what = f"Not tested: decode pods compute prompts below {length} tokens, and longer ones"
        remedy = "Lower --local-prefill-tokens and --idle-prefill-tokens, or serve without prefill pods."
        return [Finding(where, f"{what} exceed --max-model-len.", remedy, Severity.WARNING)]
    prompt = random.Random(secrets.token_bytes(8)).choices(_TOKENS, k=length)
    try:
        receipt, digest = await _decode(system, decode, prompt, [prefill.target])
        _, digest_alone = await _decode(system, decode, prompt, [])
    except grpc.aio.AioRpcError as error:
        remedy = "Read the decode pod's log."
        if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            remedy = "Give the certificate of a gateway: only gateways may send requests to decode pods."
        elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            remedy = (
                "If `tandem top` shows waiting requests, repeat without load; else read the decode pod's log."
            )
        return [Finding(where, f"The trial failed: {describe_error(error)}.", remedy)]
    if receipt.prefill_pod != prefill.status.pod_id or not receipt.transfer_bytes:
        what = f"the decode pod computed the prompt itself ({receipt.prefill_retries} failed attempts)."
        remedy = (
            f"Let {decode.target} reach {prefill.target}, and the prefill pod the decode pod's --kv-host and "
            "--kv-port; both need one KV layout. If only large packets are lost, the pods' MTU is larger "
            "than that of the network between them."
        )
        return [Finding(where, f"No KV arrived, and {what}", remedy)]
    if digest != digest_alone:
        what = f"The answer from this KV has the digest {digest}, and the one of the decode pod alone"
        remedy = "Give both pods the same model, --dtype, --quantization and kind of processor."
        return [Finding(where, f"{what} {digest_alone}.", remedy)]
    return []


async def _decode(
    system: System, pod: Pod, prompt: Sequence[int], targets: Sequence[str]
) -> tuple[common_pb2.Receipt, str]:
    """The receipt and a digest of the tokens. Raises AioRpcError."""
    request = decode_pb2.DecodeRequest(
        request_id=f"doctor-{secrets.token_hex(8)}",
        # Two tenants, so that the second trial does not find the first one's prompt in the prefix cache.
        tenant="tandem-doctor" if targets else "tandem-doctor-alone",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True, seed=0, detokenize=False
        ),
        prefill_targets=targets,
        speculation="off",
        decode_retries=1,  # the text of such a request is not shared
        due_seconds=_REQUEST_TIMEOUT_S,
    )
    tokens: list[int] = []
    async with open_channel(pod.target, system.access.tls, Role.DECODE) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Decode(request, timeout=_REQUEST_TIMEOUT_S):
            tokens += response.chunk.token_ids
            receipt = response.finished.receipt
    digest = hashlib.blake2b(b",".join(b"%d" % token for token in tokens), digest_size=8)
    return receipt, digest.hexdigest()


async def redis_rights(system: System) -> AsyncIterator[Finding]:
    """Redis permits what tandem_gateway.answers.answer_store and tandem_lookahead.store need."""
    if system.redis is None:
        return
    where = f"Redis {_without_password(system.redis.url)}"
    try:
        client = await connect(system.redis)
    except NO_ANSWER as error:
        yield Finding(
            where,
            f"It does not answer: {_first_line(error)}.",
            "Start it, let this machine reach it, or correct the URL, its password and --redis-ca-file.",
        )
        return
    try:
        if refused := [text async for text in _refused(client)]:
            yield Finding(
                where,
                f"Its user may not do what gateways and the lookahead service need: {', '.join(refused)}.",
                "Allow its user all commands but admin ones on ~tandem:* (ACL SETUSER).",
            )
        if (policy := await _eviction_policy(client)) not in ("", "noeviction"):
            yield Finding(
                where,
                f"Its maxmemory-policy is {policy}, which drops text and answers without an error.",
                "Set maxmemory-policy to noeviction.",
                Severity.WARNING,
            )
    except NO_ANSWER as error:
        yield Finding(where, f"It stopped answering: {_first_line(error)}.", "Look at its log.")
    finally:
        await client.aclose()


async def _refused(client: Any) -> AsyncIterator[str]:
    """Commands that Redis refuses. Raises the errors of NO_ANSWER."""
    name = f"doctor:{secrets.token_hex(8)}"
    script = "return redis.call('HSET', KEYS[1], 'owner', ARGV[1])"
    trials: tuple[tuple[str, Callable[[str], Awaitable[object]]], ...] = (
        ("SET", lambda key: client.set(key, "1", px=10_000)),
        ("GET", lambda key: client.get(key)),
        ("EXISTS", lambda key: client.exists(key)),
        ("EVAL", lambda key: client.eval(script, 1, f"{key}:hash", "1")),
        ("HMGET", lambda key: client.hmget(f"{key}:hash", ("owner",))),
        ("RPUSH", lambda key: client.rpush(f"{key}:list", "1")),
        ("LRANGE", lambda key: client.lrange(f"{key}:list", 0, -1)),
        ("SADD", lambda key: client.sadd(f"{key}:set", "1")),
        ("XADD", lambda key: client.xadd(f"{key}:stream", {"d": "1"})),
        ("XREAD", lambda key: client.xread({f"{key}:stream": "0"}, count=1)),
        ("PEXPIRE", lambda key: client.pexpire(f"{key}:hash", 10_000)),
        ("DEL", lambda key: _delete(client, key)),
    )
    for prefix in ("tandem:answer:", "tandem:gateway:", "tandem:lookahead:2:"):
        for command, attempt in trials:
            try:
                await attempt(prefix + name)
            except RedisError as error:
                if not _is_refusal(error):
                    raise
                yield f"{command} {prefix}* ({_first_line(error)})"


async def _delete(client: Any, key: str) -> None:
    # One by one: in a cluster they are on different servers.
    for suffix in ("", ":hash", ":list", ":set", ":stream"):
        await client.delete(key + suffix)


def _is_refusal(error: RedisError) -> bool:
    """A script's refusal is a plain ResponseError, which only its text distinguishes."""
    kinds = (NoPermissionError, ReadOnlyError, OutOfMemoryError)
    return isinstance(error, kinds) or "permission" in str(error).lower()


async def _eviction_policy(client: Any) -> str:
    """Redis' maxmemory-policy; "" if it may not be read, or a cluster has several."""
    if is_cluster(client):
        return ""
    with contextlib.suppress(RedisError):
        return str((await client.info("memory")).get("maxmemory_policy", ""))
    return ""


async def shared_answers(system: System) -> AsyncIterator[Finding]:
    gateways = system.answering_gateways
    if len(gateways) < 2 or not any(pod.is_serving for pod in system.of(Role.DECODE)):
        return
    for first, second in zip(gateways, [*gateways[1:], gateways[0]], strict=True):
        where = f"{first.where} and {second.where}"
        try:
            event_id = await _first_event(system, first)
            if event_id and not await _can_resume(system, second, event_id):
                yield Finding(
                    where,
                    f"An answer of {first.target} cannot be resumed at {second.target}.",
                    "Give all gateways one --redis-url, or --resume-ttl-s 0 to disable resuming.",
                )
        except grpc.aio.AioRpcError as error:
            yield Finding(where, f"The trial failed: {describe_error(error)}.", "Read the gateway's log.")


async def _first_event(system: System, gateway: Gateway) -> str:
    """Id of the first event of a complete short answer; "" if the gateway keeps none. Raises AioRpcError."""
    request = gateway_pb2.GenerateRequest(
        text="a",
        sampling=common_pb2.SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
    )
    event_ids = [response.chunk.event_id async for response in _generate(system, gateway, request)]
    return event_ids[0] if event_ids else ""


async def _can_resume(system: System, gateway: Gateway, event_id: str) -> bool:
    request = gateway_pb2.GenerateRequest(last_event_id=event_id)
    for _ in range(_STORE_LOOKS):
        try:
            async for _response in _generate(system, gateway, request):
                return True
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        await asyncio.sleep(_STORE_WAIT_S)
    return False


async def _generate(
    system: System, gateway: Gateway, request: gateway_pb2.GenerateRequest
) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    access = system.access
    async with open_public_channel(gateway.target, access.ca_file) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Generate(request, timeout=_REQUEST_TIMEOUT_S, metadata=access.metadata):
            yield response


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _first_line(error: BaseException) -> str:
    return ((str(error) or type(error).__name__).splitlines() or [""])[0].rstrip(".")


PROBES: tuple[Probe, ...] = (certificates, kv_path, redis_rights, shared_answers)
