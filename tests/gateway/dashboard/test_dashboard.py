"""The dashboard's samples, access to them, and the files of its page."""

import asyncio
import hashlib
import json
import time

import grpc
import pytest
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_gateway.dashboard.ended import SHOWN_PER_SECOND, EndedRequests
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.rows import Sample
from tandem_gateway.errors import Outcome
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2
from waiting import pause_async, until_async

DATA = "/dashboard/data"
FILES = (
    "",
    "style.css",
    "main.js",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
    "vendor/uPlot.LICENSE",
)


def rows(data: dict, sample: dict, name: str) -> list[dict]:
    """Rows of a sample by the names of their columns."""
    return [dict(zip(data["about"]["columns"][name], row, strict=True)) for row in sample[name]]


async def data_until(front, is_there, **params):
    """Reads until the newest sample is as wanted; returns the answer."""
    found = None

    async def check() -> bool:
        nonlocal found
        await pause_async(0.05)
        found = (await front.http.get(DATA, params=params)).json()
        return bool(found["samples"]) and is_there(found["samples"][-1])

    await until_async(check)
    return found


async def chat(front, **fields):
    return await front.openai.chat.completions.create(
        model="", messages=[{"role": "user", "content": "a secret order"}], **fields
    )


async def test_a_sample_shows_what_the_metrics_count(pods, gateway):
    front = await gateway(await pods(free_blocks=60))
    for _ in range(3):
        await chat(front)
    data = await data_until(front, lambda sample: sample["ended"] == 3)
    sample = data["samples"][-1]
    classes = {
        name: dict(zip(data["about"]["columns"]["classes"], row, strict=True))
        for name, row in sample["classes"].items()
    }
    assert classes["standard"] == {
        "received": 3, "met": 3, "missed": 0, "goodput_tokens": 9, "output_tokens": 9,
    }  # fmt: skip
    assert await front.metric('tandem_slo_requests_met_total{slo_class="standard"}') == 3
    assert (sample["queued"], sample["prefill"], sample["decode"]) == (0, 0, 0)
    assert (sample["admitted"], sample["begun"]) == (3, 3)
    assert sample["accepted"] == {"prompt": 6}
    assert sample["drafted"] == {"prompt": 9}
    (pod,) = rows(data, sample, "pods")
    assert (pod["pod_id"], pod["role"], pod["trouble"], pod["kv_blocks"]) == ("d-0", "decode", "", 100)


async def test_requests_are_shown_without_their_texts(pods, gateway):
    front = await gateway(await pods())
    answer = await chat(front, extra_headers={"x-request-id": "mine"})
    data = await data_until(front, lambda sample: sample["ended"] == 1, since=0)
    shown = [row for sample in data["samples"] for row in rows(data, sample, "requests")]
    assert [(row["request_id"], row["outcome"], row["cause"]) for row in shown] == [("mine", "ok", "")]
    receipt = answer.usage.tandem_receipt
    assert shown[0]["ttft_s"] == pytest.approx(receipt["ttft_ns"] / 1e9, abs=1e-3)
    assert (shown[0]["output_tokens"], shown[0]["decode_pod"]) == (3, "d-0")
    text = json.dumps(data)
    assert "secret" not in text
    assert "Hello" not in text


async def test_a_running_request_is_in_its_stage(pods, gateway):
    pod = await pods(pause_s=1.5)
    front = await gateway(pod, max_in_flight=1)
    running = asyncio.create_task(chat(front))
    await pod.started.wait()
    waiting = asyncio.create_task(chat(front))

    def begun(sample):
        return sample["queued"] == 1 and sample["decode"] == 1

    data = await data_until(front, begun)
    first, second = rows(data, data["samples"][-1], "open")
    assert first["queued_s"] < first["ttft_s"] < first["age_s"]
    assert first["output_tokens"] >= 1
    assert second["queued_s"] is None and second["ttft_s"] is None
    prefilling = [sample for sample in data["samples"] if sample["prefill"] == 1]
    assert prefilling
    for task in (running, waiting):
        task.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)


async def test_stages_count_sequences_and_ended_counts_only_admitted_ones(pods, gateway):
    pod = await pods(pause_s=1.5)
    front = await gateway(pod, max_in_flight=3, max_queue=1)
    running = asyncio.create_task(chat(front, n=3))
    await pod.started.wait()
    waiting = asyncio.create_task(chat(front, n=2))
    data = await data_until(front, lambda sample: sample["decode"])
    prefilling = [one for one in data["samples"] if one["prefill"]]
    assert {(one["prefill"], one["decode"]) for one in prefilling} <= {(3, 0)}
    sample = data["samples"][-1]
    assert (sample["queued"], sample["prefill"], sample["decode"]) == (2, 0, 3)
    refused = await front.http.post("/v1/completions", json={"prompt": "a"})
    invalid = await front.http.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
    assert (refused.status_code, invalid.status_code) == (429, 400)
    waiting.cancel()
    await front.until_metric('tandem_requests_total{outcome="cancelled"}', 2)
    data = await data_until(front, lambda sample: not sample["queued"])
    assert data["samples"][-1]["ended"] == 0
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    await data_until(front, lambda sample: sample["ended"] == sample["admitted"] == 3)


async def test_a_move_to_another_pod_is_shown(pods, gateway):
    first = await pods("d-0", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=1, free_blocks=90)
    front = await gateway(first, await pods("d-1", free_blocks=10))
    await chat(front)
    data = await data_until(front, lambda sample: sample["ended"] == 1, since=0)
    assert data["samples"][-1]["failovers"] == {"crashed": 1}
    (ended,) = (row for sample in data["samples"] for row in rows(data, sample, "requests"))
    assert (ended["decode_pod"], ended["decode_retries"]) == ("d-1", 1)
    await first.stop()

    def is_gone(sample):
        return any(row[:2] == ["decode", "d-0"] and row[3] for row in sample["pods"])

    await data_until(front, is_gone)


async def test_only_an_operators_key_shows_requests_of_all_tenants(pods, gateway, tmp_path):
    lines = [
        {"key_sha256": hashlib.sha256(b"acme-key").hexdigest(), "tenant": "acme"},
        {"key_sha256": hashlib.sha256(b"ops-key").hexdigest(), "tenant": "ops", "operator": True},
    ]
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    front = await gateway(await pods(), api_keys_file=path)

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return (await front.http.get(DATA, headers=headers)).status_code

    assert [await status(key) for key in ("", "wrong", "acme-key", "ops-key")] == [401, 401, 403, 200]
    refused = await front.http.get(DATA, headers={"authorization": "Bearer acme-key"})
    assert '"operator": true' in refused.json()["error"]["message"]
    assert "samples" not in refused.text
    # The page itself needs no key, and has no data.
    page = await front.http.get("/dashboard/")
    assert page.status_code == 200
    assert "acme" not in page.text


async def test_the_page_is_served_with_its_charts_and_their_licence(pods, gateway):
    front = await gateway(await pods())
    for name in FILES:
        answer = await front.http.get(f"/dashboard/{name}")
        assert answer.status_code == 200, name
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "Permission is hereby granted" in answer.text
    assert (await front.http.get("/dashboard")).headers["location"] == "dashboard/"
    for name in ("none.js", "../routes.py", "%2e%2e/routes.py", "vendor"):
        assert (await front.http.get(f"/dashboard/{name}")).status_code == 404


async def test_a_reader_gets_each_sample_once(pods, gateway):
    front = await gateway(await pods())
    first = await data_until(front, lambda sample: True)
    since = first["next"]
    assert since == first["newest"] + 1
    later = await data_until(front, lambda sample: True, since=since)
    assert later["samples"][0]["number"] == since
    assert later["about"]["start"] == first["about"]["start"]
    # A sample number of an earlier gateway.
    beyond = (await front.http.get(DATA, params={"since": 10**6})).json()
    assert beyond["samples"] == []
    assert beyond["next"] == beyond["newest"] + 1


# -- bounds ------------------------------------------------------------------------------------------------


def sample(number: int, requests: int = 0) -> Sample:
    return {"number": number, "requests": ["x" * 100] * requests}  # type: ignore[return-value]


def test_the_history_keeps_its_number_of_samples():
    history = History(max_samples=5)
    for number in range(12):
        history.append(sample(number))
    assert history.first_number == 7
    stop, text = history.since(0, 3)
    assert stop == 10
    assert [one["number"] for one in json.loads(text)] == [7, 8, 9]
    assert history.since(12, 3) == (12, b"[]")
    assert history.since(-5, 1) == (8, b"[" + json.dumps(sample(7), separators=(",", ":")).encode() + b"]")


def test_the_history_keeps_its_number_of_bytes():
    history = History(max_bytes=10_000)
    for number in range(100):
        history.append(sample(number, requests=number % 20))
    assert 8_000 < history.num_bytes <= 10_000
    stop, text = history.since(0, 1000)
    assert stop == 100
    assert len(text) < 10_200


# -- requests that ended -------------------------------------------------------------------------------------


def add(log: EndedRequests, name: str, outcome: Outcome = Outcome.OK, **fields: object) -> None:
    now = time.monotonic()
    request = TokenizedRequest(
        name, "acme", (1, 2), SamplingParams(), DEFAULT_SLO_CLASSES["chat"], now, now + 60
    )
    log.add(request, outcome, common_pb2.Receipt(**fields) if fields else None, was_admitted=True)


def test_of_many_requests_slo_misses_are_shown_first_and_refused_ones_last():
    log = EndedRequests()
    add(log, "refused", Outcome.REFUSED)
    for number in range(SHOWN_PER_SECOND):
        add(log, f"met-{number}", slo_met=True, output_tokens=1)
    add(log, "late", slo_met=False, slo_miss_cause="prefill", output_tokens=1)
    add(log, "lost", Outcome.UNAVAILABLE)
    shown, _ = log.take()
    assert len(shown) == SHOWN_PER_SECOND
    causes = {row.request_id: row.cause for row in shown}
    assert causes["late"] == "prefill"
    assert causes["lost"] == "unavailable"
    assert "refused" not in causes
    assert log.take() == ([], None)


def test_predicted_and_measured_times_are_of_the_same_requests():
    log = EndedRequests()
    for ttft_ms, p50_ms, p90_ms in ((100, 120, 180), (300, 200, 400), (200, 150, 220)):
        nanoseconds = [value * 1_000_000 for value in (ttft_ms, p50_ms, p90_ms)]
        names = ("ttft_ns", "predicted_ttft_p50_ns", "predicted_ttft_p90_ns")
        add(log, "r", **dict(zip(names, nanoseconds, strict=True)))
    add(log, "not predicted", ttft_ns=9_000_000_000)
    _, ttft = log.take()
    assert ttft == (3, 0.2, 0.15, 0.22)


def test_drafts_are_summed_by_source_over_all_requests():
    log = EndedRequests()
    for _ in range(3000):
        add(log, "r", drafted_by_source={"prompt": 3, "global": 1}, accepted_by_source={"prompt": 2})
    shown, _ = log.take()
    assert len(shown) == SHOWN_PER_SECOND
    assert log.drafted == {"prompt": 9000, "global": 3000}
    assert log.accepted == {"prompt": 6000}


async def test_a_wrong_sample_number_is_refused_by_name(pods, gateway):
    front = await gateway(await pods())
    answer = await front.http.get("/dashboard/data?since=abc")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "since"
    assert error["message"].startswith("since: is 'abc'")
