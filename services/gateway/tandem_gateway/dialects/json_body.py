"""The base of the models that parse JSON bodies.

Lists are refused at their first wrong element. By default pydantic collects all errors, which takes 5 us each
and blocks all streams.

Fields that take an integer also take 5.0: some clients' languages have only one kind of numbers.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


def _adapt(schema: Any) -> None:
    """Sets `fail_fast` in every list, tuple and dictionary, and lets fields of integers take whole floats."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _adapt(part)
    elif isinstance(schema, dict):
        kind: object = schema.get("type")
        inner: Any = schema.get("schema")
        if kind in ("list", "tuple", "dict"):
            schema["fail_fast"] = True
        # Not in lists: a call per token id would be slow.
        if kind in ("model-field", "default", "nullable") and inner["type"] == "int":
            schema["schema"] = core_schema.no_info_before_validator_function(_whole, inner)
        for name, part in schema.items():
            if name != "metadata":
                _adapt(part)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class JsonBody(BaseModel):
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _adapt(schema)
        return schema
