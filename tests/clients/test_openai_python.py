"""The openai package, unmodified, against a running system."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from pydantic import BaseModel

#: The model's end token may come at any time otherwise.
TO_THE_LIMIT = {"ignore_eos": True}
MESSAGES = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Where is my order?"}]


@pytest.fixture
def client(system) -> Iterator[openai.OpenAI]:
    http_client = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=system.base_url, api_key="none", http_client=http_client) as client:
        yield client


def test_models_are_listed_with_their_context(client, system):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (system.model, "tandem")
    assert client.models.retrieve(model.id).model_extra["max_model_len"] == 1024


def test_chat(client, system):
    chat = client.chat.completions.create(
        model=system.model, messages=MESSAGES, max_tokens=8, seed=1, extra_body=TO_THE_LIMIT
    )
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.completion_tokens == 8
    again = client.chat.completions.create(
        model=system.model, messages=MESSAGES, max_tokens=8, seed=1, extra_body=TO_THE_LIMIT
    )
    assert again.choices[0].message.content == chat.choices[0].message.content


def test_a_chat_stream_brings_the_same_text_and_its_usage(client, system):
    options = {
        "model": system.model,
        "messages": MESSAGES,
        "max_tokens": 8,
        "seed": 1,
        "extra_body": TO_THE_LIMIT,
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 8


def test_logprobs_have_the_alternatives_that_are_asked_for(client, system):
    chat = client.chat.completions.create(
        model=system.model,
        messages=MESSAGES,
        max_tokens=3,
        logprobs=True,
        top_logprobs=4,
        extra_body=TO_THE_LIMIT,
    )
    content = chat.choices[0].logprobs.content
    assert [len(position.top_logprobs) for position in content] == [4, 4, 4]
    assert all(position.logprob <= 0 for position in content)


def test_a_completion_continues_text_and_token_ids(client, system):
    for prompt in ("Once upon", [5, 6, 7]):
        done = client.completions.create(
            model=system.model, prompt=prompt, max_tokens=4, logprobs=2, extra_body=TO_THE_LIMIT
        )
        assert done.usage.completion_tokens == 4
        assert len(done.choices[0].logprobs.tokens) == 4
    stream = client.completions.create(
        model=system.model, prompt="Once", max_tokens=4, stream=True, extra_body=TO_THE_LIMIT
    )
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


def test_a_response_and_its_stream(client, system):
    options = {"model": system.model, "instructions": "You help.", "input": "Where?", "max_output_tokens": 16}
    response = client.responses.create(**options, extra_body={"seed": 3, **TO_THE_LIMIT})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 16
    with client.responses.stream(**options, extra_body={"seed": 3, **TO_THE_LIMIT}) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].type == "response.incomplete"


class Verdict(BaseModel):
    is_late: bool


def test_parse_gives_an_object_of_the_schema(client, system):
    chat = client.chat.completions.parse(
        model=system.model, messages=MESSAGES, response_format=Verdict, max_tokens=200, seed=1
    )
    assert isinstance(chat.choices[0].message.parsed, Verdict)
    response = client.responses.parse(
        model=system.model, input="Is it late?", text_format=Verdict, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Verdict)


def test_errors_are_the_clients_own_exceptions(client, system):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=system.model, messages=MESSAGES, temperature=9)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_a_raw_response_has_the_request_id(client, system):
    raw = client.chat.completions.with_raw_response.create(
        model=system.model, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id.endswith("mine-1")
