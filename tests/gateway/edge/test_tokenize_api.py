"""/tokenize and /detokenize: vLLM's formats, the tokens of completions and chats, refusals."""

import pytest
from tandem_core.model.conversation import Message
from tandem_core.model.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the order ✓"}]


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_a_prompt_gets_the_tokens_of_its_completion(front, model_folder):
    answer = (await front.http.post("/tokenize", json={"prompt": "the order ✓"})).json()
    expected = Tokenizer(model_folder).encode("the order ✓")
    assert answer == {
        "count": len(expected), "max_model_len": 256, "tokens": expected, "token_strs": None,
    }  # fmt: skip


async def test_messages_get_the_tokens_of_their_chat(front, model_folder):
    answer = (await front.http.post("/tokenize", json={"model": "tiny-chat", "messages": MESSAGES})).json()
    assert answer["tokens"] == Tokenizer(model_folder).encode_chat([Message("user", "the order ✓")])


async def test_detokenizing_returns_the_text(front):
    text = "<|im_start|>the order ✓ \N{GRINNING FACE}"
    body = {"prompt": text, "return_token_strs": True, "add_special_tokens": False}
    answer = (await front.http.post("/tokenize", json=body)).json()
    assert len(answer["token_strs"]) == answer["count"] and answer["token_strs"][0] == "<|im_start|>"
    back = await front.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_prompt_longer_than_the_context_is_counted(front):
    answer = (await front.http.post("/tokenize", json={"prompt": "the order " * 200})).json()
    assert answer["count"] > answer["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
    ],
)
async def test_wrong_fields_are_refused_by_name(front, path, body, field):
    answer = await front.http.post(path, json=body)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == field


async def test_unknown_fields_are_ignored_and_named(pods, gateway):
    pod = await pods()
    front, strict = await gateway(pod), await gateway(pod, strict_fields=True)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = await front.http.post(path, json={**body, "add_special": True})
        assert (answer.status_code, answer.headers["x-tandem-ignored"]) == (200, "add_special")
        refused = await strict.http.post(path, json={**body, "add_special": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special")


async def test_tokenizing_requires_a_key_if_answers_do(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    for path in ("/tokenize", "/detokenize"):
        assert (await front.http.post(path, json={"prompt": "a"})).status_code == 401
