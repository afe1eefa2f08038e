"""Paths with a slash at their end, paths that no route has, and one rule for keys on all of them."""

import pytest

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/tandem.v1.GatewayService/GetFleetStatus": {},
}
GETS = ("/v1/models", "/v1/models/tiny-chat", "/fleet", "/metrics", "/dashboard/data")


async def test_a_slash_at_the_end_changes_nothing(pods, gateway):
    front = await gateway(await pods())
    for path, body in BODIES.items():
        answer = await front.http.post(f"{path}/", json=body)
        assert answer.status_code == 200, path
    for path in (*GETS, "/health", "/version", "/openapi.json"):
        assert (await front.http.get(f"{path}/")).status_code == 200, path
    listed = (await front.http.get("/v1/models/")).json()
    assert listed == (await front.http.get("/v1/models")).json() and listed["object"] == "list"
    for page, target in (("/docs/", "../docs"), ("/dashboard", "dashboard/")):
        moved = await front.http.get(page)
        assert (moved.status_code, moved.headers["location"]) == (307, target), "relative, as behind a proxy"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "this gateway serves no embeddings; see /docs"),
        ("POST", "/v1/moderations", "no moderations"),
        ("GET", "/v1/files/file-1", "no files"),
        ("POST", "/v1/images/generations", "no images"),
        ("POST", "/v1/audio/speech/", "no audio"),
        ("POST", "/v1/fine_tuning/jobs", "no fine tuning"),
        ("POST", "/v1/messages/batches", "no messages batches"),
        ("GET", "/v1/responses/resp_1", "are not stored"),
        ("POST", "/chat/completions", "use /v1/chat/completions"),
        ("POST", "/v1/v1/messages", "use /v1/messages"),
        ("POST", "/api/chat", "Ollama"),
        ("GET", "/v1/nothing", "GET '/v1/nothing': there is no such path; see /docs"),
        ("GET", "/nothing/", "no such path"),
    ],
)
async def test_an_unknown_path_gets_an_error_with_a_hint(method, path, words, pods, gateway):
    front = await gateway(await pods())
    answer = await front.http.request(method, path, json={})
    assert answer.status_code == 404
    body = answer.json()
    assert body["type"] == "error"
    assert words in body["error"]["message"]
    assert body["error"]["type"]


async def test_another_method_is_refused_with_those_of_the_path(pods, gateway):
    front = await gateway(await pods())
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models/a", "GET"), ("PUT", "/fleet/", "GET"),
    ):  # fmt: skip
        answer = await front.http.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed
        assert f"use {allowed}" in answer.json()["error"]["message"]


async def test_the_models_answer_head_without_a_body(pods, gateway):
    front = await gateway(await pods())
    answer = await front.http.head("/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_key_counts_in_either_header_on_every_path(pods, gateway, keys_file):
    keys_file.write_text(keys_file.read_text().replace('"acme"', '"acme", "operator": true', 1))
    front = await gateway(await pods(), api_keys_file=keys_file)
    either = (
        {"x-api-key": "acme-key"}, {"authorization": "Bearer acme-key"}, {"authorization": "bearer acme-key"},
        {"x-api-key": "acme-key", "authorization": "Basic cHJveHk6cGFzcw=="},
        {"x-api-key": "wrong", "authorization": "Bearer acme-key"},
    )  # fmt: skip
    neither = ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": "acme-key"})
    requests = [("POST", path, body) for path, body in BODIES.items()] + [
        ("GET", path, None) for path in GETS
    ]
    for method, path, body in requests:
        for headers in either:
            answer = await front.http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 200, (path, headers)
        for headers in neither:
            answer = await front.http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 401, (path, headers)
            if "Service" not in path:
                assert answer.headers["www-authenticate"] == "Bearer"
