"""How namespaces divide the memory, and that damaged data in Redis harms nobody else."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st
from tandem_drafting.spans import AcceptedSpan
from tandem_lookahead.corpus import BYTES_PER_SEQUENCE, BYTES_PER_TOKEN, fair_limit
from tandem_lookahead.namespace import namespace_key
from tandem_lookahead.store import EntryKind, RedisStore, StoreUnavailableError
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.redis_client import RedisAddress
from waiting import until_async

ANSWER = tuple(range(100, 120))
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 4000))
def test_who_holds_least_gives_up_last(sizes, total):
    cap = fair_limit(sizes, total)
    held = sum(min(size, cap) for size in sizes)
    assert held <= total
    if sum(sizes) > total:  # no larger cap would do
        assert sum(min(size, cap + 1) for size in sizes) > total


async def test_a_large_tenant_does_not_push_out_a_small_one(fleet):
    room = 1 << 20
    service = await fleet.service(max_bytes=2 * room, max_total_bytes=room)
    small, kept = await fleet.pod(service)
    large, other = await fleet.pod(
        service, namespace=pb.Namespace(tenant="large", model_revision="rev1", tokenizer_hash="tok1")
    )
    small.push("r", 0, ANSWER)
    await fleet.until(lambda: kept.num_tokens == 20)
    count = 3 * room // (200 * BYTES_PER_TOKEN + BYTES_PER_SEQUENCE)
    for number in range(count):
        large.push(f"r{number}", 0, range(200))
    registry = service.pod.server.registry
    held = "tandem_lookahead_corpus_memory_bytes"
    await fleet.until(lambda: other.num_tokens == 200 * count)
    large.push("last", 0, range(200))
    await fleet.until(lambda: 0 < registry.get_sample_value(held) <= room)
    _, late = await fleet.pod(service)
    await fleet.until(lambda: late.num_tokens == 20)


async def test_what_others_write_into_our_stream_harms_nobody(fleet):
    service = await fleet.service()
    sender, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
    async with redis.Redis.from_url(service.redis.url) as client:
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        for fields in ({"s": b"\xff"}, {"p": b"\xff"}, {"nonsense": b"1"}):
            await client.xadd(stream, fields)
    sender.push("r2", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 40)
    registry = service.pod.server.registry
    assert registry.get_sample_value("tandem_lookahead_stream_entries_damaged_total") == 3


OTHER = pb.Namespace(tenant="beta", model_revision="rev1", tokenizer_hash="tok1")


async def write_string(client: redis.Redis, key: bytes) -> None:
    await client.set(key, b"garbage")


async def write_payload(client: redis.Redis, key: bytes) -> None:
    await client.hset(key, "0", b"TLKR\1\0\0\0\2")


async def write_numbers(client: redis.Redis, key: bytes) -> None:
    await client.hset(key, mapping={"chunks": b"many", "ms": b"soon"})


async def write_truncated(client: redis.Redis, key: bytes) -> None:
    payload = await client.hget(key, "0")
    await client.hset(key, "0", payload[: len(payload) // 2])


@pytest.mark.parametrize("write_garbage", [write_string, write_payload, write_numbers, write_truncated])
@pytest.mark.parametrize("stream_is_left", [True, False])
async def test_a_damaged_snapshot_of_one_tenant_does_not_stop_others(fleet, write_garbage, stream_is_left):
    """The damaged namespace starts from its stream, or empty where that is gone; it publishes again."""
    process = await fleet.redis()
    one = await fleet.service(redis_url=process.url, snapshot_interval_s=0.1)
    for namespace in (NAMESPACE, OTHER):
        sender, mirror = await fleet.pod(one, namespace=namespace)
        sender.push("r1", 0, ANSWER)
        await fleet.until(lambda mirror=mirror: mirror.num_tokens == 20)
        await sender.close()
    await one.stop()  # publishes
    async with redis.Redis.from_url(process.url) as client:
        (key,) = [key async for key in client.scan_iter("*acme*:snapshot")]
        if write_garbage is write_string:
            await client.delete(key)
        await write_garbage(client, key)
        if not stream_is_left:
            async for stream in client.scan_iter("*:stream"):
                await client.xtrim(stream, maxlen=0, approximate=False)
        two = await fleet.service(redis_url=process.url, snapshot_interval_s=0.1)
        damaged_sender, damaged = await fleet.pod(two)
        sender, mirror = await fleet.pod(two, namespace=OTHER)
        await fleet.until(lambda: mirror.num_tokens == 20)
        await fleet.until(lambda: damaged.position != "")
        await fleet.until(lambda: damaged.num_tokens == (20 if stream_is_left else 0))
        damaged_sender.push("r2", 0, ANSWER[:7])
        sender.push("r2", 0, ANSWER[:7])
        await fleet.until(lambda: mirror.num_tokens == 27)
        await fleet.until(lambda: damaged.num_tokens == (27 if stream_is_left else 7))
        registry = two.pod.server.registry
        assert registry.get_sample_value("tandem_lookahead_snapshots_rejected_total") == 1
        assert registry.get_sample_value("tandem_lookahead_redis_failures_total") == 0
        await until_async(lambda: client.exists(key))
        published = pb.Snapshot.FromString(await client.hget(key, "0"))
        assert pb.NamespaceCorpus.FromString(published.content).sequences


async def test_a_namespace_without_pods_leaves_memory_and_comes_back(fleet):
    service = await fleet.service(idle_s=0.3, snapshot_interval_s=0.1)
    registry = service.pod.server.registry

    def num_held() -> float:
        return registry.get_sample_value("tandem_lookahead_namespaces")

    sender, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
    await asyncio.sleep(0.6)
    assert num_held() == 1, "a pod uses it"
    await sender.close()
    await fleet.until(lambda: num_held() == 0)
    again, mirror = await fleet.pod(service)
    await fleet.until(lambda: mirror.num_tokens == 20)
    again.push("r2", 0, tuple(range(200, 220)))
    await fleet.until(lambda: mirror.num_tokens == 40)


async def test_namespaces_that_no_pod_uses_do_not_refuse_the_next_one(fleet):
    """300 of tenants and revisions that were used before a restart, and more pods than places after it."""
    process = await fleet.redis()
    store = RedisStore(RedisAddress(process.url), stream_length=100, stream_bytes=1 << 20, ttl_s=1000)
    await until_async(lambda: pings(store))
    for tenant, revision in itertools.product(range(75), range(4)):
        key = namespace_key(pb.Namespace(tenant=f"t{tenant}", model_revision=f"r{revision}"))
        await store.append(key, "g", EntryKind.SPANS, (AcceptedSpan("a", 0, ANSWER),))
    await store.close()
    service = await fleet.service(redis_url=process.url, max_namespaces=4, snapshot_interval_s=0.1)
    for number in range(8):
        namespace = pb.Namespace(tenant=f"t{number}", model_revision="r3")
        client, mirror = await fleet.pod(service, namespace=namespace)
        await fleet.until(lambda mirror=mirror: mirror.num_tokens == 20)
        await client.close()
    registry = service.pod.server.registry
    assert registry.get_sample_value("tandem_lookahead_namespaces") <= 4


async def pings(store: RedisStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailableError:
        return False
    return True


async def test_text_enters_a_redis_that_was_full(fleet):
    """Streams give way, and drafts go on."""
    service = await fleet.service(stream_bytes=1 << 40, stream_length=1_000_000)
    registry = service.pod.server.registry
    sender, mirror = await fleet.pod(service)
    async with redis.Redis.from_url(service.redis.url) as client:
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", used + (2 << 20))
        failures = "tandem_lookahead_redis_failures_total"
        for number in range(2000):
            sender.push(f"r{number}", 0, range(1000 + number, 3000 + number))
            await asyncio.sleep(0.002)
            if registry.get_sample_value(failures):
                break
        assert registry.get_sample_value(failures) > 0
        full = "tandem_lookahead_redis_full_total"
        await fleet.until(lambda: registry.get_sample_value(full) > 0)
        sender.push("last", 0, ANSWER)
        await fleet.until(lambda: mirror.count(ANSWER) == 1)
        await fleet.until(
            lambda: (
                registry.get_sample_value("tandem_lookahead_redis_connected") == 1
                and registry.get_sample_value("tandem_lookahead_backlog_spans") == 0
            )
        )
