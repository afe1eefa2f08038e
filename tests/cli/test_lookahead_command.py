"""`tandem lookahead` against real services: commands and error messages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis_servers import RedisServer
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_lookahead.main import LookaheadPod
from tandem_lookahead.settings import LookaheadSettings
from tandem_proto.v1 import lookahead_pb2 as pb
from waiting import until

TANDEM = str(Path(sys.executable).parent / "tandem")
ANSWER = tuple(range(100, 120))


class Cluster:
    """A service with its own Redis server, and a decode pod's client of tenant acme."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)
        self.pod = LookaheadPod(LookaheadSettings(redis_url=self.redis.url, pod_id="la0", drain_s=1.0))
        self.mirror = GlobalMirror()
        self.client: LookaheadClient | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.pod.server.port}"

    async def start(self) -> None:
        await self.redis.start()
        await self.pod.start()
        registry = self.pod.server.registry
        await until(lambda: registry.get_sample_value("tandem_lookahead_redis_connected") == 1)
        namespace = pb.Namespace(tenant="acme", model_revision="0123456789abcdef", tokenizer_hash="t")
        self.client = LookaheadClient(self.target, namespace, "pod", self.mirror)
        self.client.start()
        await until(lambda: self.mirror.position != "")

    async def say_twice(self) -> None:
        for number in range(2):
            self.client.push(f"r{number}", 0, (number, *ANSWER))
        await until(lambda: self.mirror.count(ANSWER) == 1)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        await self.pod.server.stop()
        await self.pod.close()
        await self.redis.stop()


@pytest.fixture
async def clusters(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Cluster]]:
    both = Cluster(tmp_path / "old"), Cluster(tmp_path / "new")
    try:
        for cluster in both:
            await cluster.start()
        yield both
    finally:
        for cluster in both:
            await cluster.close()


async def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [TANDEM, "lookahead", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )


async def test_a_warm_namespace_moves_to_a_new_cluster_and_is_purged_in_the_old(clusters, tmp_path):
    old, new = clusters
    await old.say_twice()
    shown = await tandem("stats", "--target", old.target)
    assert "Redis" in shown.stdout
    (row,) = [line.split() for line in shown.stdout.splitlines() if "acme" in line]
    assert row[:6] == ["acme", "0123456789ab", "2", "42", "20", "0.0"]
    file = str(tmp_path / "acme.snapshot")
    assert (await tandem("export", file, "--tenant", "acme", "--target", old.target)).returncode == 0
    imported = await tandem("import", file, "--target", new.target)
    assert "imported 20 tokens" in imported.stderr
    await until(lambda: new.mirror.count(ANSWER) == 1)
    assert (await tandem("import", file, "--target", new.target)).returncode == 0  # no effect
    purged = await tandem("purge", "acme", "--yes", "--target", old.target)
    assert purged.stdout == "removed 1 namespace of tenant acme\n"
    await until(lambda: old.mirror.num_tokens == 0)
    assert new.mirror.num_tokens == 20


async def test_errors_are_one_sentence(clusters, tmp_path):
    old, new = clusters
    await old.say_twice()
    file = tmp_path / "acme.snapshot"
    await tandem("export", str(file), "--tenant", "acme", "--target", old.target)
    good = file.read_bytes()
    for payload, words in (
        (b"junk", "damaged"),
        (good[:-3], "damaged"),
        (good[:-1] + b"\xff", "digest"),
    ):
        file.write_bytes(payload)
        refused = await tandem("import", str(file), "--target", new.target)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
        assert "Traceback" not in refused.stderr
    assert new.mirror.num_tokens == 0
    for arguments, words in (
        (("stats", "--target", "127.0.0.1:1"), "--target"),
        (("export", str(file), "--tenant", "nobody", "--target", old.target), "nobody"),
        (("purge", "nobody", "--yes", "--target", old.target), "nobody"),
        (("import", "/nonexistent/x", "--target", old.target), "/nonexistent/x"),
        (("purge", "acme", "--target", old.target), "Aborted"),
    ):
        refused = await tandem(*arguments)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
        assert "Traceback" not in refused.stderr
    assert old.mirror.count(ANSWER) == 1
