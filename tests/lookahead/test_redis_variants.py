"""Redis behind TLS, with users of few rights, and as a cluster: the whole service against each."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis_servers import RedisServer, answers, cluster, tls_door
from tandem_lookahead.store import RedisStore, StoreUnavailableError
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.redis_client import RedisAddress

ANSWER = tuple(range(100, 120))
#: All that the service ever says to Redis, scripts included (docs/lookahead.md).
COMMANDS = """
    ping info client hello select sadd smembers eval get set del exists expire ttl rename srem memory|usage
    hset hget hmget xadd xread xtrim xinfo bgrewriteaof
"""


async def shares_across_replicas(fleet, urls: list[str], **options: object) -> None:
    """Two replicas, two tenants, a snapshot, a restart: what a fleet does in its life."""
    one, two = [
        await fleet.service(redis_url=url, snapshot_interval_s=0.1, min_requests=2, **options) for url in urls
    ]
    for tenant in ("acme", "beta", "gamma"):  # in slots of their own, on a cluster
        namespace = pb.Namespace(tenant=tenant, model_revision="r", tokenizer_hash="t")
        sender, here = await fleet.pod(one, namespace=namespace)
        back, there = await fleet.pod(two, namespace=namespace)
        sender.push("r1", 0, ANSWER)
        back.push("r2", 0, ANSWER)
        await fleet.until(lambda m=(here, there): all(mirror.count(ANSWER) == 1 for mirror in m))
    registry = one.pod.server.registry
    published = "tandem_lookahead_snapshots_published_total"
    other = two.pod.server.registry
    await fleet.until(lambda: registry.get_sample_value(published) + other.get_sample_value(published) >= 3)
    await one.stop()
    await two.stop()
    three = await fleet.service(redis_url=urls[0], min_requests=2, **options)
    _, late = await fleet.pod(three, namespace=namespace)
    await fleet.until(lambda: late.count(ANSWER) == 1)


# --- users


async def test_a_user_that_may_touch_nothing_but_our_keys_will_do(fleet):
    process = await fleet.redis()
    async with redis.Redis.from_url(process.url) as client:
        await answers(client)
        rights = [f"+{command}" for command in COMMANDS.split()]
        user = ("tandem", "on", ">secret", "~tandem:lookahead:*", "-@all", *rights)
        await client.execute_command("ACL", "SETUSER", *user)
        await client.execute_command("ACL", "SETUSER", "default", "off")
    path = process.url.removeprefix("unix://")
    url = f"unix://tandem:secret@{path}"
    await shares_across_replicas(fleet, [url, url])


# --- TLS


@dataclass(frozen=True)
class Certificates:
    """Of a made-up authority, of a server on 127.0.0.1, and of a client."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def of(self, who: str) -> tuple[Path, Path]:
        return self.folder / f"{who}.pem", self.folder / f"{who}.key"

    def make(self) -> None:
        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
        openssl(*new, "/CN=authority", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        for who in ("server", "client"):
            openssl(*new, f"/CN={who}", "-keyout", f"{who}.key", "-out", f"{who}.csr")
            openssl(
                *(
                    "x509",
                    "-req",
                    "-in",
                    f"{who}.csr",
                    "-CA",
                    "ca.pem",
                    "-CAkey",
                    "ca.key",
                    "-CAcreateserial",
                ),
                *("-days", "2", "-extfile", "names", "-out", f"{who}.pem"),
            )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    certificates.make()
    return certificates


@contextlib.asynccontextmanager
async def behind_tls(process: RedisServer, certificates: Certificates) -> AsyncIterator[str]:
    """The URL of a door to the server, which asks for a client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.load_cert_chain(*certificates.of("server"))
    context.verify_mode = ssl.CERT_REQUIRED
    async with tls_door(process.url.removeprefix("unix://"), context) as port:
        yield f"rediss://127.0.0.1:{port}/0"


async def test_tls_with_a_private_authority_and_a_client_s_certificate(fleet, certificates):
    process = await fleet.redis()
    cert, key = certificates.of("client")
    async with behind_tls(process, certificates) as url:
        await shares_across_replicas(
            fleet,
            [url, url],
            redis_ca_file=certificates.ca,
            redis_cert_file=cert,
            redis_key_file=key,
        )
        await fleet.stop()


async def test_a_server_that_nobody_vouches_for_is_not_talked_to(fleet, certificates):
    process = await fleet.redis()
    async with behind_tls(process, certificates) as url:
        for address in (RedisAddress(url), RedisAddress(url, ca_file=certificates.ca)):
            store = RedisStore(address, stream_bytes=1 << 20, ttl_s=1000, stream_length=100)
            with pytest.raises(StoreUnavailableError):
                await store.ping()
            await store.close()


# --- a cluster


@pytest.mark.wide
async def test_a_cluster_of_three(fleet, tmp_path):
    async with cluster(tmp_path) as urls:
        store = RedisStore(RedisAddress(urls[0]), stream_bytes=1 << 20, ttl_s=1000, stream_length=100)
        await store.ping()
        assert store.is_cluster
        await store.close()
        await shares_across_replicas(fleet, urls[:2])
        await fleet.stop()
