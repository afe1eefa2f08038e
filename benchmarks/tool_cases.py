"""Cases for tools.py: what a user says, and the call that answers it. None: no tool helps, so none is called.

Written for this benchmark in the style of BFCL (one question, several functions) and of tau-bench's retail
domain (its tools' names and the shape of its ids).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def _tool(name: str, text: str, optional: tuple[str, ...] = (), **properties: object) -> dict[str, object]:
    required = [key for key in properties if key not in optional]
    parameters = {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False,
    }  # fmt: skip
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
TOOLS: list[dict[str, Any]] = [
    _tool("find_user_id_by_email", "Finds a customer by the email address.", email=_TEXT),
    _tool("find_user_id_by_name_zip", "Finds a customer by name and zip code.",
          first_name=_TEXT, last_name=_TEXT, zip=_TEXT),
    _tool("get_order_details", "Status, items and payment of an order.",
          order_id={"type": "string", "description": "Begins with #, such as #W0000000."}),
    _tool("cancel_pending_order", "Cancels an order that is not sent yet.", order_id=_TEXT,
          reason={"type": "string", "enum": ["no longer needed", "ordered by mistake"]}),
    _tool("get_weather", "The weather in a city now.", ("unit",), city=_TEXT,
          unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    _tool("convert_currency", "Converts an amount of money.", amount=_NUMBER,
          source={"type": "string", "description": "ISO 4217"},
          target={"type": "string", "description": "ISO 4217"}),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    text: str
    name: str | None
    #: Those that must be equal; case does not count.
    arguments: Mapping[str, object]


CASES = [
    Case("Hi, please look me up. My email is mia.garcia2723@example.com", "find_user_id_by_email",
         {"email": "mia.garcia2723@example.com"}),
    Case("I am Yusuf Rossi and my zip code is 19122. Who am I in your system?", "find_user_id_by_name_zip",
         {"first_name": "Yusuf", "last_name": "Rossi", "zip": "19122"}),
    Case("What is the status of order #W2378156?", "get_order_details", {"order_id": "#W2378156"}),
    Case("Which items are in #W4923227?", "get_order_details", {"order_id": "#W4923227"}),
    Case("Cancel #W9102111, I ordered it by mistake. Yes, I am sure.", "cancel_pending_order",
         {"order_id": "#W9102111", "reason": "ordered by mistake"}),
    Case("I do not need order #W5199551 any more; please cancel it. I confirm.", "cancel_pending_order",
         {"order_id": "#W5199551", "reason": "no longer needed"}),
    Case("How is the weather in Oslo, in celsius?", "get_weather", {"city": "Oslo", "unit": "celsius"}),
    Case("Is it raining in Paris?", "get_weather", {"city": "Paris"}),
    Case("How many euros are 250 US dollars?", "convert_currency",
         {"amount": 250, "source": "USD", "target": "EUR"}),
    Case("Convert 99.5 Swiss francs to Japanese yen.", "convert_currency",
         {"amount": 99.5, "source": "CHF", "target": "JPY"}),
    Case("Write one short sentence that thanks a customer.", None, {}),
    Case("What does the word 'refund' mean? Answer in one short sentence.", None, {}),
]  # fmt: skip
