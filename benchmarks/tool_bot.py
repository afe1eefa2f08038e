"""Runs a bot with two tools in three APIs, whole and streamed. Its calls must be the same in all of them.

Chat and responses go through the openai package, messages through anthropic, both unmodified, to a running
system: `tandem up --model qwen2.5-coder-1.5b-instruct`. Needs `pip install openai anthropic`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import anthropic
import openai
from reporting import describe_machine

SYSTEM = "You are the assistant of a shop. After a tool's result, tell the customer in one sentence."
QUESTIONS = (
    "Where is my order 1042?",
    "The lamp in it arrived broken. Please create a return for it.",
    "Thank you. And where is order 1043?",
)
ORDERS: dict[str, dict[str, Any]] = {
    "1042": {"status": "delivered on 24 November", "items": [{"item_id": "L-5531", "name": "lamp"}]},
    "1043": {"status": "sent, expected on 3 December", "items": [{"item_id": "C-0207", "name": "chair"}]},
}
_TEXT = {"type": "string"}
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "look_up_order": ("Looks up an order by its number.", {"order_id": _TEXT}),
    "create_return": (
        "Creates the return of an item. The item_id is in the order.",
        {"item_id": _TEXT, "reason": {"type": "string", "enum": ["broken", "wrong", "unwanted"]}},
    ),
}
_MOST_TURNS = 8


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass
class Transcript:
    lines: list[tuple[str, str]] = field(default_factory=list)
    """who and what: customer, call, result, bot"""
    seconds: float = 0.0

    def calls(self) -> list[str]:
        return [text for who, text in self.lines if who == "call"]


def run_tool(call: Call) -> dict[str, Any]:
    if call.name == "look_up_order":
        return ORDERS.get(str(call.arguments["order_id"]), {"error": "no such order"})
    items = [item["item_id"] for order in ORDERS.values() for item in order["items"]]
    if call.arguments["item_id"] not in items:
        return {"error": "no such item"}
    return {"return_id": "R-77", "label": "sent by e-mail"}


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


class Dialect(ABC):
    """One API. Keeps the history in its form."""

    def __init__(self, url: str, model: str, is_streamed: bool) -> None:
        self.url, self.model, self.is_streamed = url, model, is_streamed
        self.history: list[Any] = []

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    @abstractmethod
    def answer(self, must_call: bool) -> tuple[str, list[Call]]:
        """Adds the model's next turn to the history. `must_call`: a grammar enforces a call."""

    @abstractmethod
    def give(self, results: list[tuple[Call, str]]) -> None:
        """Adds the results of the last turn's calls."""


class Chat(Dialect):
    def __init__(self, url: str, model: str, is_streamed: bool) -> None:
        super().__init__(url, model, is_streamed)
        self.completions = openai.OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions
        self.history.append({"role": "system", "content": SYSTEM})

    def answer(self, must_call: bool) -> tuple[str, list[Call]]:
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": text, "parameters": schema_of(properties)},
            }
            for name, (text, properties) in TOOLS.items()
        ]
        asked: Any = {
            "model": self.model, "messages": self.history, "tools": tools,
            "tool_choice": "required" if must_call else "auto", "parallel_tool_calls": False,
            "temperature": 0, "max_tokens": 200,
        }  # fmt: skip
        if self.is_streamed:
            with self.completions.stream(**asked) as stream:
                completion: Any = stream.get_final_completion()
        else:
            completion = self.completions.create(**asked)
        message = completion.choices[0].message
        self.history.append(message.model_dump(exclude_none=True))
        return message.content or "", [
            Call(call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ]

    def give(self, results: list[tuple[Call, str]]) -> None:
        self.history += [
            {"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results
        ]


class Responses(Dialect):
    def answer(self, must_call: bool) -> tuple[str, list[Call]]:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        tools = [
            {
                "type": "function",
                "name": name,
                "description": text,
                "parameters": schema_of(properties),
                "strict": False,
            }
            for name, (text, properties) in TOOLS.items()
        ]
        asked: Any = {
            "model": self.model, "instructions": SYSTEM, "input": self.history, "tools": tools,
            "tool_choice": "required" if must_call else "auto", "parallel_tool_calls": False,
            "temperature": 0, "max_output_tokens": 200, "store": False,
        }  # fmt: skip
        if self.is_streamed:
            with client.responses.stream(**asked) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        return response.output_text, [
            Call(item.call_id, item.name, json.loads(item.arguments))
            for item in response.output
            if item.type == "function_call"
        ]

    def give(self, results: list[tuple[Call, str]]) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call.id, "output": result} for call, result in results
        ]


class Messages(Dialect):
    def answer(self, must_call: bool) -> tuple[str, list[Call]]:
        client = anthropic.Anthropic(base_url=self.url, api_key="none")
        tools = [
            {"name": name, "description": text, "input_schema": schema_of(properties)}
            for name, (text, properties) in TOOLS.items()
        ]
        asked: Any = {
            "model": self.model, "system": SYSTEM, "messages": self.history, "tools": tools,
            "tool_choice": {"type": "any" if must_call else "auto", "disable_parallel_tool_use": True},
            "max_tokens": 200, "extra_body": {"temperature": 0},
        }  # fmt: skip
        if self.is_streamed:
            with client.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        self.history.append({"role": "assistant", "content": content})
        text = "".join(block.text for block in message.content if block.type == "text")
        return text, [
            Call(block.id, block.name, dict(block.input))
            for block in message.content
            if block.type == "tool_use"
        ]

    def give(self, results: list[tuple[Call, str]]) -> None:
        content = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in results
        ]
        self.history.append({"role": "user", "content": content})


DIALECTS: dict[str, Callable[[str, str, bool], Dialect]] = {
    "chat": Chat,
    "responses": Responses,
    "messages": Messages,
}


def talk(dialect: Dialect) -> Transcript:
    """The whole conversation. Raises RuntimeError if the bot does not come to an answer."""
    transcript, start = Transcript(), time.perf_counter()
    for question in QUESTIONS:
        dialect.say(question)
        transcript.lines.append(("customer", question))
        for turn in range(_MOST_TURNS):
            text, calls = dialect.answer(must_call=turn == 0)
            if text.strip():
                transcript.lines.append(("bot", text.strip()))
            if not calls:
                break
            results = [(call, json.dumps(run_tool(call))) for call in calls]
            for call, result in results:
                transcript.lines += [("call", str(call)), ("result", result)]
            dialect.give(results)
        else:
            raise RuntimeError(f"still calls tools after {_MOST_TURNS} turns: {transcript.lines}")
    transcript.seconds = time.perf_counter() - start
    return transcript


def page(model: str, transcripts: dict[str, Transcript]) -> str:
    first = next(iter(transcripts.values()))
    rows = [
        f"| {name} | {len(transcript.calls())} | {'yes' if transcript.calls() == first.calls() else 'no'} "
        f"| {'yes' if transcript.lines == first.lines else 'no'} | {transcript.seconds:.1f} |"
        for name, transcript in transcripts.items()
    ]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("openai", "anthropic"))
    return "\n".join(
        [
            "# A bot with two tools in three dialects",
            "",
            "| dialect | calls | same calls as the first | same texts | seconds |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "| who | what |",
            "| --- | --- |",
            *(f"| {who} | {' '.join(text.split())} |" for who, text in first.lines),
            "",
            f"Command: `tandem up --model {model}`, beside it `python benchmarks/tool_bot.py --out FILE`  ",
            f"Hardware: {describe_machine()}",
            "",
            f"{model} at temperature 0. The first turn after a question must call a tool (`required`, in",
            "messages `any`); the model is free in later turns (`auto`). Calls are the same if names and",
            "arguments are equal, in order. The second table is the first conversation. Clients, unmodified:",
            f"{versions}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP address of the gateway")
    parser.add_argument("--out", type=Path, help="results page; unset: print it")
    arguments = parser.parse_args()
    model = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none").models.list().data[0].id
    transcripts = {
        f"{name}, {'streamed' if is_streamed else 'whole'}": talk(dialect(arguments.url, model, is_streamed))
        for name, dialect in DIALECTS.items()
        for is_streamed in (False, True)
    }
    text = page(model, transcripts)
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text)
    if len({tuple(transcript.calls()) for transcript in transcripts.values()}) > 1:
        sys.exit("the dialects' calls differ")


if __name__ == "__main__":
    main()
