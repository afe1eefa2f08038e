"""The rendered manifests as processes, under load (the process kubelet of tests/helpers)."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from kubelet import overlay
from kubelet.cluster import Cluster
from stream_load import Answer, Tally, ask, load
from tandem_cli import models
from tandem_core.errors import ModelLoadError
from tandem_core.model.registry import DEFAULT_MODEL
from tandem_proto.v1 import decode_pb2, decode_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(600)]
PROMPTS, LEAST_TOKENS = 3, 512


class Loaded:
    """A running cluster, and the answers that it gave before anything happened to it."""

    def __init__(self, cluster: Cluster, expected: list[Answer]) -> None:
        self.cluster = cluster
        self.expected = expected

    def gateways(self) -> list[str]:
        return [f"{self.cluster.service_address('tandem-gateway')}:20051"]

    async def under_load(self, step, seed: int = 1) -> None:
        """Runs the step while two clients stream; no answer may fail or change, and no pod be killed."""
        tally, rng = Tally(), random.Random(seed)
        num_ended = len(self.cluster.ended)
        clients = [
            asyncio.create_task(load(self.gateways, self.expected, tally, rng, LEAST_TOKENS))
            for _ in range(2)
        ]
        await asyncio.sleep(2.0)
        await step()
        tally.is_over = True
        await asyncio.gather(*clients)
        assert tally.failures == []
        assert tally.counts["changed"] == 0
        assert tally.counts["answers"] > 0
        ended = self.cluster.ended[num_ended:]
        assert ended, "the step replaced no pod"
        assert [pod.name for pod in ended if pod.was_killed] == []


def prepared_model() -> Path:
    try:
        model = models.obtain(DEFAULT_MODEL)
    except ModelLoadError as error:
        pytest.skip(str(error))
    models.prepare_weights(model, "auto", "auto")
    return model


@asynccontextmanager
async def running(
    folder: Path, network: int, start: Callable[[Cluster], Awaitable[None]]
) -> AsyncIterator[Loaded]:
    cluster = Cluster(folder, Path(sys.prefix) / "bin", network=network, paths={})
    await cluster.start()
    try:
        await start(cluster)
        await cluster.until_rolled_out()
        loaded = Loaded(cluster, [])
        rng = random.Random(0)
        loaded.expected = [await ask(loaded.gateways, index, rng, LEAST_TOKENS) for index in range(PROMPTS)]
        assert all(answer.tokens and not answer.failure for answer in loaded.expected)
        yield loaded
    finally:
        await cluster.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Loaded]:
    """The overlay dev with two pods of each role, applied by kubectl."""
    settings = overlay.small(prepared_model())
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "overlay").mkdir()

    async def start(cluster: Cluster) -> None:
        overlay.manifests(folder / "overlay", settings)
        await cluster.kubectl("apply", "--server-side", "--validate=false", "-k", str(folder / "overlay"))
        for role in ("decode", "prefill", "lookahead", "gateway"):
            await cluster.kubectl("-n", "tandem", "rollout", "status", f"deployment/tandem-{role}")

    async with running(folder, 78, start) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", ["gateway", "decode", "prefill", "lookahead"])
async def test_a_role_rolls_under_load_without_a_failed_or_changed_answer(loaded: Loaded, role: str) -> None:
    async def roll() -> None:
        loaded.cluster.restart(f"tandem-{role}", reason="test")
        await loaded.cluster.until_rolled_out()

    await loaded.under_load(roll)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_is_drained_under_load(loaded: Loaded) -> None:
    async def drain() -> None:
        await loaded.cluster.drain("node-b")
        await loaded.cluster.until_rolled_out()
        loaded.cluster.uncordon("node-b")

    await loaded.under_load(drain)


@pytest.mark.asyncio(loop_scope="module")
async def test_decode_goes_to_zero_and_wakes_under_load(loaded: Loaded) -> None:
    async def scale() -> None:
        for count in (0, 2):
            loaded.cluster.scale("tandem-decode", count)
            await asyncio.sleep(0.1)
            await loaded.cluster.until_rolled_out()

    await loaded.under_load(scale)


@pytest.mark.asyncio(loop_scope="module")
async def test_kubectl_restarts_deletes_and_drains_under_load(loaded: Loaded) -> None:
    cluster = loaded.cluster

    async def steps() -> None:
        await cluster.kubectl("-n", "tandem", "rollout", "restart", "deployment/tandem-decode")
        await cluster.kubectl("-n", "tandem", "rollout", "status", "deployment/tandem-decode")
        await cluster.kubectl("-n", "tandem", "delete", "pod", cluster.of("tandem-prefill")[0].name)
        await cluster.until_rolled_out()
        await cluster.kubectl("drain", "node-b", "--timeout=120s")
        await cluster.kubectl("uncordon", "node-b")
        await cluster.until_rolled_out()

    await loaded.under_load(steps)


async def test_with_tls_a_role_rolls_and_renewed_certificates_are_taken(tmp_path: Path) -> None:
    settings = overlay.small(prepared_model())
    (tmp_path / "overlay").mkdir()
    manifests = overlay.manifests(tmp_path / "overlay", settings, ("two-of-each", "tls"))

    async def renew(cluster: Cluster) -> None:
        address = cluster.service_address("tandem-redis")
        await cluster.apply([*manifests, *overlay.tls_secrets(tmp_path / "tls", address)])

    async def start(cluster: Cluster) -> None:
        await cluster.apply([item for item in manifests if item["kind"] == "Service"])
        await renew(cluster)

    async with running(tmp_path, 80, start) as loaded:
        cluster = loaded.cluster

        async def roll() -> None:
            before = set(cluster.pods)
            await renew(cluster)
            # The next rollout's pods have other certificates than those whose peers they are.
            for role in ("decode", "gateway"):
                cluster.restart(f"tandem-{role}", reason="test")
            await cluster.until_rolled_out()
            kept = {pod.workload for pod in before & set(cluster.pods)}
            assert kept == {"tandem-prefill", "tandem-lookahead", "tandem-redis"}

        await loaded.under_load(roll)
        plain = decode_pb2_grpc.DecodeServiceStub
        target = f"{cluster.of('tandem-decode')[0].address}:21200"
        async with grpc.aio.insecure_channel(target) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await plain(channel).GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=5.0)
