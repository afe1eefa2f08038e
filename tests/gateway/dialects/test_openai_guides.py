"""The guide fields of OpenAI's and vLLM's clients are read as guides."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import check_guide
from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody, parse_json

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
OF_SCHEMA = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
ANY_OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')
GBNF = 'root ::= "yes" | other\nother ::= [a-z]+'


def parsed(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_json(ChatBody, json.dumps(body).encode()).checked(Ignored()).given_sampling()


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            OF_SCHEMA,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": False},
                }
            },
            OF_SCHEMA,
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, Guide(GuideKind.REGEX, "a+")),
        ({"guided_regex": "a+"}, Guide(GuideKind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Guide(GuideKind.LARK, 'start: "a" | "b"')),
        ({"guided_grammar": "start: /a/"}, Guide(GuideKind.LARK, "start: /a/")),
    ],
)
def test_each_form_of_a_guide_is_read(fields: dict[str, Any], guide: Guide) -> None:
    assert parsed(**fields)["guide"] == guide


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_disabled_fields_give_no_guide(fields: dict[str, Any]) -> None:
    assert "guide" not in parsed(**fields)


def test_llama_cpp_s_grammars_become_lark() -> None:
    guide = parsed(guided_grammar=GBNF)["guide"]
    assert guide.kind is GuideKind.LARK
    assert "::=" not in guide.source
    check_guide(guide)


def test_completions_accept_guides() -> None:
    body = parse_json(CompletionBody, b'{"prompt": "x", "guided_regex": "[0-9]"}').checked(Ignored())
    assert body.given_sampling()["guide"] == Guide(GuideKind.REGEX, "[0-9]")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice: 2 of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "send one"),
        ({"response_format": {"type": "json_schema"}}, "schema: is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "schema: is missing"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "another type"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "whitespace_pattern"),
        ({"guided_grammar": "root ::= ("}, "not a readable GBNF grammar"),
        ({"guided_grammar": "root ::= " + "a" * 5000}, "at most 4096; write it as Lark"),
        ({"guided_grammar": "root ::= " + "(" * 2000}, "not a readable GBNF grammar"),
        ({"guided_choice": []}, "has 0 choices"),
        ({"guided_json": ""}, "has 0 bytes"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_guides_are_refused_by_name(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        given = parsed(**fields)
        from tandem_core.sampling import SamplingParams

        SamplingParams(**given)


class _Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


#: Types of fields in ordinary pydantic models.
FIELD_TYPES = (
    int, float, str, bool, bytes, pydantic.SecretStr, pathlib.Path, uuid.UUID, pydantic.AnyUrl,
    ipaddress.IPv4Address, ipaddress.IPv4Network, ipaddress.IPv6Interface, pydantic.Base64Bytes,
    pydantic.PositiveInt, pydantic.NegativeFloat, Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)],
    set[int], set[_Color], frozenset[str], tuple[int, str], list[int] | None, Literal["a", 1, None], _Color,
    decimal.Decimal, datetime.datetime, datetime.timedelta, dict[datetime.date, int], dict[int, str],
    dict[str, int], dict[_Color, int], dict[Literal["a", "b"], str],
    dict[Annotated[str, pydantic.Field(pattern="^[a-z]+$")], int], dict[str, Any], Any,
)  # fmt: skip


@pytest.mark.parametrize("strict", [False, True], ids=["pydantic", "openai's parse"])
@pytest.mark.parametrize("kind", FIELD_TYPES, ids=str)
def test_schemas_of_ordinary_pydantic_models_are_guides(kind: Any, strict: bool) -> None:
    model = pydantic.create_model("Model", value=(kind, ...), optional=(kind | None, None))
    schema = to_strict_json_schema(model) if strict else model.model_json_schema()
    check_guide(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        # zod 4: z.record(z.string(), z.int()), z.record(z.enum(...), ...), z.int(), z.map is refused there
        {"type": "object", "propertyNames": {"type": "string"},
         "additionalProperties": {"type": "integer", "minimum": -9007199254740991,
                                  "maximum": 9007199254740991}},
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
         "additionalProperties": {"type": "number"}, "required": ["a", "b"]},
        # serialisers that write unset fields as null
        {"type": "object", "properties": {"a": {"type": "string", "enum": None, "items": None}},
         "required": None, "additionalProperties": None, "description": None, "$defs": None},
    ],
)  # fmt: skip
def test_schemas_as_other_libraries_write_them_are_guides(schema: dict[str, Any]) -> None:
    check_guide(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
