"""litellm, unmodified, as a client of an OpenAI-compatible server.

Skipped where it is not installed: with its dependencies it takes more than 60 MB, so `make venv` leaves it
out (`pip install litellm`)."""

from __future__ import annotations

import pytest

litellm = pytest.importorskip("litellm")

TO_THE_LIMIT = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Where is my order?"}]


@pytest.fixture
def options(system) -> dict[str, object]:
    return {"model": f"openai/{system.model}", "api_base": system.base_url, "api_key": "none"}


def test_chat_and_its_stream_say_the_same(options):
    asked = {**options, "messages": MESSAGES, "max_tokens": 6, "seed": 1}
    whole = litellm.completion(**asked)
    assert whole.usage.completion_tokens == 6
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def test_text_completion(options):
    done = litellm.text_completion(**options, prompt="Once", max_tokens=4, extra_body=TO_THE_LIMIT)
    assert done.usage.completion_tokens == 4


def test_responses(options):
    response = litellm.responses(**options, input="Where?", max_output_tokens=16, extra_body=TO_THE_LIMIT)
    assert response.usage.output_tokens == 16


def test_a_refusal_is_litellms_exception(options):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, messages=MESSAGES, temperature=9)
