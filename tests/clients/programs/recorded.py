"""Requests as applications send them that are not run here; their answers are read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from harness import MODEL, URL


class Application:
    """Sends the requests of recorded/{name}.json to the system's model."""

    def __init__(self, name: str) -> None:
        self.requests = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
        headers = self.requests["headers"]
        self._client = httpx.Client(base_url=URL, headers=headers, timeout=60, trust_env=False)

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self._client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events' data; as in Anthropic's stream, an `event:` line names the type."""
        with self._client.stream("POST", path, json={"model": MODEL, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [json.loads(data) for data in _data(answer.iter_lines()) if data != "[DONE]"]


def _data(lines: Any) -> list[str]:
    name, found = "", []
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append(line.removeprefix("data: "))
            assert not name or json.loads(found[-1])["type"] == name
        else:
            assert not line or line.startswith(":"), line
    return found
