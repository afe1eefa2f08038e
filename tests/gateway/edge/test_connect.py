"""The Connect protocol on the HTTP port gives the answers of the gRPC port."""

import asyncio
import base64
import json
import logging

import grpc
import httpx
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.edge.connect_api import UnimplementedError, envelope, only_message
from tandem_proto.v1 import common_pb2, gateway_pb2
from tandem_service.interceptors import MalformedRequestError

SERVICE = "/tandem.v1.GatewayService"
MESSAGES = [{"role": "user", "content": "hi"}]
STREAM = {"content-type": "application/connect+json"}
ACME = {"authorization": "Bearer acme-key"}


def _envelopes(body: bytes) -> list[tuple[int, bytes]]:
    """Flags and payloads."""
    found = []
    while body:
        size = int.from_bytes(body[1:5], "big")
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def _end(response: httpx.Response) -> dict:
    """The last envelope, of a stream that the server ended."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/connect+json"
    flags, payload = _envelopes(response.content)[-1]
    assert flags == 2
    return json.loads(payload)


async def _chat(front, body=None, **headers: str) -> httpx.Response:
    content = envelope(json.dumps({"messages": MESSAGES} if body is None else body).encode())
    return await front.http.post(f"{SERVICE}/Chat", content=content, headers=STREAM | headers)


@pytest.mark.parametrize("name", ["json", "proto"])
async def test_a_unary_call_works_in_json_and_proto(pods, gateway, name):
    front = await gateway(await pods())
    headers = {"content-type": f"application/{name}", "tandem-request-id": "r-7"}
    content = b"{}" if name == "json" else b""
    response = await front.http.post(f"{SERVICE}/ListModels", content=content, headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == f"application/{name}"
    assert response.headers["tandem-request-id"] == "r-7"
    read = gateway_pb2.ListModelsResponse.FromString
    if name == "json":

        def read(content: bytes) -> gateway_pb2.ListModelsResponse:
            return json_format.Parse(content, gateway_pb2.ListModelsResponse())

    assert read(response.content) == await front.grpc.ListModels(gateway_pb2.ListModelsRequest())


@pytest.mark.parametrize("name", ["json", "proto"])
async def test_a_stream_in_json_and_proto_equals_grpcs(pods, gateway, name):
    front = await gateway(await pods())
    request = gateway_pb2.GenerateRequest(text="hi", n=2)
    expected = [response async for response in front.grpc.Generate(request)]
    is_json = name == "json"
    payload = json_format.MessageToJson(request).encode() if is_json else request.SerializeToString()
    response = await front.http.post(
        f"{SERVICE}/Generate",
        content=envelope(payload),
        headers={"content-type": f"application/connect+{name}; charset=utf-8"},
    )
    *responses, (flags, end) = _envelopes(response.content)
    assert [flags for flags, _ in responses] == [0] * len(expected)
    assert flags == 2
    got = [
        json_format.Parse(payload, gateway_pb2.GenerateResponse())
        if is_json
        else gateway_pb2.GenerateResponse.FromString(payload)
        for _, payload in responses
    ]

    def texts(events: list[gateway_pb2.GenerateResponse], choice: int) -> str:
        return "".join(event.chunk.text for event in events if event.chunk.choice == choice)

    assert [texts(got, choice) for choice in (0, 1)] == [texts(expected, choice) for choice in (0, 1)]
    assert texts(got, 1) == "Hello there!"
    receipts = json.loads(end)["metadata"]["tandem-receipt-bin"]
    assert [common_pb2.Receipt.FromString(base64.b64decode(receipt + "==")) for receipt in receipts] == [
        event.end.receipt for event in got if event.HasField("end")
    ]
    assert len(receipts) == 2


async def test_a_key_is_needed_before_the_body_is_read(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    for method, content_type in [("ListModels", "application/json"), ("Chat", "application/connect+json")]:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.process.http_port)
        head = f"POST {SERVICE}/{method} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\n".encode())
        async with asyncio.timeout(5.0):
            answer = await reader.readuntil(b"}")
        assert b'"code":"unauthenticated"' in answer
        writer.close()
    assert "error" not in _end(await _chat(front, **ACME))


async def test_another_content_type_is_not_supported(pods, gateway, subtests):
    front = await gateway(await pods())
    for method, content_type in [
        ("ListModels", "text/plain"),
        ("ListModels", ""),
        ("ListModels", "application/connect+json"),
        ("ListModels", "application/grpc"),
        ("Chat", "application/json"),
        ("Chat", "application/connect+xml"),
    ]:
        with subtests.test(method, content_type=content_type):
            response = await front.http.post(
                f"{SERVICE}/{method}", content=b"{}", headers={"content-type": content_type}
            )
            assert response.status_code == 415
            assert "proto" in response.headers["accept-post"]


async def test_unknown_methods_and_get_are_refused(pods, gateway):
    front = await gateway(await pods())
    response = await front.http.post(f"{SERVICE}/Sing", content=b"", headers=STREAM)
    assert response.status_code == 404, "unimplemented, to a Connect client"
    response = await front.http.get(f"{SERVICE}/ListModels")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


async def test_unknown_fields_of_json_are_ignored_unless_they_are_strict(pods, gateway):
    pod = await pods()
    body = {"messages": MESSAGES, "colour": "blue"}
    assert "error" not in _end(await _chat(await gateway(pod), body))
    error = _end(await _chat(await gateway(pod, strict_fields=True), body))["error"]
    assert error["code"] == "invalid_argument" and '"colour"' in error["message"]


#: A body, headers, and the code and words of the answer.
WRONG = [
    (b"", {}, "invalid_argument", "the body has 0 bytes"),
    (envelope(b"{}") * 2, {}, "invalid_argument", "the body has 14 bytes, and its envelope 5 + 2"),
    (envelope(b"{}")[:-1], {}, "invalid_argument", "the body has 6 bytes, and its envelope 5 + 2"),
    (envelope(b"{}", 1), {"connect-content-encoding": "gzip"}, "unimplemented", "identity"),
    (envelope(b"{}", 2), {}, "invalid_argument", "flags 2"),
    (envelope(b"{"), {}, "invalid_argument", "not a valid ChatRequest in json"),
    (envelope(b"\xff"), {}, "invalid_argument", "not a valid ChatRequest in json"),
    (envelope(b"[" * 4000), {}, "invalid_argument", "not a valid ChatRequest in json"),
    (envelope(b'{"messages":[]}'), {}, "invalid_argument", "messages: is empty"),
    (envelope(b" " * 5000), {}, "invalid_argument", "over the limit of 4096 bytes"),
    (b"\0\xff\xff\xff\xff", {}, "invalid_argument", "the body has 5 bytes, and its envelope 5 + 4294967295"),
    (envelope(b"{}"), {"connect-protocol-version": "2"}, "invalid_argument", "send 1"),
    (envelope(b"{}"), {"connect-timeout-ms": "1s"}, "invalid_argument", "'1s'"),
    (envelope(b"{}"), {"content-encoding": "gzip"}, "unimplemented", "identity"),
]


async def test_a_wrong_request_is_refused_in_the_last_envelope(pods, gateway, subtests):
    pod = await pods()
    front = await gateway(pod, max_body_bytes=4096)
    for content, headers, code, words in WRONG:
        with subtests.test(words):
            response = await front.http.post(f"{SERVICE}/Chat", content=content, headers=STREAM | headers)
            error = _end(response)["error"]
            assert (error["code"], words in error["message"]) == (code, True), error
    assert pod.requests == []


async def test_a_wrong_unary_request_has_the_status_of_its_code(pods, gateway):
    front = await gateway(await pods())
    for content, encoding, status, code in [
        (b"{", "identity", 400, "invalid_argument"),
        (b"{}", "gzip", 501, "unimplemented"),
    ]:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        response = await front.http.post(f"{SERVICE}/ListModels", content=content, headers=headers)
        assert (response.status_code, response.json()["code"]) == (status, code)


async def test_an_error_after_the_first_message_ends_the_stream(pods, gateway):
    front = await gateway(await pods(fail_with=grpc.StatusCode.INVALID_ARGUMENT, fail_after=1))
    response = await _chat(front)
    (flags, first), *_ = _envelopes(response.content)
    assert (flags, json.loads(first)["chunk"]["text"]) == (0, "Hello")
    assert _end(response)["error"]["code"] == "invalid_argument"


@pytest.mark.long_turns("the log renders a traceback")
async def test_an_unexpected_error_shows_only_the_request_id(pods, gateway, monkeypatch, caplog):
    front = await gateway(await pods())

    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("tandem_gateway.edge.grpc_api.caller_of", fail)
    with caplog.at_level(logging.CRITICAL):
        error = _end(await _chat(front, **{"tandem-request-id": "r-9"}))["error"]
    assert error["code"] == "internal"
    assert "r-9" in error["message"]
    assert "secret" not in error["message"]


async def test_a_refusal_has_a_retry_after(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_in_flight=1, max_queue=0)
    running = asyncio.create_task(_chat(front))
    await pod.started.wait()
    end = _end(await _chat(front))
    assert end["error"]["code"] == "resource_exhausted"
    assert end["metadata"]["refusal-reason"] == ["queue full"]
    assert int(end["metadata"]["retry-after-ms"][0]) > 0
    running.cancel()
    await asyncio.wait_for(pod.cancelled.wait(), 1.0)


async def test_the_deadline_ends_the_call_on_the_pod_too(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod)
    end = _end(await _chat(front, **{"connect-timeout-ms": "300"}))
    assert end["error"]["code"] == "deadline_exceeded"
    await asyncio.wait_for(pod.cancelled.wait(), 1.0)


async def test_a_client_that_leaves_ends_the_call(pods, gateway):
    pod = await pods(pause_s=0.2, words=("a",) * 100)
    front = await gateway(pod)
    content = envelope(json.dumps({"messages": MESSAGES}).encode())
    async with front.http.stream("POST", f"{SERVICE}/Chat", content=content, headers=STREAM) as response:
        assert b'"a"' in await anext(response.aiter_bytes())
    await asyncio.wait_for(pod.cancelled.wait(), 1.0)
    await front.until_metric('tandem_requests_total{outcome="cancelled"}', 1)


@given(st.binary(max_size=20))
def test_one_envelope_is_a_message_and_other_bytes_are_refused(body):
    assert only_message(envelope(body)) == body
    try:
        message = only_message(body)
    except (MalformedRequestError, UnimplementedError):
        return
    assert envelope(message) == body
