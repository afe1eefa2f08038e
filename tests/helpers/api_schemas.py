"""JSON schemas in the shape of real APIs: arguments of tools, orders, events, what code generators emit.

Every schema bounds the length of its instances, or ends them with high probability, so that even a random
model finishes them. Together with guide_schemas.py they use every keyword that a guide enforces.
"""

from __future__ import annotations

Schema = dict[str, object]


def text(max_length: int = 12, min_length: int = 0, **more: object) -> Schema:
    return {"type": "string", "minLength": min_length, "maxLength": max_length, **more}


def obj(properties: dict[str, object], optional: tuple[str, ...] = (), **more: object) -> Schema:
    """A closed object; all properties except the optional ones are required."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def array(items: object, max_items: int = 3, min_items: int = 0, **more: object) -> Schema:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items, **more}


def nullable(schema: object) -> Schema:
    """An Optional field in pydantic's form."""
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
CENTS = {"type": "number", "minimum": 0, "maximum": 9999, "multipleOf": 0.01}
ORDER_ID = {"type": "string", "pattern": "^#W[0-9]{7}$"}
USER_ID = {"type": "string", "pattern": "^[a-z]{2,8}_[a-z]{2,8}_[0-9]{4}$"}

BY_HAND: dict[str, Schema] = {
    "cancel order": obj(
        {
            "order_id": ORDER_ID,
            "reason": {"type": "string", "enum": ["no longer needed", "ordered by mistake"]},
        }
    ),
    "exchange items": obj(
        {
            "order_id": ORDER_ID,
            "item_ids": array({"type": "string", "pattern": "^[0-9]{10}$"}, 3, 1),
            "new_item_ids": array({"type": "string", "pattern": "^[0-9]{10}$"}, 3, 1),
            "payment_method_id": {"type": "string", "pattern": "^(credit_card|paypal|gift_card)_[0-9]{7}$"},
        }
    ),
    "address": obj(
        {
            "address1": text(20, 1, description="Street and number"),
            "address2": text(10),
            "city": text(12, 2),
            "state": {"type": "string", "pattern": "^[A-Z]{2}$", "examples": ["NY", "CA"]},
            "country": {"const": "USA"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        },
        optional=("address2",),
    ),
    "find user": {
        "oneOf": [
            obj({"by": {"const": "email"}, "email": {"type": "string", "format": "email", "maxLength": 24}}),
            obj({"by": {"const": "name"}, "first_name": text(8), "last_name": text(8), "zip": text(5, 5)}),
        ]
    },
    "calculate": obj({"expression": {"type": "string", "pattern": "^[0-9]{1,3}( [-+*/] [0-9]{1,3}){0,3}$"}}),
    "transfer to a human": obj({"summary": text(40, 1, title="Summary")}),
    "weather": obj(
        {
            "location": text(16, 1),
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        },
        optional=("unit",),
    ),
    "flight search": obj(
        {
            "origin": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "destination": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "departure": {"type": "string", "format": "date"},
            "return": nullable({"type": "string", "format": "date"}),
            "passengers": array(obj({"age": {"type": "integer", "minimum": 0, "maximum": 120}}), 3, 1),
            "cabin": {"enum": ["economy", "premium_economy", "business", "first"]},
        }
    ),
    "calendar event": obj(
        {
            "title": text(20, 1),
            "start": {"type": "string", "format": "date-time"},
            "end": {"type": "string", "format": "date-time"},
            "attendees": array({"type": "string", "format": "email", "maxLength": 20}, 2),
            "reminder": {"type": ["integer", "null"], "minimum": 0, "maximum": 10080},
            "duration": {"type": "string", "format": "duration", "maxLength": 12},
        },
        optional=("end", "reminder", "duration"),
    ),
    "charge": obj(
        {
            "id": {"type": "string", "pattern": "^ch_[A-Za-z0-9]{14}$", "readOnly": True},
            "object": {"const": "charge"},
            "amount": {"type": "integer", "minimum": 50, "maximum": 99999999},
            "currency": {"enum": ["usd", "eur", "gbp", "jpy"]},
            "captured": {"type": "boolean"},
            "created": {"type": "integer", "exclusiveMinimum": 0, "maximum": 4102444800},
            "metadata": {
                "type": "object",
                "patternProperties": {"^[a-z_]{1,8}$": text(8)},
                "additionalProperties": False,
                "maxProperties": 3,
            },
        }
    ),
    "invoice": obj(
        {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}-[0-9]{3}$"},
            "lines": array(obj({"sku": text(8, 3), "quantity": COUNT, "unit_price": CENTS}), 3, 1),
            "tax_rate": {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.001},
            "due": {"type": "string", "format": "date"},
        }
    ),
    "pydantic order": {
        "$defs": {
            "Item": obj({"sku": text(8, 1, title="Sku"), "qty": {**COUNT, "title": "Qty"}}, title="Item"),
            "Status": {"enum": ["new", "paid", "shipped"], "title": "Status", "type": "string"},
        },
        **obj(
            {
                "items": array(ref("Item"), 2, 1, title="Items"),
                "status": {"$ref": "#/$defs/Status", "default": "new"},
                "note": {**nullable(text(10)), "title": "Note"},
            },
            title="Order",
        ),
    },
    "discriminated union": {
        "$defs": {
            "Card": obj({"kind": {"const": "card"}, "last4": {"type": "string", "pattern": "^[0-9]{4}$"}}),
            "Iban": obj({"kind": {"const": "iban"}, "iban": {"type": "string", "pattern": "^DE[0-9]{20}$"}}),
            "Cash": obj({"kind": {"const": "cash"}}),
        },
        **obj(
            {
                "pay": {
                    "anyOf": [ref("Card"), ref("Iban"), ref("Cash")],
                    "discriminator": {"propertyName": "kind"},
                }
            }
        ),
    },
    "linked list": {
        "$defs": {"Node": obj({"value": COUNT, "next": {"anyOf": [{"type": "null"}, ref("Node")]}})},
        "$ref": "#/$defs/Node",
    },
    "comment tree": {
        "$defs": {"Comment": obj({"by": text(6), "replies": array(ref("Comment"), 1)})},
        **obj({"thread": array(ref("Comment"), 2)}),
    },
    "expression tree": {
        "$defs": {
            "Expr": {
                "anyOf": [
                    COUNT,
                    obj({"op": {"enum": ["neg", "abs"]}, "arg": ref("Expr")}),
                ]
            }
        },
        "$ref": "#/$defs/Expr",
    },
    "itself by #": obj({"name": text(4), "child": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    "ui component": {
        "$defs": {
            "Attribute": obj({"name": {"enum": ["class", "id", "href"]}, "value": text(8)}),
        },
        **obj(
            {
                "type": {"enum": ["div", "button", "header", "section", "field", "form"]},
                "label": text(10),
                "attributes": array(ref("Attribute"), 2),
                "children": array({"$ref": "#"}, 1),
            }
        ),
    },
    "reasoning steps": obj(
        {
            "steps": array(obj({"explanation": text(24, 1), "output": text(12, 1)}), 3, 1),
            "final_answer": text(12, 1),
        },
        title="MathReasoning",
    ),
    "extraction": obj(
        {
            "people": array(
                obj(
                    {"name": text(12, 1), "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 130}}
                ),
                2,
            ),
            "places": array(text(8), 2),
            "dates": array({"type": "string", "format": "date"}, 2),
        }
    ),
    "moderation": obj(
        {
            "violating": {"type": "boolean"},
            "category": {"type": ["string", "null"], "enum": ["violence", "self_harm", "other", None]},
            "score": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        }
    ),
    "sentiment": obj(
        {
            "label": {"enum": ["positive", "neutral", "negative"]},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        }
    ),
    "github issue": obj(
        {
            "title": text(20, 1),
            "body": {"type": ["string", "null"], "maxLength": 30},
            "labels": array(
                {
                    "anyOf": [
                        text(8, 1),
                        obj({"name": text(8), "color": {"type": "string", "pattern": "^[0-9a-f]{6}$"}}),
                    ]
                },
                2,
            ),
            "milestone": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 999}]},
            "state": {"enum": ["open", "closed"], "default": "open", "deprecated": True},
        },
        optional=("body", "labels", "milestone", "state"),
    ),
    "kubernetes container": obj(
        {
            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,6}[a-z0-9])?$"},
            "image": {"type": "string", "pattern": "^[a-z]{1,8}:[0-9]{1,2}\\.[0-9]{1,2}$"},
            "ports": array(
                obj(
                    {
                        "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535},
                        "protocol": {"enum": ["TCP", "UDP"]},
                    }
                ),
                2,
            ),
            "resources": obj(
                {
                    "limits": obj(
                        {
                            "cpu": {"type": "string", "pattern": "^[1-9][0-9]{0,2}m$"},
                            "memory": {"type": "string", "pattern": "^[1-9][0-9]{0,2}(Mi|Gi)$"},
                        }
                    )
                }
            ),
            "env": array({"oneOf": [obj({"name": text(6, 1), "value": text(6)}), text(3)]}, 2),
        }
    ),
    "kubernetes secret": obj(
        {
            "generation": {"type": "integer", "format": "int64", "minimum": 1},
            "mode": {"type": "integer", "format": "int32"},
            "token": {"type": "string", "format": "byte", "maxLength": 16},
        }
    ),
    "geojson point": obj(
        {
            "type": {"const": "Point"},
            "coordinates": {
                "type": "array",
                "prefixItems": [
                    {"type": "number", "minimum": -180, "maximum": 180, "multipleOf": 0.01},
                    {"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 0.01},
                ],
                "items": False,
                "minItems": 2,
                "maxItems": 2,
            },
        }
    ),
    "tuple of the old drafts": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [text(4), COUNT, {"type": "boolean"}],
        "additionalItems": {"type": "null"},
        "minItems": 2,
        "maxItems": 5,
    },
    "closed tuple of the old drafts": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"const": 1}, {"const": 2}],
        "additionalItems": False,
        "minItems": 2,
    },
    "bounds of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://example.com/bounds",
        "definitions": {
            "share": {
                "type": "integer",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 9,
                "exclusiveMaximum": True,
            }
        },
        "type": "object",
        "properties": {"share": {"$ref": "#/definitions/share"}},
        "required": ["share"],
        "additionalProperties": False,
    },
    "network": obj(
        {
            "v4": {"type": "string", "format": "ipv4"},
            "v6": {"type": "string", "format": "ipv6"},
            "host": {"type": "string", "format": "hostname", "maxLength": 20},
            "id": {"type": "string", "format": "uuid"},
            "at": {"type": "string", "format": "time"},
            "link": {"type": "string", "format": "uri", "maxLength": 20},
        }
    ),
    "stock by size": {
        "type": "object",
        "propertyNames": {"enum": ["s", "m", "l"]},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "required": ["m"],
    },
    "translations": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{2}$"},
        "additionalProperties": text(8),
        "minProperties": 1,
    },
    "search filters": {
        "allOf": [
            {"type": "object", "properties": {"query": text(10, 1), "limit": COUNT}, "required": ["query"]},
            {
                "type": "object",
                "properties": {"limit": {"type": "integer", "minimum": 5}, "sort": {"enum": ["asc", "desc"]}},
                "required": ["limit", "sort"],
            },
            {
                "type": "object",
                "properties": {"query": True, "limit": True, "sort": True},
                "additionalProperties": False,
            },
        ]
    },
    "intersected lengths": {"allOf": [text(9, 1), {"minLength": 4, "pattern": "^[a-z]+$"}]},
    "reference with siblings": {
        "$defs": {"name": text(12)},
        **obj({"name": {"$ref": "#/$defs/name", "minLength": 3}}),
    },
    "headers": {
        "type": "object",
        "properties": {"content-type": {"const": "application/json"}},
        "patternProperties": {"^x-[a-z]{1,5}$": text(6)},
        "additionalProperties": False,
        "required": ["content-type"],
        "maxProperties": 4,
    },
    "counters by name": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,4}$": COUNT, "^[A-Z]{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 4,
    },
    "any other property": {
        "type": "object",
        "properties": {"id": COUNT},
        "required": ["id"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "minProperties": 2,
        "maxProperties": 3,
    },
    "names that need escapes": obj(
        {
            'quote "': COUNT,
            "back\\slash": COUNT,
            "line\nbreak": COUNT,
            "naïve": COUNT,
            "数量": COUNT,
            "🙂": COUNT,
            "": COUNT,
            "a/b~c": COUNT,
        }
    ),
    "values that need escapes": {"enum": ['"', "\\", "\n\t", "é", "数", "🙂", "", " ", "</s>", "a\u2028b"]},
    "mixed enum": {"enum": ["a", 1, 2.5, None, True, {"b": [1, {"c": "d"}]}, [], {}]},
    "long enum": {"enum": [f"SKU-{number:05d}" for number in range(2000)]},
    "constants": obj(
        {
            "a": {"const": None},
            "b": {"const": False},
            "c": {"const": -7},
            "d": {"const": 0.125},
            "e": {"const": [1, "x"]},
            "f": {"const": {"y": {}}},
        }
    ),
    "multiples": array(
        {
            "anyOf": [
                {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
                {"type": "number", "multipleOf": 0.25, "minimum": -4, "maximum": 4},
            ]
        },
        4,
        2,
    ),
    "open intervals": array({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3}, 4, 2),
    "large integers": {"type": "integer", "minimum": -9007199254740992, "maximum": 9007199254740992},
    "content": obj(
        {
            "data": {
                "type": "string",
                "pattern": "^[A-Za-z0-9+/]{8}$",
                "contentEncoding": "base64",
                "contentMediaType": "image/png",
            }
        }
    ),
    "annotations": {
        "$id": "https://example.com/annotated",
        "$comment": "nothing here is enforced",
        "title": "T",
        "description": "D",
        "default": {},
        "examples": [{}],
        "readOnly": False,
        "writeOnly": False,
        "deprecated": False,
        "type": "object",
        "maxProperties": 0,
        "additionalProperties": False,
    },
    "anchor": {"$defs": {"short": {"$anchor": "short", **text(3)}}, **obj({"s": {"$ref": "#short"}})},
    "unicode text": array(
        {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[α-ω数量🙂-🙏]*$"}, 3, 1
    ),
    "empty array": array({"type": "string"}, 0),
    "matrix": array(array({"type": "integer", "minimum": -1, "maximum": 1}, 3, 3), 3, 3),
    "types without values": {"type": ["null", "boolean"]},
    "deeply nested": obj(
        {
            "a": obj(
                {
                    "b": obj(
                        {
                            "c": obj(
                                {"d": obj({"e": obj({"f": array(array(array(COUNT, 1, 1), 1, 1), 1, 1)})})}
                            )
                        }
                    )
                }
            )
        }
    ),
}
