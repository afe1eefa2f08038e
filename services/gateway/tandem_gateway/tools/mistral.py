"""Mistral: a list after a special token, or in newer models a token before each call.

[TOOL_CALLS] [{"name": "find_order", "arguments": {"id": "#W1"}}]
[TOOL_CALLS]find_order[ARGS]{"id": "#W1"}[TOOL_CALLS]cancel[CALL_ID]a1b2c3d4e[ARGS]{}
"""

import dataclasses

from tandem_gateway.tools.formats import CallSyntax, Opener, ToolFormat

MISTRAL = ToolFormat(
    "mistral",
    openers=(Opener("[TOOL_CALLS]"),),
    syntax=CallSyntax(head="{", tail="}", between=", ", begin="[TOOL_CALLS] [", end="]"),
    takes_named_arguments=True,
    has_short_ids=True,
)
#: The newer form; both are read alike.
MISTRAL_ARGS = dataclasses.replace(
    MISTRAL, name="mistral-args", syntax=CallSyntax(head="[TOOL_CALLS]", tail="", name_end="[ARGS]")
)
