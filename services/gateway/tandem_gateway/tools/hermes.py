"""Hermes, Qwen2.5, Qwen3, SmolLM2 and SmolLM3, and models without tools in their template:

    <tool_call>
    {"name": "find_order", "arguments": {"id": "#W1"}}
    </tool_call>

SmolLM2's larger models put a list of such objects between the markers. Small models sometimes forget the
markers, or write others; then only a tool that the request offers counts as a call.
"""

from tandem_gateway.tools.formats import CallSyntax, Opener, ToolFormat

HERMES = ToolFormat(
    "hermes",
    openers=(
        Opener("<tool_call>", "</tool_call>"),
        Opener("<tools>", "</tools>", is_certain=False),
        Opener("```json", "```", is_certain=False),
        Opener("```xml", "```", is_certain=False),
    ),
    syntax=CallSyntax(head="<tool_call>\n{", tail="}\n</tool_call>", between="\n"),
    takes_bare_object=True,
)
