"""What several replicas may do to one Redis at once, and what they may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio as redis
from tandem_drafting.spans import AcceptedSpan
from tandem_lookahead import store as store_module
from tandem_lookahead.store import (
    START,
    EntryId,
    EntryKind,
    RedisStore,
    StoredSnapshot,
    StoreFullError,
    StoreUnavailableError,
    WrongGenerationError,
)
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.redis_client import RedisAddress
from tandem_service.tasks import end_tasks
from waiting import until, until_async

SPANS = (AcceptedSpan("a", 0, (1, 2, 3)),)
KEY = "acme/rev1/tok1//"
TTL_S = 1000


@pytest.fixture
async def url(fleet) -> str:
    return (await fleet.redis()).url


@pytest.fixture
async def store(url: str) -> AsyncIterator[RedisStore]:
    async with open_store(url) as store:
        yield store


@pytest.fixture
async def chunked(url: str) -> AsyncIterator[RedisStore]:
    """Uploads ten bytes at a time; an upload may last three seconds."""
    async with open_store(url, chunk_bytes=10, upload_s=3) as store:
        yield store


@asynccontextmanager
async def open_store(url: str, **options: int) -> AsyncIterator[RedisStore]:
    defaults = {"stream_length": 1000, "stream_bytes": 1 << 20, "ttl_s": TTL_S}
    store = RedisStore(RedisAddress(url), **{**defaults, **options})
    try:
        await until_async(lambda: is_connected(store))
        yield store
    finally:
        await store.close()


async def is_connected(store: RedisStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailableError:
        return False
    return True


async def entries(store: RedisStore, after: EntryId = START) -> list[store_module.Entry]:
    return await store.read({KEY: after}, block_ms=50, limit=100)


def snapshot(position: str, generation: str = "g1", payload: bytes = b"text") -> StoredSnapshot:
    return StoredSnapshot(payload, f"v{position}", EntryId.parse(position), generation)


async def test_what_is_appended_is_read_by_everybody(store):
    assert await store.generation(KEY, ours="g1") == "g1"
    assert await store.generation(KEY, ours="g2") == "g1"
    await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
    await store.append(KEY, "g1", EntryKind.IMPORT, SPANS)
    assert [(e.kind, e.spans) for e in await entries(store)] == [
        (EntryKind.SPANS, SPANS),
        (EntryKind.IMPORT, SPANS),
    ]
    assert await store.namespaces() == [KEY]


async def test_a_stream_is_bounded(url):
    async with open_store(url, stream_length=100) as store:
        for _ in range(400):
            await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
        async with redis.Redis.from_url(url) as client:
            (stream,) = [key async for key in client.scan_iter("*:stream")]
            assert await client.xlen(stream) <= 250


async def test_a_stream_of_large_entries_is_bounded_by_its_bytes(url):
    large = (AcceptedSpan("a", 0, tuple(range(300, 300 + 20_000))),)  # about 40 kB
    async with open_store(url, stream_bytes=1 << 20) as store, redis.Redis.from_url(url) as client:
        for _ in range(200):
            await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
        for _ in range(60):
            await store.append(KEY, "g1", EntryKind.SPANS, large)
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        assert (1 << 19) < await client.memory_usage(stream, samples=0) < 1.3 * (1 << 20)
        assert (await entries(store))[-1].spans == large, "the newest entries stay"


async def test_every_key_of_a_namespace_expires_and_use_postpones_it(store, url):
    async with redis.Redis.from_url(url) as client:

        async def left_s() -> dict[str, int]:
            keys = [key async for key in client.scan_iter("*acme*")]
            return {key.decode().rpartition(":")[2]: await client.ttl(key) for key in keys}

        await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
        await store.take_lease(KEY, "me", lasting_ms=60_000)
        assert await store.publish(KEY, snapshot("1-0"), "me") == "ok"
        first = await left_s()
        assert set(first) == {"stream", "generation", "snapshot", "compactor"}
        assert all(0 < left <= TTL_S for left in first.values())
        for name in first:
            await client.expire(f"tandem:lookahead:2:{{{KEY}}}:{name}", 10)
        await store.renew(KEY)
        renewed = await left_s()
        assert all(renewed[name] > 10 for name in ("stream", "generation", "snapshot"))
        await store.purge(KEY, "g2")
        assert all(0 < left <= TTL_S for left in (await left_s()).values())


async def test_expired_namespaces_leave_the_set_and_those_of_an_earlier_version_expire(store, url):
    for key in (KEY, "gone/r/t//"):
        await store.append(key, "g1", EntryKind.SPANS, SPANS)
    async with redis.Redis.from_url(url) as client:
        await client.delete(*[key async for key in client.scan_iter("*gone*")])
        for name in ("stream", "generation"):
            await client.persist(f"tandem:lookahead:2:{{{KEY}}}:{name}")
        await store.forget_expired()
        assert await store.namespaces() == [KEY]
        for name in ("stream", "generation"):
            assert await client.ttl(f"tandem:lookahead:2:{{{KEY}}}:{name}") > 0


async def test_the_text_of_an_expired_namespace_leaves_the_disk(fleet):
    process = await fleet.redis()
    text = tuple(range(70_000, 70_050))
    payload = pb.SpanBatch(spans=[pb.Span(token_ids=text)]).SerializeToString()[-100:]
    folder = Path(process.url.removeprefix("unix://")).parent

    def is_on_disk() -> bool:
        return any(payload in path.read_bytes() for path in folder.rglob("*.aof"))

    async with open_store(process.url) as store, redis.Redis.from_url(process.url) as client:
        await store.append(KEY, "g1", EntryKind.SPANS, (AcceptedSpan("a", 0, text),))
        await until(is_on_disk)
        for name in ("stream", "generation"):
            await client.pexpire(f"tandem:lookahead:2:{{{KEY}}}:{name}", 1)
        await asyncio.sleep(0.01)
        await store.forget_expired()
        await until(lambda: not is_on_disk())


async def test_a_full_redis_has_room_again_after_streams_are_halved(url):
    spans = (AcceptedSpan("a", 0, tuple(range(300, 1300))),)
    unbounded = {"stream_length": 1_000_000, "stream_bytes": 1 << 40}
    async with open_store(url, **unbounded) as store, redis.Redis.from_url(url) as client:
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", used + (4 << 20))
        with pytest.raises(StoreFullError):
            for number in range(10_000):
                await store.append(f"tenant{number % 20}/r/t//", "g1", EntryKind.SPANS, spans)
        await store.shrink()
        await store.append(KEY, "g1", EntryKind.SPANS, SPANS)


async def test_after_a_purge_nothing_of_the_time_before_comes_in_or_stays(store, url):
    await store.generation(KEY, ours="g1")
    await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
    (before,) = await entries(store)
    await store.take_lease(KEY, "me", lasting_ms=10_000)
    assert await store.publish(KEY, snapshot(str(before.id)), "me") == "ok"
    await store.purge(KEY, "g2")
    with pytest.raises(WrongGenerationError):
        await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
    await store.take_lease(KEY, "me", lasting_ms=10_000)
    assert await store.publish(KEY, snapshot("9999999999999-0"), "me") == "purged"
    assert await store.latest_snapshot(KEY) is None
    (purge,) = await entries(store)
    assert (purge.kind, purge.generation) == (EntryKind.PURGE, "g2")
    assert purge.id > before.id
    async with redis.Redis.from_url(url) as client:
        values = [await client.dump(key) async for key in client.scan_iter("*")]
    assert not any(b"text" in value or bytes([1, 2, 3]) in value for value in values)


async def test_redis_that_has_lost_its_data_takes_any_generation(store, url):
    await store.generation(KEY, ours="g1")
    async with redis.Redis.from_url(url) as client:
        await client.flushall()
    await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
    assert await store.generation(KEY, ours="g2") == "g1"


async def test_one_replica_at_a_time_holds_the_lease_until_it_expires(store):
    assert await store.take_lease(KEY, "one", lasting_ms=200)
    assert not await store.take_lease(KEY, "two", lasting_ms=200)
    assert await store.take_lease(KEY, "one", lasting_ms=200)  # its holder prolongs it
    await until_async(lambda: store.take_lease(KEY, "two", lasting_ms=200))


async def test_a_holder_that_was_paused_cannot_publish(store, url):
    await store.generation(KEY, ours="g1")
    await store.take_lease(KEY, "paused", lasting_ms=50)
    async with redis.Redis.from_url(url) as client:

        async def has_expired() -> bool:
            return not [key async for key in client.scan_iter("*:compactor")]

        await until_async(has_expired)
    assert await store.publish(KEY, snapshot("5-0"), "paused") == "lease"  # nobody's now
    await store.take_lease(KEY, "next", lasting_ms=10_000)
    assert await store.publish(KEY, snapshot("7-0"), "next") == "ok"
    assert await store.publish(KEY, snapshot("5-0"), "paused") == "lease"
    assert (await store.latest_snapshot(KEY)).entry == (7, 0)


async def test_an_older_snapshot_never_takes_a_newer_one_s_place(store):
    await store.generation(KEY, ours="g1")
    await store.take_lease(KEY, "me", lasting_ms=10_000)
    assert await store.publish(KEY, snapshot("10-5"), "me") == "ok"
    for position, outcome in (("10-4", "newer"), ("9-9", "newer"), ("10-5", "ok"), ("10-6", "ok")):
        assert await store.publish(KEY, snapshot(position), "me") == outcome


async def test_an_unfinished_upload_is_no_snapshot_and_goes_away(chunked, url):
    await chunked.generation(KEY, ours="g1")
    await chunked.take_lease(KEY, "me", lasting_ms=60_000)
    async with redis.Redis.from_url(url) as client:

        async def uploads() -> list[bytes]:
            return [key async for key in client.scan_iter("*:upload:*")]

        dying = asyncio.create_task(chunked.publish(KEY, snapshot("5-0", payload=bytes(1_000_000)), "me"))
        await until_async(uploads)
        await end_tasks([dying])
        assert await chunked.latest_snapshot(KEY) is None

        async def is_gone() -> bool:
            return not await uploads()

        await until_async(is_gone)


async def test_an_upload_that_expires_half_way_is_given_up_and_leaves_nothing(chunked, url):
    await chunked.generation(KEY, ours="g1")
    await chunked.take_lease(KEY, "me", lasting_ms=60_000)
    async with redis.Redis.from_url(url) as client:

        async def expired() -> bool:
            return any([await client.delete(key) async for key in client.scan_iter("*:upload:*")])

        slow = asyncio.create_task(chunked.publish(KEY, snapshot("5-0", payload=bytes(1_000_000)), "me"))
        await until_async(expired)
        assert await slow == "late"
        assert [key async for key in client.scan_iter("*:upload:*")] == []
    assert await chunked.latest_snapshot(KEY) is None


async def test_a_snapshot_of_many_chunks_is_read_as_one_even_while_it_is_replaced(chunked):
    await chunked.generation(KEY, ours="g1")
    await chunked.take_lease(KEY, "me", lasting_ms=60_000)
    payloads = {f"{n}-0": bytes([n]) * 995 for n in range(1, 30)}
    await chunked.publish(KEY, snapshot("1-0", payload=payloads["1-0"]), "me")

    async def replace() -> None:
        for position, payload in payloads.items():
            await chunked.publish(KEY, snapshot(position, payload=payload), "me")

    replacing = asyncio.create_task(replace())
    while not replacing.done():
        found = await chunked.latest_snapshot(KEY)
        assert found.payload == payloads[str(found.entry)]
    await replacing


async def test_a_damaged_entry_is_told_from_a_good_one(store, url):
    await store.append(KEY, "g1", EntryKind.SPANS, SPANS)
    async with redis.Redis.from_url(url) as client:
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        for fields in ({"s": b"\xff\xff"}, {"x": b""}, {"s": b"", "t": b""}, {"p": b"\xff"}):
            await client.xadd(stream, fields)
    kinds = [entry.kind for entry in await entries(store)]
    assert kinds == [EntryKind.SPANS, *[EntryKind.DAMAGED] * 4]
