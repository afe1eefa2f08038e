"""What a pod gets when it joins, returns, or has been purged meanwhile."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import grpc
import grpc.aio
import pytest
import redis.asyncio as redis
from tandem_drafting.lookahead_protocol import SNAPSHOT_CHUNK_BYTES
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_lookahead.namespace import MAX_WAITING_MESSAGES, Follower, FollowerLaggingError
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc

ANSWER = tuple(range(100, 120))
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")
OTHER = pb.Namespace(tenant="beta", model_revision="rev1", tokenizer_hash="tok1")


async def first_answers(fleet, service, count: int, **hello: object) -> list[pb.SyncResponse]:
    """What the service answers to a hello, behind its welcome."""
    message = pb.SyncRequest(hello=pb.SyncHello(namespace=NAMESPACE, **hello))
    async with fleet.stream(service, message) as call:
        welcome = await call.read()
        assert welcome.WhichOneof("message") == "welcome"
        return [await asyncio.wait_for(call.read(), 5) for _ in range(count)]


async def purge(service, tenant: str) -> int:
    async with grpc.aio.insecure_channel(service.target) as channel:
        stub = lookahead_pb2_grpc.LookaheadServiceStub(channel)
        return (await stub.PurgeTenant(pb.PurgeTenantRequest(tenant=tenant))).num_namespaces


async def left_behind(fleet, process) -> GlobalMirror:
    """The mirror, with ANSWER, of a pod that has left a service that has stopped."""
    service = await fleet.service(redis_url=process.url)
    sender, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
    await sender.close()
    await service.stop()
    return mirror


async def test_a_pod_that_returns_gets_deltas_not_the_snapshot_again(fleet):
    service = await fleet.service()
    sender, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
    position = mirror.position
    sender.push("r2", 0, ANSWER[:7])
    await fleet.until(lambda: mirror.num_tokens == 27)
    (delta,) = await first_answers(fleet, service, 1, have_position=position)
    assert [tuple(span.token_ids) for span in delta.delta.spans] == [ANSWER[:7]]
    assert delta.delta.position == mirror.position


async def test_a_restarted_service_goes_on_with_its_pods_where_they_were(fleet):
    process = await fleet.redis()
    mirror = await left_behind(fleet, process)
    two = await fleet.service(redis_url=process.url)
    again, _ = await fleet.pod(two, mirror=mirror)
    again.push("r2", 0, ANSWER[:7])
    (delta,) = await first_answers(fleet, two, 1, have_position=mirror.position)
    assert delta.WhichOneof("message") == "delta"
    await fleet.until(lambda: mirror.num_tokens == 27)


async def test_a_broken_download_goes_on_at_the_chunk_where_it_broke_off(fleet):
    service = await fleet.service()
    sender, mirror = await fleet.pod(service)
    source = random.Random(0)
    text = [source.randrange(16_384, 49_152) for _ in range(900_000)]  # three bytes each
    for offset in range(0, len(text), 50_000):
        sender.push(f"r{offset}", 0, text[offset : offset + 50_000])
    await fleet.until(lambda: mirror.num_tokens == len(text))
    first, second = await first_answers(fleet, service, 2)
    assert (first.snapshot.index, second.snapshot.index, first.snapshot.num_chunks) == (0, 1, 3)
    (third,) = await first_answers(
        fleet, service, 1, snapshot_version=first.snapshot.version, snapshot_chunks=2
    )
    assert third.snapshot.index == 2
    whole = b"".join(answer.snapshot.payload for answer in (first, second, third))
    late = GlobalMirror()
    late.apply_snapshot(whole, third.snapshot.position)
    assert late.num_tokens == len(text)
    assert len(whole) > 2 * SNAPSHOT_CHUNK_BYTES
    (other,) = await first_answers(fleet, service, 1, snapshot_version="another", snapshot_chunks=2)
    assert other.snapshot.index == 0


async def test_a_purge_empties_every_replica_every_mirror_and_redis_and_no_other_tenant(fleet):
    process = await fleet.redis()
    services = [await fleet.service(redis_url=process.url, snapshot_interval_s=0.1) for _ in range(2)]
    purged = [asyncio.Event() for _ in services]

    async def forget(event: asyncio.Event) -> None:
        event.set()

    pods = [
        await fleet.pod(service, on_purge=partial(forget, event))
        for service, event in zip(services, purged, strict=True)
    ]
    neighbour, spared = await fleet.pod(services[0], namespace=OTHER)
    absent, left = await fleet.pod(services[1])
    pods[0][0].push("r1", 0, ANSWER)
    neighbour.push("r1", 0, ANSWER)
    mirrors = [mirror for _, mirror in pods]
    await fleet.until(lambda: all(m.num_tokens == 20 for m in (*mirrors, left, spared)))
    await absent.close()
    assert await purge(services[0], "acme") == 1
    await fleet.until(lambda: all(mirror.num_tokens == 0 for mirror in mirrors))
    assert all(event.is_set() for event in purged)
    assert left.num_tokens == 20
    # It was away, and its last spans had not even been sent.
    returned, _ = await fleet.pod(services[1], mirror=left)
    await fleet.until(lambda: left.num_tokens == 0)
    _, late = await fleet.pod(services[1])
    await fleet.until(lambda: late.position != "")
    assert (late.num_tokens, spared.num_tokens) == (0, 20)
    async with redis.Redis.from_url(process.url) as client:
        held = {key: await client.dump(key) async for key in client.scan_iter("*acme*")}
    assert not any(bytes(ANSWER) in value for value in held.values())
    # The tenant begins anew.
    returned.push("r2", 0, ANSWER)
    await fleet.until(lambda: all(mirror.num_tokens == 20 for mirror in (*mirrors, left, late)))


async def test_a_purge_finds_a_replica_that_was_away_from_redis(fleet):
    process = await fleet.redis()
    mirror = await left_behind(fleet, process)
    two = await fleet.service(redis_url=process.url)
    assert await purge(two, "acme") == 1
    async with redis.Redis.from_url(process.url) as client:  # not even the stream tells of it any more
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        await client.xtrim(stream, maxlen=0, approximate=False)
    # This mirror is the only one that still has it, and asks a replica that never heard of a purge.
    three = await fleet.service(redis_url=process.url)
    await fleet.pod(three, mirror=mirror)
    await fleet.until(lambda: mirror.num_tokens == 0)


async def test_without_redis_a_purge_is_refused_for_it_would_not_last(fleet, tmp_path):
    service = await fleet.service(redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await purge(service, "acme")
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "Redis" in refusal.value.details()


@pytest.mark.parametrize(("num_messages", "num_tokens"), [(MAX_WAITING_MESSAGES + 1, 1), (60, 20_000)])
async def test_a_pod_that_does_not_read_loses_its_stream_and_what_waited(num_messages, num_tokens):
    follower = Follower(pb.SyncHello())
    spans = [AcceptedSpan("r", 0, tuple(range(num_tokens)))]
    for _ in range(num_messages):
        follower.put_spans(spans)
    assert follower.is_lagging
    with pytest.raises(FollowerLaggingError):
        await anext(follower.messages())


async def test_a_pod_that_reads_gets_any_amount():
    follower = Follower(pb.SyncHello())
    messages = follower.messages()
    for _ in range(60):
        follower.put_spans([AcceptedSpan("r", 0, tuple(range(20_000)))])
        assert (await anext(messages)).HasField("delta")
    assert not follower.is_lagging
