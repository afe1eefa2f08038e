"""The anthropic package, unmodified, against a running system. Skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

MESSAGES = [{"role": "user", "content": "Where is my order?"}]
TO_THE_LIMIT = {"ignore_eos": True, "seed": 1}


@pytest.fixture
def client(system, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_and_its_stream_say_the_same(client, system):
    options = {"model": system.model, "max_tokens": 8, "messages": MESSAGES, "extra_body": TO_THE_LIMIT}
    message = client.messages.create(system="You help.", **options)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    with client.messages.stream(system="You help.", **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


def test_a_refusal_is_the_clients_own_exception(client, system):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=system.model, max_tokens=8, messages=MESSAGES, extra_body={"temperature": 9}
        )
