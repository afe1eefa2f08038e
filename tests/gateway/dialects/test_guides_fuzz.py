"""Random guides over HTTP, valid, invalid, large and malformed: each gets an answer or a 400 with the reason,
and does not block the event loop that all streams share."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest
from guide_fuzz import SOURCES
from loop_turns import STALL_S, watched_loop
from tandem_core.guide import GuideKind

FIELDS = {
    GuideKind.JSON_SCHEMA: "guided_json",
    GuideKind.REGEX: "guided_regex",
    GuideKind.LARK: "guided_grammar",
}
LARGE: tuple[dict[str, object], ...] = (
    {"guided_json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}},
    {"guided_json": {"enum": [f"value-{n}" for n in range(8000)]}},
    {"guided_json": {"oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(900)]}},
    {"guided_json": {"allOf": [{"anyOf": [{"multipleOf": 3}, {"minLength": n}]} for n in range(40)]}},
    {"guided_json": {"type": "array", "minItems": 10**6, "items": {"minLength": 10**6, "type": "string"}}},
    {"guided_json": json.dumps({"const": [[0] * 20_000]})},
    {"guided_json": "[" * 60_000},
    {"guided_regex": "|".join(f"word{n}" for n in range(12_000))},
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_regex": "(" * 60_000},
    {"guided_choice": [f"choice number {n}" for n in range(4096)]},
    {"guided_grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(9000)) + 'r9000: "a"'},
    {"guided_grammar": "start: " + "(" * 60_000},
    {"guided_grammar": "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(6000))},
)


async def statuses(front, bodies: list[bytes]) -> Counter[int]:
    counts: Counter[int] = Counter()
    slots = asyncio.Semaphore(6)

    async def send(body: bytes) -> None:
        async with slots:
            headers = {"content-type": "application/json"}
            response = await front.http.post(
                "/v1/chat/completions", content=body, headers=headers, timeout=60.0
            )
        counts[response.status_code] += 1
        if response.status_code != 200:
            assert response.json()["error"]["message"], body[:300]
        assert response.status_code in (200, 400), (body[:300], response.text)

    await asyncio.gather(*map(send, bodies))
    return counts


def body_of(fields: dict[str, object]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}).encode()


def random_fields(seed: int) -> dict[str, object]:
    choices = random.Random(seed)
    kind = choices.choice(list(SOURCES))
    source = SOURCES[kind](choices)
    if kind is GuideKind.JSON_SCHEMA and choices.random() < 0.7:
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": json.loads(source)}}
        return {"response_format": schema}
    if choices.random() < 0.3:
        return {"structured_outputs": {FIELDS[kind].removeprefix("guided_"): source}}
    return {FIELDS[kind]: source}


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 11))])
async def test_each_random_guide_is_answered_or_refused_without_blocking_streams(
    pods, gateway, part: int
) -> None:
    front = await gateway(await pods())
    bodies = [body_of(random_fields(seed)) for seed in range(150 * part, 150 * (part + 1))]
    async with watched_loop() as turns:
        counts = await statuses(front, bodies)
    assert counts.keys() == {200, 400}
    assert max(turns) < STALL_S


async def test_large_guides_do_not_block_streams(pods, gateway) -> None:
    front = await gateway(await pods())
    bodies = list(map(body_of, LARGE))
    async with watched_loop() as turns:
        counts = await statuses(front, bodies)
    assert counts[200] >= 4
    assert max(turns) < STALL_S
