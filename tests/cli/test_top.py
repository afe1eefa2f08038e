"""`tandem top` reads and prints the samples of a gateway."""

import asyncio
import hashlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from tandem_cli.top import Feed, SeveralGatewaysError
from tandem_gateway.auth import ApiKeys
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.routes import dashboard_routes
from tandem_gateway.dashboard.rows import ClassRow, EndedRow, PodRow, Sample, TtftRow
from tandem_gateway.dashboard.sampler import INTERVAL_S
from tandem_gateway.edge.http_server import HttpServer
from tandem_gateway.errors import GatewayError, presentation

TANDEM = str(Path(sys.executable).parent / "tandem")
START = 1_800_000_000.0


def ended(name: str, **fields: object) -> EndedRow:
    empty = dict.fromkeys(EndedRow._fields, 0)
    texts = {"tenant": "acme", "slo_class": "chat", "outcome": "ok", "cause": "", "miss_reason": ""}
    times = {"queue_s": 0.25, "prefill_s": 0.25, "decode_s": 0.5, "ttft_s": 0.5, "e2e_s": 1.0}
    pods = {"prefill_pod": "p-0", "decode_pod": "d-0", "drafted": {}, "accepted": {}}
    return EndedRow(**{**empty, **texts, **times, **pods, "request_id": name, **fields})


def sample(number: int) -> Sample:
    """Each second two requests of class chat end, of which one misses its SLO, and 60 tokens are goodput."""
    lost = "UNAVAILABLE: gone" if number >= 70 else ""
    chat = ClassRow(2 * number, number, number, 60 * number, 90 * number)
    return Sample(
        number=number, time=START + number, classes={"chat": chat}, misses={"prefill": number}, queued=3,
        prefill=2, decode=1, admitted=2 * number, begun=2 * number, ended=2 * number, predictions=2 * number,
        predictions_held=number, ttft=TtftRow(2, 0.3, 0.2, 0.4), drafted={"prompt": 10 * number},
        accepted={"prompt": 5 * number}, steps=30 * number,
        failovers={"crashed": 2} if number > 80 else {}, prefill_retries=0,
        pods=[
            PodRow("decode", "d-0", "a:1", "", 50, 25, 100, 4, 5, 6, 0.1),
            PodRow("decode", "d-1", "b:1", lost, 0, 0, 100, 0, 0, 0, 0.1),
        ],
        open=[], requests=[ended(f"r-{number}", cause="prefill")],
    )  # fmt: skip


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable]:
    """`await serve(history)` serves a history as a gateway does; returns the address. With several histories
    their gateways take turns."""
    servers = []

    async def refuse(request, error):
        status = presentation(error).http_status
        return JSONResponse({"error": {"message": str(error)}}, status_code=status)

    def gateway(history: History, keys: ApiKeys | None) -> Starlette:
        routes = dashboard_routes(history, keys or ApiKeys.load(None), gateway_id="gw-0", model="tiny")
        return Starlette(routes=routes, exception_handlers={GatewayError: refuse})

    async def start(*histories: History, keys: ApiKeys | None = None) -> str:
        turns = itertools.cycle([gateway(history, keys) for history in histories])

        async def app(scope, receive, send):
            await next(turns)(scope, receive, send)

        server = HttpServer(
            app, "127.0.0.1", 0, is_known=lambda _: True, max_connections=8, header_timeout_s=5.0
        )
        await server.start()
        servers.append(server)
        return f"http://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        await server.stop(0.0)


def filled(num_samples: int) -> History:
    history = History()
    for number in range(num_samples):
        history.append(sample(number))
    return history


async def top(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TANDEM_API_KEY"}
    return await asyncio.to_thread(
        subprocess.run, [TANDEM, "top", "--once", "--target", url, *more],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip


def line(text: str, start: str) -> list[str]:
    """The words of the first line that begins with this."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


async def test_the_display_has_the_numbers_of_the_samples(serve):
    shown = await top(await serve(filled(701)))
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout
    assert line(text, "gateway")[1:3] == ["gw-0", "tiny"]
    chat = line(text, "chat")
    # requests/s, tokens/s, goodput/s, attainment, burn over 5 and 30 minutes, missed
    assert chat[-8:] == ["2.0", "90", "60", "50.0", "%", "50.0", "50.0", "700"]
    assert "queued 3" in text and "prefill 2" in text and "decode 1" in text
    assert "decode 2 (crashed 2), prefill 0" in text
    assert "within p90 in the last minute: 50.0 %" in text
    assert line(text, "d-0")[2:4] == ["████████▒▒▒▒····", "50.0"]
    assert line(text, "d-1")[1:4] == ["lost", "UNAVAILABLE:", "gone"]
    assert line(text, "prompt") == ["prompt", "600", "300", "50.0", "%"]
    newest = next(line for line in text.splitlines() if "r-700" in line)
    bar = newest.split()[-1]
    # Queue and prefill take a quarter each, decode a half; a bar is rounded to characters.
    assert bar.count("·") == bar.count("▒") > 10
    assert bar.count("█") == pytest.approx(2 * bar.count("·"), abs=1)


async def test_a_feed_reads_each_sample_once_and_restarts_with_the_gateway(serve):
    history = filled(5)
    feed = Feed(await serve(history))
    await asyncio.to_thread(feed.poll)
    history.append(sample(5))
    await asyncio.to_thread(feed.poll)
    assert [one["number"] for one in feed.samples] == list(range(6))
    feed._start = "of the gateway before"
    await asyncio.to_thread(feed.poll)
    assert [one["number"] for one in feed.samples] == list(range(6))
    assert feed.before(2.0)["number"] == 3
    assert feed.before(1000.0)["number"] == 0


async def test_a_feed_reports_several_gateways_behind_one_address(serve):
    first, second = filled(5), filled(3)
    feed = Feed(await serve(first, second))
    await asyncio.to_thread(feed.poll)
    began = time.monotonic()
    with pytest.raises(SeveralGatewaysError, match=r"several gateways answer at .*--target"):
        await asyncio.to_thread(feed.poll)
    assert time.monotonic() - began > INTERVAL_S
    assert not feed.samples, "of two gateways"
    with pytest.raises(SeveralGatewaysError):
        await asyncio.to_thread(feed.poll)


async def test_a_missing_sample_and_a_missing_gateway_are_reported(serve):
    shown = await top(await serve(History()))
    assert (shown.returncode, shown.stdout.strip()) == (0, "the gateway has no sample yet")
    refused = await top("127.0.0.1:9")
    assert refused.returncode == 1
    assert "no gateway answers at http://127.0.0.1:9" in refused.stderr
    assert "--target" in refused.stderr


async def test_tandem_top_needs_an_operators_key(serve, tmp_path):
    path = tmp_path / "keys.jsonl"
    digest = hashlib.sha256(b"ops-key").hexdigest()
    path.write_text(f'{{"key_sha256": "{digest}", "tenant": "ops", "operator": true}}\n')
    url = await serve(filled(2), keys=ApiKeys.load(path))
    refused = await top(url)
    assert refused.returncode == 1
    assert "--api-key" in refused.stderr
    assert (await top(url, "--api-key", "ops-key")).returncode == 0
