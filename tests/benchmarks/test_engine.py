"""`benchmarks/engine.py` with a fake OpenAI server as the peer."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from peers import Peer

from engine import Bench, Load, Prompts, Report

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "ignore_eos" not in body, body
        self.send_response(200)
        self.end_headers()
        delta = {"choices": [{"delta": {"content": "x"}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}}
        for event in (delta, delta, usage):
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def peer(name: str, source: str) -> Peer:
    return Peer(name, "m", lambda port: [sys.executable, "-c", source, str(port)], {"ignore_eos": None})


def test_a_peer_is_measured_and_one_that_does_not_start_is_named() -> None:
    report = Report("tiny")
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        bench.start(peer("works", SERVER), stack)
        bench.start(peer("broken", "raise SystemExit('no such model')"), stack)
        bench.measure(Load(64, 1, rounds=2), Prompts(None))
        bench.interfere(Prompts(None))
    assert list(report.rows) == ["works"]
    assert set(report.rows["works"]) == {"64 tokens, concurrency 1", "ITL"}
    assert report.missing == {"broken": "its process ended: no such model"}
    lines = report.markdown().splitlines()
    assert lines[2] == "| system | 64 tokens, concurrency 1 | ITL |"
    assert any(line.startswith("Missing: broken") for line in lines)


def test_prompts_have_the_wanted_length_and_no_common_beginning() -> None:
    prompts = Prompts(None)
    made = [*prompts.make(200, 2), *prompts.make(200, 1)]
    assert len({prompt.messages[0].content.split("\n")[0] for prompt in made}) == 3
