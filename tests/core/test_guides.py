"""Guides compiled: which texts they allow, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import toy_tokenizers
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer

EOS = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[GuideCompiler, Tokenizer]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = toy_tokenizers.trained(
        ['{"name": "Zoë", "number": 12, "list": [true, null]}', "yes and no"],
        320,
        ["<unk>", "</s>", "<call>"],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    manifest = ModelManifest(
        name="toy", revision="r", source="", license="", architecture="llama", max_model_len=512,
        vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(EOS,), bos_token="", eos_token="</s>",
        chat_template="", tokenizer_hash="h", add_bos=False, weights="", weight_bits=16,
    )  # fmt: skip
    manifest.write(folder)
    return GuideCompiler(folder, manifest), Tokenizer(folder)


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


def allows(model: tuple[GuideCompiler, Tokenizer], guide: Guide, text: str) -> bool:
    compiler, tokenizer = model
    matcher = compiler.matcher(guide)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("guide", "text", "is_allowed"),
    [
        (schema({"type": "object"}), '{"a": 1, "b": [true, null]}', True),
        (schema({"type": "object"}), '{"a":1}', False),
        (schema({"type": "object"}), '{"a": \n1}', False),
        (schema({"type": "object"}), "[1]", False),
        (schema(True), "[1]", True),
        (schema({"type": "string", "maxLength": 2}), '"ëë"', True),
        (schema({"type": "string", "maxLength": 2}), '"ëëë"', False),
        (schema({"properties": {"b": {}, "a": {}}, "required": ["b", "a"], "type": "object"}),
         '{"b": 1, "a": 2}', True),
        (schema({"properties": {"b": {}, "a": {}}, "required": ["b", "a"], "type": "object"}),
         '{"a": 2, "b": 1}', False),
        (Guide(GuideKind.REGEX, "[a-c]{2}|é"), "é", True),
        (Guide(GuideKind.REGEX, "[a-c]{2}"), "abc", False),
        (Guide.of_choices(["yes", 'a "b"\n\u0001é']), 'a "b"\n\u0001é', True),
        (Guide.of_choices(["yes", "no"]), "ye", False),
        (Guide(GuideKind.LARK, 'start: "no" <call> %json {"type": "integer"}'), "no<call>12", True),
    ],
)  # fmt: skip
def test_exactly_the_texts_of_a_guide_end(
    model: tuple[GuideCompiler, Tokenizer], guide: Guide, text: str, is_allowed: bool
) -> None:
    assert allows(model, guide, text) is is_allowed


@pytest.mark.parametrize(
    ("guide", "what"),
    [
        (schema({"type": "array", "uniqueItems": True}), "'uniqueItems' is not supported"),
        (schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum .3. is greater than maximum"),
        (schema({"$ref": "#/$defs/absent"}), "does not exist"),
        (schema({"type": "text"}), "Invalid type: text"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema(False), "guide: its json_schema cannot be used"),
        (Guide(GuideKind.REGEX, "("), "its regex cannot be used"),
        (Guide(GuideKind.LARK, "begin: /a/"), "its lark cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_named_with_and_without_a_model(
    model: tuple[GuideCompiler, Tokenizer], guide: Guide, what: str
) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        check_guide(guide)
    with pytest.raises(InvalidRequestError, match=what):
        model[0].matcher(guide)


def test_an_unknown_special_token_is_refused_by_the_model(model: tuple[GuideCompiler, Tokenizer]) -> None:
    guide = Guide(GuideKind.LARK, "start: <tool> /a/")
    check_guide(guide)
    with pytest.raises(InvalidRequestError, match="tool"):
        model[0].matcher(guide)


def test_matchers_of_one_guide_do_not_share_their_state(model: tuple[GuideCompiler, Tokenizer]) -> None:
    compiler, tokenizer = model
    guide = Guide.of_choices(["yes", "no"])
    first, second = compiler.matcher(guide), compiler.matcher(guide)
    assert first.consume_tokens(tokenizer.encode("yes", add_special_tokens=False))
    assert not second.is_accepting()
    assert allows(model, guide, "no")
