"""API keys on both ports, tenants, SLO classes, and errors in the keys file."""

import contextlib
import hashlib
import json
import time

import grpc
import openai
import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.slo import SloTarget
from tandem_gateway.auth import ApiKeys, Caller, KeyFileError
from tandem_gateway.errors import ForbiddenError, UnauthenticatedError
from tandem_proto.v1 import gateway_pb2
from waiting import pause_async, until_async

REQUEST = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def line(key: str, tenant: str, **fields: object) -> str:
    """A line of a keys file."""
    return json.dumps({"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **fields})


async def test_grpc_requires_a_known_key(pods, gateway, keys_file):
    pod = await pods()
    front = await gateway(pod, api_keys_file=keys_file)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "Basic acme-key"),)):
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await front.grpc.Chat(REQUEST, metadata=metadata).read()
        assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await front.grpc.GetFleetStatus(gateway_pb2.GetFleetStatusRequest(), metadata=metadata)
        assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED
    call = front.grpc.Chat(REQUEST, metadata=(("authorization", "Bearer acme-key"),))
    assert (await call.read()).chunk.text == "Hello"
    assert [request.tenant for request in pod.requests] == ["acme"]
    call.cancel()


async def test_http_requires_a_known_key(pods, gateway, keys_file):
    pod = await pods()
    front = await gateway(pod, api_keys_file=keys_file)
    with pytest.raises(openai.AuthenticationError) as info:
        await front.openai.chat.completions.create(model="", messages=USER)
    assert info.value.code == "invalid_api_key"
    for path in ("/v1/models", "/fleet"):
        assert (await front.http.get(path)).status_code == 401
    assert (await front.http.get("/health")).status_code == 200
    async with front.openai_client("acme-key") as client:
        answer = await client.chat.completions.create(model="", messages=USER)
    assert answer.choices[0].message.content == "Hello there!"
    assert pod.requests[0].tenant == "acme"


async def test_only_operators_see_the_prompts_that_pods_compute(pods, gateway, tmp_path):
    """Clients of all tenants choose the ids of these prompts."""
    path = tmp_path / "keys"
    path.write_text(f"{line('user-key', 'acme')}\n{line('boss-key', 'boss', operator=True)}\n")
    front = await gateway(await pods(num_prompts=2), api_keys_file=path)
    for key, count in (("user-key", 0), ("boss-key", 2)):
        headers = {"authorization": f"Bearer {key}"}
        (pod,) = (await front.http.get("/fleet", headers=headers)).json()["pods"]
        assert len(pod["status"]["prompts"]) == count
        view = await front.grpc.GetFleetStatus(
            gateway_pb2.GetFleetStatusRequest(), metadata=tuple(headers.items())
        )
        assert len(view.pods[0].status.prompts) == count


async def test_metrics_name_tenants_and_are_for_operators(pods, gateway, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{line('user-key', 'acme')}\n{line('boss-key', 'boss', operator=True)}\n")
    front = await gateway(await pods(), api_keys_file=path, metrics_port=0)
    for key, status in (("", 401), ("user-key", 403), ("boss-key", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert (await front.http.get("/metrics", headers=headers)).status_code == status


async def test_changed_keys_are_read_again(pods, gateway, tmp_path):
    """As a mounted Secret changes: the file is a link into a folder that is exchanged as a whole."""
    (tmp_path / "keys.jsonl").symlink_to("..data/keys.jsonl")

    def mount(name: str, text: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.jsonl").write_text(text)
        (tmp_path / "new").symlink_to(name)
        (tmp_path / "new").replace(tmp_path / "..data")

    mount("1", line("old-key", "acme"))
    front = await gateway(await pods(), api_keys_file=tmp_path / "keys.jsonl")

    async def status(key: str) -> int:
        return (await front.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

    assert (await status("old-key"), await status("new-key")) == (200, 401)
    mount("2", "damaged")
    await pause_async(2.5)
    assert await status("old-key") == 200, "a damaged file is not taken"
    mount("3", line("new-key", "acme"))

    async def is_exchanged() -> bool:
        return (await status("old-key"), await status("new-key")) == (401, 200)

    await until_async(is_exchanged)


async def test_a_key_may_use_only_its_classes(pods, gateway, keys_file):
    pod = await pods()
    front = await gateway(pod, api_keys_file=keys_file)
    async with front.openai_client("slow-key") as client:
        answer = await client.chat.completions.create(model="", messages=USER)
        receipt = answer.usage.tandem_receipt
        assert receipt["slo"]["name"] == "batch", "its first class is its default"
        with pytest.raises(openai.PermissionDeniedError, match="may use batch"):
            await client.chat.completions.create(
                model="", messages=USER, extra_body={"slo_class": "interactive"}
            )


def test_refusals_name_the_callers_first_class_that_waits():
    classes = {
        "voice": SloTarget("voice", ttft_s=1.0),
        "mail": SloTarget("mail", e2e_slowdown=5.0),
        "slow": SloTarget("slow", e2e_s=9.0, waits=True),
        "batch": SloTarget("batch"),
    }
    assert Caller("t", known_classes=classes).waiting_class == "slow"
    assert Caller("t", ("voice", "batch", "slow"), classes).waiting_class == "batch"
    assert Caller("t", ("voice", "mail"), classes).waiting_class == ""


def test_without_a_file_everyone_is_the_default_tenant():
    anyone = ApiKeys.load(None).authenticate("")
    assert anyone.is_anyone
    assert anyone.tenant == "default"


def test_an_empty_keys_file_refuses_every_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# no keys yet\n\n")
    with pytest.raises(UnauthenticatedError):
        ApiKeys.load(path).authenticate("Bearer x")


DIGEST = hashlib.sha256(b"k").hexdigest()


def test_a_tenant_has_one_weight(tmp_path):
    path = tmp_path / "keys"
    path.write_text("".join(f"{line(key, 'acme', weight=weight)}\n" for key, weight in (("a", 2), ("b", 3))))
    with pytest.raises(KeyFileError, match=":2: weight: tenant acme has 2 in a line before and 3 here"):
        ApiKeys.load(path)
    path.write_text(f"{line('a', 'acme')}\n{line('b', 'acme', weight=3)}\n{line('c', 'blue')}\n")
    keys = ApiKeys.load(path)
    assert [keys.authenticate(f"Bearer {key}").weight for key in "abc"] == [3, 3, 1]


@pytest.mark.parametrize("field", ["max_requests", "tokens_per_minute"])
def test_limits_belong_to_the_tenant_and_not_to_a_line(field, tmp_path):
    """Otherwise a second key, for example during a key rotation, would have no limits."""
    path = tmp_path / "keys"
    path.write_text(f"{line('a', 'acme', **{field: 7})}\n{line('b', 'acme')}\n{line('c', 'blue')}\n")
    keys = ApiKeys.load(path)
    assert [getattr(keys.authenticate(f"Bearer {key}"), field) for key in "abc"] == [7, 7, None]
    path.write_text(f"{line('a', 'acme', **{field: 7})}\n{line('b', 'acme', **{field: 8})}\n")
    with pytest.raises(KeyFileError, match=f":2: {field}: tenant acme has 7 in a line before and 8 here"):
        ApiKeys.load(path)


def test_the_log_names_who_may_call_in_one_sentence(tmp_path):
    assert ApiKeys.load(None).described() == "no API keys: everyone who reaches the ports may use the models"
    path = tmp_path / "keys"
    path.write_text(f"{line('a', 'acme')}\n{line('b', 'acme')}\n{line('c', 'blue')}\n")
    assert ApiKeys.load(path).described() == "API keys: 3 of 2 tenants"


def test_a_key_has_one_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{line('a', 'acme')}\n\n{line('a', 'evil', operator=True)}\n")
    with pytest.raises(KeyFileError, match=r":3: key_sha256: line 1 has the same key"):
        ApiKeys.load(path)


def test_a_file_that_is_being_written_is_not_read_again(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{line('a', 'acme')}\n{line('b', 'acme')}\n")
    keys = ApiKeys.load(path)
    path.write_text(f"{line('a', 'acme')}\n")
    keys.refresh()
    assert keys.authenticate("Bearer b").tenant == "acme", "it may be half written"
    path.write_text(f"{line('a', 'acme')}\n{line('b', 'acme')}\n{line('c', 'blue')}\n")
    keys.refresh()
    keys.refresh()
    assert keys.authenticate("Bearer c").tenant == "blue"


def test_a_check_takes_no_longer_with_many_keys(tmp_path):
    def seconds(number: int) -> float:
        path = tmp_path / "keys"
        path.write_text("\n".join(line(f"key {n}", "acme") for n in range(number)))
        keys, times = ApiKeys.load(path), []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(200):
                with contextlib.suppress(UnauthenticatedError):
                    keys.authenticate("Bearer wrong")
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(4000) < 3 * seconds(4)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/fleet", "/v1/messages", "/v1/chat/completions"]
)
async def test_each_route_takes_the_key_of_anthropics_clients(path, pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    headers = {"x-api-key": "acme-key"}
    if path in ("/v1/models", "/fleet"):
        answer = await front.http.get(path, headers=headers)
    else:
        body = {"prompt": "hi"} if path == "/tokenize" else {"messages": USER, "max_tokens": 4}
        answer = await front.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    wrong = await front.http.get("/v1/models", headers={"x-api-key": "wrong"})
    assert wrong.status_code == 401


async def test_grpc_takes_the_key_of_anthropics_clients(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    request = gateway_pb2.ListModelsRequest()
    assert (await front.grpc.ListModels(request, metadata=(("x-api-key", "acme-key"),))).models


async def test_refused_callers_are_counted_for_every_protocol(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    wrong = {"authorization": "Bearer wrong"}
    for path in ("/v1/chat/completions", "/tokenize", "/tandem.v1.GatewayService/ListModels"):
        answer = await front.http.post(path, json={"messages": USER}, headers=wrong)
        assert answer.status_code == 401
    assert (await front.http.get("/v1/models", headers=wrong)).status_code == 401
    with pytest.raises(grpc.aio.AioRpcError):
        await front.grpc.ListModels(gateway_pb2.ListModelsRequest())
    counted = 'tandem_requests_total{outcome="unauthenticated"}'
    assert await front.metric(counted) == 5
    acme = {"authorization": "Bearer acme-key"}
    assert (await front.http.get("/metrics", headers=acme)).status_code == 403
    assert await front.metric(counted) == 6
    answer = await front.http.post("/v1/chat/completions", json={"messages": USER}, headers=acme)
    assert (answer.status_code, await front.metric(counted)) == (200, 6)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"tenant": "a"}', "key_sha256"),
        ('{"key_sha256": "12", "tenant": "a"}', "key_sha256"),
        (f'{{"key_sha256": "{DIGEST}", "tenant": "a", "slo_classes": ["fast"]}}', "fast"),
        (f'{{"key_sha256": "{DIGEST}", "tenant": "a", "key": "in clear"}}', "key"),
        ("not json", "JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(line, words, tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n" + line + "\n")
    with pytest.raises(KeyFileError, match=f":2: .*{words}"):
        ApiKeys.load(path)


def test_a_key_bounds_the_objectives_of_its_requests(tmp_path):
    digest = hashlib.sha256(b"k").hexdigest()
    file = tmp_path / "keys.jsonl"
    file.write_text(f'{{"key_sha256": "{digest}", "tenant": "t", "weight": 2.5, "min_ttft_ms": 500}}')
    caller = ApiKeys.load(file).authenticate("Bearer k")
    assert caller.weight == 2.5
    assert caller.slo("chat", SloTarget("", ttft_s=0.5, e2e_s=0.001)).ttft_s == 0.5
    with pytest.raises(
        ForbiddenError, match="ttft objective: this key may ask for 500 ms or more, not for 499"
    ):
        caller.slo("chat", SloTarget("", ttft_s=0.499))
    with pytest.raises(InvalidRequestError, match=r"slo\.e2e_ns: is 86401 s; send at most 86400 s"):
        caller.slo("chat", SloTarget("", e2e_s=86_401.0))
    with pytest.raises(InvalidRequestError, match=r"slo\.tpot_slowdown: can be set only by classes"):
        caller.slo("chat", SloTarget("", tpot_slowdown=2.0))


def test_an_objective_of_a_request_takes_the_place_of_a_relative_one():
    mail = SloTarget("mail", ttft_slowdown=5.0, e2e_slowdown=9.0)
    caller = Caller("t", known_classes={"mail": mail})
    assert caller.slo("", SloTarget("", ttft_s=0.5)) == SloTarget("mail", ttft_s=0.5, e2e_slowdown=9.0)
