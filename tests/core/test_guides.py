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
    matcher, _ = compiler.matcher(guide)
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
        (Guide(GuideKind.LARK, 'start: %json {"type": "object"}'), '{"a": 1}', True),
        (Guide(GuideKind.LARK, 'start: %json {"type": "object"}'), '{"a" : 1}', False),
        (Guide(GuideKind.LARK, 'start: "%json {" /a/'), "%json {a", True),
        # A name in other letters must not stand beside the property of that name.
        (schema({"type": "object", "properties": {"a": {"type": "null"}}}), '{"\\u0061": 1}', False),
        (schema({"type": "object", "properties": {"a\n": {"type": "null"}}}), '{"a\\u000a": 1}', False),
        (schema({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}}), "null", True),
        (schema({"format": "date", "type": "string"}), '"2024-02-29"', True),
        (schema({"format": "date", "type": "string"}), '"2023-02-29"', False),
        (schema({"format": "date", "type": "string"}), '"1900-02-29"', False),
        (schema({"format": "date", "type": "string"}), '"0000-01-01"', False),
        (schema({"format": "date-time", "type": "string"}), '"2024-02-29T23:59:59.5+01:00"', True),
        (schema({"format": "date-time", "type": "string"}), '"2024-02-30T23:59:59Z"', False),
        (schema({"format": "time", "type": "string"}), '"23:59:60Z"', False),
        (schema({"format": "date"}), "1", True),
        # OpenAPI's.
        (schema({"type": "integer", "format": "int32"}), "-2147483648", True),
        (schema({"type": "integer", "format": "int32"}), "2147483648", False),
        (schema({"type": "number", "format": "int32"}), "1.5", False),
        (schema({"type": "integer", "format": "int64", "minimum": 1}), "9007199254740992", True),
        (schema({"type": "integer", "format": "int64", "minimum": 1}), "0", False),
        (schema({"type": "string", "format": "byte"}), '"YWI="', True),
        (schema({"type": "string", "format": "byte"}), '"YWI"', False),
        (schema({"type": "string", "nullable": True}), "null", True),
        (schema({"type": "string", "nullable": False}), "null", False),
        (schema({"type": "string", "nullable": True, "enum": ["a"]}), "null", False),
        (schema({"const": "\b\t\n\f\r é"}), '"\\b\\t\\n\\f\\r é"', True),
        (schema({"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]\\n$"}), '"a\\n"', True),
        (schema({"type": "string", "pattern": "^\\x{a}$"}), '"\\n"', True),
        # Annotations, whatever their value.
        (schema({"type": "string", "format": "ipv4network"}), '"any"', True),
        (schema({"type": "number", "format": "double"}), "1.5", True),
        (schema({"type": "string", "format": None, "pattern": None}), '"any"', True),
        # Null means absent, but not where it is a value.
        (schema({"type": "object", "properties": None, "required": None, "additionalProperties": None,
                 "patternProperties": None, "minProperties": None, "$ref": None, "anyOf": None}),
         '{"a": 1}', True),
        (schema({"type": "array", "items": None, "prefixItems": None, "maxItems": None}), "[1, null]", True),
        (schema({"type": "integer", "minimum": None, "multipleOf": None, "enum": None}), "7", True),
        (schema({"properties": {"a": {"type": "string", "pattern": None}}, "type": "object"}),
         '{"a": 1}', False),
        (schema({"const": None}), "null", True),
        (schema({"const": None}), "1", False),
        # Bounds of int64.
        (schema({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}), "-9007199254740992", True),
        (schema({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}), "9007199254740993", False),
        (schema({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2**64}), "12", True),
        # Bounds of float64.
        (schema({"type": "number", "maximum": 1.7976931348623157e308, "minimum": -1.8e308}), "-1.5e9", True),
        (schema({"type": "number", "exclusiveMaximum": 1.8e308, "minimum": 0}), "-1", False),
        # Names of properties.
        (schema({"type": "object", "propertyNames": {"minLength": 2}}), '{"ab": 1, "\\n\\n": 2}', True),
        (schema({"type": "object", "propertyNames": {"minLength": 2}}), '{"a": 1}', False),
        (schema({"type": "object", "propertyNames": {"maxLength": 1.0}}), '{"": 1, "b": 2}', True),
        (schema({"type": "object", "propertyNames": {"maxLength": 1}}), '{"ab": 1}', False),
        (schema({"type": "object", "propertyNames": {"type": "string"}}), '{"a": 1}', True),
        (schema({"type": "object", "propertyNames": True, "additionalProperties": {"type": "null"}}),
         '{"a": null}', True),
        (schema({"type": "object", "propertyNames": {"enum": ["a", "b"]},
                 "additionalProperties": {"type": "integer"}}), '{"b": 1}', True),
        (schema({"type": "object", "propertyNames": {"enum": ["a", "b"]},
                 "additionalProperties": {"type": "integer"}}), '{"b": null}', False),
        (schema({"type": "object", "propertyNames": {"enum": ["a", "b"]}}), '{"c": 1}', False),
        (schema({"type": "object", "propertyNames": {"enum": ["a", "b"], "type": "string"},
                 "properties": {"a": {"type": "null"}, "z": {}}}), '{"a": 1}', False),
        (schema({"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "required": ["k"],
                 "$defs": {"k": {"enum": ["k"], "type": "string"}}}), '{"k": 1}', True),
        (schema({"type": "object", "propertyNames": {"pattern": "^a+$"}}), '{"aa": 1}', True),
        (schema({"type": "object", "propertyNames": {"pattern": "^a+$"}}), '{"b": 1}', False),
        # Not enforced, apart from the number of items.
        (schema({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}), '["a", "a"]', True),
        (schema({"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}), '["a", "a"]', False),
        # ECMA's classes.
        *((schema({"type": "string", "pattern": pattern}), f'"{text}"', is_allowed)
          for pattern, text, is_allowed in (
              ("^.$", "\u2028", False), ("^.$", "\\r", False), ("^.$", "\u0085", True), ("^[.]$", "a", False),
              ("^\\.$", "a", False), ("^\\s$", "\ufeff", True), ("^\\s$", "\u0085", False),
              ("^\\s$", "\\t", True), ("^\\S$", "\u0085", True), ("^\\S$", " ", False),
              ("^[\\sx]$", "\ufeff", True), ("^[^\\s]$", "\u0085", True), ("^[\\S]$", "\ufeff", False),
              ("^[\\S]$", "é", True), ("^\\d$", "٣", False), ("^\\w$", "é", False),
          )),
        (schema({"type": "object", "patternProperties": {"^.$": {"type": "null"}},
                 "additionalProperties": False}), '{"\u2029": null}', False),
        # Off, or written in another way.
        (schema({"type": "array", "items": {"type": "null"}, "uniqueItems": False}), "[null, null]", True),
        (schema({"type": "array", "items": {"type": "null"}, "maxItems": 1.0}), "[null, null]", False),
        (schema({"$schema": "https://json-schema.org/draft-07/schema", "type": "null"}), "null", True),
        (schema({"$schema": "http://json-schema.org/draft/2020-12/schema#", "type": "null"}), "null", True),
    ],
)  # fmt: skip
def test_exactly_the_texts_of_a_guide_end(
    model: tuple[GuideCompiler, Tokenizer], guide: Guide, text: str, is_allowed: bool
) -> None:
    assert allows(model, guide, text) is is_allowed


#: Requires itself without an end.
ENDLESS = {
    "type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text", "beginning"),
    [
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "null", '{"n": '),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}, "{}", '{"x": '),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}}, "[]", '[{"n": '),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}}, "{}", '{"y": '),
    ],
)
def test_a_text_cannot_enter_what_would_never_end(
    model: tuple[GuideCompiler, Tokenizer], value: dict[str, Any], text: str, beginning: str
) -> None:
    compiler, tokenizer = model
    guide = schema({**value, "$defs": {"a": ENDLESS}})
    check_guide(guide)
    assert allows(model, guide, text)
    token_ids = tokenizer.encode(beginning, add_special_tokens=False)
    assert compiler.matcher(guide).matcher.try_consume_tokens(token_ids) < len(token_ids)


@pytest.mark.parametrize(
    ("guide", "what"),
    [
        (schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum .3. is greater than maximum"),
        (schema({"type": ["string"], "nullable": 1}), "'nullable' has no boolean"),
        (schema({"nullable": True}), "'nullable' has no effect without type"),
        (schema({"$schema": "https://a.example/s"}), "'.schema' has 'https://a.example/s'; use a draft"),
        (schema({"oneOf": [{"type": "string"}, {"minLength": 1}]}), "alternatives of a oneOf may both match"),
        (schema({"$ref": "#/$defs/absent"}), "'#/[$]defs/absent' is none of a schema in here"),
        (schema({"type": "text"}), "Invalid type: text"),
        # What llguidance would not enforce, or take otherwise than the standard.
        (
            schema({"$ref": "#/x-d/a", "x-d": {"a": {"maxlength": 3}}}),
            "'#/x-d/a' is none of a schema in here",
        ),
        (schema({"$ref": "other.json"}), "'other.json' is none"),
        (schema({"type": "object", "minProperties": 2}), "'minProperties' may be 1 at most"),
        (schema({"type": "array", "prefixItems": [{}], "additionalItems": False}), "'prefixItems' excludes"),
        (
            schema({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}),
            "'prefixItems'",
        ),
        (schema({"type": "array", "additionalItems": False}), "'additionalItems' has no effect"),
        (schema({"const": [2**53 + 1]}), "'const' has an integer beyond 9007199254740992"),
        (schema({"type": "integer", "minimum": 10**400}), "'minimum' has an integer beyond"),
        (schema({"type": "integer", "exclusiveMaximum": -(2**63)}), "'exclusiveMaximum' has an integer"),
        (schema({"type": "integer", "multipleOf": 2**63}), "'multipleOf' has an integer beyond"),
        (Guide(GuideKind.JSON_SCHEMA, '{"minimum": NaN}'), "'minimum' has a number that is not finite"),
        (Guide(GuideKind.JSON_SCHEMA, '{"const": 1e999}'), "'const' has a number that is not finite"),
        (schema({"type": "integer", "multipleOf": True}), "'multipleOf' has no number"),
        (schema({"type": "integer", "minimum": "3"}), "'minimum' has no number"),
        # llguidance cuts the wrong value within a character and panics.
        (schema({"type": "string", "minLength": "a" + "🙂" * 40}), "llguidance cannot read it"),
        (schema({"$anchor": [1], "contains": {}}), "'contains' is not supported"),
        (
            schema({"type": "object", "propertyNames": {"minLength": 2, "enum": ["a"]}}),
            "may have lengths, an enum",
        ),
        (schema({"type": "object", "propertyNames": {"maxLength": 1001}}), "may have lengths up to 1000"),
        (schema({"type": "number", "minimum": 1.8e308}), "'minimum' has a number that is not finite"),
        (schema({"type": "object", "propertyNames": False}), "'propertyNames' may have an enum"),
        (schema({"type": "object", "propertyNames": {"pattern": "["}}), "cannot be used"),
        (
            schema({"properties": {"a": {}}, "propertyNames": {"pattern": "a"}}),
            "'propertyNames' with a pattern excludes properties",
        ),
        (
            schema({"additionalProperties": {"enum": ["v" * 999]}, "propertyNames": {"enum": ["a"] * 99}}),
            "'propertyNames' with an enum excludes patternProperties and long",
        ),
        (schema({"type": "string", "pattern": "^[[:alpha:]]$"}), "'pattern' has '\\[' in a .class."),
        # llguidance would leave these characters out.
        (schema({"const": {"a": ["b\0c"]}}), "'const' has a control character"),
        (schema({"enum": ["a", "\x7f"]}), "'enum' has a control character"),
        *(
            (schema({"type": "string", "pattern": f"^a{text}b$"}), "'pattern' asks for the control character")
            for text in (
                "\0",
                "\\x00",
                "\\u0001",
                "\\u{1}",
                "\\v",
                "\\a",
                "[\\x01]",
                "[\\x01-\\x02]",
                "(\\x1F|c)",
            )
        ),
        (schema({"patternProperties": {"^\x01$": {}}}), "'patternProperties' asks for"),
        (schema({"type": "string", "pattern": "[a&&b]"}), "'pattern' has '&&' in a .class."),
        (schema({"properties": {"a": {"$id": "http://x/y"}}}), "/properties/a: the keyword '.id'"),
        (schema({"x-guidance": {"lenient": True}}), "'x-guidance' is not supported"),
        (Guide(GuideKind.LARK, 'start: %json {"maxlength": 3}'), "'maxlength' is not supported"),
        (Guide(GuideKind.LARK, "start: %json no"), "%json without a JSON schema"),
        (Guide(GuideKind.JSON_SCHEMA, '{"const": ' + "[" * 2000 + "]" * 2000 + "}"), "recursion"),
        # What would take seconds or more.
        (
            schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
            "'pattern' is too large: .* 1000002 parts",
        ),
        (Guide(GuideKind.REGEX, "((a{100}){100}){100}"), "its regex is too large"),
        (Guide(GuideKind.LARK, "start: /(a{1000}){1000}/"), "its lark has a terminal of"),
        (
            Guide(GuideKind.LARK, 'start: A\nA: B{1000}\nB: "a"~1000'),
            "its lark has a terminal of 1000000 parts",
        ),
        (schema({"allOf": [{"multipleOf": n} for n in (101, 103, 107)]}), "'multipleOf' has too many steps"),
        (
            schema({"patternProperties": {f"^{n}$": {} for n in range(33)}}),
            "'patternProperties' has more than 32",
        ),
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


RULES = "".join(f"r{n}: r{n + 1}\n" for n in range(9000))
DEFS = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(2000)}


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.LARK, f'start: r0\n{RULES}r9000: "a"'),
        schema({"$ref": "#/$defs/0", "$defs": DEFS | {"2000": {}}}),
    ],
)
def test_rules_that_name_each_other_thousands_deep_do_not_exhaust_the_stack(
    model: tuple[GuideCompiler, Tokenizer], guide: Guide
) -> None:
    check_guide(guide)
    matcher, _ = model[0].matcher(guide)
    matcher.compute_bitmask()
    assert not matcher.is_error()


def test_an_unknown_special_token_is_refused_by_the_model(model: tuple[GuideCompiler, Tokenizer]) -> None:
    guide = Guide(GuideKind.LARK, "start: <tool> /a/")
    check_guide(guide)
    with pytest.raises(InvalidRequestError, match="tool"):
        model[0].matcher(guide)


def test_matchers_of_one_guide_do_not_share_their_state(model: tuple[GuideCompiler, Tokenizer]) -> None:
    compiler, tokenizer = model
    guide = Guide.of_choices(["yes", "no"])
    (first, _), (second, _) = compiler.matcher(guide), compiler.matcher(guide)
    assert first.consume_tokens(tokenizer.encode("yes", add_special_tokens=False))
    assert not second.is_accepting()
    assert allows(model, guide, "no")


def test_a_grammar_with_too_many_regular_expressions_is_refused() -> None:
    def grammar(number: int) -> Guide:
        rules = "".join(f'r{index}: /[a-z]*/ | "q{index}"\n' for index in range(number))
        return Guide(GuideKind.LARK, f"start: {' '.join(f'r{index}' for index in range(number))}\n{rules}")

    check_guide(grammar(256))
    with pytest.raises(InvalidRequestError, match="more than 256 regular expressions"):
        check_guide(grammar(257))
