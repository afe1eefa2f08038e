"""Stand-ins for the servers of `benchmarks/peers.py`: child processes with OpenAI's protocol."""

from __future__ import annotations

import sys

from peers import Peer

#: Source of a server that answers every request and refuses fields that it does not know.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert not {"ignore_eos", "slo_class"} & set(body), body
        self.send_response(200)
        self.end_headers()
        delta = {"choices": [{"delta": {"content": "x"}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}}
        for event in (delta, delta, usage):
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer(name: str, source: str) -> Peer:
    """The peer whose server is this Python source."""
    return Peer(
        name,
        "m",
        lambda port: [sys.executable, "-c", source, str(port)],
        {"ignore_eos": None, "slo_class": None},
    )
