"""The gateway's pages for people, programs and probes, and its answers to other origins."""

import re
from urllib.parse import urljoin

import chromium
import pytest
from tandem_gateway.edge.site.openapi import ROUTES
from tandem_gateway.settings import GatewaySettings
from waiting import until_async


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_the_page_names_the_model_and_its_links_work(front):
    page = await front.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "tiny-chat" in page.text and "256 tokens" in page.text and "{" not in page.headers["content-type"]
    links = re.findall(r'(?:href|src)="([^"]+)"', page.text) + re.findall(
        r'(?:href|src)="([^"]+)"', (await front.http.get("/docs")).text
    )
    assert {"docs", "openapi.json", "dashboard/", "site/style.css", "site/docs.js"} <= set(links)
    for link in set(links) - {"data:,"}:
        assert ":" not in link, "nothing is loaded from elsewhere"
        assert (await front.http.get(urljoin("/", link))).status_code == 200, link
    assert (await front.http.get("/site/../settings.py")).status_code == 404


async def test_the_page_asks_for_a_key_where_one_is_needed(front, pods, gateway, keys_file):
    with_keys = await gateway(await pods(), api_keys_file=keys_file)
    for one, key, is_hidden in ((front, "none", True), (with_keys, "KEY", False)):
        page = (await one.http.get("/")).text
        assert re.search(r"\{[A-Z_]+\}", page) is None, "each placeholder has its text"
        assert f'api_key="{key}"' in page and ("Bearer KEY" in page) is not is_hidden
        assert ("<label hidden>" in page) is is_hidden


@pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium is on PATH; Debian's package is chromium")
async def test_the_page_streams_an_answer_and_shows_its_receipt(front, tmp_path):
    async with chromium.open_page(tmp_path / "profile") as page:
        await page.go_to(front.url)
        await page.evaluate("document.querySelector('#try button').click()")

        async def is_answered() -> bool:
            return "TTFT" in await page.evaluate("document.querySelector('#receipt').textContent")

        await until_async(is_answered)
        assert await page.evaluate("document.querySelector('#answer').textContent") == "Hello there!"


async def test_the_document_lists_every_route_and_the_fields_of_bodies(front):
    document = (await front.http.get("/openapi.json")).json()
    listed = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert listed == {(route.method, route.path) for route in ROUTES}
    for method, path in listed:
        answer = await front.http.request(method, path.replace("{model}", "tiny-chat"), content=b"{")
        assert answer.status_code == (400 if method == "post" else 200), path
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and {"temperature", "stop", "stream"} <= chat["properties"].keys()
    for kind in ("Chat", "Completion", "Messages", "Responses", "Tokenize", "Detokenize"):
        fields = document["components"]["schemas"][f"{kind}Body"]["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == [], kind
    assert "Range [0, 2]" in chat["properties"]["temperature"]["description"], "as in the .proto file"
    headers = {p["name"] for p in document["paths"]["/v1/chat/completions"]["post"]["parameters"]}
    assert {"x-slo-class", "idempotency-key", "last-event-id"} <= headers
    references = set(re.findall(r'"#/components/schemas/(\w+)"', str(document).replace("'", '"')))
    assert references <= document["components"]["schemas"].keys()


async def test_probes_and_clients_get_state_and_version(front, pods):
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", (await front.http.get("/version")).json()["version"])
    for method, path in (("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert (await front.http.request(method, path)).status_code == 200
    model = (await front.http.get("/v1/models/tiny-chat")).json()
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
        "tiny-chat", "model", "tandem", 256,
    )  # fmt: skip
    assert model["limits"]["max_messages"] == 1024
    assert (await front.http.get("/v1/models")).json()["data"] == [model]


async def test_an_unknown_slo_header_is_refused_by_name(front):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await front.http.post("/v1/chat/completions", json=body, headers={"x-slo-clas": "batch"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "'x-slo-clas'"


PREFLIGHT = {
    "origin": "https://shop.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_other_origins_are_not_answered_by_default(front):
    answer = await front.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    plain = await front.http.get("/v1/models", headers={"origin": "https://shop.example"})
    assert "access-control-allow-origin" not in plain.headers


async def test_only_configured_origins_may_call(pods, gateway):
    front = await gateway(await pods(), cors_origins="https://shop.example")
    answer = await front.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://shop.example"
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    refused = await front.http.post("/v1/completions", json={}, headers={"origin": "https://shop.example"})
    assert refused.status_code == 400
    assert refused.headers["access-control-allow-origin"] == "https://shop.example"
    other = await front.http.options("/v1/models", headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["shop.example", "https://shop.example/path", "https://*.example", "null"])
def test_invalid_origins_are_refused(origin):
    with pytest.raises(ValueError, match="is not an origin"):
        GatewaySettings(model="m", decode="127.0.0.1:1", cors_origins=origin)
