"""The service over real gRPC and a real Redis server: what pods can rely on."""

from __future__ import annotations

import random

import grpc
import grpc.aio
import pytest
import redis.asyncio as redis
from otlp_collector import collecting
from tandem_drafting.lookahead_protocol import SNAPSHOT_CHUNK_BYTES
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc

ANSWER = tuple(range(100, 120))


async def status(service) -> pb.GetLookaheadStatusResponse:
    async with grpc.aio.insecure_channel(service.target) as channel:
        stub = lookahead_pb2_grpc.LookaheadServiceStub(channel)
        return await stub.GetLookaheadStatus(pb.GetLookaheadStatusRequest())


def metric(service, name: str) -> float:
    return service.pod.server.registry.get_sample_value(f"tandem_lookahead_{name}")


async def test_what_one_pod_accepts_another_can_draft(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER[:10])
    sender.push("r1", 10, ANSWER[10:])
    await fleet.until(lambda: mirror.count(ANSWER[8:12]) == 1)  # across the two spans
    assert mirror.count(ANSWER[:1]) == 1
    assert mirror.count((*ANSWER[:1], 7)) == 0


async def test_a_pod_that_joins_later_gets_a_snapshot(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    _, witness = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: witness.count(ANSWER[:8]) == 1)
    _, late = await fleet.pod(service)
    await fleet.until(lambda: late.count(ANSWER[:8]) == 1)
    assert late.position == witness.position != ""


async def test_a_pod_that_returns_gets_only_what_it_missed(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    client, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    await client.close()
    _, witness = await fleet.pod(service)
    sender.push("r2", 0, ANSWER)
    await fleet.until(lambda: witness.count(ANSWER[:4]) == 2)
    await fleet.pod(service, mirror=mirror)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 2)


async def test_a_resent_span_counts_once(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    for _ in range(3):
        sender.push("r1", 0, ANSWER)
    sender.push("r2", 0, ANSWER[:5])
    await fleet.until(lambda: mirror.count(ANSWER[:5]) == 2)
    assert mirror.count(ANSWER) == 1
    assert (await status(service)).namespaces[0].tokens_total == 25


async def test_nothing_crosses_namespaces(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    _, friend = await fleet.pod(service)
    others = [
        await fleet.pod(service, namespace=other)
        for other in (
            pb.Namespace(tenant="evil", model_revision="rev1", tokenizer_hash="tok1"),
            pb.Namespace(tenant="acme", model_revision="rev2", tokenizer_hash="tok1"),
            pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1", lora="x"),
            pb.Namespace(tenant="acme/rev1", model_revision="tok1"),
        )
    ]
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: friend.count(ANSWER[:4]) == 1)
    for client, mirror in others:
        client.push("own", 0, (7, 8))  # arrives behind whatever the service has sent before
        await fleet.until(lambda mirror=mirror: mirror.count((7, 8)) == 1)
        assert mirror.num_tokens == 2


async def test_a_restarted_service_still_has_the_text(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    await service.stop()
    again = await fleet.service()
    _, late = await fleet.pod(again)
    await fleet.until(lambda: late.count(ANSWER[:8]) == 1)


async def test_pods_reconnect_and_deliver_what_they_accepted_meanwhile(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    port = service.pod.server.port
    await service.stop()
    await fleet.until(lambda: not sender.connected)
    sender.push("r1", 0, ANSWER)
    again = await fleet.service(port=port)
    _, mirror = await fleet.pod(again)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    assert sender.dropped == 0


async def test_redis_killed_under_traffic_is_not_felt_and_heals(fleet):
    service = await fleet.service()
    sender, _ = await fleet.pod(service)
    receiver, mirror = await fleet.pod(service)
    for number in range(5):
        sender.push(f"before{number}", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 5)
    old_pid = fleet.kill_redis(service.redis)
    for number in range(20):
        sender.push(f"during{number}", 0, ANSWER)
        await fleet.until(lambda number=number: mirror.count(ANSWER[:4]) > 5 + number)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 25)  # whether Redis is back or not
    await fleet.until(lambda: service.redis.pid not in (None, old_pid))
    await fleet.until(lambda: metric(service, "redis_connected") == 1)
    sender.push("after", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 26)
    assert sender.connected and receiver.connected
    # What was merged meanwhile reached the stream: another replica on this Redis sees all of it.
    other = await fleet.service(redis_url=service.redis.url)
    _, there = await fleet.pod(other)
    await fleet.until(lambda: there.count(ANSWER[:4]) == 26)


async def test_without_redis_from_the_start_pods_still_share(fleet, tmp_path):
    service = await fleet.service(redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False)
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    answer = await status(service)
    assert (answer.redis_connected, answer.spans_dropped_total) == (False, 0)


async def test_a_full_backlog_drops_the_oldest_and_counts_it(fleet, tmp_path):
    service = await fleet.service(
        redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False, backlog_tokens=50
    )
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    for number in range(5):
        sender.push(f"r{number}", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 5)
    assert (await status(service)).spans_dropped_total == 3


async def test_two_replicas_on_one_redis_share_their_text(fleet):
    process = await fleet.redis()
    one, two = await fleet.service(redis_url=process.url), await fleet.service(redis_url=process.url)
    sender, here = await fleet.pod(one)
    back_sender, there = await fleet.pod(two)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: there.count(ANSWER[:4]) == 1)
    back_sender.push("r2", 0, ANSWER)
    await fleet.until(lambda: here.count(ANSWER[:4]) == 2)


async def test_one_replica_publishes_and_a_damaged_snapshot_is_ignored(fleet):
    process = await fleet.redis()
    one = await fleet.service(redis_url=process.url, snapshot_interval_s=0.1)
    sender, _ = await fleet.pod(one)
    _, mirror = await fleet.pod(one)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    await fleet.until(lambda: metric(one, "snapshots_published_total") == 1)
    await one.stop()
    client = redis.Redis.from_url(process.url)
    (key,) = [key async for key in client.scan_iter("*:snapshot")]
    payload = bytearray(await client.hget(key, "0"))
    payload[-5] ^= 0xFF
    await client.hset(key, "0", bytes(payload))
    await client.aclose()
    two = await fleet.service(redis_url=process.url)
    _, late = await fleet.pod(two)
    await fleet.until(lambda: late.count(ANSWER[:4]) == 1)  # from the stream, which has it all
    assert metric(two, "snapshots_rejected_total") == 1


async def test_a_snapshot_outlives_the_stream_it_was_made_from(fleet):
    process = await fleet.redis()
    one = await fleet.service(redis_url=process.url)
    sender, _ = await fleet.pod(one)
    _, mirror = await fleet.pod(one)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    await one.stop()  # publishes
    client = redis.Redis.from_url(process.url)
    (stream,) = [key async for key in client.scan_iter("*:stream")]
    await client.xtrim(stream, maxlen=0, approximate=False)
    await client.aclose()
    two = await fleet.service(redis_url=process.url)
    _, late = await fleet.pod(two)
    await fleet.until(lambda: late.count(ANSWER[:4]) == 1)


async def test_redis_that_loses_its_data_costs_no_text(fleet):
    process = await fleet.redis()
    service = await fleet.service(redis_url=process.url)
    sender, _ = await fleet.pod(service)
    _, mirror = await fleet.pod(service)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    async with redis.Redis.from_url(process.url) as client:
        await client.flushall()
    fleet.kill_redis(process)
    await fleet.until(lambda: metric(service, "redis_failures_total") >= 1)
    await fleet.until(lambda: metric(service, "redis_connected") == 1)
    sender.push("r2", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 2)
    _, late = await fleet.pod(service)
    await fleet.until(lambda: late.count(ANSWER[:4]) == 2)


async def test_a_large_snapshot_arrives_in_chunks(fleet):
    service = await fleet.service()
    sender, mirror = await fleet.pod(service)
    source = random.Random(0)
    text = [source.randrange(16_384, 49_152) for _ in range(400_000)]  # three bytes each
    for offset in range(0, len(text), 50_000):
        sender.push(f"r{offset}", 0, text[offset : offset + 50_000])
    await fleet.until(lambda: mirror.num_tokens == len(text))
    _, late = await fleet.pod(service)
    await fleet.until(lambda: late.num_tokens == len(text))
    assert len(late.snapshot()[0]) > SNAPSHOT_CHUNK_BYTES
    assert all(late.count(text[i : i + 8]) == 1 for i in range(0, len(text) - 8, 50_000))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([pb.SyncRequest(spans=pb.SpanBatch())], "hello"),
        ([pb.SyncRequest(hello=pb.SyncHello(namespace=pb.Namespace(tenant="x" * 600)))], "namespace"),
        (
            [
                pb.SyncRequest(hello=pb.SyncHello()),
                pb.SyncRequest(spans=pb.SpanBatch(spans=[pb.Span(run="r", token_ids=[2**31])])),
            ],
            "token_ids",
        ),
    ],
)
async def test_a_stream_that_breaks_the_protocol_is_refused_by_name(fleet, tmp_path, messages, field):
    service = await fleet.service(redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False)
    async with fleet.stream(service, *messages) as call:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in call:
                pass
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refusal.value.details()


async def test_a_namespace_too_many_is_refused(fleet, tmp_path):
    service = await fleet.service(
        redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False, max_namespaces=1
    )
    await fleet.pod(service)
    second = pb.SyncRequest(hello=pb.SyncHello(namespace=pb.Namespace(tenant="second")))
    async with fleet.stream(service, second) as call:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in call:
                pass
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_mirror_survives_a_poorer_service(fleet, tmp_path):
    rich = await fleet.service()
    sender, mirror = await fleet.pod(rich)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
    await sender.close()
    poor = await fleet.service(redis_url=f"unix://{tmp_path}/nobody.sock", expect_redis=False)
    client, _ = await fleet.pod(poor, mirror=mirror)
    client.push("r2", 0, (7, 8))
    await fleet.until(lambda: mirror.count((7, 8)) == 1)
    assert mirror.count(ANSWER[:4]) == 1


async def test_a_traced_request_shows_when_its_text_was_stored(fleet, monkeypatch):
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        service = await fleet.service()
        sender, mirror = await fleet.pod(service)
        sender.push("r1", 0, ANSWER)
        sender.push_trace(f"00-{trace_id}-{span_id}-01")
        await fleet.until(lambda: mirror.count(ANSWER[:8]) == 1)
        sender.push_trace("malformed")
        sender.push_trace(f"00-{trace_id}-{span_id}-00")  # not sampled
        sender.push("r2", 0, ANSWER)
        await fleet.until(lambda: mirror.count(ANSWER[:8]) == 2)
        await fleet.stop()
    server = collector.only("lookahead service")
    assert (server.trace_id, server.parent_id, server.service) == (trace_id, span_id, "tandem-lookahead")
    assert server.attributes == {"tandem.lookahead.spans": 1, "tandem.lookahead.redis": True}
    assert collector.names_below(server) == ["store text"]
    collector.assert_stages_add_up()
