"""Bodies as they arrive: types, codings, byte order marks, and lengths."""

import asyncio
import json

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
CHAT = "/v1/chat/completions"


async def test_a_refused_type_or_coding_comes_with_those_that_are_served(pods, gateway):
    front = await gateway(await pods())
    for headers, name, value in (
        ({"content-type": "text/plain"}, "accept-post", "application/json"),
        ({"content-encoding": "gzip"}, "accept-encoding", "identity"),
        ({"content-encoding": "zstd"}, "accept-encoding", "identity"),
    ):
        refused = await front.http.post(CHAT, content=BODY, headers=headers)
        assert refused.status_code == 415 and refused.headers[name] == value
        assert next(iter(headers.values())) in refused.json()["error"]["message"]
    parameters = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "Identity"}
    assert (await front.http.post(CHAT, content=BODY, headers=parameters)).status_code == 200


async def test_a_byte_order_mark_is_skipped(pods, gateway):
    front = await gateway(await pods())
    for path in (CHAT, "/tokenize"):
        assert (await front.http.post(path, content=b"\xef\xbb\xbf" + BODY)).status_code == 200
    two = await front.http.post(CHAT, content=b"\xef\xbb\xbf" * 2 + BODY)
    assert two.status_code == 400


async def test_a_request_with_two_lengths_is_the_last_of_its_connection(pods, gateway):
    front = await gateway(await pods())
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        "content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", front.process.http_port)
    writer.write(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) + smuggled)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
