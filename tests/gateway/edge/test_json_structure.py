"""Bodies that are expensive to parse are refused before they are parsed, and invalid ones cheaply."""

import contextlib
import json
import random
import time
from functools import partial

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody, parse_json
from tandem_gateway.dialects.responses_models import ResponsesBody
from tandem_gateway.edge.json_structure import JsonLimits, check_structure
from tandem_gateway.edge.tokenize_api import DetokenizeBody

LIMITS = JsonLimits(max_containers=5, max_values=7)


@pytest.mark.parametrize(
    ("value", "is_fine"),
    [
        ({"a": [[], [], {}]}, True),
        ({"a": [[], [], {}, {}]}, False),
        ([1] * 8, True),
        ([1] * 9, False),
        ({"a": '{[,\\"{[,{[,{[,{[,{[,'}, True),
        (['\\"{{{{{{{{', "\\\\", "{{{{{{,,,,,,,,"], True),
        (["{{{{{{{{", [], [], [], [], []], False),
    ],
)
async def test_only_values_outside_of_strings_count(value, is_fine):
    body = json.dumps(value).encode()
    if is_fine:
        await check_structure(body, LIMITS)
    else:
        with pytest.raises(InvalidRequestError, match="body: holds more than"):
            await check_structure(body, LIMITS)


async def test_invalid_json_is_left_to_the_parser():
    for body in (b"", b'"', b'"\\', b'\\\\"', b'{"a": "' + b"{" * 100):
        await check_structure(body, LIMITS)


async def test_random_values_are_counted_as_a_parser_counts_them():
    random_ = random.Random(3)

    def value(depth: int) -> object:
        kind = random_.randrange(4 if depth else 2)
        if kind == 0:
            return random_.randrange(100)
        if kind == 1:
            return "".join(random_.choices('{}[],"\\a\n✓', k=random_.randrange(12)))
        size = random_.randrange(4)
        if kind == 2:
            return [value(depth - 1) for _ in range(size)]
        return {str(value(0)): value(depth - 1) for _ in range(size)}

    def containers(value: object) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(containers, value.values()))
        return 1 + sum(map(containers, value)) if isinstance(value, list) else 0

    def commas(value: object) -> int:
        parts = list(value.values()) if isinstance(value, dict) else value
        return max(len(parts) - 1, 0) + sum(map(commas, parts)) if isinstance(parts, list) else 0

    for _ in range(500):
        made = value(4)
        body = json.dumps(made, ensure_ascii=random_.random() < 0.5).encode()
        limits = JsonLimits(max_containers=containers(made), max_values=10**6)
        await check_structure(body, limits)
        if containers(made):
            with pytest.raises(InvalidRequestError):
                await check_structure(body, JsonLimits(containers(made) - 1, 10**6))
        await check_structure(body, JsonLimits(10**6, commas(made)))
        if commas(made):
            with pytest.raises(InvalidRequestError):
                await check_structure(body, JsonLimits(10**6, commas(made) - 1))


@pytest.mark.parametrize("unit", ['"', '"":', "\\", '\\"', '\\\\"', "{", ",", '"",', '\\\\\\"'])
@pytest.mark.parametrize("head", ['{"a": "', ""])
async def test_the_check_itself_does_not_block_streams(head, unit):
    """8 MiB, which holds the GIL in the thread of the check too."""
    body = head.encode() + unit.encode() * (2**23 // len(unit)) + b'"' + b",{" * 50_000
    best_s = 1.0
    for _ in range(3):
        started = time.process_time()
        with contextlib.suppress(InvalidRequestError):
            await check_structure(body, JsonLimits())
        best_s = min(best_s, time.process_time() - started)
    assert best_s < 0.15


def filled(head: str, unit: str, tail: str) -> bytes:
    """As many as the limits allow."""
    count = JsonLimits().max_containers - 10 if unit[0] in "{[" else JsonLimits().max_values - 10
    return (head + ",".join([unit] * count) + tail).encode()


def checking(kind):
    return lambda body: parse_json(kind, body).checked(Ignored())


CHAT, COMPLETION, RESPONSES = map(checking, (ChatBody, CompletionBody, ResponsesBody))
COSTLY = {
    "messages": (CHAT, filled('{"messages":[', '{"role":"user","content":"a"}', "]}")),
    "empty messages": (CHAT, filled('{"messages":[', "{}", "]}")),
    "no messages": (CHAT, filled('{"messages":[', "1", "]}")),
    "parts": (CHAT, filled('{"messages":[{"role":"user","content":[', "1", "]}]}")),
    "tools": (CHAT, filled('{"messages":[],"tools":[', "1", "]}")),
    "words": (CHAT, filled('{"messages":[],"bad_words":[', "1", "]}")),
    "stops": (CHAT, filled('{"messages":[],"stop":[', "1", "]}")),
    "ids": (CHAT, filled('{"messages":[],"stop_token_ids":[', '"a"', "]}")),
    "prompts": (COMPLETION, filled('{"prompt":[', "1.5", "]}")),
    "biases": (
        CHAT,
        json.dumps(
            {"messages": [], "logit_bias": dict.fromkeys(map(str, range(JsonLimits().max_values - 10)), "x")}
        ).encode(),
    ),
    "fields": (
        CHAT,
        json.dumps(
            {"messages": [], **dict.fromkeys(map("x{}".format, range(JsonLimits().max_values - 10)), 1)}
        ).encode(),
    ),
    "input": (RESPONSES, filled('{"input":[', '{"role":"user","content":"a"}', "]}")),
    "no input": (RESPONSES, filled('{"input":[', "1", "]}")),
    "tokens": (partial(parse_json, DetokenizeBody), filled('{"tokens":[', '"a"', "]}")),
}


@pytest.mark.parametrize("name", COSTLY)
async def test_no_body_within_the_limits_blocks_streams(name):
    """Measures CPU time of this thread, which a busy machine does not change."""
    parse, body = COSTLY[name]
    best_s = 1.0
    for _ in range(3):
        started = time.thread_time()
        await check_structure(body, JsonLimits())
        try:
            parse(body)
        except InvalidRequestError as error:
            assert len(str(error)) < 1200
        best_s = min(best_s, time.thread_time() - started)
    assert best_s < 0.05


async def test_a_body_of_megabytes_of_objects_is_refused_at_once(pods, gateway):
    front = await gateway(await pods())
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = await front.http.post(path, content=b'{"messages":[' + b"{}," * 80_000 + b"{}]}")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("body: holds more than 4096 objects and lists")
