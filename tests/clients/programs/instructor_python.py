"""instructor."""

from __future__ import annotations

from harness import BASE_URL, MODEL, feature
from instructor import Mode

# snippet
import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    is_even: bool


client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none"))
answer = client.create(
    model=MODEL, response_model=Answer, messages=[{"role": "user", "content": "Is 2+2 even?"}]
)
print(answer.is_even)
# end


class Closed(Answer, extra="forbid"):
    """Without it the random model adds properties to the end."""


ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Is 2+2 even?"}], "max_tokens": 200}


@feature("tools")
def _() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        asking = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none"), mode=mode)
        assert isinstance(asking.create(**ASKED, response_model=Closed, max_retries=0), Closed)


@feature("schema")
def _() -> None:
    asking = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none"), mode=Mode.JSON_SCHEMA)
    assert isinstance(asking.create(**ASKED, response_model=Closed, max_retries=0), Closed)


@feature("stream")
def _() -> None:
    *_, last = client.create_partial(**ASKED, response_model=Answer, max_retries=0)
    assert isinstance(last.is_even, bool)
