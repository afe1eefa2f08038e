"""Llama 3.1 and later: an object as the whole answer, or after a special token; several are joined by `;`.

{"name": "find_order", "parameters": {"id": "#W1"}}
<|python_tag|>{"name": "find_order", "parameters": {"id": "#W1"}}
"""

from tandem_gateway.tools.formats import CallSyntax, Opener, ToolFormat

LLAMA3 = ToolFormat(
    "llama3",
    openers=(Opener("<|python_tag|>"),),
    syntax=CallSyntax(head="{", tail="}", between="; ", arguments_key="parameters"),
    takes_bare_object=True,
    separator=";",
)
