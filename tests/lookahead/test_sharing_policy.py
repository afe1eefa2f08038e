"""What of a tenant's text its pods get to see, over real gRPC and a real Redis server."""

from __future__ import annotations

import asyncio
import random

import redis.asyncio as redis
from tandem_proto.v1 import lookahead_pb2 as pb
from waiting import run_ready_tasks

ANSWER = tuple(range(100, 120))
#: Adds its 8 tokens to a mirror.
MARK = tuple(range(900, 908))
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")
HELLO = pb.SyncRequest(hello=pb.SyncHello(namespace=NAMESPACE))


async def holds(fleet, service, num_tokens: int) -> None:
    """Until the service has merged so much text."""
    registry = service.pod.server.registry
    await fleet.until(lambda: registry.get_sample_value("tandem_lookahead_corpus_tokens") == num_tokens)


async def caught_up(fleet, sender, *mirrors) -> None:
    """Until the mirrors have all that their services have merged: deltas keep their order, MARK is last."""
    sender.push("mark one", 0, MARK)
    sender.push("mark two", 0, MARK)
    await fleet.until(lambda: all(mirror.count(MARK) == 1 for mirror in mirrors))


async def test_text_is_shared_once_two_requests_have_generated_it(fleet):
    service = await fleet.service(min_requests=2)
    sender, own = await fleet.pod(service)
    other, mirror = await fleet.pod(service)
    sender.push("r1", 0, (1, 2, *ANSWER))
    await holds(fleet, service, 22)
    await caught_up(fleet, other, own, mirror)
    assert (own.num_tokens, mirror.num_tokens) == (8, 8)  # not even in its own pod
    other.push("r2", 0, (3, *ANSWER))
    await fleet.until(lambda: mirror.count(ANSWER) == own.count(ANSWER) == 1)
    assert (own.num_tokens, mirror.num_tokens) == (28, 28)


async def test_neither_snapshots_nor_deltas_nor_replicas_tell_what_one_request_said(fleet):
    process = await fleet.redis()
    one = await fleet.service(redis_url=process.url, min_requests=2)
    two = await fleet.service(redis_url=process.url, min_requests=2)
    sender, _ = await fleet.pod(one)
    _, there = await fleet.pod(two)
    for number in range(3):
        sender.push(f"r{number}", 0, (*range(1000 * number, 1000 * number + 30), *ANSWER))
    await holds(fleet, two, 150)
    _, late = await fleet.pod(two)
    await caught_up(fleet, sender, there, late)
    assert there.count(ANSWER) == late.count(ANSWER) == 2
    assert (there.num_tokens, late.num_tokens) == (48, 48)
    await one.stop()
    again = await fleet.service(redis_url=process.url, min_requests=2)
    _, restarted = await fleet.pod(again)
    await fleet.until(lambda: restarted.num_tokens == 48)
    assert restarted.count(ANSWER) == 2
    # Text from before the restart counts after it.
    sender_there, _ = await fleet.pod(again)
    sender_there.push("r9", 0, tuple(range(2000, 2030)))
    await fleet.until(lambda: restarted.count(tuple(range(2000, 2030))) == 1)
    assert restarted.num_tokens == 78


async def test_a_stricter_service_takes_back_what_it_would_not_have_shared(fleet):
    process = await fleet.redis()
    lax = await fleet.service(redis_url=process.url, min_requests=1)
    sender, mirror = await fleet.pod(lax)
    sender.push("r1", 0, ANSWER)
    await fleet.until(lambda: mirror.num_tokens == 20)
    await sender.close()
    await lax.stop()
    strict = await fleet.service(redis_url=process.url, min_requests=2)
    await fleet.pod(strict, mirror=mirror)
    await fleet.until(lambda: mirror.num_tokens == 0)


async def test_prompts_stay_in_the_pod_unless_their_tenant_wants_them_shared(fleet):
    service = await fleet.service(min_requests=2, share_prompts=("open",))
    closed, opened = NAMESPACE, pb.Namespace(tenant="open", model_revision="rev1", tokenizer_hash="tok1")
    for namespace, expected in ((closed, 0), (opened, 1)):
        pods = [await fleet.pod(service, namespace=namespace) for _ in range(2)]
        if expected:
            await fleet.until(lambda pods=pods: all(client.wants_prompts for client, _ in pods))
        for number, (client, _) in enumerate(pods):
            client.push_prompt(f"r{number}", ANSWER)
            client.push(f"r{number}", 0, range(500, 510))
        mirrors = [mirror for _, mirror in pods]
        await fleet.until(lambda ms=mirrors: all(m.count(range(500, 510)) == 1 for m in ms))
        await caught_up(fleet, client, *mirrors)
        assert [mirror.count(ANSWER) for mirror in mirrors] == [expected, expected]


async def test_a_prompt_that_comes_uninvited_is_dropped_and_counted(fleet):
    service = await fleet.service()
    _, mirror = await fleet.pod(service)
    span = pb.Span(run="a", token_ids=ANSWER, is_prompt=True)
    spans = pb.SpanBatch(spans=[span, pb.Span(run="a", token_ids=[7, 8])])
    async with fleet.stream(service, HELLO, pb.SyncRequest(spans=spans)) as call:
        await call.read()
        await fleet.until(lambda: mirror.count((7, 8)) == 1)
    registry = service.pod.server.registry
    assert registry.get_sample_value("tandem_lookahead_prompts_refused_total") == 1
    assert mirror.num_tokens == 2


async def test_no_mirror_ever_holds_what_only_another_tenant_s_requests_made(fleet):
    """Two tenants with overlapping text, two replicas: every n-gram of a mirror is from its own tenant."""
    process = await fleet.redis()
    services = [
        await fleet.service(redis_url=process.url, min_requests=2, snapshot_interval_s=0.1) for _ in range(2)
    ]
    source = random.Random(3)
    phrases = [tuple(source.choices(range(50), k=12)) for _ in range(30)]
    said: dict[str, list[tuple[int, ...]]] = {"acme": [], "evil": []}
    mirrors = {"acme": [], "evil": []}
    clients = {"acme": [], "evil": []}
    for tenant in said:
        namespace = pb.Namespace(tenant=tenant, model_revision="rev1", tokenizer_hash="tok1")
        for service in services:
            client, mirror = await fleet.pod(service, namespace=namespace)
            clients[tenant].append(client)
            mirrors[tenant].append(mirror)
    for number in range(60):
        for tenant, mine in (("acme", phrases[:20]), ("evil", phrases[10:])):
            text = sum(source.choices(mine, k=3), ())
            said[tenant].append(text)
            clients[tenant][number % 2].push(f"{number}", 0, text)
        await run_ready_tasks()
    for service in services:
        await holds(fleet, service, 2 * 60 * 36)
    for tenant in said:
        namespace = pb.Namespace(tenant=tenant, model_revision="rev1", tokenizer_hash="tok1")
        _, late = await fleet.pod(services[0], namespace=namespace)
        mirrors[tenant].append(late)
        await caught_up(fleet, clients[tenant][0], *mirrors[tenant])
        assert all(mirror.num_tokens > 500 for mirror in mirrors[tenant])
    for tenant, other in (("acme", "evil"), ("evil", "acme")):
        for length in (4, 8):
            own = {text[i : i + length] for text in said[tenant] for i in range(37 - length)}
            foreign = {text[i : i + length] for text in said[other] for i in range(37 - length)} - own
            sample = source.sample(sorted(foreign), 200)
            for mirror in mirrors[tenant]:
                assert sum(mirror.count(ngram) for ngram in sample) == 0


async def test_no_message_and_no_stream_entry_names_a_request(fleet):
    service = await fleet.service(min_requests=2)
    names: list[str] = []
    async with fleet.stream(service, HELLO) as call:
        assert (await call.read()).WhichOneof("message") == "welcome"
        sender, mirror = await fleet.pod(service)
        for number in range(40):
            sender.push(f"secret{number}", 0, [5 * number] * number + [*ANSWER])
            await run_ready_tasks()
        await holds(fleet, service, 40 * 20 + sum(range(40)))
        await caught_up(fleet, sender, mirror)
        assert mirror.count(ANSWER) == 39
        position = ""
        while position != mirror.position:
            response = await asyncio.wait_for(call.read(), 5)
            names += [span.run for span in response.delta.spans]
            position = response.delta.position or response.snapshot.position
    assert len(names) >= 40
    assert not any("secret" in name for name in names)
    async with redis.Redis.from_url(service.redis.url) as client:
        (stream,) = [key async for key in client.scan_iter("*:stream")]
        assert b"secret" not in b"".join(fields[b"s"] for _, fields in await client.xrange(stream))
