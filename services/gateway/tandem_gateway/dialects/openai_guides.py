"""Guided decoding in the fields of OpenAI's and vLLM's clients.

response_format      {"type": "json_object"}, with a "schema" too, or {"type": "json_schema", "json_schema":
                     {"schema": ...}}; the schema is always enforced, whatever `strict` says
structured_outputs   vLLM's: one of json, regex, choice, grammar, json_object
guided_json, ...     vLLM's older names for it
"""

from __future__ import annotations

import json
from typing import Any

import llguidance.gbnf_to_lark
from pydantic import ConfigDict
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.guide import Guide, GuideKind

from tandem_gateway.dialects.openai_messages import Body
from tandem_gateway.errors import UnsupportedFieldError

_OBJECT = '{"type": "object"}'
#: Conversion takes time quadratic in the length and blocks other streams.
MAX_GBNF_BYTES = 4096


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = None
    strict: bool | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class ResponseFormat(Body):
    type: str
    json_schema: JsonSchemaFormat | None = None
    #: Schema of "json_object", as in llama.cpp.
    schema_: dict[str, Any] | bool | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    def guide(self) -> Guide | None:
        """Raises InvalidRequestError."""
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidRequestError(
                "response_format", "has a json_schema, but another type; send one of them"
            )
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema_ is not None:
            return _of_schema(self.schema_, "response_format.schema")
        if self.type == "json_object":
            return Guide(GuideKind.JSON_SCHEMA, _OBJECT, "response_format")
        if self.type != "json_schema":
            raise UnsupportedFieldError(
                "response_format.type", f"is {quoted(self.type)}; use text, json_object or json_schema"
            )
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequestError("response_format.json_schema.schema", "is missing; add it")
        return _of_schema(self.json_schema.schema_, "response_format.json_schema.schema")


class StructuredOutputs(Body):
    """vLLM's field; at most one of these is given."""

    json_: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    #: Options of vLLM's backends without an effect on the allowed texts.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    def guide(self, prefix: str = "structured_outputs.") -> Guide | None:
        """`prefix`: how the client's field names begin. Raises InvalidRequestError."""
        if self.disable_additional_properties or self.whitespace_pattern is not None:
            raise UnsupportedFieldError(
                "structured_outputs",
                "disable_additional_properties and whitespace_pattern are not supported; write "
                "additionalProperties into the schema, and leave the pattern out",
            )
        guides = [
            None if self.json_ is None else _of_schema(self.json_, f"{prefix}json"),
            None if self.regex is None else Guide(GuideKind.REGEX, self.regex, f"{prefix}regex"),
            None if self.choice is None else Guide.of_choices(self.choice, f"{prefix}choice"),
            None if self.grammar is None else _of_grammar(self.grammar, f"{prefix}grammar"),
            Guide(GuideKind.JSON_SCHEMA, _OBJECT, f"{prefix}json_object") if self.json_object else None,
        ]
        if self.model_extra and not any(guides):
            raise UnsupportedFieldError(
                f"structured_outputs.{next(iter(self.model_extra))}",
                "is not a guide; use json, regex, choice, grammar or json_object",
            )
        return only_guide(guides)


def only_guide(guides: list[Guide | None]) -> Guide | None:
    """The only given guide, or None. Raises InvalidRequestError if there are several."""
    given = [guide for guide in guides if guide is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            given[1].field,
            f"{len(given)} of response_format, structured_outputs, guided_* and strict tools guide the text; "
            "send one",
        )
    return given[0] if given else None


def _of_schema(schema: dict[str, Any] | bool | str, field: str) -> Guide:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Guide(GuideKind.JSON_SCHEMA, text, field)


def _of_grammar(text: str, field: str) -> Guide:
    """Reads Lark, or llama.cpp's GBNF, recognized by `::=`."""
    guide = Guide(GuideKind.LARK, text, field)
    if "::=" not in text:
        return guide
    if len(text) > MAX_GBNF_BYTES:
        raise InvalidRequestError(
            field, f"has {len(text)} characters of GBNF, at most {MAX_GBNF_BYTES}; write it as Lark"
        )
    try:
        return Guide(GuideKind.LARK, llguidance.gbnf_to_lark.gbnf_to_lark(text), field)
    except Exception as error:  # a hand-written parser that raises anything
        raise InvalidRequestError(field, f"is not a readable GBNF grammar: {error}") from error
