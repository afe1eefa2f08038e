"""`--chat-template`: a file replaces the model's template, in every gateway that has it."""

from pathlib import Path

import chat_templates
from tandem_core.model.tokenizer import Tokenizer
from tool_models import make_tool_folder

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
BODY = {"messages": [{"role": "user", "content": "Where?"}], "tools": [TOOL]}


async def test_prompts_and_tool_calls_follow_the_file_in_two_gateways(pods, gateway, tmp_path):
    """The model's own template knows no tools; the file has Mistral's."""
    special = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    model = make_tool_folder(tmp_path, "smollm2", special)
    template = Path(chat_templates.__path__[0], "mistral.jinja")
    pod = await pods(words=('[TOOL_CALLS] [{"name": "find", ', '"arguments": {}}]'))
    for front in (
        await gateway(pod, model=model, chat_template=template),
        await gateway(pod, model=model, chat_template=template),
    ):
        answer = (await front.http.post("/v1/chat/completions", json=BODY)).raise_for_status().json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], answer["choices"][0]["finish_reason"]) == ("find", "tool_calls")
    first, second = (list(request.prompt_token_ids) for request in pod.requests)
    prompt = Tokenizer(model).decode(first, skip_special_tokens=False)
    assert first == second
    assert "[AVAILABLE_TOOLS]" in prompt and "[INST]" in prompt and "im_end" not in prompt
