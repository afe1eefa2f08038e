"""How the room for all text is divided, and that no mishap ends the sharing."""

from __future__ import annotations

import pytest
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st
from redis_servers import answers
from tandem_lookahead.hub import fair_cap
from tandem_lookahead.text import BYTES_PER_RUN, BYTES_PER_TOKEN
from tandem_proto.v1 import lookahead_pb2 as pb

pytestmark = pytest.mark.drafts

ANSWER = tuple(range(100, 120))


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 4000))
def test_who_holds_least_gives_up_last(sizes, total):
    cap = fair_cap(sizes, total)
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
    count = 3 * room // (200 * BYTES_PER_TOKEN + BYTES_PER_RUN)
    for number in range(count):
        large.push(f"r{number}", 0, range(200))
    registry = service.pod.server.registry
    held = "tandem_lookahead_forest_memory_bytes"
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
    async with redis.Redis.from_url(service.pod.redis.url) as client:
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        for fields in ({"s": b"\xff"}, {"p": b"\xff"}, {"nonsense": b"1"}):
            await client.xadd(stream, fields)
    sender.push("r2", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 40)
    registry = service.pod.server.registry
    assert registry.get_sample_value("tandem_lookahead_stream_entries_damaged_total") == 3


async def test_a_name_that_is_no_namespace_s_harms_nobody(fleet):
    process = await fleet.redis()
    async with redis.Redis.from_url(process.url) as client:
        await answers(client)
        await client.sadd("tandem:lookahead:2:namespaces", "nonsense")
    service = await fleet.service(redis_url=process.url)
    sender, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
