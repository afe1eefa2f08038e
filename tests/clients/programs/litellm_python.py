"""litellm's SDK, with the providers that it has for servers like this one."""

from __future__ import annotations

import copy
import json
import os

# It would ask for a list of prices otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm as api
from harness import BASE_URL, MODEL, TO_THE_LIMIT, URL, feature

# snippet
import litellm

answer = litellm.completion(
    model=f"hosted_vllm/{MODEL}",
    api_base=BASE_URL,
    messages=[{"role": "user", "content": "What is 2+2?"}],
    max_tokens=100,
)
print(answer.choices[0].message.content)
# end

MESSAGES = [{"role": "user", "content": "Where is my order?"}]
PROVIDERS = {
    f"openai/{MODEL}": {"api_base": BASE_URL, "api_key": "none"},
    f"hosted_vllm/{MODEL}": {"api_base": BASE_URL},
    f"anthropic/{MODEL}": {"api_base": URL, "api_key": "none"},
}
OPENAI = {"model": f"openai/{MODEL}", **PROVIDERS[f"openai/{MODEL}"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_order",
        "parameters": {
            "type": "object",
            "properties": {"urgent": {"type": "boolean"}},
            "required": ["urgent"],
            "additionalProperties": False,
        },
    },
}


@feature("chat")
def _() -> None:
    for model, options in PROVIDERS.items():
        whole = api.completion(model=model, **options, messages=MESSAGES, max_tokens=6)
        assert 1 <= whole.usage.completion_tokens <= 6


@feature("stream")
def _() -> None:
    for model, options in PROVIDERS.items():
        asked = {"model": model, **options, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
        chunks = list(api.completion(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == (api.completion(**asked).choices[0].message.content or "")


@feature("tools")
def _() -> None:
    for model, options in PROVIDERS.items():
        # litellm deletes `additionalProperties`, in place, so the random model may add many.
        asked = {"model": model, **options, "messages": MESSAGES, "max_tokens": 4000}
        asked |= {"tools": copy.deepcopy([TOOL]), "parallel_tool_calls": False}
        choice = api.completion(**asked, tool_choice="required").choices[0]
        call = choice.message.tool_calls[0]
        assert isinstance(json.loads(call.function.arguments)["urgent"], bool)
        result = {"role": "tool", "tool_call_id": call.id, "content": "It was sent yesterday."}
        replayed = [*MESSAGES, choice.message.model_dump(), result]
        api.completion(**{**asked, "messages": replayed, "max_tokens": 4})


@feature("schema")
def _() -> None:
    schema = TOOL["function"]["parameters"]
    shape = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}
    answer = api.completion(**OPENAI, messages=MESSAGES, max_tokens=200, response_format=shape)
    assert isinstance(json.loads(answer.choices[0].message.content)["urgent"], bool)


@feature("reasoning_effort")
def _() -> None:
    model = f"hosted_vllm/{MODEL}"
    api.completion(model=model, **PROVIDERS[model], messages=MESSAGES, max_tokens=4, reasoning_effort="low")


@feature("completions")
def _() -> None:
    done = api.text_completion(**OPENAI, prompt="Once", max_tokens=4, extra_body=TO_THE_LIMIT)
    assert done.usage.completion_tokens == 4


@feature("responses")
def _() -> None:
    response = api.responses(**OPENAI, input="Where?", max_output_tokens=16, extra_body=TO_THE_LIMIT)
    assert response.usage.output_tokens == 16


@feature("errors")
def _() -> None:
    long = [{"role": "user", "content": "Where is my order? " * 4096}]
    for error, asked in (
        (api.BadRequestError, {"messages": MESSAGES, "temperature": 9}),
        (api.ContextWindowExceededError, {"messages": long}),
    ):
        try:
            api.completion(**OPENAI, **asked)
        except error as refusal:
            assert type(refusal) is error, type(refusal)
        else:
            raise AssertionError(f"{asked} is not refused")
